"""The version of offmap."""

__version__ = "0.1.0"
