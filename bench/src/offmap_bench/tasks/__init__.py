"""Tasks: in-distribution data to train, validate and test on, and OOD data to detect."""
