from __future__ import annotations

import pytest
import torch

from offmap.errors import ConfigError
from offmap_bench.tasks.catalog import TASKS, expand, task


def test_a_pattern_gives_the_eight_sets_of_a_mode() -> None:
    found = expand(["uci/*/extrapolation"])
    assert len(found) == 8
    assert all(name.endswith("/extrapolation") for name in found)


def test_names_found_twice_count_once() -> None:
    assert expand(["uci/yacht/*", "uci/yacht/extrapolation", "regression"]) == [
        "uci/yacht/extrapolation", "uci/yacht/interpolation", "regression",
    ]  # fmt: skip


def test_tasks_carry_the_name_they_are_asked_by() -> None:
    assert task("regression").name == "regression"
    assert len(TASKS) == 72


def test_the_seed_reaches_the_split() -> None:
    assert not torch.equal(task("digits", 0).train[0], task("digits", 1).train[0])


@pytest.mark.parametrize("name", ["uci/yatch/extrapolation", "uci/yacht/extrapolatoin"])
def test_unknown_names_get_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean 'uci/yacht/extrapolation'.*but got '{name}'"):
        task(name)
    with pytest.raises(ConfigError, match=f"did you mean 'uci/yacht/extrapolation'.*but got '{name}'"):
        expand([name])
