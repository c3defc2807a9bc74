"""The options of the `offmap` command as a page, from the command itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

HEAD = """\
# Command-line options

Every option of every command, from the command itself: what `offmap COMMAND --help` prints. [Command line](cli.md) shows how
to use them.
"""


def markdown() -> str:
    """Return the page: a table of arguments and options for each command of the library."""
    from typer.main import get_command

    from offmap.cli.app import create_app

    app: Any = get_command(create_app())
    own = {name: each for name, each in app.commands.items() if getattr(each.callback, "__module__", "").startswith("offmap.")}
    return "\n".join([HEAD, *(section(name, command) for name, command in own.items())])


def section(name: str, command: Any) -> str:
    purpose = (command.help or "").split("\n\n")[0].replace("\n", " ").strip()
    return "\n".join([f"## offmap {name}", "", purpose, "", "| option | default | |", "|---|---|---|", *rows(command), ""])


def rows(command: Any) -> Iterator[str]:
    for each in command.params:
        if each.name != "help" and not getattr(each, "hidden", False):
            argument = each.param_type_name == "argument"
            shown = each.name.upper() if argument else ", ".join([*each.opts, *each.secondary_opts])
            plain = isinstance(each.default, int | float | str) and each.default is not False and each.default != ""
            default = "required" if each.required else f"`{each.default}`" if plain else ""
            text = OPTION.sub(r"`\g<0>`", " ".join((each.help or "").split()).replace("|", "\\|"))
            yield f"| `{shown}` | {default} | {text} |"
