"""Where work runs; knows nothing of methods."""
