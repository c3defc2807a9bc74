"""The Gaussian process is scikit-learn's; its standard deviation is also computed from the kernel by hand."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from offmap.errors import ConfigError, DataError, ShapeError
from offmap.posterior.predictive import Scorer
from offmap_bench.detectors import estimators
from offmap_bench.detectors.estimators import gaussian_process
from trained import inputs, regression

TRAIN, Y = regression(50, 0)
X = 2 * inputs(9, 1)


def test_scores_are_scikit_learns_standard_deviations() -> None:
    shift, scale = TRAIN.mean(0), TRAIN.std(0, correction=0)
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * RBF(1.0, (1e-2, 1e3)) + WhiteKernel(0.1, (1e-8, 1e1))
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    # all rows, in another order: the same process up to rounding
    process.fit(((TRAIN - shift) / scale).double().numpy(), Y.double().numpy())
    slow = process.predict(((X - shift) / scale).double().numpy(), return_std=True)[1]
    scorer = gaussian_process(TRAIN, Y)
    assert isinstance(scorer, Scorer)
    torch.testing.assert_close(scorer.score(X), torch.from_numpy(slow), rtol=1e-3, atol=0)


def test_scores_are_the_posterior_variance_of_the_kernel() -> None:
    """k(x, x) − k(x, T) (k(T, T) + s²I)⁻¹ k(T, x) + s², in units of the targets."""
    made = gaussian_process(TRAIN, Y)
    kernel = made.estimator.kernel_
    rows, new = made.estimator.X_train_, made.rows(X)
    inverse = torch.linalg.inv(torch.from_numpy(kernel(rows)))
    across, own = torch.from_numpy(kernel(new, rows)), torch.from_numpy(kernel.diag(new))
    variance = torch.stack([o - k @ inverse @ k for o, k in zip(own, across, strict=True)])
    torch.testing.assert_close(made.score(X), variance.sqrt() * Y.double().std(correction=0), rtol=1e-4, atol=0)


def test_it_knows_at_most_so_many_rows_by_the_seed() -> None:
    made = gaussian_process(TRAIN, Y, rows=20, seed=4)
    assert len(made.estimator.X_train_) == 20
    assert torch.equal(made.score(X), gaussian_process(TRAIN, Y, rows=20, seed=4).score(X))
    assert not torch.equal(made.score(X), gaussian_process(TRAIN, Y, rows=20, seed=5).score(X))


def test_ood_rows_score_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    made = gaussian_process(TRAIN, Y)
    assert made.score(10 * X).median() > made.score(TRAIN).max()
    whole = made.score(X)
    monkeypatch.setattr(estimators, "STEP", 2)
    torch.testing.assert_close(made.score(X), whole)


def test_several_targets_share_a_kernel() -> None:
    made = gaussian_process(TRAIN, torch.stack([Y, Y], 1))
    torch.testing.assert_close(made.score(X), gaussian_process(TRAIN, Y).score(X), rtol=0.05, atol=0)


def test_what_scikit_learn_warns_of_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    gaussian_process(TRAIN, torch.zeros(50))
    assert caplog.messages
    assert all(text.startswith("The Gaussian process: ") for text in caplog.messages)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="Expected `rows` to be a whole number ≥ 2, but got 1"):
        gaussian_process(TRAIN, Y, rows=1)
    with pytest.raises(DataError, match="Expected two training rows or more, each with a target, but got 50 and 49"):
        gaussian_process(TRAIN, Y[1:])
    with pytest.raises(DataError, match="the training data"):
        gaussian_process(TRAIN, Y * math.nan)
    made = gaussian_process(TRAIN, Y, rows=5)
    with pytest.raises(ShapeError, match=r"Expected rows of shape \(3,\), but got \(2,\)"):
        made.score(X[:, :2])
    with pytest.raises(DataError, match="Expected at least one input, but got none"):
        made.score(X[:0])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    with pytest.raises(ConfigError) as error:
        gaussian_process(TRAIN, Y)
    assert str(error.value) == "scikit-learn is needed here and is not installed: pip install 'offmap[sklearn]'"
