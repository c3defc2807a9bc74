"""What an output says about a target, against torch.distributions and loops in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal as TorchNormal

from offmap.errors import ConfigError, DataError, ShapeError
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction, infer, resolve


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------------- densities


@pytest.mark.parametrize("targets", [1, 3])
def test_gaussian_nll_with_log_variances_is_minus_the_log_density(targets: int) -> None:
    outputs, y = random(4, 5, 2 * targets), random(5, targets, seed=1)
    mean, log_variance = outputs.double().split(targets, -1)
    expected = -TorchNormal(mean, (0.5 * log_variance).exp()).log_prob(y.double()).sum(-1)
    torch.testing.assert_close(Gaussian(targets, flat=False).nll(outputs, y).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3)])
def test_gaussian_nll_with_estimated_noise_is_minus_the_log_density(shape: tuple[int, ...]) -> None:
    targets = shape[2] if len(shape) == 3 else 1
    noise = torch.arange(1.0, targets + 1) / 4
    outputs, y = random(*shape), random(5, targets, seed=1)
    expected = -TorchNormal(outputs.reshape(4, 5, targets), noise.sqrt()).log_prob(y).sum(-1)
    torch.testing.assert_close(Gaussian(targets, noise=noise).nll(outputs, y), expected)


def test_gaussian_nll_takes_whole_targets_and_flat_targets() -> None:
    outputs, whole = random(2, 4, 2), torch.tensor([1, -2, 3, 0])
    law = Gaussian()
    assert torch.equal(law.nll(outputs, whole), law.nll(outputs, whole.float()))
    assert torch.equal(law.nll(outputs, whole[:, None]), law.nll(outputs, whole.float()))


@pytest.mark.parametrize(("raw", "bound"), [(1e6, 20.0), (-1e6, -20.0), (20.0, 20.0), (3.0, 3.0)])
def test_log_variances_are_clamped_to_twenty(raw: float, bound: float) -> None:
    mean, variance = Gaussian().moments(torch.tensor([[[0.5, raw]]]))
    assert mean.item() == 0.5
    torch.testing.assert_close(variance.double().log().item(), bound)


def test_categorical_nll_is_minus_the_log_probability() -> None:
    outputs, y = random(4, 5, 3), torch.tensor([0, 2, 1, 1, 0])
    expected = -TorchCategorical(logits=outputs).log_prob(y)
    torch.testing.assert_close(Categorical().nll(outputs, y), expected)


def test_dense_categorical_nll_is_the_mean_over_positions() -> None:
    outputs, y = random(2, 3, 4, 5, 6), torch.randint(0, 4, (3, 5, 6), generator=torch.Generator().manual_seed(0))
    slow = torch.zeros(2, 3)
    for p in range(2):
        for b in range(3):
            terms = [-outputs[p, b, :, h, w].log_softmax(0)[y[b, h, w]] for h in range(5) for w in range(6)]
            slow[p, b] = torch.stack(terms).mean()
    torch.testing.assert_close(Categorical().nll(outputs, y), slow)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("column", [False, True])
def test_bernoulli_nll_is_minus_the_log_probability(shape: tuple[int, ...], dtype: torch.dtype, column: bool) -> None:
    outputs, y = random(*shape), torch.tensor([0, 1, 1, 0, 1])
    expected = -TorchBernoulli(logits=outputs.reshape(4, 5)).log_prob(y.float())
    given = y.to(dtype)[:, None] if column else y.to(dtype)
    torch.testing.assert_close(Bernoulli().nll(outputs, given), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_bernoulli_is_a_categorical_with_logits_zero_and_l(dtype: torch.dtype) -> None:
    logit, y = random(4, 5), torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    two = torch.stack([torch.zeros_like(logit), logit], -1)
    torch.testing.assert_close(Bernoulli().nll(logit, y), Categorical().nll(two, y))
    for method in ("score", "epistemic"):
        torch.testing.assert_close(getattr(Bernoulli(), method)(logit), getattr(Categorical(), method)(two))
    mine, other = Bernoulli().predict(logit), Categorical().predict(two)
    assert mine.probs.shape == (5, 2)
    torch.testing.assert_close(mine.probs, other.probs)
    assert torch.equal(mine.label, other.label)


def test_extreme_logits_give_finite_nlls_and_probabilities() -> None:
    binary = torch.tensor([[1e4, -1e4]])
    assert Bernoulli().nll(binary, torch.tensor([0, 1])).tolist() == [[1e4, 1e4]]
    wide = torch.tensor([[[1e4, -1e4, 0.0]]])
    assert Categorical().nll(wide, torch.tensor([1])).item() == 2e4
    assert Categorical().score(wide).item() == 0.0
    assert Categorical().predict(wide).probs.tolist() == [[1.0, 0.0, 0.0]]


# ----------------------------------------------------------------------------------------------------------- mixture


@pytest.mark.parametrize("noise", [None, torch.tensor([0.5, 2.0])])
def test_gaussian_prediction_has_the_moments_of_the_mixture(noise: Tensor | None) -> None:
    outputs = random(7, 5, 2 if noise is not None else 4)
    law = Gaussian(2, flat=False, noise=noise)
    mean = outputs[..., :2].double()
    variance = noise.double().expand(7, 5, 2) if noise is not None else outputs[..., 2:].double().exp()
    second = (variance + mean.square()).mean(0)  # E[y²]
    prediction = law.predict(outputs)
    torch.testing.assert_close(prediction.mean.double(), mean.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prediction.std.double().square(), second - mean.mean(0).square(), rtol=1e-5, atol=1e-6)
    assert prediction.probs is None
    assert prediction.label is None


@pytest.mark.parametrize("targets", [1, 2])
def test_nll_of_a_gaussian_prediction_is_that_of_its_moments(targets: int) -> None:
    outputs, y = random(7, 5, 2 * targets), random(5, targets, seed=1)
    law = Gaussian(targets, flat=False)
    prediction = law.predict(outputs)
    slow = -TorchNormal(prediction.mean, prediction.std).log_prob(y).sum(-1)
    torch.testing.assert_close(law.predictive_nll(outputs, y), slow)
    # one draw alone: the same as its own NLL
    torch.testing.assert_close(law.predictive_nll(outputs[:1], y), law.nll(outputs[:1], y)[0])


def test_nll_of_a_class_prediction_is_that_of_the_mean_probability() -> None:
    outputs, y = random(7, 5, 3), torch.tensor([0, 2, 1, 1, 0])
    slow = -outputs.double().softmax(2).mean(0)[torch.arange(5), y].log()
    torch.testing.assert_close(Categorical().predictive_nll(outputs, y).double(), slow, rtol=1e-5, atol=1e-6)
    logit, truth = random(7, 5), torch.tensor([True, False, True, True, False])
    p = logit.double().sigmoid().mean(0)
    slow = -torch.where(truth, p, 1 - p).log()
    for shape in ((5,), (5, 1)):
        found = Bernoulli().predictive_nll(logit, truth.reshape(shape))
        torch.testing.assert_close(found.double(), slow, rtol=1e-5, atol=1e-6)


def test_nll_of_a_dense_prediction_is_the_mean_over_positions() -> None:
    outputs, y = random(4, 3, 3, 2, 2), torch.randint(0, 3, (3, 2, 2), generator=torch.Generator().manual_seed(0))
    probs = outputs.softmax(2).mean(0)
    slow = torch.stack([
        torch.stack([-probs[b, y[b, h, w], h, w].log() for h in range(2) for w in range(2)]).mean() for b in range(3)
    ])  # fmt: skip
    torch.testing.assert_close(Categorical().predictive_nll(outputs, y), slow)


def test_confident_draws_that_are_wrong_give_finite_nlls() -> None:
    outputs = torch.tensor([[[200.0, 0.0]], [[200.0, 0.0]]])
    torch.testing.assert_close(Categorical().predictive_nll(outputs, torch.tensor([1])), torch.tensor([200.0]))


def test_flat_targets_give_flat_predictions() -> None:
    outputs = random(7, 5, 2)
    assert Gaussian(1, flat=True).predict(outputs).mean.shape == (5,)
    assert Gaussian(1, flat=False).predict(outputs).std.shape == (5, 1)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("tiny", [1e-8, 1e-6, 1e-2])
def test_mixture_variance_is_right_in_float32_for_tiny_variances_at_large_means(offset: float, tiny: float) -> None:
    # draws that differ by single units in the last place of float32
    steps = torch.tensor([0, 1, 2, -1, 5, 0, -3, 1])
    unit = torch.tensor(offset).nextafter(torch.tensor(torch.inf)).item() - offset if offset else 1e-4
    means = (offset + steps.double() * unit).float().reshape(8, 1, 1)
    outputs = torch.cat([means, torch.full_like(means, tiny).log()], -1)
    exact = means.double().var(0, correction=0) + outputs[..., 1:].double().exp().mean(0)
    law = Gaussian()
    torch.testing.assert_close(law.score(outputs).double(), exact[:, 0], rtol=1e-5, atol=0)
    torch.testing.assert_close(law.predict(outputs).std.double().square(), exact[:, 0], rtol=1e-5, atol=0)
    torch.testing.assert_close(law.epistemic(outputs).double(), means.double().var(0, correction=0)[:, 0], rtol=1e-5, atol=0)
    torch.testing.assert_close(law.predict(outputs).mean.double(), means.double().mean(0)[:, 0], rtol=1e-7, atol=0)


def test_draws_that_agree_have_no_epistemic_score() -> None:
    outputs = random(1, 5, 4).expand(9, 5, 4)
    assert Gaussian(2).epistemic(outputs).eq(0).all()
    assert (Categorical().epistemic(outputs) < 1e-12).all()
    torch.testing.assert_close(Categorical().score(outputs), TorchCategorical(logits=outputs[0]).entropy())


def test_one_target_scores_in_its_own_unit_and_several_in_units_of_their_variance() -> None:
    outputs = random(7, 5, 4)
    each = Gaussian(2, flat=False).predict(outputs).std.square()
    torch.testing.assert_close(Gaussian(2).score(outputs), each.sum(-1))
    units = torch.tensor([4.0, 0.25])
    torch.testing.assert_close(Gaussian(2, units=units).score(outputs), (each / units).sum(-1))
    alone = random(7, 5, 2)
    assert torch.equal(Gaussian(units=torch.tensor([4.0])).score(alone), Gaussian().score(alone))


def test_score_of_several_targets_does_not_depend_on_their_units() -> None:
    y = random(20, 2, seed=1)
    factor = torch.tensor([1000.0, 0.001])
    outputs = torch.stack([y + 0.1 * random(20, 2, seed=s) for s in range(6)])
    small, large = resolve(None, outputs, y), resolve(None, outputs * factor, y * factor)
    torch.testing.assert_close(small.score(outputs), large.score(outputs * factor), rtol=1e-4, atol=0)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 5), st.integers(0, 100))
def test_classification_scores_lie_between_zero_and_log_c(draws: int, rows: int, count: int, seed: int) -> None:
    outputs = 5 * random(draws, rows, count, seed=seed)
    total, part = Categorical().score(outputs), Categorical().epistemic(outputs)
    assert (total <= torch.tensor(float(count)).log() + 1e-5).all()
    assert (part >= 0).all()
    assert (part <= total + 1e-5).all()
    probs = Categorical().predict(outputs).probs
    torch.testing.assert_close(probs.sum(1), torch.ones(rows))


# ------------------------------------------------------------------------------------------------------------- positions


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def test_classes_on_the_last_axis_are_classes_on_axis_one_moved() -> None:
    outputs, y = random(4, 3, 6, 5), whole(5, 3, 6)
    first, last = Categorical(), Categorical(-1)
    moved = outputs.movedim(-1, 2)
    for method in ("nll", "predictive_nll"):
        assert torch.equal(getattr(last, method)(outputs, y), getattr(first, method)(moved, y))
    for method in ("score", "epistemic"):
        assert getattr(last, method)(outputs).shape == (3, 6)
        assert torch.equal(getattr(last, method)(outputs), getattr(first, method)(moved))
    assert last.predict(outputs).probs.shape == (3, 5, 6)
    assert torch.equal(last.predict(outputs).label, first.predict(moved).label)


@pytest.mark.parametrize("axis", [0, 2, -2])
def test_the_class_axis_is_one_or_the_last(axis: int) -> None:
    with pytest.raises(ConfigError, match=f"`axis` to be 1 or -1, the class axis of a batch, but got {axis}"):
        Categorical(axis)


@pytest.mark.parametrize("law", [Categorical(), Bernoulli(2)])
def test_ignored_targets_count_for_nothing(law: Any) -> None:
    outputs = random(4, 3, 2, 5, 6) if isinstance(law, Categorical) else random(4, 3, 5, 6)
    y = whole(2, 3, 5, 6)
    y[0, :2], y[1] = -100, -100
    each, mixed = law.nll(outputs, y), law.predictive_nll(outputs, y)
    shorter = outputs[..., 2:, :]
    torch.testing.assert_close(each[:, 0], law.nll(shorter, y[:, 2:])[:, 0])
    torch.testing.assert_close(mixed[0], law.predictive_nll(shorter, y[:, 2:])[0])
    assert (each[:, 1] == 0).all()  # nothing counts there, and nothing is NaN
    assert mixed[1] == 0
    torch.testing.assert_close(each[:, 2], law.nll(outputs[:, 2:], y[2:])[:, 0])


def test_an_ignored_row_of_plain_classes_costs_nothing_even_where_the_model_overflows() -> None:
    outputs = torch.tensor([[[0.0, 1.0], [math.inf, 0.0]]])
    assert Categorical().nll(outputs, torch.tensor([1, -100]))[0, 1] == 0
    assert Categorical().nll(outputs, torch.tensor([1, -100])).isfinite().all()


def test_ignored_targets_agree_with_torch() -> None:
    outputs, y = random(1, 3, 4, 7), whole(4, 3, 7)
    y[:, 5:] = -100
    torch.testing.assert_close(Categorical().nll(outputs, y).mean(), torch.nn.functional.cross_entropy(outputs[0], y))


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (4, 3, 1, 5, 6), (4, 3, 5, 6, 1)])
def test_dense_bernoulli_is_one_bernoulli_per_position(shape: tuple[int, ...]) -> None:
    outputs, y = random(*shape), whole(2, 3, 5, 6)
    slow = -TorchBernoulli(logits=outputs.reshape(4, 3, 5, 6)).log_prob(y.float())
    torch.testing.assert_close(Bernoulli(2).nll(outputs, y), slow.mean((2, 3)))
    alone = Bernoulli().score(outputs.reshape(4, 3, 5, 6)[:, :, 2, 4])
    torch.testing.assert_close(Bernoulli(2).score(outputs)[:, 2, 4], alone)
    assert Bernoulli(2).predict(outputs).probs.shape == (3, 2, 5, 6)


@pytest.mark.parametrize(("flat", "axis"), [(True, 1), (True, -1), (False, 1), (False, -1)])
@pytest.mark.parametrize("noisy", [False, True])
def test_dense_gaussian_is_one_gaussian_per_position(flat: bool, axis: int, noisy: bool) -> None:
    count = 1 if flat else 2
    plain = Gaussian(count, False, torch.tensor([0.5, 2.0])[:count] if noisy else None, torch.tensor([3.0, 0.1])[:count])
    outputs, y = random(4, 3, 5, 6, plain.width), random(3, 5, 6, count, seed=1)
    law = Gaussian(count, flat, plain.noise, plain.units, axis)
    placed = outputs.movedim(-1, 2) if axis == 1 else outputs
    targets = y[..., 0] if flat else y.movedim(-1, axis)
    at = [(h, w) for h in range(5) for w in range(6)]
    for method in ("nll", "predictive_nll"):
        slow = torch.stack([getattr(plain, method)(outputs[:, :, h, w], y[:, h, w]) for h, w in at]).mean(0)
        torch.testing.assert_close(getattr(law, method)(placed, targets), slow)
    torch.testing.assert_close(law.score(placed)[:, 2, 4], plain.score(outputs[:, :, 2, 4]))
    prediction = law.predict(placed)
    assert prediction.mean.shape == prediction.std.shape == targets.shape
    torch.testing.assert_close(law.columns(prediction.mean), outputs[..., :count].mean(0).flatten(0, -2))


def test_noise_of_a_dense_regression_is_shared_by_its_positions() -> None:
    outputs, y = random(2, 9, 3, 5, 6), random(9, 3, 5, 6, seed=1)
    law = resolve(None, outputs, y)
    assert isinstance(law, Gaussian)
    torch.testing.assert_close(law.noise, (y - outputs.mean(0)).square().mean((0, 2, 3)))
    torch.testing.assert_close(law.units, y.var((0, 2, 3), correction=0))


@pytest.mark.parametrize(
    ("law", "output", "targets"),
    [
        (Categorical(-1), (2, 3, 7, 4), torch.zeros(3, 6, dtype=torch.int64)),
        (Bernoulli(1), (2, 3, 7), torch.zeros(3, 6, dtype=torch.int64)),
        (Gaussian(noise=torch.ones(1)), (2, 3, 1, 7), torch.zeros(3, 6)),
    ],
)
def test_positions_that_do_not_match_are_refused(law: Any, output: tuple[int, ...], targets: Tensor) -> None:
    law.check_targets(torch.zeros(output[1:]), targets, "train")  # lengths vary from batch to batch
    with pytest.raises(ShapeError, match=r"one target per prediction, \(3, 7.*but got targets \((3, 6|18, 1)\).*same length"):
        law.nll(torch.zeros(output), targets)


def test_targets_that_are_all_ignored_are_refused() -> None:
    with pytest.raises(DataError, match="at least one target that counts, but all of `valid` are -100. Label some"):
        resolve(None, random(1, 4, 3), torch.full((4,), -100))
    Categorical().check_targets(torch.zeros(4, 3), torch.tensor([-100, 2]), "train")
    with pytest.raises(DataError, match="`train` holds values from -1 to 2"):
        Categorical().check_targets(torch.zeros(4, 3), torch.tensor([-100, -1, 2]), "train")


# -------------------------------------------------------------------------------------------------------------- rule

FLOAT, INT, BOOL = torch.float32, torch.int64, torch.bool
RULE: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Likelihood]] = [
    ((4, 1), (4,), FLOAT, Gaussian(1, True, torch.ones(1))),
    ((4,), (4,), FLOAT, Gaussian(1, True, torch.ones(1))),
    ((4,), (4, 1), FLOAT, Gaussian(1, False, torch.ones(1))),
    ((4, 2), (4,), FLOAT, Gaussian(1, True)),
    ((4, 2), (4, 1), FLOAT, Gaussian(1, False)),
    ((4, 2), (4, 2), FLOAT, Gaussian(2, False, torch.ones(2))),
    ((4, 4), (4, 2), FLOAT, Gaussian(2, False)),
    ((4, 6), (4, 3), FLOAT, Gaussian(3, False)),
    ((4, 3), (4,), INT, Categorical()),
    ((4, 2), (4,), INT, Categorical()),
    ((4, 2), (4,), BOOL, Categorical()),
    ((4, 3, 8), (4, 8), INT, Categorical()),
    ((4, 3, 8, 8), (4, 8, 8), INT, Categorical()),
    ((4, 7, 3), (4, 7), INT, Categorical(-1)),
    ((4, 7, 8, 3), (4, 7, 8), INT, Categorical(-1)),
    ((4, 5, 5), (4, 5), INT, Categorical(1)),  # both axes would do
    ((4,), (4,), INT, Bernoulli()),
    ((4, 1), (4,), INT, Bernoulli()),
    ((4,), (4, 1), BOOL, Bernoulli()),
    ((4, 1), (4, 1), BOOL, Bernoulli()),
    ((4, 7, 1), (4, 7), INT, Bernoulli(1)),
    ((4, 1, 5, 6), (4, 5, 6), BOOL, Bernoulli(2)),
    ((4, 1, 5, 6), (4, 5, 6), FLOAT, Gaussian(1, True, torch.ones(1))),
    ((4, 2, 5, 6), (4, 5, 6), FLOAT, Gaussian(1, True)),
    ((4, 3, 5, 6), (4, 3, 5, 6), FLOAT, Gaussian(3, False, torch.ones(3))),
    ((4, 6, 5, 7), (4, 3, 5, 7), FLOAT, Gaussian(3, False)),
    ((4, 7, 2), (4, 7), FLOAT, Gaussian(1, True, axis=-1)),
    ((4, 7, 6), (4, 7, 3), FLOAT, Gaussian(3, False, axis=-1)),
]


@pytest.mark.parametrize(("output", "targets", "dtype", "law"), RULE)
def test_likelihood_is_inferred_from_types_and_shapes(
    output: tuple[int, ...], targets: tuple[int, ...], dtype: torch.dtype, law: Likelihood
) -> None:
    found = infer(torch.zeros(output), torch.zeros(targets, dtype=dtype))
    assert type(found) is type(law)
    if isinstance(law, Gaussian):
        assert isinstance(found, Gaussian)
        assert (found.targets, found.flat, found.axis) == (law.targets, law.flat, law.axis)
        assert (found.noise is None) == (law.noise is None)
    else:
        assert found == law
    found.check_targets(torch.zeros(output), torch.zeros(targets, dtype=dtype), "train")


@pytest.mark.parametrize(("shape", "dtype"), [((4, 7), INT), ((4, 7), FLOAT), ((4, 5, 6), BOOL)])
def test_targets_of_the_outputs_own_shape_are_yes_and_no_by_name_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    output, y = torch.zeros(shape), torch.zeros(shape, dtype=dtype)
    assert infer(output, y, "bernoulli") == Bernoulli(len(shape) - 1)
    if dtype != FLOAT:
        with pytest.raises(ShapeError, match="for the categorical likelihood"):  # one-hot, perhaps
            infer(output, y)


MISFITS: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str | None, str]] = [
    ((4, 3), (4,), FLOAT, None, r"outputs \(B, K\) of means or \(B, 2K\).*targets \(4,\) \(torch.float32\) and outputs \(4, 3\)"),
    ((4, 3), (4, 2), FLOAT, None, r"for the gaussian likelihood, but got targets \(4, 2\)"),
    ((4, 5, 2), (4, 2), FLOAT, None, r"but got targets \(4, 2\) .* and outputs \(4, 5, 2\)"),
    ((4, 3, 5, 6), (4, 3, 6, 5), FLOAT, None, r"for the gaussian likelihood"),
    ((4, 5, 3), (4, 6), INT, None, r"for the categorical likelihood"),
    ((4, 1, 5), (4, 6), INT, "bernoulli", r"or both \(B, \*positions\) for the bernoulli likelihood"),
    ((4, 2), (4, 2, 2), FLOAT, None, r"but got targets \(4, 2, 2\)"),
    ((4, 3), (4, 1), INT, None, r"integer targets \(B, ...\) with outputs \(B, C, ...\) of logits.*got targets \(4, 1\)"),
    ((4, 3, 8), (4,), INT, None, r"for the categorical likelihood"),
    ((4, 3), (5,), INT, None, r"targets \(5,\) \(torch.int64\) and outputs \(4, 3\)"),
    ((4, 1), (4, 2), INT, None, r"targets \(B,\) or \(B, 1\) of 0 and 1 with outputs \(B,\) or \(B, 1\) of logits"),
    ((4, 3), (4,), FLOAT, "categorical", r"integer targets"),
    ((4, 3), (4,), INT, "bernoulli", r"for the bernoulli likelihood"),
    ((4, 1, 1), (4,), INT, "bernoulli", r"and outputs \(4, 1, 1\)"),
    ((4, 3), (4,), INT, "gaussian", r"for the gaussian likelihood"),
]  # fmt: skip


@pytest.mark.parametrize(("output", "targets", "dtype", "name", "message"), MISFITS)
def test_shapes_that_do_not_fit_are_refused_with_both_shapes(
    output: tuple[int, ...], targets: tuple[int, ...], dtype: torch.dtype, name: str | None, message: str
) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        infer(torch.zeros(output), torch.zeros(targets, dtype=dtype), name)
    assert "Reshape the targets, pass `output_fn=`, or name another `likelihood=`" in str(caught.value)


def test_unknown_names_and_objects_are_refused() -> None:
    outputs, y = random(1, 4, 3), torch.tensor([0, 1, 2, 0])
    with pytest.raises(ConfigError, match="did you mean 'categorical'.*or an `offmap.Likelihood`, but got 'categoric'"):
        resolve("categoric", outputs, y)
    with pytest.raises(ConfigError, match="or an `offmap.Likelihood`, but got object"):
        resolve(object(), outputs, y)
    with pytest.raises(ConfigError, match="or an `offmap.Likelihood`, but got the class Categorical"):
        resolve(Categorical, outputs, y)


@pytest.mark.parametrize(
    ("law", "output", "targets", "error", "message"),
    [
        (Categorical(), (4, 3), torch.tensor([0, 3]), DataError, "0 to 2 for 3 classes, but `train` holds values from 0 to 3"),
        (Categorical(), (4, 3), torch.tensor([-1, 2]), DataError, "from -1 to 2. Relabel the targets, or use a model"),
        (Bernoulli(), (4,), torch.tensor([0, 2]), DataError, "from 0 to 1 for 2 classes, but `train` holds values from 0 to 2"),
        (Bernoulli(), (4, 1), torch.tensor([0.0, 0.5]), DataError, "whole numbers as classes, but `train` holds fractions"),
        (Bernoulli(), (4, 1), torch.tensor([0.0, -0.5]), DataError, "holds values from -0.5 to 0"),
        (Bernoulli(), (4, 2), torch.tensor([0, 1]), ShapeError, "for the bernoulli likelihood"),
        (Categorical(), (4, 3), torch.tensor([0.0, 1.0]), ShapeError, "for the categorical likelihood"),
        (Gaussian(), (4, 1), torch.tensor([0.0, 1.0]), ShapeError, "for the gaussian likelihood"),
        (Gaussian(noise=torch.ones(1)), (4, 2), torch.tensor([0.0, 1.0]), ShapeError, "for the gaussian likelihood"),
        (Gaussian(), (4, 2), torch.zeros(2, 2), ShapeError, "for the gaussian likelihood"),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit_are_refused(
    law: Likelihood, output: tuple[int, ...], targets: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        law.check_targets(torch.zeros(output), targets, "train")


@pytest.mark.parametrize("targets", [torch.tensor([0.0, 1.0]), torch.tensor([True, False]), torch.tensor([[1], [0]])])
def test_binary_targets_may_be_floats_bools_or_a_column(targets: Tensor) -> None:
    Bernoulli().check_targets(torch.zeros(4, 1), targets, "train")


# ------------------------------------------------------------------------------------------------------------- noise


def test_noise_is_the_mean_squared_residual_of_the_members_mean() -> None:
    outputs, y = random(3, 50, 2), random(50, 2, seed=1)
    law = resolve(None, outputs, y)
    assert isinstance(law, Gaussian)
    torch.testing.assert_close(law.noise, (y - outputs.mean(0)).square().mean(0))
    torch.testing.assert_close(law.units, y.var(0, correction=0))


def test_a_model_that_interpolates_gets_a_floor_of_noise() -> None:
    y = random(50)
    law = resolve(None, y[None, :, None], y)
    assert isinstance(law, Gaussian)
    torch.testing.assert_close(law.noise, 1e-6 * y.var(correction=0)[None])
    constant = resolve(None, torch.zeros(1, 9, 1), torch.zeros(9))
    assert isinstance(constant, Gaussian)
    torch.testing.assert_close(constant.noise, torch.tensor([1e-6]))


def test_whole_numbers_can_be_regressed_by_name() -> None:
    outputs, y = random(1, 30, 1), torch.arange(30)
    law = resolve("gaussian", outputs, y)
    assert isinstance(law, Gaussian)
    torch.testing.assert_close(law.noise, (y - outputs[0, :, 0]).square().mean()[None])


def test_log_variance_outputs_need_no_noise() -> None:
    law = resolve(None, random(1, 30, 2), random(30, seed=1))
    assert isinstance(law, Gaussian)
    assert law.noise is None


# ----------------------------------------------------------------------------------------------------- a user's own


@dataclass
class Own(Likelihood):
    """A unit-variance Gaussian of the user's; fields spoil one method each."""

    shape: tuple[int, ...] | None = None
    silent: bool = False

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        each = 0.5 * (output[..., 0] - y).square()
        return each if self.shape is None else each.reshape(self.shape)

    def predict(self, outputs: Tensor) -> Prediction:
        return Prediction() if self.silent else Prediction(mean=outputs[..., 0].mean(0), std=outputs[..., 0].std(0))

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)

    def epistemic(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)


def test_an_object_of_a_subclass_with_the_four_methods_is_accepted() -> None:
    own = Own()
    assert isinstance(own, Likelihood)
    assert resolve(own, random(2, 6, 1), random(6)) is own


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (Own(shape=(12,)), ShapeError, r"one number per draw and example, \(2, 6\), but got \(12,\). Sum it over all other axes"),
        (Own(silent=True), ConfigError, "give a mean and a std, or probs and a label, but it gives neither"),
    ],
)
def test_an_object_that_answers_in_the_wrong_form_is_refused(own: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(own, random(2, 6, 1), random(6))


@pytest.mark.parametrize("missing", ["nll", "predict", "score", "epistemic"])
def test_an_object_without_one_of_the_methods_is_refused(missing: str) -> None:
    methods = {name: getattr(Own, name) for name in ("nll", "predict", "score", "epistemic") if name != missing}
    with pytest.raises(ConfigError, match="or an `offmap.Likelihood`, but got Half"):
        resolve(type("Half", (), methods)(), random(2, 6, 1), random(6))
    with pytest.raises(TypeError, match=f"abstract method {missing}|abstract method '{missing}'"):
        type("Half", (Likelihood,), methods)()
