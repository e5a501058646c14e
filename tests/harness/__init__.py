"""Real clusters for tests: processes started, killed and swept, and conditions waited for."""
