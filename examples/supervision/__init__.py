"""Who hears of a failure, and what each owner can do about it: the whole story in one run."""
