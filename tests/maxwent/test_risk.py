"""One definition of the validation risk, and the threshold τ."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import oracles
import trained
from offmap.data import Rows
from offmap.errors import ConfigError
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Prediction
from offmap.maxwent import risk
from offmap.maxwent.risk import RISKS, Validation, as_risk, zero_one
from offmap.model import forward
from offmap.model.forward import BatchedModel, copy_model
from offmap.posterior.distribution import WeightDistribution, scaling
from offmap.posterior.parameterization import Parameterization

P = 7


class Laplace(Likelihood):
    """A likelihood of the user's own."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return (output[..., 0] - y).abs() + math.log(2)

    def predict(self, outputs: Tensor) -> Prediction:
        return Prediction(mean=outputs[..., 0].mean(0))

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)

    def epistemic(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)


def regression(
    members: int = 2, likelihood: Likelihood | None = None, rows: int = 20, **options: object
) -> tuple[WeightDistribution, Validation, Tensor]:
    """A distribution of members, how to ask for its risk, and the outputs (M, P, n, 2) of its validation draws, by hand."""
    nets = [copy_model(trained.regressor(m, log_variance=True)) for m in range(members)]
    q = scaling(nets, initial_scale=0.05)
    x, y = trained.regression(rows)
    validation = Validation(BatchedModel(nets[0]), likelihood or Gaussian(), Rows(x, y, 8, "valid"), draws=P, **options)  # pyright: ignore[reportArgumentType]
    outputs = oracles.run(nets[0], q.draw(range(P), seed=validation.seed, stream="valid"), x)
    return q, validation, outputs.unflatten(0, (members, P)).double()


def test_the_risk_of_a_gaussian_is_the_nll_of_the_mixtures_moments():
    q, validation, outputs = regression()
    y = validation.data.targets.double()
    for member in range(2):
        mean, variance = outputs[member, ..., 0].numpy(), np.exp(outputs[member, ..., 1].numpy())
        total = variance.mean(0) + mean.var(0)
        nll = 0.5 * (np.log(2 * np.pi * total) + (y.numpy() - mean.mean(0)) ** 2 / total)
        np.testing.assert_allclose(validation.evaluate(q).losses[member], nll, rtol=1e-4, atol=1e-5)
        assert float(validation.evaluate(q).risk[member]) == pytest.approx(nll.mean(), rel=1e-4)


@pytest.mark.parametrize("name", ["nll", "expected-nll", "averaged-nll"])
def test_the_risk_of_a_users_likelihood_is_that_of_the_mixture(name: str):
    q, validation, outputs = regression(likelihood=Laplace(), risk=RISKS[name])
    nll = (outputs[..., 0] - validation.data.targets.double()).abs() + math.log(2)  # (M, P, n)
    expected = nll.mean(1) if name == "expected-nll" else math.log(P) - (-nll).logsumexp(1)
    torch.testing.assert_close(validation.evaluate(q).risk.double(), expected.mean(1), rtol=1e-4, atol=1e-5)


