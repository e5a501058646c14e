"""The control plane: one engine around the core, and the gRPC services that feed it."""
