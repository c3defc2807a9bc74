"""The page of promises names tests that exist, and trials that are registered."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from checks.trust import CHECKS, PAGE, page
from doc_code import module

ROOT = Path(__file__).parents[3]
PROMISES = module("blocks").PROMISES
TESTS = sorted({test for promise in PROMISES for test in promise["tests"]})


@pytest.mark.parametrize("test", TESTS)
def test_a_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_the_page_of_trials_is_that_of_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m checks.trust page`"


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise["name"])
def test_a_promise_has_a_test_and_its_trials_are_known(promise: dict[str, Any]) -> None:
    assert promise["tests"]
    assert set(promise.get("trials", ())) <= set(CHECKS)
