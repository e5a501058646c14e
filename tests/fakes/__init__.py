"""Stand-ins for the edges of a cluster: workers that register by hand, agents without processes."""