def test_expected_and_averaged_risks_of_a_gaussian():
    y = trained.regression(20)[1]
    q, validation, outputs = regression(risk=RISKS["expected-nll"])
    expected = oracles.gaussian_nll(outputs, y).mean((1, 2))
    torch.testing.assert_close(validation.evaluate(q).risk.double(), expected, rtol=1e-4, atol=1e-5)
    q, validation, outputs = regression(risk=RISKS["averaged-nll"])
    expected = oracles.gaussian_nll(outputs.mean(1), y).mean(1)
    torch.testing.assert_close(validation.evaluate(q).risk.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_risk_of_a_classifier_is_minus_the_log_of_the_mean_probability():
    logits = torch.randn(5, 6, 3)
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    probs = logits.double().softmax(2).mean(0)
    expected = -torch.stack([probs[i, y[i]].log() for i in range(6)])
    for name in ("nll", "averaged-nll"):
        torch.testing.assert_close(RISKS[name](Categorical(), logits, y).double(), expected, rtol=1e-5, atol=1e-6)
    single = torch.randn(5, 6)
    probs = single.double().sigmoid().mean(0)
    expected = -torch.where(y > 0, probs.log(), (1 - probs).log())
    torch.testing.assert_close(RISKS["nll"](Bernoulli(), single, (y > 0).long()).double(), expected, rtol=1e-5, atol=1e-6)


def test_certain_and_wrong_classifiers_have_a_large_but_finite_risk():
    logits = torch.tensor([[[80.0, 0.0]], [[90.0, 0.0]]])
    assert float(RISKS["nll"](Categorical(), logits, torch.tensor([1]))) == pytest.approx(80 + math.log(2), rel=1e-4)


def test_zero_one_counts_wrong_labels_of_the_mean_prediction():
    logits = torch.tensor([[[2.0, 0], [2, 0], [0, 3]], [[-1.0, 0], [-4, 0], [0, 3]]])
    assert RISKS["zero-one"](Categorical(), logits, torch.tensor([0, 0, 0])).tolist() == [0.0, 1.0, 1.0]
    assert RISKS["zero-one"](Bernoulli(), -logits[..., :1], torch.tensor([[0], [0], [1]])).tolist() == [0.0, 1.0, 1.0]


def test_zero_one_of_dense_labels_is_the_share_of_wrong_positions():
    logits = torch.zeros(1, 1, 2, 4)
    logits[0, 0, 1, 0] = 5
    assert RISKS["zero-one"](Categorical(), logits, torch.zeros(1, 4, dtype=torch.long)).tolist() == [0.25]


def test_zero_one_of_a_regression_is_refused():
    q, validation, _ = regression(risk=RISKS["zero-one"])
    with pytest.raises(
        ConfigError, match="Expected a classification likelihood for the risk 'zero-one'; use 'nll' for regression"
    ):
        validation.evaluate(q)


def test_an_unknown_risk_is_refused_and_the_nearest_named():
    with pytest.raises(ConfigError, match=r"Expected `risk` to be one of .* \(did you mean 'zero-one'\?\) or a function, but"):
        as_risk("zero_one")
    assert as_risk(RISKS["nll"]) is RISKS["nll"]


@pytest.mark.parametrize("tolerance", ["paper", "reference"])
def test_max_risk_is_the_base_risk_and_twice_its_standard_error(tolerance: str):
    q, validation, _ = regression()
    x, y = trained.regression(20)
    for member in range(2):
        losses = oracles.gaussian_nll(copy_model(trained.regressor(member, log_variance=True))(x), y).numpy()
        expected = oracles.max_risk(losses, per_root=tolerance == "paper")
        assert float(validation.max_risk(q, tolerance=tolerance)[member]) == pytest.approx(expected, rel=1e-4)


def test_max_risk_does_not_depend_on_the_scale():
    q, validation, _ = regression()
    before = validation.max_risk(q)
    q.set_scale({n: 100 * s for n, s in q.scale().items()})
    assert torch.equal(validation.max_risk(q), before)


def test_a_risk_of_the_users_own_is_used():
    q, validation, outputs = regression(risk=lambda likelihood, stack, y: (stack[..., 0].mean(0) - y).abs())
    expected = (outputs[..., 0].mean(1) - validation.data.targets).abs().mean(1)
    torch.testing.assert_close(validation.evaluate(q).risk.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_noise_of_validation_is_fixed_and_its_own():
    q, validation, _ = regression()
    assert torch.equal(validation.evaluate(q).risk, validation.evaluate(q).risk)
    other = Validation(validation.model, Gaussian(), validation.data, draws=P, seed=1)
    assert not torch.equal(validation.evaluate(q).risk, other.evaluate(q).risk)


def test_a_factor_that_is_tried_is_not_written():
    q, validation, _ = regression()
    before = {n: s.detach().clone() for n, s in q.scale().items()}
    factor = torch.full((q.members,), 2.0)
    risk = validation.evaluator(q)(factor).risk
    assert all(torch.equal(s, before[n]) for n, s in q.scale().items())
    q.scale_by(factor)
    torch.testing.assert_close(validation.evaluate(q).risk, risk, rtol=1e-4, atol=1e-5)


def test_risk_is_the_same_in_blocks_of_rows_of_any_size(monkeypatch: pytest.MonkeyPatch):
    q, validation, _ = regression()
    whole = validation.evaluate(q).losses
    for numbers in (14, 3 * 14, 1 << 24):  # rows of 2·P numbers per block: 1, 3, all
        monkeypatch.setattr(forward, "OUTPUT_NUMBERS", numbers)
        torch.testing.assert_close(validation.evaluate(q).losses, whole, rtol=1e-4, atol=1e-5)


def test_outputs_that_are_not_numbers_have_a_risk_above_any_threshold():
    q, validation, _ = regression(members=1)
    q.scale_by(math.nan)
    assert not bool((validation.evaluate(q).risk <= 1e30).any())
    assert not bool((validation.evaluate(q)[0] <= 1e30).any())


def test_the_smoothed_threshold_counts_one_more_example_at_chance():
    q, validation, _ = regression()
    y = trained.regression(20)[1].double()
    chance = 0.5 * math.log(2 * math.pi * math.e * float(y.var(correction=0)))
    for member, losses in enumerate(validation.evaluate(q, clip=0).losses.double().numpy()):
        expected = oracles.max_risk(np.append(losses, chance), per_root=True)
        assert float(validation.max_risk(q, tolerance="smoothed")[member]) == pytest.approx(expected, rel=1e-4)


def test_smoothed_tolerance_needs_a_baseline():
    q, validation, _ = regression(likelihood=Laplace())
    with pytest.raises(ConfigError, match="a likelihood with `baseline_nll` for tolerance='smoothed'; use tolerance='paper'"):
        validation.max_risk(q, tolerance="smoothed")


def test_chance_of_classes_is_the_entropy_of_their_frequencies():
    assert float(Categorical().baseline_nll(torch.tensor([0, 0, 0, 1])).mean()) == pytest.approx(
        -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    )
    assert float(Bernoulli().baseline_nll(torch.tensor([[1], [0]])).mean()) == pytest.approx(math.log(2))


# -------------------------------------------------------------------------------------------------------------- ignored


def test_ignored_targets_are_no_mistakes_and_no_class_of_their_own():
    outputs = torch.tensor([[[[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]], [[2.0, 0.0]] * 3]])  # (P, B, T, C)
    y = torch.tensor([[0, 0, -100], [-100, -100, -100]])
    assert zero_one(Categorical(-1), outputs, y).tolist() == [0.5, 0.0]
    assert float(Categorical(-1).baseline_nll(torch.tensor([0, 1, -100, -100])).mean()) == pytest.approx(math.log(2))


def test_chance_of_a_dense_regression_is_that_of_one_position():
    y = torch.randn(40, 3, 5, generator=torch.Generator().manual_seed(0))
    pooled = y.double().var(correction=0)
    expected = 0.5 * (2 * math.pi * math.e * pooled).log()
    assert float(Gaussian(noise=torch.ones(1)).baseline_nll(y).mean()) == pytest.approx(float(expected))


def test_evaluate_gives_the_risk_and_the_mean_uncertainty_of_every_member():
    q, validation, outputs = regression()
    risk, uncertainty, losses = validation.evaluate(q)
    assert torch.equal(risk, losses.mean(1))
    variance = outputs[..., 1].exp().mean(1) + outputs[..., 0].var(1, correction=0)  # (M, n)
    torch.testing.assert_close(uncertainty, variance.mean(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("most", [1 << 23, 0])
def test_the_risk_along_a_factor_is_that_of_the_widened_distribution(most: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(risk, "CACHE_NUMBERS", most)
    q, validation, _ = regression()
    along = validation.evaluator(q)
    for factor in (torch.tensor([1e-3, 1.0]), torch.tensor([7.0, 0.2])):
        wider, validation, _ = regression()
        wider.scale_by(factor)
        for ours, expected in zip(along(factor), validation.evaluate(wider), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bounded", [True, False])
def test_members_that_are_not_evaluated_cost_nothing(bounded: bool, monkeypatch: pytest.MonkeyPatch):
    q, validation, _ = regression()
    validation = validation.clip_losses(q) if bounded else validation
    passed, outputs = list[int](), BatchedModel.outputs
    monkeypatch.setattr(BatchedModel, "outputs", lambda *args, members: passed.append(members) or outputs(*args, members=members))
    along = validation.evaluator(q)
    both = along(torch.tensor([3.0, 2.0]))
    second = along(torch.tensor([math.nan, 2.0]))
    assert passed == [2, 1]
    for all_, one in zip(both[:2], second[:2], strict=True):
        assert bool(one[0].isnan())
        torch.testing.assert_close(one[1], all_[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("most", "made"), [(0, 1), (-1, 3)])
def test_small_draws_along_a_factor_are_made_once(most: int, made: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Small are those of as many numbers as are cached; large ones are drawn for every evaluation."""
    q, validation, _ = regression()
    q, rows = q.to(dtype), validation.data
    validation = replace(validation, data=replace(rows, inputs=rows.inputs.to(dtype), targets=rows.targets.to(dtype)))
    monkeypatch.setattr(risk, "CACHE_NUMBERS", P * q.members * q.dimension + most)
    along, drawn, draw = validation.evaluator(q), [], q.draw
    monkeypatch.setattr(q, "draw", lambda span, **options: drawn.append(span) or draw(span, **options))
    for factor in (0.1, 1.0, 10.0):
        along(torch.full((2,), factor))
    assert len(drawn) == made


def test_a_users_own_parameterization_is_drawn_for_every_factor():
    """w̄ + c·(w − w̄) is not what a wider φ gives there."""
    q, validation, _ = regression()
    q.parameterization = Parameterization(
        lambda mean, scale, z: {n: mean[n] + scale[n].square() * z[n] for n in mean}, lambda *_: torch.zeros(1)
    )
    factor = torch.tensor([3.0, 0.5])
    tried = validation.evaluator(q)(factor)
    q.scale_by(factor)
    for ours, expected in zip(tried, validation.evaluate(q), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_members_themselves_are_passed_once(monkeypatch: pytest.MonkeyPatch):
    q, validation, _ = regression()
    asked, outputs = list[int](), BatchedModel.outputs
    monkeypatch.setattr(
        BatchedModel,
        "outputs",
        lambda model, draw, draws, *args, **options: asked.append(draws) or outputs(model, draw, draws, *args, **options),
    )
    validation.base_risk(q)
    assert asked == [1]


def test_a_subsample_takes_fewer_rows_and_draws_and_is_as_far_from_its_max_risk(monkeypatch: pytest.MonkeyPatch):
    q, validation, _ = regression(rows=50)
    monkeypatch.setattr(risk, "SUBSAMPLE", 20)
    max_risk = validation.max_risk(q)
    few, near, _ = validation.subsample(q, max_risk)
    assert torch.equal(few.data.targets, validation.data.targets[::3])
    assert few.draws == 2
    torch.testing.assert_close(near - few.base_risk(q), max_risk - validation.base_risk(q))


def test_a_subsample_of_few_rows_has_the_same_max_risk():
    q, validation, _ = regression()
    max_risk = validation.max_risk(q)
    few, near, _ = validation.subsample(q, max_risk)
    assert few.data.rows == validation.data.rows
    assert torch.equal(near, max_risk)


@pytest.mark.parametrize("tolerance", ["smoothed", "reference", "paper"])
def test_a_tolerance_is_compared_by_its_letters(tolerance: str):
    q, validation, _ = regression()
    assert torch.equal(validation.max_risk(q, tolerance="".join(list(tolerance))), validation.max_risk(q, tolerance=tolerance))
