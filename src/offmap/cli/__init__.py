"""The `offmap` command: one file for each sub-command."""

from offmap.cli.app import main

__all__ = ["main"]
