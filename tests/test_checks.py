"""Checks at the door, and the functions that stand behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offmap import checks, conformal, metrics
from offmap.atomic import write_whole
from offmap.errors import ConfigError, DataError, FileError

V = torch.tensor([0.1, 0.4, 0.3])
LOOKING: list[Callable[[Any], Any]] = [
    lambda x: metrics.auroc(x, V),
    lambda x: metrics.risk_coverage(x, V),
    lambda x: metrics.aurc(x, V),
    lambda x: metrics.expected_calibration_error(x, torch.tensor([0])),
    lambda x: metrics.coverage(V, V, x),
    lambda x: conformal.quantile(x, 0.5),
]


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5)])
def test_shares_of_any_library_are_plain_numbers(value: Any) -> None:
    assert checks.fraction("level", value) == checks.fraction("false_alarms", value, example=0.05) == 0.5
    assert type(checks.fraction("level", value)) is float


@pytest.mark.parametrize("value", [0, 1, -0.5, float("nan"), "0.5", None, True, torch.tensor(0.5), [0.5], 1j, object])
def test_what_is_no_share_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="Expected `level` strictly between 0 and 1, such as 0.95, but got"):
        checks.fraction("level", value)
    with pytest.raises(ConfigError, match="Expected `false_alarms` strictly between 0 and 1, such as 0.05, but got"):
        checks.fraction("false_alarms", value, example=0.05)


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_whole_numbers_of_any_library_are_plain_ones(value: Any) -> None:
    assert checks.integer("draws", value, 2, 3) == 3
    assert type(checks.integer("draws", value)) is int


@pytest.mark.parametrize("value", [1, 4, 2.0, "3", None, True, torch.tensor([3, 3]), np.array([3])])
def test_what_is_no_whole_number_in_range_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="Expected `draws` to be a whole number from 2 to 3, but got"):
        checks.integer("draws", value, 2, 3)


@pytest.mark.parametrize("value", ["idd", 3, None, ["id"], np.array(["id", "ood"]), torch.ones(2)])
def test_other_words_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Expected `positive` to be one of \['id', 'ood'\].*, but got"):
        checks.one_of("positive", value, ("id", "ood"))


@pytest.mark.parametrize("value", ["", 3, None, ".", b"", ["a"]])
def test_what_names_no_file_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="Expected `checkpoint` to be the path of a file, but got"):
        checks.path("checkpoint", value)
    assert checks.path("checkpoint", "a/b") == checks.path("checkpoint", Path("a/b")) == Path("a/b")


@pytest.mark.parametrize("value", [V.tolist(), V.numpy(), 3.0, None, "x", V.to(torch.complex64), V.to_sparse()])
@pytest.mark.parametrize("ask", LOOKING)
def test_functions_of_tensors_say_what_else_they_were_given(ask: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(DataError, match="to be a tensor of real numbers, but got"):
        ask(value)


@pytest.mark.parametrize("ask", LOOKING)
def test_functions_of_values_need_some(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(DataError, match="to be a tensor of real numbers, but got one without values"):
        ask(V.to("meta"))


@pytest.mark.parametrize("value", ["0.95", None, [0.5], 0, 2])
def test_rates_and_counts_of_metrics_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="Expected `rate` to be a number above 0 and at most 1"):
        metrics.fpr_at(V, V, value)
    probs, labels = torch.full((3, 2), 0.5), torch.tensor([0, 1, 0])
    with pytest.raises(ConfigError, match="Expected `bins` to be a whole number ≥ 1, but got"):
        metrics.expected_calibration_error(probs, labels, -3 if value == 2 else value)


def test_a_path_without_a_name_is_not_written() -> None:
    with pytest.raises(FileError, match="Cannot write '.': it names no file"):
        write_whole(Path(""), b"x")
