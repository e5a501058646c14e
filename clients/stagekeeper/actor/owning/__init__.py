"""What an owner does for its meshes: bring up, watch, hear of failures, respawn, stop."""
