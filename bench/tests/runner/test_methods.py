"""Every method that a plan may name gives what a cell can measure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from offmap.errors import ConfigError
from offmap_bench.runner.methods import FitContext
from offmap_bench.runner.plan import METHODS
from offmap_bench.runner.store import significant
from offmap_bench.tasks.task import Task
from trained import inputs, regression

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
