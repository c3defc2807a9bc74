"""Tables and folders in, scores out."""
