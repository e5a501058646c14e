"""The program on each host: it starts, watches and adopts stage processes, and loads no model."""
