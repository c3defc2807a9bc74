"""The examples run as a user would run them, print what they should, and become pages and notebooks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
NEEDS = {"huggingface": "transformers", "lightning_callback": "lightning", "sklearn_pipeline": "sklearn"}
NOISE = ("ignore::FutureWarning", "ignore:The 'train_dataloader' does not", "ignore:The 'val_dataloader' does not",
         "ignore:The number of training batches")  # fmt: skip
"""What Lightning warns of, with the torch of today and with small data."""


def printed(name: str, folder: Path, **environment: str) -> str:
    """Run an example in its own process, with warnings as errors, and return its output."""
    paths = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT / "bench/src"), os.environ.get("PYTHONPATH")]))
    }
    silent = [part for warning in (NOISE if name == "lightning_callback" else ()) for part in ("-W", warning)]
    result = subprocess.run(
        [sys.executable, "-W", "error", *silent, ROOT / "examples" / f"{name}.py"],
        capture_output=True, text=True, cwd=folder, env=os.environ | environment | paths, check=False, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert not any(folder.iterdir()), "an example leaves no files behind"
    return result.stdout


@pytest.mark.parametrize("name", [name for name in NAMES if name != "huggingface"])  # that one runs whole, below
def test_an_example_runs_in_smoke_mode(name: str, tmp_path: Path) -> None:
    package = NEEDS.get(name, "sklearn")
    pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    assert len(printed(name, tmp_path, OFFMAP_SMOKE="1").splitlines()) >= 3


def test_the_guard_of_a_hugging_face_model_detects_unknown_sentences(tmp_path: Path) -> None:
    header, *lines = printed("huggingface", tmp_path).splitlines()
    assert header.split() == ["set", "accuracy", "score", "called", "OOD"]
    table = {line[:15].strip(): [float(v.rstrip("%")) for v in line[15:].split() if v != "-"] for line in lines}
    assert set(table) == {"in-distribution", "shuffled words", "unknown words"}
    assert table["in-distribution"][0] >= 95
    assert table["in-distribution"][-1] <= 15
    assert table["shuffled words"][-1] >= 60
    assert table["unknown words"][-1] >= 90
    assert table["in-distribution"][-2] < table["shuffled words"][-2]
    assert table["in-distribution"][-2] < table["unknown words"][-2]


# ------------------------------------------------------------------------------------------------- pages and notebooks


@pytest.fixture(scope="module")
def percent() -> ModuleType:
    spec = importlib.util.spec_from_file_location("percent", ROOT / "docs" / "percent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["percent"] = module
    spec.loader.exec_module(module)
    return module


def test_a_script_is_cut_into_its_cells(percent: ModuleType) -> None:
    script = "import os\n\n# %% [markdown]\n# # A title\n#\n# Words.\n\n# %%\nprint(1)\n\n\n# %% [markdown]\n# # Last\n"
    found = [tuple(cell) for cell in percent.cells(script)]
    assert found == [("code", "import os"), ("markdown", "# A title\n\nWords."), ("code", "print(1)"), ("markdown", "# Last")]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_a_notebook_that_holds_all_of_its_code(name: str, percent: ModuleType) -> None:
    script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    made = percent.notebook(script)
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert set(made) == {"nbformat", "nbformat_minor", "metadata", "cells"}
    assert made["cells"][0]["cell_type"] == "markdown"
    assert made["cells"][0]["source"].startswith("# ")
    identities = [cell["id"] for cell in made["cells"]]
    assert len(set(identities)) == len(identities)
    for cell in made["cells"]:
        extra = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"id", "cell_type", "metadata", "source"} | extra
    code = [line for cell in made["cells"] if cell["cell_type"] == "code" for line in cell["source"].splitlines() if line]
    assert code == [line for line in script.splitlines() if line and not (line.startswith("#") and line not in code)]


def test_all_notebooks_are_written(percent: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    percent.main(tmp_path / "notebooks")
    assert sorted(path.stem for path in (tmp_path / "notebooks").iterdir()) == NAMES
    assert capsys.readouterr().out == f"{len(NAMES)} notebooks are in {tmp_path / 'notebooks'}\n"
