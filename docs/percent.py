"""Percent-format scripts (`# %%` cells) as notebooks, and notebooks as Markdown pages.

`python docs/percent.py write NAME ...` runs `examples/NAME.py`, cell by cell, and writes `examples/NAME.ipynb` with its outputs;
without a name, all of them. `python docs/percent.py run NAME` runs the cells of the notebook and prints their outputs as JSON.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parents[1] / "examples"

Output = dict[str, Any]
"""{"text": what a cell prints, "figures": its figures, PNG in base64}."""


class Cell(NamedTuple):
    """`kind` is "markdown" or "code"."""

    kind: str
    text: str


def scripts() -> dict[str, str]:
    """The examples by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.py"))}


def read(name: str) -> dict[str, Any]:
    """A notebook as it is on disk, with its outputs."""
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))


def cells(script: str) -> Iterator[Cell]:
    """The cells of a script; what stands before the first marker is a cell too."""
    for part in re.split(r"^(?=# %%)", script, flags=re.MULTILINE):
        marker, _, body = part.partition("\n") if part.startswith("# %%") else ("", "", part)
        kind = "markdown" if "[markdown]" in marker else "code"
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind == "markdown" else body
        if text.strip():
            yield Cell(kind, text.strip("\n"))


def run(code: Iterable[str]) -> Iterator[Output]:
    """Run cells one after another in one namespace. Figures that are open at the end of a cell are its outputs, as in Jupyter."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"cell {number}", "exec"), names)
        yield {"text": printed.getvalue(), "figures": list(take_figures())}


def take_figures() -> Iterator[str]:
    """Close all open figures of matplotlib, if it is in use; PNG in base64."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        for number in pyplot.get_fignums():
            png = io.BytesIO()
            pyplot.figure(number).savefig(png, dpi=110, facecolor="white", bbox_inches="tight", metadata={"Software": None})
            yield base64.b64encode(png.getvalue()).decode()
        pyplot.close("all")


def notebook(script: str, outputs: Iterable[Output] = ()) -> dict[str, Any]:
    """The script in nbformat 4.5, with the outputs of its code cells."""
    left = iter(outputs)
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(cells(script)):
        one: dict[str, Any] = {"id": f"cell-{number}", "cell_type": cell.kind, "metadata": {}, "source": cell.text}
        if cell.kind == "code":
            one |= {"execution_count": None, "outputs": pack(next(left, {"text": "", "figures": []}))}
        made.append(one)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "cells": made,
    }


def pack(output: Output) -> list[dict[str, Any]]:
    """An output as nbformat has it."""
    text = [{"output_type": "stream", "name": "stdout", "text": output["text"]}] if output["text"] else []
    figures = [{"output_type": "display_data", "data": {"image/png": png}, "metadata": {}} for png in output["figures"]]
    return text + figures


def unpack(cell: dict[str, Any]) -> Output:
    """The output of a notebook's code cell."""
    text = "".join(each["text"] for each in cell["outputs"] if each["output_type"] == "stream")
    return {"text": text, "figures": [each["data"]["image/png"] for each in cell["outputs"] if "data" in each]}


def markdown(made: dict[str, Any], name: str) -> str:
    """One page: the words as they are, the code in fences with its outputs, and where to get both."""
    parts: list[str] = []
    for cell in made["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        output = unpack(cell)
        parts.append(f"```python\n{cell['source']}\n```")
        parts += [f"```text\n{output['text'].rstrip()}\n```"] if output["text"] else []
        parts += [f"![Figure of the code above](data:image/png;base64,{png})" for png in output["figures"]]
    title, *rest = parts
    get = f"*Download: [notebook]({name}.ipynb), [script]({name}.py).*"
    head, _, body = title.partition("\n")
    return "\n\n".join([head, get, body.strip(), *rest]) + "\n"


def main(what: str, *names: str) -> None:
    """Write or run notebooks."""
    if what == "run":
        print(json.dumps(list(run(cell["source"] for cell in read(names[0])["cells"] if cell["cell_type"] == "code"))))
    elif len(names) == 1:
        script = scripts()[names[0]]
        made = notebook(script, run(cell.text for cell in cells(script) if cell.kind == "code"))
        text = json.dumps(made, indent=1, ensure_ascii=False)
        (EXAMPLES / f"{names[0]}.ipynb").write_text(text + "\n", encoding="utf-8")
    else:
        for name in names or scripts():  # a fresh process for each
            subprocess.run([sys.executable, __file__, "write", name], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
