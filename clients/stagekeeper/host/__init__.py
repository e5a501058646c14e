"""What every program of ours needs of its machine: processes, owned tasks, gRPC servers."""
