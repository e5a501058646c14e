"""Processes that this agent runs for actors, for as long as their owners hold them."""
