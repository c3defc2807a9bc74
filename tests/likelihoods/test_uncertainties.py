"""Variances and entropies against float64 loops, hand counted cases, and the identities that tie them together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offmap._types import ScoreFn
from offmap.likelihoods import Gaussian
from offmap.likelihoods.classification import mutual_information, predictive_entropy
from offmap.likelihoods.gaussian import epistemic_variance

ENTROPIES = [predictive_entropy, mutual_information]


def mixture_variance(means: Tensor, variances: Tensor) -> Tensor:
    """The variance of a regression with these means and variances, (P, B, K) each."""
    outputs = torch.cat([means, variances.log()], 2)
    return Gaussian(targets=means.shape[2], flat=False).mixture_moments(outputs)[1]


def expected_entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(2).mean(0)


def random_probs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (3 * logits).softmax(2).to(dtype)


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def slow_entropies(probs: Tensor) -> tuple[list[float], list[float]]:
    """Entropy of the mean and mean entropy of (P, B, C), one number at a time."""
    draws, batch, classes = probs.shape
    of_mean, mean_of = [], []
    for b in range(batch):
        rows = [[probs[p, b, c].item() for c in range(classes)] for p in range(draws)]
        of_mean.append(entropy([sum(row[c] for row in rows) / draws for c in range(classes)]))
        mean_of.append(sum(entropy(row) for row in rows) / draws)
    return of_mean, mean_of


def test_mixture_variance_is_the_variance_of_samples_of_the_mixture_by_definition() -> None:
    # E[x²] − E[x]² of the mixture, exact in float64 at this scale
    g = torch.Generator().manual_seed(0)
    means = torch.randn(5, 3, 2, generator=g, dtype=torch.float64)
    variances = torch.rand(5, 3, 2, generator=g, dtype=torch.float64)
    second_moment = (means.square() + variances).mean(0)
    torch.testing.assert_close(mixture_variance(means, variances), second_moment - means.mean(0).square())


def test_epistemic_variance_divides_by_the_number_of_draws() -> None:
    means = torch.randn(7, 4, 2, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(epistemic_variance(means), means.var(0, correction=0))


def test_tiny_spread_at_a_large_mean_is_exact_in_float32() -> None:
    # 1e6 + {0, 1/16, 2/16, 3/16} are float32 numbers; their mean 1e6 + 3/32 is not
    steps = torch.arange(4.0)[:, None, None] / 16
    means = 1e6 + steps
    expected = torch.tensor([[(1.5**2 + 0.5**2) / 2 / 256]])
    assert torch.equal(means - 1e6, steps)
    assert torch.equal(epistemic_variance(means), expected)
    assert torch.equal(mixture_variance(means, torch.ones_like(means)), expected + 1)
    two_pass_without_reference = (means - means.mean(0)).square().mean(0)
    assert not torch.equal(two_pass_without_reference, expected)


def test_tiny_variances_survive_beside_large_means() -> None:
    means = torch.full((50, 1, 1), 12345.678)
    variances = torch.full((50, 1, 1), 1e-8)  # log-variances are clamped to ±20
    torch.testing.assert_close(mixture_variance(means, variances), torch.tensor([[1e-8]]), rtol=1e-6, atol=0)


def test_one_draw_has_no_epistemic_variance_and_no_mutual_information() -> None:
    means = torch.tensor([[[3.7, -1.2e8]]])
    assert torch.equal(epistemic_variance(means), torch.zeros(1, 2))
    probs = random_probs(1, 3, 4, dtype=torch.float32)
    assert torch.equal(mutual_information(probs), torch.zeros(3))


@pytest.mark.parametrize(
    "column",
    [
        [torch.inf, 1.0],
        [1.0, torch.inf],
        [torch.inf, torch.inf],
        [torch.inf, -torch.inf],
        [3e38, -3e38],
        [1e30, 0.0],
    ],
)
def test_overflowed_means_give_infinite_variance(column: list[float]) -> None:
    means = torch.tensor(column)[:, None, None]
    assert torch.equal(epistemic_variance(means), torch.tensor([[torch.inf]]))


def test_nan_means_stay_nan_and_do_not_spread() -> None:
    means = torch.tensor([[[torch.nan], [1.0]], [[torch.inf], [3.0]]])
    variance = epistemic_variance(means)
    assert variance[0].isnan().all()
    assert variance[1].item() == 1.0


def test_entropies_match_the_loop() -> None:
    probs = random_probs(6, 5, 4)
    of_mean, mean_of = (torch.tensor(v, dtype=torch.float64) for v in slow_entropies(probs))
    torch.testing.assert_close(predictive_entropy(probs), of_mean)
    torch.testing.assert_close(expected_entropy(probs), mean_of)
    torch.testing.assert_close(mutual_information(probs), of_mean - mean_of)


def test_certain_draws_that_disagree_have_log_c_of_mutual_information() -> None:
    probs = torch.eye(3)[:, None]  # three draws, one example, each sure of another class
    log3 = torch.tensor([math.log(3)])
    torch.testing.assert_close(predictive_entropy(probs), log3)
    torch.testing.assert_close(mutual_information(probs), log3)
    assert torch.equal(expected_entropy(probs), torch.zeros(1))


@pytest.mark.parametrize("score", ENTROPIES)
def test_certain_draws_that_agree_have_no_entropy(score: ScoreFn) -> None:
    probs = torch.tensor([1.0, 0.0, 0.0]).expand(4, 2, 3)
    assert torch.equal(score(probs), torch.zeros(2))


@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-5])
def test_mutual_information_of_nearly_equal_draws_is_right_in_float32(gap: float) -> None:
    probs = torch.tensor([[0.3 + gap, 0.7 - gap], [0.3 - gap, 0.7 + gap]])[:, None]  # (2, 1, 2), float32
    exact = mutual_information(probs.double())
    second_order = torch.tensor([gap**2 / 2 * (1 / 0.3 + 1 / 0.7)], dtype=torch.float64)
    torch.testing.assert_close(exact, second_order, rtol=2e-2, atol=0)
    torch.testing.assert_close(mutual_information(probs).double(), exact, rtol=2e-2, atol=0)


def test_rounding_never_makes_mutual_information_negative() -> None:
    probs = random_probs(1, 2000, 5, dtype=torch.float32)
    jitter = 1 + 1e-7 * torch.randn(6, 2000, 5, generator=torch.Generator().manual_seed(1))
    assert (mutual_information(probs * jitter) >= 0).all()


@pytest.mark.parametrize("score", ENTROPIES)
def test_positions_are_kept_and_agree_with_flattened_examples(score: ScoreFn) -> None:
    probs = random_probs(3, 2, 4, 5, 6)  # (P, B, C, H, W)
    flat = probs.permute(0, 1, 3, 4, 2).reshape(3, 60, 4)
    dense = score(probs)
    assert dense.shape == (2, 5, 6)
    torch.testing.assert_close(dense.flatten(), score(flat))


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(2, 5))
def test_entropy_of_the_mean_is_shared_doubt_plus_disagreement(seed: int, draws: int, classes: int) -> None:
    probs = random_probs(draws, 3, classes, seed=seed, dtype=torch.float32)
    total, shared, disagreement = predictive_entropy(probs), expected_entropy(probs), mutual_information(probs)
    torch.testing.assert_close(total, shared + disagreement, atol=2e-6, rtol=0)
    assert (disagreement >= 0).all()
    assert (disagreement <= min(math.log(draws), math.log(classes)) + 1e-6).all()


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(-100, 100))
def test_variance_ignores_a_shift_and_the_order_of_draws(seed: int, shift: float) -> None:
    means = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(epistemic_variance(means.flip(0) + shift), epistemic_variance(means))


def test_scores_run_under_vmap() -> None:
    probs = random_probs(3, 8, 4).reshape(3, 2, 4, 4)  # (P, 2, B, C)
    mapped = torch.func.vmap(mutual_information, in_dims=1)(probs)
    torch.testing.assert_close(mapped, torch.stack([mutual_information(probs[:, i]) for i in range(2)]))
    means = probs.log()
    mapped = torch.func.vmap(epistemic_variance, in_dims=1)(means)
    torch.testing.assert_close(mapped, means.var(0, correction=0))


def test_mutual_information_of_saturated_draws_equals_the_entropy_of_their_mean():
    logits = 200 * torch.eye(4).unsqueeze(1) - 40 * torch.rand(4, 1, 4, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(2)  # one-hot to rounding: probabilities far below the mean, but not zero
    torch.testing.assert_close(mutual_information(probs), predictive_entropy(probs), rtol=1e-5, atol=0)


def test_tensors_without_values_are_traced() -> None:
    """Compilers and exporters ask what shape comes of a shape."""
    found = predictive_entropy(torch.zeros(3, 5, 4, device="meta"))
    assert found.is_meta
    assert found.shape == (5,)
