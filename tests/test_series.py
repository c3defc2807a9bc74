"""Series: whole groups calibrate, the threshold follows a stream, and rows that are alike are noticed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.conformal import count_groups, effective_rows, group_weights, quantile
from offmap.detector import Calibration
from offmap.errors import ConfigError, DataError, ShapeError
from trained import classes, classifier, quick, regression, regressor


def runs(count: int, source: torch.Generator, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Scores of runs that have a level of their own, and are of different lengths; and the run of each row."""
    lengths = torch.randint(2, rows, (count,), generator=source)
    groups = torch.arange(count).repeat_interleave(lengths)
    level = 5 * torch.randn(count, generator=source)[groups]
    return level + torch.randn(len(groups), generator=source), groups


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(60, 0), regression(60, 1))


# ------------------------------------------------------------------------------------------------------------- groups


def test_a_new_group_is_flagged_as_promised_where_rows_alone_break_the_promise() -> None:
    # 500 calibrations on 4 or 5 groups, 40 new groups each: the standard error of a mean rate is below 0.007
    source, rates = torch.Generator().manual_seed(0), {"groups": list[float](), "rows": list[float](), "p": list[float]()}
    for trial in range(500):
        scores, groups = runs(4 + trial % 2, source)
        new, new_groups = runs(40, source)
        share = 1 / new_groups.bincount()[new_groups].double() / 40  # a random row of a random group
        grouped, plain = Calibration(scores, None, 0.2, weights=group_weights(groups)), Calibration(scores, None, 0.2)
        rates["groups"].append(float(share[new > grouped.threshold].sum()))
        rates["rows"].append(float(share[new > plain.threshold].sum()))
        rates["p"].append(float(share[grouped.p_value(new) <= 0.4].sum()))
    means = {name: sum(values) / len(values) for name, values in rates.items()}
    assert 0.08 < means["groups"] <= 0.2
    assert means["rows"] > 0.22
    assert 0.3 < means["p"] <= 0.4


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=2, max_size=5), st.sampled_from([0.3, 0.6, 0.75, 0.9])
)
def test_the_expected_share_of_a_new_group_is_bounded_whatever_the_groups_hold(values: list[list[int]], level: float) -> None:
    # each group is the new one in turn: exactly what exchangeability says
    above = 0.0
    for new, group in enumerate(values):
        others = [(k, s) for k, rows in enumerate(values) for s in rows if k != new]
        q = float(quantile(torch.tensor([s for _, s in others]).double(), level, group_weights([k for k, _ in others])))
        above += sum(s > q for s in group) / len(group) / len(values)
    assert above <= 1 - level + 1e-9


def test_groups_of_one_row_are_rows(guard: offmap.Guard) -> None:
    generator = torch.Generator().manual_seed(0)
    for n, level in product((1, 18, 19, 57, 200), (0.2, 0.6, 0.9, 0.95)):
        scores = torch.randn(n, 2, generator=generator)
        weights = group_weights(torch.randperm(n, generator=generator))
        assert torch.equal(quantile(scores, level, weights), quantile(scores, level))
        new = torch.randn(9, generator=generator)
        plain, weighted = Calibration(scores[:, 0]), Calibration(scores[:, 0], weights=weights)
        torch.testing.assert_close(weighted.p_value(new), plain.p_value(new))
    rows = regression(60, 3)
    assert guard.calibrate(rows, block=1).calibration.weights is None
    assert guard.calibrate(rows, groups=range(60)).threshold == guard.calibrate(rows).threshold


def test_weighted_quantiles_agree_with_repeated_rows() -> None:
    # groups of 1, 2 and 4 rows: rows repeated 4, 2 and 1 times count alike, and infinity 4 times
    scores, groups = torch.tensor([5.0, 1.0, 7.0, 2.0, 3.0, 9.0, 4.0]), ["a", "b", "b", "c", "c", "c", "c"]
    weights = group_weights(groups)
    assert count_groups(weights) == 3
    repeated = sorted([*scores.repeat_interleave(torch.tensor([4, 2, 2, 1, 1, 1, 1])).tolist(), *[math.inf] * 4])
    for level in (0.1, 0.3, 0.5, 0.62, 0.74, 0.76):
        assert quantile(scores, level, weights) == repeated[math.ceil(level * 16) - 1]
    p = Calibration(scores, weights=weights).p_value(torch.tensor([0.0, 2.5, 9.0, 10.0]))
    assert p.tolist() == [sum(c >= s for c in repeated) / 16 for s in (0.0, 2.5, 9.0, 10.0)]


