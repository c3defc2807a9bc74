"""Parts of a cell: means over members, and outputs that are cached."""

from __future__ import annotations

import torch

from offmap.model.forward import LRUCache
from offmap.posterior.predictive import CachedPredictive, OutputsOnly
from offmap_bench.runner.base_models import as_predictive, init_nets
from offmap_bench.runner.methods import Member, recipe
from offmap_bench.runner.run import average_members
from offmap_bench.tasks.catalog import task


def test_a_number_that_one_member_lacks_has_no_mean() -> None:
    parts = [{"test": {"nll": 1.0, "width": 2.0}}, {"test": {"nll": 3.0, "width": float("inf")}}]
    assert average_members(parts, task("regression"))["test"] == {
        "nll": 2.0, "width": None, "not_finite": {"width": 1}, "valid_rows": 20,
    }  # fmt: skip


def test_a_cached_predictive_runs_once_for_the_same_rows() -> None:
    data = task("regression")
    nets = init_nets(data, 0, recipe("deep_ensemble", {"hidden": [4]}))
    calls: list[int] = []

    class Counted:
        members = 5

        def outputs(self, x, draws, *, clip, seed):
            calls.append(len(x))
            return as_predictive(nets, data).outputs(x, draws, clip=clip, seed=seed)

    whole = CachedPredictive(OutputsOnly(Counted()))
    x = data.test[0]
    first = [Member(whole, m).outputs(x, 2, clip=None, seed=0) for m in range(5)]
    assert calls == [len(x)]
    assert torch.equal(torch.cat(first), whole.outputs(x, 2, clip=None, seed=0))
    assert calls == [len(x)]
    whole.outputs(x[1:], 2, clip=None, seed=0)
    whole.outputs(x, 2, clip=0.1, seed=0)
    assert len(calls) == 3


def test_a_cached_predictive_keeps_no_more_than_it_may() -> None:
    data = task("regression")
    nets = init_nets(data, 0, recipe("deep_ensemble", {"hidden": [4]}))
    own = as_predictive(nets, data)
    x = data.test[0]
    whole = CachedPredictive(own, LRUCache(own.outputs(x, 1).numel()))
    assert whole.outputs(x, 1, clip=None, seed=0) is whole.outputs(x, 1, clip=float("inf"), seed=0)
    first = whole.outputs(x, 1, clip=0.1, seed=0)  # in the place of the oldest
    assert whole.outputs(x, 1, clip=None, seed=0) is not first
    assert whole.outputs(x, 1, clip=0.1, seed=0) is not first
