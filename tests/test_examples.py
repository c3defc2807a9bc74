"""Notebooks hold their scripts, run from top to bottom, and print what they show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from doc_code import ROOT, is_same_line, module, skip_without

NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def percent() -> ModuleType:
    return module("percent")


def code(made: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in made["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom_and_prints_what_it_shows(name: str, percent: ModuleType, tmp_path: Path) -> None:
    cells = code(percent.read(name))
    skip_without("\n".join(cell["source"] for cell in cells))
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "docs" / "percent.py", "run", name],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=600,
        env=os.environ | {"PYTHONPATH": paths, "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert not any(tmp_path.iterdir()), "a notebook leaves no files behind"
    for cell, output in zip(cells, json.loads(result.stdout), strict=True):
        shown = percent.unpack(cell)
        lines = zip(shown["text"].splitlines(), output["text"].splitlines(), strict=True)
        fixed = [pair for pair in lines if pair[0][:1] != " "]  # indented lines are examples, and may be others
        assert all(is_same_line(*pair) for pair in fixed), f"run `python docs/percent.py write {name}`"
        assert len(shown["figures"]) == len(output["figures"])


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_script(name: str, percent: ModuleType) -> None:
    script, made = percent.scripts()[name], percent.read(name)
    assert percent.notebook(script, map(percent.unpack, code(made))) == made, f"run `python docs/percent.py write {name}`"
    lines = [line for cell in code(made) for line in cell["source"].splitlines() if line]
    assert lines == [line for line in script.splitlines() if line and not (line.startswith("#") and line not in lines)]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid(name: str, percent: ModuleType) -> None:
    made = percent.read(name)
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert set(made) == {"nbformat", "nbformat_minor", "metadata", "cells"}
    assert made["cells"][0]["cell_type"] == "markdown"
    assert made["cells"][0]["source"].startswith("# ")
    identities = [cell["id"] for cell in made["cells"]]
    assert len(set(identities)) == len(identities)
    for cell in made["cells"]:
        extra = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"id", "cell_type", "metadata", "source"} | extra
        for output in cell.get("outputs", []):
            keys = {"stream": {"name", "text"}, "display_data": {"data", "metadata"}}[output["output_type"]]
            assert set(output) == keys | {"output_type"}


def test_the_five_notebooks_are_there() -> None:
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb")) == NAMES
    assert NAMES == ["deploy", "images", "own_method", "tables", "text"]


def test_a_script_is_cut_into_its_cells(percent: ModuleType) -> None:
    script = "import os\n\n# %% [markdown]\n# # A title\n#\n# Words.\n\n# %%\nprint(1)\n\n\n# %% [markdown]\n# # Last\n"
    found = [tuple(cell) for cell in percent.cells(script)]
    assert found == [("code", "import os"), ("markdown", "# A title\n\nWords."), ("code", "print(1)"), ("markdown", "# Last")]


def test_a_page_shows_what_cells_print_and_draw(percent: ModuleType) -> None:
    script = "# %% [markdown]\n# # A title\n#\n# Words.\n\n# %%\nx = 1\n\n# %%\nprint(x)\n"
    made = percent.notebook(script, [{"text": "", "figures": ["aGk="]}, {"text": "1\n", "figures": []}])
    page = percent.markdown(made, "one")
    assert page.startswith("# A title\n\n*Download: [notebook](one.ipynb), [script](one.py).*\n\nWords.\n")
    assert "```python\nx = 1\n```\n\n![Figure of the code above](data:image/png;base64,aGk=)\n" in page
    assert page.endswith("```python\nprint(x)\n```\n\n```text\n1\n```\n")


def test_cells_run_in_one_namespace_and_give_their_outputs(percent: ModuleType) -> None:
    plot = "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\nplt.figure()\nprint('drawn')"
    first, second, third = percent.run(["x = 2", "print(x)", plot])
    assert (first, second) == ({"text": "", "figures": []}, {"text": "2\n", "figures": []})
    assert third["text"] == "drawn\n"
    assert re.match("iVBOR", third["figures"][0])  # PNG
    assert len(third["figures"]) == 1
