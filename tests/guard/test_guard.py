"""Verdicts: threshold, p-values, intervals, sets and samples, against slow versions and simulation."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.errors import ConfigError, NotFittedError
from offmap.scores.score import PaperScore
from trained import binary, binary_classifier, classes, classifier, inputs, quick, regression, regressor


@dataclass(frozen=True)
class Closed:
    """A Predictive in closed form: means x₀ with a spread that grows with |x₁|, log-variance x₂ / 2."""

    members: int = 1

    def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
        z = torch.randn(self.members * draws, 1, generator=torch.Generator().manual_seed(seed))
        spread = 0.3 * z if clip is None else (0.3 * z).clamp(-clip, clip)
        mean = x[:, 0] + spread * x[:, 1].abs()
        return torch.stack([mean, (x[:, 2] / 2).expand_as(mean)], -1)


def simulate(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data whose noise is heavy-tailed: nothing that `Closed` believes is true."""
    x = inputs(n, seed)
    generator = torch.Generator().manual_seed(seed + 10_000)
    return x, x[:, 0] + torch.randn(n, generator=generator) / torch.rand(n, generator=generator).sqrt()


def fit_closed_form(n: int, seed: int = 0, **options: Any) -> offmap.Guard:
    return offmap.guard(Closed(), simulate(20, 999), calibration=simulate(n, seed), draws=4, clip=0.0, **options)


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(60, 0), regression(60, 1))


@pytest.fixture(scope="module")
def sorter() -> offmap.Guard:
    return quick(classifier(), classes(60, 0), classes(60, 1))


