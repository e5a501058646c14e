"""The control plane: who is there, what is wanted, what is routed. It runs no model."""
