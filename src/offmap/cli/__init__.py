"""The `offmap` command: a file for each sub-command, a few lines that call lower rooms."""

from offmap.cli.app import main

__all__ = ["main"]
