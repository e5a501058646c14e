"""What every program needs and none of them decides: clock, tasks, servers, processes."""
