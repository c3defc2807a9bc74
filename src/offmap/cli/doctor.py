"""`offmap doctor`: what this installation is made of, and whether it works."""

from __future__ import annotations

import typer

from offmap.cli.options import Json, tell


def doctor(as_json: Json = False) -> None:
    """Show versions, devices, threads and optional packages, and try a small fit. Example: offmap doctor --json"""
    from offmap.cli.checkup import examine_installation

    health = examine_installation()
    tell(as_json, health.record(), str(health.table()))
    if not health.well:
        raise typer.Exit(1)
