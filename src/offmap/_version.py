"""Which offmap this is, for every room."""

__version__ = "0.1.0"
