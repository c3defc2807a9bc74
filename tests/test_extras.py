"""Optional packages: what is missing is said in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from offmap.checks import require
from offmap.errors import ConfigError
from offmap_bench.tasks.synthetic import moons
from shells import ENVIRONMENT

LAZY = {
    "adaptive", "assessment", "cli", "detectors", "diagnosis", "ensemble", "evaluation", "export", "integrations",
    "io", "report", "serve",
}  # fmt: skip
"""Packages and modules of the library that are imported when they are first used."""


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError) as error:
        moons()
    assert str(error.value) == "scikit-learn is needed here and is not installed: pip install 'offmap[sklearn]'"


def test_an_error_inside_a_package_is_not_taken_for_its_absence(monkeypatch, tmp_path):
    (tmp_path / "broken_package.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        require("broken_package", "none")


def test_packages_that_bring_another_torch_are_to_be_installed_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(ConfigError) as error:
        require("laplace", "laplace", package="offmap-bench", no_deps="laplace-torch backpack-for-pytorch")
    assert str(error.value) == (
        "laplace-torch is needed here and is not installed: pip install 'offmap-bench[laplace]' && "
        "pip install --no-deps laplace-torch backpack-for-pytorch"
    )


def test_every_extra_that_an_error_names_exists():
    root = Path(__file__).parents[1]
    sources = [p.read_text(encoding="utf-8") for folder in ("src", "bench/src") for p in (root / folder).rglob("*.py")]
    named = {
        extra
        for text in sources
        for pair in re.findall(r'require\([\w".]+, "([\w-]+)"\)|offmap\[(\w+)\]', text)
        for extra in pair
    }
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert named - {""} <= set(declared)


def test_importing_the_library_imports_torch_and_no_optional_package():
    code = (
        "import json, sys, torch; before = set(sys.modules); import offmap; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout
    added = {name for name in json.loads(output) if not name.startswith("torch.")}
    packages = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert packages == {"offmap", "safetensors"}
    assert {name.split(".")[1] for name in added if name.startswith("offmap.")} & LAZY == set()
