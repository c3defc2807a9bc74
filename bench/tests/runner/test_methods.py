"""Every method that a plan may name gives what a cell can measure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import offmap
from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap.model.forward import BatchedModel
from offmap.model.params import stack_models
from offmap.posterior.predictive import Sampled
from offmap_bench.runner.methods import FitContext, Member
from offmap_bench.runner.plan import METHODS
from offmap_bench.runner.store import significant
from offmap_bench.tasks.task import Task
from trained import inputs, regression, regressor

MODELS = {"method": "deep_ensemble", "config": {"hidden": [8], "steps": 20}}
QUICK: dict[str, dict[str, Any]] = {
    "mean_field": {"hidden": [8], "steps": 20, "check_every": 10, "risk_draws": 4},
    "swag": {"steps": 20, "collect_every": 5, "rank": 3},
    "hidden_nearest": {},
    "hidden_mahalanobis": {},
    "gaussian_process": {"rows": 20},
    "isolation_forest": {"trees": 5},
}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> FitContext:
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path))
    task = Task(
        "small",
        regression(40),
        regression(30, 1),
        regression(20, 2),
        {"far": 5 * inputs(20, 3)},
        outputs=2,
        likelihood="gaussian",
    )
    return FitContext(task, 0, MODELS)


@pytest.mark.parametrize("name", QUICK)
def test_a_fit_gives_scores_or_outputs(name: str, context: FitContext) -> None:
    method = METHODS[name]
    assert set(QUICK[name]) <= method.keys
    fitted = method.fit(context, QUICK[name])
    x = context.task.test[0]
    if method.scores_only:
        assert fitted.scorer is not None
        assert fitted.scorer.score(x).shape == (20,)
    else:
        assert fitted.predictive is not None
        assert fitted.predictive.outputs(x, 3, clip=None, seed=0).shape == (15, 20, 2)
        assert fitted.steps == 20
    assert fitted.seconds > 0
    assert json.loads(json.dumps(significant(method.settings(QUICK[name])))) is not None


def test_a_grid_of_the_competitor_is_what_its_settings_give_alone(context: FitContext) -> None:
    candidates = [{"tradeoff": value} for value in (0.01, 100.0)]
    x, fit_grid = context.task.test[0], METHODS["mean_field"].fit_grid
    assert fit_grid is not None
    for own, together in zip(candidates, fit_grid(context, QUICK["mean_field"], candidates), strict=True):
        alone = METHODS["mean_field"].fit(context, {**QUICK["mean_field"], **own})
        assert together.predictive is not None
        assert alone.predictive is not None
        assert together.chosen["tradeoff"] == own["tradeoff"]
        torch.testing.assert_close(
            together.predictive.outputs(x, 3, clip=None, seed=0),
            alone.predictive.outputs(x, 3, clip=None, seed=0),
            rtol=1e-3,
            atol=1e-4,
        )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("swag", {"rank": 1}, "Expected `rank` of at least 2"),
        ("laplace", {"structure": "block"}, "Expected `structure` to be"),
        ("mean_field", {"tradeoff": -1.0}, "Expected `tradeoff` to be a number above 0, but got -1.0"),
    ],
)
def test_impossible_settings_are_refused_before_anything_runs(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        METHODS[name].settings(settings)


def three() -> Sampled:
    stacked = stack_models([regressor(seed) for seed in range(3)])
    return Sampled(BatchedModel(stacked.module), stacked.mean | stacked.fixed)


def test_a_member_alone_gives_its_own_share_of_the_outputs() -> None:
    whole, x = three(), inputs(9, 5)
    outputs = whole.outputs(x, 4, clip=None, seed=0)
    alone = [Member(whole, m) for m in range(3)]
    assert all(isinstance(member, offmap.Predictive) and member.members == 1 for member in alone)
    assert torch.equal(torch.cat([member.outputs(x, 4, clip=None, seed=0) for member in alone]), outputs)
    assert alone[0].model is whole.model
    weights = alone[1].mean_weights()
    assert weights is not None
    torch.testing.assert_close(weights["0.weight"], regressor(1)[0].weight.detach())


def test_the_first_member_of_a_fit_is_a_fit_on_that_net_alone() -> None:
    nets, x = [mlp(3, 2, hidden=[20], seed=s) for s in range(2)], inputs(60, 5)  # with variances of their own: no shared noise
    data = (x, x[:, 0])
    options: dict[str, Any] = {"solver": "refine", "steps": 20, "check_every": 10, "risk_draws": 10, "progress": False}
    both = offmap.fit(nets, data, data, **options)
    alone = offmap.fit(nets[0], data, data, **options)
    seen = offmap.guard(Member(both.predictive, 0), data, train=data, likelihood=both.likelihood)
    assert seen.clip == alone.clip
    torch.testing.assert_close(seen.score(x), alone.score(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(seen.predict(x).mean, alone.predict(x).mean, rtol=1e-4, atol=1e-4)


def test_a_member_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="Expected `index` from 0 to 2, one of the members, but got 3"):
        Member(three(), 3)
