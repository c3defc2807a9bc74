"""The version of offmap."""

__version__ = "0.2.0"
