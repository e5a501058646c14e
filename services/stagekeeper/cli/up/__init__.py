"""`stagekeeper up`: a supervisor and agents as child processes, kept running while it lives."""
