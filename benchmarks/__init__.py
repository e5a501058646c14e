"""How fast it is, with the bare ceiling measured in the same run beside each number."""
