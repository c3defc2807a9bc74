"""What tests of pages and notebooks share: what code needs, and whether it prints what a page says."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def skip_without(code: str) -> None:
    """Skip a test of code whose packages or data are not there."""
    for package in packages(code):
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    for file in re.findall(r"\bfolder / \"([\w/.-]+)\"|\bread\(\"(\w+/[\w.]+)\"", code) if "OFFMAP_DATA" in code else []:
        if not (Path(os.environ.get("OFFMAP_DATA", "data")) / "".join(file)).exists():
            pytest.skip(f"needs {''.join(file)} in the folder that OFFMAP_DATA names")


def packages(code: str) -> set[str]:
    """Return the packages that code imports, but for those of this repository and the standard library."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module or "" if isinstance(node, ast.ImportFrom) else alias.name for node in imports for alias in node.names}
    return {module.split(".")[0] for module in modules} - {*sys.stdlib_module_names, "offmap", "offmap_bench"}


NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def is_printed(block: str, printed: str) -> bool:
    """Whether all lines of a block are printed, but for spaces; numbers may be off by 2, or by 0.05 if they have two decimals.

    Indented lines are examples, and may be others.
    """
    return all(any(map(partial(is_same_line, line), printed.splitlines())) for line in block.splitlines() if line[:1] != " ")


def is_same_line(said: str, printed: str) -> bool:
    numbers = zip(NUMBER.findall(said), NUMBER.findall(printed), strict=False)
    words = [" ".join(NUMBER.sub("#", line).split()) for line in (said, printed)]
    return words[0] == words[1] and all(abs(float(a) - float(b)) <= (0.05 if re.search(r"\.\d\d", a) else 2) for a, b in numbers)


def module(name: str) -> ModuleType:
    """A file of `docs/` that is code."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # dataclasses and tuples of it look it up
    spec.loader.exec_module(found)
    return found
