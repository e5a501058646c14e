"""Connections between the processes of a tree: frames out and in, both ends."""
