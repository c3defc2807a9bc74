"""Guards of different nets together: the mean of their scores, an even mixture of their predictions, one threshold."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.ensemble import mixture_nll
from offmap.errors import ConfigError, DataError, NotFittedError, ShapeError
from offmap.likelihoods import Prediction
from offmap.metrics import auroc
from offmap.scores.score import FunctionScore
from trained import classes, classifier, inputs, model, quick, regression, regressor

TRAIN, VALID = regression(60, 0), regression(40, 1)
X, FAR = inputs(30, 5), 20 * inputs(30, 6)


def wide(seed: int = 1) -> nn.Sequential:
    """A regressor of another kind: thirty hidden units instead of twelve."""
    x, y = regression(200, 7, 1)
    return model(x, y, hidden=30, seed=seed)


@pytest.fixture(scope="module")
def guards() -> list[offmap.Guard]:
    return [quick(net, TRAIN, VALID) for net in (regressor(), wide())]


@pytest.fixture(scope="module")
def mixed(guards: list[offmap.Guard]) -> offmap.GuardEnsemble:
    return offmap.combine(guards, VALID)


def by_hand(guards: Sequence[offmap.Guard], x: Tensor, valid: Tensor = VALID[0]) -> Tensor:
    """The mean over guards of their scores, in standard deviations over validation rows."""
    each = []
    for guard in guards:
        id_scores = guard.score(valid).double()
        each.append((guard.score(x).double() - id_scores.mean()) / id_scores.std(correction=0))
    return torch.stack(each).mean(0).float()


# ------------------------------------------------------------------------------------------------------------- parts


def test_parts_of_a_guard_join_to_its_score(guards: list[offmap.Guard]) -> None:
    parts = guards[0].terms(X)
    assert list(parts) == ["disagreement", "inputs", "layers", "whitened"]
    assert all(values.shape == (30,) and values.dtype == torch.float32 for values in parts.values())
    weights = guards[0].score_module.weights
    torch.testing.assert_close((weights @ torch.stack(list(parts.values())).double()).float(), guards[0].score(X))


def test_a_score_that_joins_nothing_is_its_own_part() -> None:
    guard = quick(regressor(), TRAIN, VALID, score="epistemic")
    assert list(guard.terms(X)) == ["score"]
    assert torch.equal(guard.terms(X)["score"], guard.score(X))


# ------------------------------------------------------------------------------------------------------------- scores


def test_the_score_is_the_mean_of_theirs_in_standard_deviations(guards: list[offmap.Guard], mixed: offmap.GuardEnsemble) -> None:
    torch.testing.assert_close(mixed.score(X), by_hand(guards, X))
    assert float(auroc(mixed.score(X), mixed.score(FAR))) == 1.0


def test_guards_with_other_scores_are_mixed_all_the_same(guards: list[offmap.Guard]) -> None:
    several = [guards[0], quick(wide(), TRAIN, VALID, score="paper")]
    torch.testing.assert_close(offmap.combine(several, VALID).score(X), by_hand(several, X))


def test_classifiers_of_images_are_mixed() -> None:
    def net_of(channels: int) -> nn.Sequential:
        torch.manual_seed(channels)
        layers = [nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Conv2d(channels, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3)]
        return nn.Sequential(*layers).eval()

    x = torch.randn(90, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    nets = [net_of(4), net_of(5)]
    y = nets[0](x).argmax(1)
    guards = [offmap.fit(net, (x[:60], y[:60]), (x[60:], y[60:]), draws=8) for net in nets]
    names = ["disagreement", "energy", "gen", "inputs", "layers", "whitened", "last-layer"]
    assert list(guards[0].terms(x[:2])) == names
    found = offmap.combine(guards, (x[60:], y[60:])).score(3 * x[:9])
    torch.testing.assert_close(found, by_hand(guards, 3 * x[:9], x[60:]), rtol=1e-4, atol=1e-4)


def test_a_guard_with_one_score_for_all_in_distribution_rows_does_not_blow_up(guards: list[offmap.Guard]) -> None:
    flat = replace(guards[1], score_module=FunctionScore(lambda outputs: outputs.new_full((outputs.shape[1],), 3.0)))
    found = offmap.combine([guards[0], flat], VALID)
    torch.testing.assert_close(found.score(X), by_hand(guards[:1], X) / 2)


def test_infinite_scores_are_infinitely_ood_and_no_scale(guards: list[offmap.Guard]) -> None:
    def some(outputs: Tensor) -> Tensor:
        values = outputs.mean(0).flatten()
        return torch.where(torch.arange(len(values)) == 0, torch.inf, values)

    odd = replace(guards[1], score_module=FunctionScore(some))
    found = offmap.combine([guards[0], odd], VALID)
    assert found.score(X)[0] == torch.inf
    assert bool(found.score(X)[1:].isfinite().all())
    endless = replace(guards[1], score_module=FunctionScore(lambda outputs: outputs.new_full((outputs.shape[1],), torch.inf)))
    with pytest.raises(DataError, match="Expected finite scores of in-distribution data"):
        offmap.combine([guards[0], endless], VALID)


def test_blocks_and_loaders_change_nothing(mixed: offmap.GuardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, result = mixed.score(X), mixed(X)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, X[:, 0]), batch_size=7)
    monkeypatch.setattr(sys.modules["offmap.guard"], "OUTPUT_NUMBERS", 1)
    torch.testing.assert_close(mixed.score(X), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed(loader).score, result.score, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed(loader).mean, result.mean)


# ------------------------------------------------------------------------------------------------------------- answers


def test_predictions_are_those_of_an_even_mixture(guards: list[offmap.Guard], mixed: offmap.GuardEnsemble) -> None:
    one, two = (guard.predict(X) for guard in guards)
    found = mixed.predict(X)
    torch.testing.assert_close(found.mean, (one.mean + two.mean) / 2)
    between = ((one.mean - two.mean) / 2) ** 2
    torch.testing.assert_close(found.std**2, (one.std**2 + two.std**2) / 2 + between)


def test_probabilities_are_averaged_and_the_likeliest_class_is_the_label() -> None:
    train, valid = classes(60, 0), classes(40, 1)
    guards = [quick(classifier(seed), train, valid) for seed in (0, 1)]
    mixed = offmap.combine(guards, valid)
    mean = (guards[0].predict(X).probs + guards[1].predict(X).probs) / 2
    result = mixed(X)
    torch.testing.assert_close(result.probs, mean)
    assert torch.equal(result.label, mean.argmax(1))
    chosen = mixed.prediction_set(valid[0], 0.9)
    assert 0.85 <= float(chosen.gather(1, valid[1][:, None]).float().mean()) < 1
    with pytest.raises(NotFittedError, match="Expected a regression guard for `interval`"):
        mixed.interval(X)


def test_threshold_verdicts_and_p_values_come_from_validation_rows(mixed: offmap.GuardEnsemble) -> None:
    own = mixed.score(VALID[0])
    assert mixed.threshold == float(own.sort().values[math.ceil(0.95 * 41) - 1])
    result = mixed(torch.cat([X, FAR]))
    assert torch.equal(result.ood, result.score > mixed.threshold)
    assert result.ood[30:].all()
    expected = [(1 + int((own >= s).sum())) / 41 for s in result.score]
    torch.testing.assert_close(result.p_value, torch.tensor(expected))
    stricter = mixed.calibrate(regression(200, 3), false_alarms=0.2)
    assert stricter.calibration.exact
    assert not mixed.calibration.exact
    assert float((stricter.score(regression(200, 3)[0]) > stricter.threshold).float().mean()) == pytest.approx(0.2, abs=0.01)


def test_intervals_hold_validation_targets_at_their_level(mixed: offmap.GuardEnsemble) -> None:
    found = mixed.interval(VALID[0], 0.9)
    inside = (found.lower <= VALID[1]) & (VALID[1] <= found.upper)
    assert 0.9 <= float(inside.float().mean()) < 1
    with pytest.raises(NotFittedError, match="Expected a classification guard for `prediction_set`"):
        mixed.prediction_set(X)


def test_an_ensemble_is_a_scorer_among_others(guards: list[offmap.Guard], mixed: offmap.GuardEnsemble) -> None:
    found = offmap.evaluate({"both": mixed, "one": guards[0]}, VALID, {"far": FAR})
    assert {row["scorer"] for row in found.rows if row["set"] == "far" and row["auroc"] == 1.0} == {"both", "one"}


def test_predictions_of_an_ensemble_are_judged_like_those_of_a_guard(guards: list[offmap.Guard]) -> None:
    twice = offmap.combine([guards[0], guards[0]], VALID)
    same, one = (offmap.evaluate(scorer, VALID, {"far": FAR}) for scorer in (twice, guards[0]))
    assert same.rows[0] == pytest.approx({n: v for n, v in one.rows[0].items() if not n.startswith("wide_")}, rel=1e-4)
    torch.testing.assert_close(same.details["guard"].losses, one.details["guard"].losses)
    assert list(same.details["guard"].reliability) == ["own"]


def test_classes_of_an_ensemble_are_judged_where_they_have_a_label() -> None:
    x, y = classes(60, 3)
    guards = [quick(classifier(), classes(60, 0), (x, y)) for _ in range(2)]
    twice, some = offmap.combine(guards, (x, y)), torch.where(torch.arange(60) < 20, -100, y)
    same, one = (offmap.evaluate(scorer, (x, some), {"far": 20 * x}).rows[0] for scorer in (twice, guards[0]))
    assert same == pytest.approx({n: v for n, v in one.items() if not n.startswith("wide_")}, rel=1e-4)
    others = offmap.evaluate(guards[0], (x[20:], y[20:]), {"far": 20 * x}).rows[0]
    assert (one["nll"], one["wide_nll"]) == pytest.approx((others["nll"], others["wide_nll"]), rel=1e-4)


def test_what_is_deemed_impossible_costs_much_and_is_no_nan() -> None:
    cost = mixture_nll(Prediction(probs=torch.tensor([[1.0, 0.0]])), torch.tensor([1]))
    assert 80 < float(cost) < 100


def test_too_few_rows_for_a_threshold_are_said(guards: list[offmap.Guard], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offmap"):
        made = offmap.combine(guards, regression(5, 2))
    assert made.threshold == math.inf
    assert "5 calibration rows are too few for a false alarm rate of 0.05. Pass at least 19." in caplog.text


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("wrong", [[], None, 3, "guards"])
def test_fewer_than_two_guards_are_refused(guards: list[offmap.Guard], wrong: object) -> None:
    for given in (wrong, guards[:1], [guards[0], "other"], guards[0]):
        with pytest.raises(ConfigError, match="Expected two or more guards, as `offmap.fit` gives them, in a list"):
            offmap.combine(given, VALID)


def test_guards_that_predict_other_things_are_refused(guards: list[offmap.Guard]) -> None:
    other = quick(classifier(), classes(60, 0), classes(40, 1))
    with pytest.raises(ShapeError, match=r"guard 0 gives means \(40,\) and guard 1 probabilities \(40, 3\)"):
        offmap.combine([guards[0], other], VALID)


def test_guards_of_another_precision_are_refused(guards: list[offmap.Guard]) -> None:
    other = quick(wide().double(), *[tuple(t.double() for t in rows) for rows in (TRAIN, VALID)])
    with pytest.raises(ConfigError, match="Expected guards on one device and of one precision"):
        offmap.combine([guards[0], other], VALID)


def test_guards_with_other_targets_are_refused(guards: list[offmap.Guard]) -> None:
    other = quick(wide(), TRAIN, VALID, target="y")
    with pytest.raises(ConfigError, match="Expected guards with one `target`, but got 'labels' and 'y'"):
        offmap.combine([guards[0], other], VALID)


def test_dense_outputs_are_refused() -> None:
    x = torch.randn(24, 3, 5, generator=torch.Generator().manual_seed(0))
    net = nn.Conv1d(3, 2, 1)
    y = net(x).argmax(1)
    guards = [offmap.fit(nn.Conv1d(3, 2, 1), (x, y), (x, y), draws=4) for _ in range(2)]
    with pytest.raises(ShapeError, match="dense outputs cannot be mixed"):
        offmap.combine(guards, (x, y))


def test_models_of_different_kinds_in_one_fit_are_referred_to_combine() -> None:
    with pytest.raises(offmap.errors.ModelError, match=r"offmap\.combine"):
        offmap.fit([regressor(), wide()], TRAIN, VALID)
