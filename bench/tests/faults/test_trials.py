"""The first trials of every promise; all of them are for `make trust-run`."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import offmap
from checks.trust import CHECKS, check_of
from faults import making, numbers

QUICK = [
    pytest.param(name, seed, marks=pytest.mark.xdist_group(name), id=f"{name}-{seed}")  # one process makes what trials share
    for name in CHECKS
    for seed in range(check_of(name).quick)
]


@pytest.mark.parametrize(("name", "seed"), QUICK)
def test_the_promise_holds(name: str, seed: int, tmp_path: Path):
    assert check_of(name).trial(seed, tmp_path)


def test_the_options_drawn_for_fits_are_those_that_fit_has():
    options = {*inspect.signature(offmap.fit).parameters, *(field.name for field in fields(offmap.Config))}
    assert making.FIT.keys() <= options
    assert not options.intersection(making.MISSPELT)


def test_every_argument_of_a_metric_can_be_drawn():
    arguments = {name for function in numbers.FUNCTIONS for name in inspect.signature(function).parameters}
    assert arguments <= numbers.MADE.keys()
