"""What every service stands on: clock, tasks, servers, retries, processes. It decides nothing."""
