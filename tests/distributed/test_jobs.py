"""Jobs in processes of this machine: results in order, reports, errors and deaths."""

from __future__ import annotations

import pytest
import torch

from demo_jobs import die, fail, square
from offmap.distributed.jobs import Pool
from offmap.errors import ConfigError, DataError, OffmapError


@pytest.mark.parametrize("workers", [1, 2])
def test_run_jobs_returns_results_in_order_and_reports(workers):
    said: list[tuple[int, str]] = []
    x = torch.arange(4.0)
    results = Pool(workers=workers).run_jobs(
        [(square, (x,)), (square, (x[:2],))], report=lambda n, doing: said.append((n, doing))
    )
    assert [r.tolist() for r in results] == [[0, 1, 4, 9], [0, 1]]
    assert sorted(said) == [(0, "squaring 4"), (1, "squaring 2")]


def test_run_jobs_raises_the_error_of_a_job():
    with pytest.raises(DataError, match="Expected a fine day, but got rain."):
        Pool(workers=2).run_jobs([(fail, ())], report=lambda n, doing: None)


def test_run_jobs_raises_when_a_worker_dies():
    said: list[str] = []
    with pytest.raises(OffmapError, match="A worker process died. Try again with `--jobs 1`."):
        Pool(workers=2).run_jobs([(die, ())], report=lambda n, doing: said.append(doing))
    assert said == ["about to die"]


def test_pool_checks_engine_and_address():
    with pytest.raises(
        ConfigError, match=r"Expected `engine` to be one of \['local', 'ray'\] .did you mean 'ray'.., but got 'rai'"
    ):
        Pool("rai")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="Expected an address only with the engine 'ray', but got 'x:1' with 'local'"):
        Pool(address="x:1")
