"""What every program of Stagekeeper needs and none of them decides: clock, tasks, servers, processes."""
