"""The stage process: it hosts one shard of a model and serves it on its own address."""
