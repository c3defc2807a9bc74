"""What passes from function to function cannot be changed on the way, except what is there to be filled."""

from __future__ import annotations

import pkgutil
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

FILLED = {"Cycle", "Descent", "History", "LRUCache", "Moment", "Part", "Total"}
"""Sums, memories and states of a fit or a search under way."""


def records(package: str) -> list[Any]:
    """The dataclasses that a package defines."""
    modules = [
        import_module(f"offmap.{package}.{module.name}")
        for module in pkgutil.iter_modules(import_module(f"offmap.{package}").__path__)
    ]
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.__name__
    ]


@pytest.mark.parametrize("package", ["model", "posterior", "maxwent"])
def test_records_are_frozen(package: str):
    found = records(package)
    assert len(found) > 5
    assert {each.__name__ for each in found if not each.__dataclass_params__.frozen} <= FILLED
    assert all(not each.__dataclass_params__.frozen for each in found if each.__name__ in FILLED)
