"""Optional packages: what is missing is said in one line."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from offmap.errors import ConfigError
from offmap.extras import require
from offmap_bench.tasks.synthetic import moons


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