def test_threshold_p_values_and_intervals_are_of_the_groups_and_survive_a_file(guard: offmap.Guard, tmp_path: Path) -> None:
    x, y = regression(90, 3)
    made = guard.calibrate((x, y), 0.1, groups=[f"day {i // 5}" for i in range(90)])
    weights = made.calibration.weights
    assert weights is not None
    scores, residuals = made.calibration.scores, made.calibration.residuals
    assert residuals is not None
    assert made.threshold == quantile(scores, 0.9, weights)
    assert torch.equal(made.calibration.radius(0.8), quantile(residuals, 0.8, weights))
    assert "0.1 false alarms on 90 calibration rows in 18 groups (exact)" in repr(made)
    assert "in 18 groups" in str(made.summary())
    blocks = guard.calibrate((x, y), 0.1, block=5).calibration.weights
    assert blocks is not None
    assert torch.equal(blocks, weights)
    made.save(tmp_path / "guard.safetensors")
    loaded = offmap.load(tmp_path / "guard.safetensors", regressor())
    assert loaded.calibration.weights is not None
    assert torch.equal(loaded.calibration.weights, weights)
    assert torch.equal(loaded(x).p_value, made(x).p_value)
    assert torch.equal(made.to("cpu")(x).ood, made(x).ood)


def test_too_few_groups_are_told_with_what_they_can_promise(guard: offmap.Guard, caplog: pytest.LogCaptureFixture) -> None:
    assert guard.calibrate(regression(90, 3), groups=torch.arange(90) // 15).threshold == math.inf
    assert caplog.messages == [
        "The threshold is infinite, so nothing will be flagged: 6 calibration groups are too few for a false alarm rate of 0.05. "
        "Pass at least 19, or `false_alarms=0.143`, the least that 6 can promise."
    ]
    made = guard.calibrate(regression(90, 3), 0.143, groups=torch.arange(90) // 15)
    assert made.threshold == made.calibration.scores.max()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"groups": [0] * 30, "block": 5}, ConfigError, "`groups` or `block`, but got both"),
        ({"groups": [0] * 29}, ShapeError, "for each of 30 rows, but got 29"),
        ({"groups": torch.zeros(30, 1)}, ShapeError, r"Expected `groups` of shape \(n,\)"),
        ({"groups": [math.nan] * 30}, DataError, "some are missing"),
        ({"groups": ["a", None] * 15}, DataError, "some are missing"),
        ({"groups": [{}] * 30}, DataError, "words or numbers as labels in `groups`, but got dict"),
        ({"block": 31}, ConfigError, "at most 30, the number of rows"),
        ({"block": 2.5}, ConfigError, "Expected `block` to be a whole number"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    guard: offmap.Guard, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        guard.calibrate(regression(30, 3), **options)  # pyright: ignore[reportArgumentType]


def test_labels_that_a_data_frame_lacks_are_refused(guard: offmap.Guard) -> None:
    pandas = pytest.importorskip("pandas")
    for labels in (pandas.Series(["a", pandas.NA] * 15, dtype="string"), [pandas.NaT] * 30):
        with pytest.raises(DataError, match="some are missing"):
            guard.calibrate(regression(30, 3), groups=labels)


def test_groups_of_a_loader_that_shuffles_are_refused(guard: offmap.Guard) -> None:
    rows = TensorDataset(*regression(30, 3))
    with pytest.raises(ConfigError, match="its DataLoader shuffles"):
        guard.calibrate(DataLoader(rows, shuffle=True), groups=range(30))
    assert guard.calibrate(DataLoader(rows), 0.2, block=3).calibration.groups == 10


# ------------------------------------------------------------------------------------------------------------ notices


def test_rows_in_random_order_raise_no_notice_and_series_do() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (40, 100, 400, 2000):
        sets: dict[str, Callable[[int], Tensor]] = {
            "normal": lambda n: torch.randn(n, generator=generator),
            "tied": lambda n: torch.randn(n, generator=generator).clamp_min(0),
            "heavy": lambda n: torch.randn(n, generator=generator).exp().pow(9),
        }
        for name, draw in sets.items():
            assert sum(effective_rows(draw(n)) is not None for _ in range(200)) <= 1, (name, n)  # at most 0.1 % by its level
    walk = torch.randn(400, generator=generator).cumsum(0)
    assert (effective_rows(walk) or 400) < 30
    assert effective_rows(torch.ones(400)) is None
    assert effective_rows(torch.randn(31, generator=generator).sort().values) is None  # too few to tell
    levels = torch.arange(400) // 100
    mixed = torch.randn(400, generator=generator) + 3 * levels
    assert effective_rows(mixed) is not None
    assert effective_rows(mixed, levels) is None  # sorted by class, as a folder of images: no series
    assert effective_rows(mixed + walk, levels) is not None


def test_fit_and_calibrate_warn_of_neighbours_that_are_alike(
    guard: offmap.Guard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = regression(200, 5)
    order = guard.score(x).argsort()  # as slow a series as there is
    alike = guard.calibrate((x[order], y[order]))
    assert "200 rows are worth about 19 independent ones" in caplog.messages[0]
    assert "of another run may be flagged. Pass `groups=` or `block=` to `guard.calibrate`" in caplog.messages[0]
    assert "worth about 19" in repr(alike)
    assert "worth about 19" in str(alike.summary())
    alike.save(tmp_path / "guard.safetensors")
    assert offmap.load(tmp_path / "guard.safetensors", regressor()).calibration.effective_rows == 19
    caplog.clear()
    guard.calibrate((x[order], y[order]), block=10)
    guard.calibrate((x, y))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        quick(regressor(), regression(60, 0), (x[order], y[order]))
    assert any("independent ones" in message for message in caplog.messages)


def test_a_classifier_with_sorted_labels_raises_no_notice(caplog: pytest.LogCaptureFixture) -> None:
    x, y = classes(300, 1)
    order = y.argsort(stable=True)
    guard = quick(classifier(), classes(60, 0), (x[order], y[order]))
    guard.calibrate((x[order], y[order]))
    assert not [message for message in caplog.messages if "independent ones" in message]


# ----------------------------------------------------------------------------------------------------------- adaptive


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.inf), min_size=1, max_size=30),
    st.integers(1, 40),
    st.sampled_from([0.02, 0.1, 1.0]),
    st.sampled_from([0.05, 0.2]),
)
def test_the_share_of_alarms_is_bounded_for_any_sequence(values: list[float], times: int, lr: float, rate: float) -> None:
    guard = make_detector()
    adaptive = offmap.AdaptiveThreshold(guard, lr=lr, false_alarms=rate)
    scores = torch.tensor(values, dtype=torch.float64).repeat_interleave(times).repeat(times)
    first, flagged = adaptive.level, adaptive.update(scores)
    levels = [*((scores - adaptive.centre) / adaptive.unit).clamp(max=1e38).asinh().tolist(), first]
    assert abs(float(flagged.double().mean()) - rate) <= (max(levels) - min(levels) + lr) / (lr * len(scores)) + 1e-9


