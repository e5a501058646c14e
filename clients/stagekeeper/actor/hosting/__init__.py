"""What a process does for the actors in it: their life, their messages, who owns them."""
