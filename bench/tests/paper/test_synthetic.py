"""Section 7.1 of the paper: the SVD guard is calm on the data and uncertain everywhere else, in the gap too."""

from __future__ import annotations

import pytest
import torch

import offmap
from offmap.data import Place, as_batches, load_rows
from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap_bench.methods import deep_ensemble
from offmap_bench.tasks.synthetic import regression


@pytest.fixture(scope="module")
def task():
    return regression()


@pytest.fixture(scope="module")
def plain(task):
    """The paper's plain net, with a shorter training."""
    net = mlp(1, 2, seed=0)
    place = Place.of(net)
    train, valid = (
        as_batches(task.train, place, name="train", batch_size=32),
        load_rows(as_batches(task.valid, place, name="valid")),
    )
    return deep_ensemble.fit(net, train, valid, likelihood=Gaussian(), config=deep_ensemble.Config(steps=3000, lr=2e-3))


@pytest.mark.parametrize("solver", ["refine", "closed-form"])
def test_standard_deviation_off_the_data_is_five_times_the_one_on_it(task, plain, solver):
    guard = offmap.fit(plain.nets()[0], task.train, task.valid, solver=solver, score="paper")
    on_data = guard.score(task.train[0]).sqrt().mean()
    outside, gap = (guard.score(task.ood[name]).sqrt().mean() for name in ("outside", "gap"))
    assert outside > 5 * on_data
    assert gap > 5 * on_data


def test_clipped_rmse_is_within_five_percent_of_the_plain_net(task, plain):
    guard = offmap.fit(plain.nets()[0], task.train, task.valid)
    x, y = task.valid

    def rmse(prediction: offmap.Prediction) -> float:
        assert prediction.mean is not None
        return float((prediction.mean - y).square().mean().sqrt())

    assert rmse(guard.predict(x)) < 1.05 * rmse(offmap.guard(plain, task.valid).predict(x))


def test_scaling_misses_the_gap_that_svd_sees(task, plain):
    """The paper's figure: without the basis the uncertainty between the two parts of the data is under-estimated."""
    net = plain.nets()[0]
    contrast = {}
    for basis in ("identity", "svd"):
        guard = offmap.fit(net, task.train, task.valid, basis=basis, score="paper")
        contrast[basis] = guard.score(task.ood["gap"]).log().mean() - guard.score(task.train[0]).log().mean()
    assert contrast["svd"] > contrast["identity"]


def test_entropy_of_the_svd_guard_is_higher_at_equal_risk(task, plain):
    net = plain.nets()[0]
    entropy = {
        basis: float(offmap.fit(net, task.train, task.valid, basis=basis).predictive.q.mean_log_square())
        for basis in ("identity", "svd")
    }
    assert entropy["svd"] > entropy["identity"]


def test_every_score_is_finite_or_infinite_but_never_nan(task, plain):
    guard = offmap.fit(plain.nets()[0], task.train, task.valid)
    far = torch.tensor([[1e3], [-1e6], [1e12], [-1e30]])
    result = guard(far)
    assert not result.score.isnan().any()
    assert result.ood.all()
