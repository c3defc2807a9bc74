"""Tables larger than memory: read and written block by block."""