@pytest.fixture(scope="module")
def painter() -> offmap.Guard:
    """A dense classifier: (B, 1, 4, 5) -> (B, 3, 4, 5)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    x = inputs(60, 0, features=20).reshape(60, 1, 4, 5)
    y = net(x).argmax(1)
    return quick(net, (x[:30], y[:30]), (x[30:], y[30:]))


# ---------------------------------------------------------------------------------------------------------- threshold


@pytest.mark.parametrize("n", [19, 20, 38, 39, 40, 100, 199])
@pytest.mark.parametrize("false_alarms", [0.05, 0.1, 0.25])
def test_threshold_is_the_right_order_statistic(n: int, false_alarms: float) -> None:
    made = fit_closed_form(n, false_alarms=false_alarms)
    x, _ = simulate(n, 0)
    k = math.ceil(round((1 - false_alarms) * (n + 1), 9))
    assert made.threshold == sorted(made.score(x).tolist())[k - 1]


@pytest.mark.parametrize(
    ("n", "false_alarms", "least"), [(2, 0.05, 19), (18, 0.05, 19), (8, 0.1, 9), (98, 0.01, 99), (2, 0.3, 3)]
)
def test_threshold_is_infinite_and_said_so_when_rows_are_too_few(
    n: int, false_alarms: float, least: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = fit_closed_form(n, false_alarms=false_alarms)
    assert made.threshold == math.inf
    assert not made(inputs(50, 3) * 100).ood.any()
    said = (f"The threshold is infinite, so nothing will be flagged: {n} calibration rows are too few for a false alarm rate of "
            f"{false_alarms:g}. Pass at least {least}.")  # fmt: skip
    assert caplog.messages == [said]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "offmap"):
        enough = fit_closed_form(least, false_alarms=false_alarms)
    assert math.isfinite(enough.threshold)
    assert not caplog.messages


def test_calibrate_says_so_too(guard: offmap.Guard, caplog: pytest.LogCaptureFixture) -> None:
    assert guard.calibrate(regression(5, 3)).threshold == math.inf
    assert "5 calibration rows are too few" in caplog.messages[0]
    assert math.isfinite(guard.threshold)  # the guard itself is as it was


def test_scores_that_overflow_are_said_to_be_the_cause_of_an_infinite_threshold(caplog: pytest.LogCaptureFixture) -> None:
    offmap.guard(Closed(), simulate(60, 1), draws=4, score=lambda outputs: outputs[0, :, 0] * math.inf)
    assert caplog.messages == ["The threshold is infinite, so nothing will be flagged: the scores of `valid` overflow."]


def test_calibrate_moves_threshold_p_values_and_intervals_and_nothing_else(guard: offmap.Guard) -> None:
    fresh = regression(50, 7)
    moved = guard.calibrate(fresh, false_alarms=0.2)
    x = inputs(9, 5)
    assert torch.equal(moved.score(x), guard.score(x))
    assert torch.equal(moved.predict(x).mean, guard.predict(x).mean)
    assert moved.threshold == guard.score(fresh[0]).sort().values[math.ceil(0.8 * 51) - 1].item()
    assert moved.calibration.exact
    assert not guard.calibration.exact
    assert not torch.equal(moved.interval(x, 0.8).lower, guard.interval(x, 0.8).lower)


def test_ood_is_score_above_threshold_and_not_at_it(guard: offmap.Guard) -> None:
    known = guard(regression(60, 1)[0])
    assert (known.score == guard.threshold).sum() == 1  # a calibration row, which is no alarm
    assert known.ood.sum() == 60 - math.ceil(0.95 * 61)
    far = guard(5 * inputs(20, 6))
    assert torch.equal(far.ood, far.score > guard.threshold)
    assert far.ood.any()


# ------------------------------------------------------------------------------------------- p-values, intervals, sets


def test_p_values_count_calibration_scores_at_least_as_large(guard: offmap.Guard) -> None:
    x = torch.cat([regression(60, 1)[0], 5 * inputs(20, 6)])
    result = guard(x)
    known = guard.calibration.scores.tolist()
    slow = [(1 + sum(c >= s for c in known)) / (len(known) + 1) for s in result.score.tolist()]
    torch.testing.assert_close(result.p_value, torch.tensor(slow), rtol=1e-6, atol=0)
    # flagged means: p-value at most the rate of false alarms
    assert torch.equal(result.ood, result.p_value <= 0.05)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_interval_radius_is_the_right_order_statistic_of_relative_errors(guard: offmap.Guard, level: float) -> None:
    x, y = regression(60, 1)
    known = guard.predict(x)
    residuals = ((y - known.mean).abs() / known.std).sort().values
    k = math.ceil(round(level * 61, 9))
    fresh = inputs(9, 5)
    prediction, interval = guard.predict(fresh), guard.interval(fresh, level)
    torch.testing.assert_close(interval.upper - prediction.mean, residuals[k - 1] * prediction.std, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(interval.lower + interval.upper, 2 * prediction.mean, rtol=1e-4, atol=1e-5)


def test_several_targets_have_a_radius_each() -> None:
    made = quick(regressor(targets=2), regression(60, 0, 2), regression(60, 1, 2))
    x, y = regression(60, 1, 2)
    assert made.calibration.residuals.shape == (60, 2)
    interval = made.interval(x, 0.9)
    inside = (interval.lower <= y) & (y <= interval.upper)
    assert ((inside.float().mean(0) - 0.9).abs() < 0.03).all()


@pytest.mark.parametrize(("n", "level", "finite"), [(9, 0.9, True), (8, 0.9, False), (99, 0.99, True), (98, 0.99, False)])
def test_interval_is_infinite_when_rows_are_too_few_for_the_level(n: int, level: float, finite: bool) -> None:
    interval = fit_closed_form(n).interval(inputs(7, 5), level)
    assert interval.upper.isfinite().all() == finite
    if not finite:
        assert (interval.upper == math.inf).all()
        assert (interval.lower == -math.inf).all()


def test_prediction_set_holds_the_classes_that_are_probable_enough(sorter: offmap.Guard) -> None:
    x, y = classes(60, 1)
    probs = sorter.predict(x).probs
    missing = (1 - probs[torch.arange(60), y]).sort().values
    bound = missing[math.ceil(round(0.9 * 61, 9)) - 1]
    assert torch.equal(sorter.prediction_set(x, 0.9), 1 - probs <= bound)
    # at least 55 of the 60 rows that set the bound are covered
    assert sorter.prediction_set(x, 0.9)[torch.arange(60), y].sum() >= 55
    wider, narrower = sorter.prediction_set(x, 0.95), sorter.prediction_set(x, 0.5)
    assert (wider | ~narrower).all()


def test_prediction_set_is_everything_when_rows_are_too_few(sorter: offmap.Guard) -> None:
    assert sorter.calibrate(classes(8, 3)).prediction_set(inputs(9, 5), 0.9).all()


def test_binary_prediction_sets_are_over_two_classes() -> None:
    made = quick(binary_classifier(), binary(60, 0), binary(60, 1))
    x, y = binary(200, 4)
    chosen = made.prediction_set(x, 0.9)
    assert chosen.shape == (200, 2)
    assert chosen[torch.arange(200), y.long()].float().mean() > 0.8


def test_coverage_false_alarms_and_p_values_are_exact_over_many_calibration_sets() -> None:
    # n = 39: P(y in interval) = ⌈0.9·40⌉/40 = 0.9 and P(flagged) = 1 − ⌈0.95·40⌉/40 = 0.05, whatever the data.
    # Coverage given the calibration set is Beta(36, 4): standard deviation 0.047, over 250 sets 0.003.
    rounds, inside, flagged, small = 250, 0.0, 0.0, 0.0
    for seed in range(rounds):
        made = fit_closed_form(39, seed=2 * seed)
        x, y = simulate(100, 2 * seed + 1)
        interval, result = made.interval(x, 0.9), made(x)
        inside += ((interval.lower <= y) & (y <= interval.upper)).float().mean().item() / rounds
        flagged += result.ood.float().mean().item() / rounds
        small += (result.p_value <= 0.2).float().mean().item() / rounds
    assert abs(inside - 0.9) < 0.012
    assert abs(flagged - 0.05) < 0.009
    assert abs(small - 0.2) < 0.016


def test_prediction_sets_cover_over_many_calibration_sets() -> None:
    @dataclass(frozen=True)
    class Logits:
        members: int = 1

        def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
            return 2 * x.expand(draws, *x.shape)

    def sample_rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x = inputs(n, seed)
        # the truth is less sure than the stub believes
        y = torch.multinomial(x.softmax(1), 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)
        return x, y

    rounds, inside = 200, 0.0
    for seed in range(rounds):
        made = offmap.guard(Logits(), sample_rows(20, 9999), calibration=sample_rows(39, 2 * seed), draws=2, clip=0.0)
        x, y = sample_rows(100, 2 * seed + 1)
        inside += made.prediction_set(x, 0.9)[torch.arange(100), y].float().mean().item() / rounds
    assert abs(inside - 0.9) < 0.014


# ------------------------------------------------------------------------------------------------------------- samples


def test_samples_are_the_outputs_of_the_drawn_models(guard: offmap.Guard) -> None:
    x = inputs(9, 5)
    q, net = guard.predictive.q, guard.predictive.model.module
    drawn = q.draw(range(5), seed=guard.seed, clip=0.3)
    slow = torch.stack([functional_call(net, {n: w[p] for n, w in drawn.items()}, (x,)) for p in range(5)])
    torch.testing.assert_close(guard.samples(x, 5, clip=0.3), slow, rtol=1e-5, atol=1e-6)


def test_fewer_samples_are_the_first_of_more(guard: offmap.Guard) -> None:
    x = inputs(9, 5)
    torch.testing.assert_close(guard.samples(x, 3), guard.samples(x, 7)[:3], rtol=1e-5, atol=1e-6)


def test_clip_zero_is_the_model_and_infinity_is_no_clip(guard: offmap.Guard) -> None:
    x = inputs(9, 5)
    model = guard.predictive.model.module
    torch.testing.assert_close(guard.samples(x, 4, clip=0.0), model(x).expand(4, 9, 1), rtol=1e-5, atol=1e-6)
    assert torch.equal(guard.samples(x, 4, clip=math.inf), guard.samples(x, 4))
    spreads = [guard.samples(x, 50, clip=c).std(0).mean() for c in (0.0, 0.01, 0.1, 1.0)]
    assert spreads == sorted(spreads)
    assert spreads[0] == 0.0


def test_prediction_and_score_come_from_their_own_draws(guard: offmap.Guard) -> None:
    x = inputs(9, 5)
    wide = guard.predict(x, clip=None)
    paper = replace(guard, score_module=PaperScore())
    torch.testing.assert_close(wide.std.square(), paper.score(x), rtol=1e-4, atol=0)
    tight = guard.predict(x, clip=0.0)
    assert (tight.std < wide.std).all()
    chosen = guard.predict(x)
    assert torch.equal(chosen.mean, guard.predict(x, clip=guard.clip).mean)


def test_an_ensemble_is_the_mixture_of_its_members_outputs() -> None:
    nets = [regressor(s) for s in range(3)]
    made = quick(nets, regression(60, 0), regression(60, 1), score="paper")
    x = inputs(9, 5)
    outputs = made.samples(x, made.draws)
    assert outputs.shape == (3 * made.draws, 9, 1)
    drawn = made.predictive.q.draw(range(made.draws), seed=made.seed)
    singles = []
    for member, net in enumerate(nets):  # every member by its own module, one draw at a time
        for draw in range(made.draws):
            weights = {n: w[member * made.draws + draw] for n, w in drawn.items()}
            singles.append(functional_call(net, weights, (x,)).detach())
    torch.testing.assert_close(outputs, torch.stack(singles), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.score(x), made.likelihood.score(torch.stack(singles)), rtol=1e-3, atol=1e-5)
    # members differ in centre and in noise
    means = outputs.unflatten(0, (3, made.draws))
    assert not torch.allclose(means[0], means[1])


def test_members_of_an_ensemble_are_centred_on_their_own_buffers() -> None:
    def fit_normalised(seed: int) -> nn.Module:
        net = regressor(seed)
        layer = nn.BatchNorm1d(12)
        layer.running_mean.fill_(0.1 * seed)
        return nn.Sequential(net[0], layer, net[1], net[2]).eval()

    nets = [fit_normalised(s) for s in range(2)]
    made = quick(nets, regression(60, 0), regression(60, 1))
    x = inputs(9, 5)
    plain = made.samples(x, 1, clip=0.0)
    torch.testing.assert_close(plain, torch.stack([net(x).detach() for net in nets]), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("numbers", [1, 50, 150])
@pytest.mark.parametrize("kind", ["guard", "sorter", "painter"])
def test_answers_do_not_depend_on_the_block_size(
    kind: str, numbers: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request.getfixturevalue(kind)
    x = inputs(21, 5, features=20).reshape(21, 1, 4, 5) if kind == "painter" else inputs(21, 5)
    whole, samples = made(x), made.samples(x, 5)
    monkeypatch.setattr(sys.modules["offmap.guard"], "OUTPUT_NUMBERS", numbers)
    blocks = made(x)
    assert len(list(made.blocks(x))) > 1
    for name, value in vars(whole).items():
        other = getattr(blocks, name)
        if value is None:
            assert other is None
        elif value.is_floating_point():
            torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(other, value), name
    torch.testing.assert_close(made.samples(x, 5), samples, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 21])
@pytest.mark.parametrize("labelled", [False, True])
def test_scores_of_a_loader_agree_with_scores_of_a_tensor(guard: offmap.Guard, batch_size: int, labelled: bool) -> None:
    x, y = regression(21, 5)
    loader = DataLoader(TensorDataset(x, y) if labelled else TensorDataset(x), batch_size=batch_size)
    torch.testing.assert_close(guard.score(loader), guard.score(x), rtol=1e-4, atol=0)
    torch.testing.assert_close(guard(loader).mean, guard(x).mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(guard.interval(loader).lower, guard.interval(x).lower, rtol=1e-4, atol=1e-4)
    assert guard.samples(loader, 2).shape == (2, 21, 1)


@pytest.mark.parametrize("chunk_size", [1, 3, 64, "auto"])
def test_scores_do_not_depend_on_the_chunk(chunk_size: Any) -> None:
    made = quick(regressor(), regression(60, 0), regression(60, 1), chunk_size=chunk_size)
    reference = quick(regressor(), regression(60, 0), regression(60, 1))
    torch.testing.assert_close(made.score(inputs(9, 5)), reference.score(inputs(9, 5)), rtol=1e-4, atol=0)


def test_arrays_and_tensors_score_alike(guard: offmap.Guard) -> None:
    x = inputs(9, 5)
    assert torch.equal(guard.score(x.numpy()), guard.score(x))
    assert torch.equal(guard.score(x.double().numpy()[::-1]), guard.score(x.flip(0)))


def test_asking_twice_gives_the_same_answer_and_touches_no_global_generator(guard: offmap.Guard) -> None:
    x = inputs(9, 5)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = guard(x)
    assert torch.equal(before, torch.random.get_rng_state())
    guard.samples(x, 17, clip=0.1)
    assert torch.equal(first.score, guard(x).score)


# --------------------------------------------------------------------------------------------------------------- dense


def test_dense_outputs_keep_their_positions(painter: offmap.Guard) -> None:
    x = inputs(7, 5, features=20).reshape(7, 1, 4, 5)
    result = painter(x)
    assert result.probs.shape == (7, 3, 4, 5)
    assert result.label.shape == (7, 4, 5)
    assert result.score.shape == result.ood.shape == result.p_value.shape == (7,)
    assert result.score_map.shape == (7, 4, 5)
    assert torch.equal(painter.score(x, reduce=None), result.score_map)
    torch.testing.assert_close(painter.score(x), result.score_map.mean((1, 2)))
    torch.testing.assert_close(painter.score(x, reduce="max"), result.score_map.amax((1, 2)))
    assert painter.prediction_set(x).shape == (7, 3, 4, 5)
    probs = painter.samples(x, painter.draws).softmax(2).mean(0)
    slow = -(probs * probs.log()).sum(1)
    torch.testing.assert_close(result.score_map, slow, rtol=1e-4, atol=1e-5)


def test_reduction_does_nothing_to_flat_scores(guard: offmap.Guard) -> None:
    x = inputs(9, 5)
    assert torch.equal(guard.score(x, reduce=None), guard.score(x))
    assert torch.equal(guard.score(x, reduce="max"), guard.score(x))


# ---------------------------------------------------------------------------------------------------------------- clip


@pytest.mark.parametrize("kind", ["guard", "sorter"])
def test_clip_has_the_lowest_validation_nll_of_the_papers_grid(kind: str, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(kind)
    x, y = regression(60, 1) if kind == "guard" else classes(60, 1)
    risks = {}
    for clip in (math.inf, 10, 5, 2, 1, 0.5, 0.2, 0.1, 0):
        outputs = made.samples(x, made.draws, clip=clip).double()
        if kind == "guard":  # of the Gaussian with the moments of the mixture
            spread = outputs[..., 0].var(0, correction=0) + made.likelihood.noise.double()
            each = -torch.distributions.Normal(outputs[..., 0].mean(0), spread.sqrt()).log_prob(y.double())
        else:
            each = -outputs.softmax(2).mean(0)[torch.arange(60), y].log()
        risks[clip] = each.mean().item()
    best = min(risks, key=risks.__getitem__)
    chosen = math.inf if made.clip is None else made.clip
    assert risks[chosen] <= risks[best] + 1e-6


@pytest.mark.parametrize("best", [math.inf, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.0])
def test_every_clip_of_the_grid_can_win(best: float) -> None:
    @dataclass(frozen=True)
    class Tuned:
        """Predicts well at one clip alone."""

        members: int = 1

        def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
            here = math.inf if clip is None else clip
            return (x[:, 0] + (0.0 if here == best else 1.0)).expand(draws, -1)

    x = inputs(30, 0)
    made = offmap.guard(Tuned(), (x, x[:, 0]), likelihood=offmap.Gaussian(noise=torch.tensor([0.1])), draws=2)
    assert made.clip == (None if best == math.inf else best)


def test_a_clip_that_gives_nan_never_wins() -> None:
    @dataclass(frozen=True)
    class Wild:
        """NaN unless clipped at 0.2 or less."""

        members: int = 1

        def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
            fine = clip is not None and clip <= 0.2
            return (x[:, 0] if fine else x[:, 0] * math.nan).expand(draws, -1)

    x = inputs(30, 0)
    made = offmap.guard(Wild(), (x, x[:, 0]), draws=2)
    assert made.clip == 0.2
    # NaN counts as infinitely OOD, and predictions stay
    result = made(x)
    assert (result.score == math.inf).all()
    assert result.mean.isfinite().all()
    assert (result.p_value == 1.0).all()


def test_nll_is_that_of_the_prediction_as_reported(guard: offmap.Guard, sorter: offmap.Guard) -> None:
    x, y = regression(12, 4)
    rows = offmap.data.Rows(x, y, 128, "test")
    for clip in (None, 0.5, 0.0):
        prediction = guard.predict(x, clip=clip)
        slow = -torch.distributions.Normal(prediction.mean, prediction.std).log_prob(y)
        torch.testing.assert_close(guard.sampler.nll(rows, clip), slow, rtol=1e-4, atol=1e-5)
    x, y = classes(12, 4)
    rows = offmap.data.Rows(x, y, 128, "test")
    slow = -sorter.predict(x, clip=0.5).probs[torch.arange(12), y].log()
    torch.testing.assert_close(sorter.sampler.nll(rows, 0.5), slow, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- other predictives


def test_any_predictive_gets_the_same_verdicts() -> None:
    made = offmap.guard(Closed(members=2), simulate(60, 1), draws=5)
    x = inputs(9, 5)
    assert isinstance(made.predictive, offmap.Predictive)
    assert isinstance(made, offmap.Scorer)
    result = made(x.numpy())
    assert result.mean.shape == (9,)
    assert made.samples(x, 5).shape == (10, 9, 2)
    assert made.history.step == []
    assert "Closed" in str(made.summary())


def test_tiny_variances_at_large_means_survive_float32_in_a_guard() -> None:
    @dataclass(frozen=True)
    class Far:
        """Means around 1e6 that differ by a quarter, where float32 has steps of 1/16."""

        members: int = 1

        def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
            steps = 0.0 if clip == 0 else 0.25 * torch.arange(draws).remainder(3) - 0.25
            mean = 1e6 + steps + torch.zeros(len(x), draws)
            return torch.stack([mean.mT, torch.full((draws, len(x)), math.log(1e-4))], -1)

    x = inputs(30, 0)
    made = offmap.guard(Far(), (x, torch.full((30,), 1e6)), draws=6)
    result = made(x)
    exact = (0.25**2) * 2 / 3 + 1e-4
    torch.testing.assert_close(result.score, torch.full((30,), exact), rtol=1e-5, atol=0)
    torch.testing.assert_close(made.predict(x, clip=None).std, torch.full((30,), math.sqrt(exact)), rtol=1e-5, atol=0)


def test_huge_inputs_are_infinitely_ood_and_not_nan(guard: offmap.Guard) -> None:
    result = guard(torch.full((3, 3), 3e38))
    assert not result.score.isnan().any()
    assert result.ood.all()


def test_to_moves_a_copy(guard: offmap.Guard) -> None:
    moved = guard.to("cpu")
    x = inputs(9, 5)
    assert torch.equal(moved.score(x), guard.score(x))
    assert moved.predictive.model.module is not guard.predictive.model.module
    with pytest.raises(ConfigError, match="a guard over a weight distribution; build other guards on the device where they run"):
        fit_closed_form(30).to("cpu")
    with pytest.raises(ConfigError, match="a device that torch can use here, but got 'banana': Expected one of cpu"):
        guard.to("banana")


def test_guards_are_frozen_compared_by_identity_and_can_be_keys(guard: offmap.Guard) -> None:
    with pytest.raises(AttributeError):
        guard.clip = 3.0
    same = guard
    assert guard == same
    assert guard != guard.calibrate(regression(40, 3))
    assert {guard: 1}[guard] == 1


# ----------------------------------------------------------------------------------------------------------- bad asking


def test_wrong_questions_are_refused(guard: offmap.Guard, sorter: offmap.Guard) -> None:
    x = inputs(9, 5)
    with pytest.raises(NotFittedError, match="Expected a regression guard for `interval`; use `prediction_set`"):
        sorter.interval(x)
    with pytest.raises(NotFittedError, match="Expected a classification guard for `prediction_set`; use `interval`"):
        guard.prediction_set(x)
    with pytest.raises(ConfigError, match="Expected `reduce` to be 'mean', 'max' or None, but got 'sum'"):
        guard.score(x, reduce="sum")


@pytest.mark.parametrize("level", [0, 1, -0.5, 1.5, math.nan, "0.9", None])
def test_levels_outside_zero_and_one_are_refused(guard: offmap.Guard, sorter: offmap.Guard, level: Any) -> None:
    message = "Expected `level` strictly between 0 and 1, such as 0.95, but got"
    with pytest.raises(ConfigError, match=message):
        guard.interval(inputs(9, 5), level)
    with pytest.raises(ConfigError, match=message):
        sorter.prediction_set(inputs(9, 5), level)


@pytest.mark.parametrize("clip", [-1, -0.1, math.nan, "small", [1.0]])
def test_impossible_clips_are_refused(guard: offmap.Guard, clip: Any) -> None:
    message = "Expected `clip` to be a number ≥ 0 or None, but got"
    with pytest.raises(ConfigError, match=message):
        guard.predict(inputs(9, 5), clip=clip)
    with pytest.raises(ConfigError, match=message):
        guard.samples(inputs(9, 5), 3, clip=clip)
    with pytest.raises(ConfigError, match=message):
        offmap.guard(Closed(), simulate(30, 0), draws=4, clip=clip)


@pytest.mark.parametrize("draws", [0, -1, 2.5, "many", None])
def test_impossible_numbers_of_samples_are_refused(guard: offmap.Guard, draws: Any) -> None:
    with pytest.raises(ConfigError, match="Expected `draws` to be a whole number ≥ 1, but got"):
        guard.samples(inputs(9, 5), draws)


@pytest.mark.parametrize("lr", [0, 1, -0.1, 2])
def test_impossible_rates_of_false_alarms_are_refused(guard: offmap.Guard, lr: float) -> None:
    with pytest.raises(ConfigError, match="Expected `false_alarms` strictly between 0 and 1, such as 0.05, but got"):
        guard.calibrate(regression(30, 0), lr)
    with pytest.raises(ConfigError, match="Expected `false_alarms` strictly between 0 and 1, such as 0.05, but got"):
        fit_closed_form(30, false_alarms=lr)
