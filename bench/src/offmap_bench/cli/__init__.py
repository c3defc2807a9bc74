"""The sub-commands that this package adds to `offmap`: `bench` and `demo`."""
