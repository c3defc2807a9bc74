"""Percent-format scripts (`# %%` cells) as Markdown pages and as notebooks.

`python docs/percent.py build/notebooks` writes every script of `examples/` there as a notebook.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parents[1] / "examples"


class Cell(NamedTuple):
    """`kind` is "markdown" or "code"."""

    kind: str
    text: str


def cells(script: str) -> Iterator[Cell]:
    """The cells of a script; what stands before the first marker is a cell too."""
    for part in re.split(r"^(?=# %%)", script, flags=re.MULTILINE):
        marker, _, body = part.partition("\n") if part.startswith("# %%") else ("", "", part)
        kind = "markdown" if "[markdown]" in marker else "code"
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind == "markdown" else body
        if text.strip():
            yield Cell(kind, text.strip("\n"))


def markdown(script: str, name: str) -> str:
    """One page: the words as they are, the code in fences, and where to get both."""
    parts = [cell.text if cell.kind == "markdown" else f"```python\n{cell.text}\n```" for cell in cells(script)]
    origin = f"*This page is `examples/{name}.py`; [the same as a notebook]({name}.ipynb).*"
    return "\n\n".join([*parts, origin]) + "\n"


def notebook(script: str) -> dict[str, Any]:
    """The script in nbformat 4.5, nothing run yet."""
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        },
        "cells": [_cell(number, cell) for number, cell in enumerate(cells(script))],
    }


def _cell(number: int, cell: Cell) -> dict[str, Any]:
    made: dict[str, Any] = {"id": f"cell-{number}", "cell_type": cell.kind, "metadata": {}, "source": cell.text}
    return made | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {})


def scripts() -> dict[str, str]:
    """The examples by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.py"))}


def main(folder: Path) -> None:
    """Write all examples as notebooks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, script in scripts().items():
        text = json.dumps(notebook(script), indent=1, ensure_ascii=False)
        (folder / f"{name}.ipynb").write_text(text + "\n", encoding="utf-8")
    print(f"{len(scripts())} notebooks are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/notebooks"))
