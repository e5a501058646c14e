"""Search the Python language reference by meaning: an example of a model in three stages."""