def test_the_share_of_alarms_is_held_against_an_adversary_and_a_drift() -> None:
    guard = make_detector()
    adversary = offmap.AdaptiveThreshold(guard)
    for _ in range(20_000):  # always just above the threshold, as long as that is below 50
        adversary.update(torch.tensor([min(adversary.threshold + 0.1, 50.0)], dtype=torch.float64))
    assert adversary.flagged / adversary.rows == pytest.approx(0.05, abs=0.03)
    generator = torch.Generator().manual_seed(0)
    drifting = torch.randn(20_000, generator=generator) + torch.linspace(0, 20, 20_000)
    assert float((drifting > guard.threshold).double().mean()) > 0.8
    follower = offmap.AdaptiveThreshold(guard)
    late = follower.update(drifting)[10_000:]
    assert float(late.double().mean()) == pytest.approx(0.05, abs=0.01)
    assert follower.update(torch.full((50,), 60.0)).all()  # a jump is flagged, for long enough to be seen


def test_blocks_files_and_single_rows_give_the_same(guard: offmap.Guard) -> None:
    scores = guard.score(regression(300, 7)[0] * 2)
    whole, parts = offmap.AdaptiveThreshold(guard), offmap.AdaptiveThreshold(guard)
    assert whole.threshold == pytest.approx(guard.threshold)
    ood = whole.update(scores)
    first = parts.update(scores[:123])
    resumed = offmap.AdaptiveThreshold(guard, lr=0.5, false_alarms=0.3)
    resumed.load_state_dict(json.loads(json.dumps(parts.state_dict())))
    rest = [resumed.update(score) for score in scores[123:].split(1)]
    assert torch.equal(torch.cat([first, *rest]), ood)
    assert resumed.state_dict() == whole.state_dict()
    assert repr(whole).endswith(f"{int(ood.sum())} of 300 rows flagged")


def test_only_normal_rows_move_the_threshold_where_they_are_known(guard: offmap.Guard) -> None:
    adaptive = offmap.AdaptiveThreshold(guard)
    before = adaptive.threshold
    far = torch.full((500,), 1e3)
    assert adaptive.update(far, normal=torch.zeros(500, dtype=torch.bool)).all()
    assert (adaptive.threshold, adaptive.rows) == (before, 0)
    assert not offmap.AdaptiveThreshold(guard).update(far)[-1]  # else it gets used to them


def test_scores_and_states_that_do_not_fit_are_refused(guard: offmap.Guard) -> None:
    adaptive = offmap.AdaptiveThreshold(guard)
    with pytest.raises(ShapeError, match=r"Expected `scores` of shape \(B,\), but got \(2, 1\)"):
        adaptive.update(torch.zeros(2, 1))
    with pytest.raises(DataError, match="1 of 2 are"):
        adaptive.update(torch.tensor([0.0, math.nan]))
    with pytest.raises(ShapeError, match="Expected `normal` as bool"):
        adaptive.update(torch.zeros(2), normal=torch.zeros(2))
    with pytest.raises(ConfigError, match="Expected finite false_alarms, lr"):
        adaptive.load_state_dict({"level": 0.0})
    with pytest.raises(ConfigError, match="Expected `lr` to be a number above 0"):
        offmap.AdaptiveThreshold(guard, lr=0)


def make_detector() -> offmap.Detector:
    """A detector that only has a calibration: 200 scores of a normal variable."""
    return Scored(calibration=Calibration(torch.randn(200, generator=torch.Generator().manual_seed(0))), place=None)  # pyright: ignore


class Scored(offmap.Detector):
    def _score(self, features: Tensor) -> Tensor:
        return features

    def _predict(self, features: Tensor) -> offmap.Prediction:
        return offmap.Prediction()
