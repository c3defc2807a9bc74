"""OOD metrics against pair counting and scikit-learn, ties and infinities included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from offmap.errors import ConfigError, DataError, ShapeError
from offmap.metrics import aupr_in, aupr_out, auroc, fpr_at

METRICS = [auroc, fpr_at, aupr_in, aupr_out]
# few distinct values: many ties
scores = st.lists(st.integers(-5, 5), min_size=1, max_size=15).map(lambda v: torch.tensor(v, dtype=torch.float64))
rates = st.sampled_from([0.05, 0.3, 0.5, 0.55, 0.75, 0.8, 0.95, 1.0])


def label_scores(id_scores: Tensor, ood_scores: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Labels (OOD is 1) and scores, as scikit-learn wants them."""
    labels = np.r_[np.zeros(len(id_scores)), np.ones(len(ood_scores))]
    return labels, torch.cat([id_scores, ood_scores]).numpy()


@settings(deadline=None)
@given(scores, scores)
def test_auroc_counts_pairs_with_ties_half(ids: Tensor, oods: Tensor) -> None:
    wins = sum((o > i) + 0.5 * (o == i) for i in ids.tolist() for o in oods.tolist())
    assert auroc(ids, oods).item() == pytest.approx(wins / (len(ids) * len(oods)), abs=1e-12)


@settings(deadline=None)
@given(scores, scores)
def test_auroc_agrees_with_scikit_learn(ids: Tensor, oods: Tensor) -> None:
    assert auroc(ids, oods).item() == pytest.approx(roc_auc_score(*label_scores(ids, oods)), abs=1e-12)


@settings(deadline=None)
@given(scores, scores)
def test_auroc_is_one_minus_itself_with_the_sets_swapped(ids: Tensor, oods: Tensor) -> None:
    assert auroc(ids, oods).item() == pytest.approx(1 - auroc(oods, ids).item(), abs=1e-12)


@pytest.mark.parametrize("metric", METRICS)
@settings(deadline=None)
@given(ids=scores, oods=scores)
def test_monotone_maps_change_nothing(metric: Callable[..., Tensor], ids: Tensor, oods: Tensor) -> None:
    for grow in (torch.exp, lambda s: s**3 - 7, lambda s: s.float().sigmoid()):
        assert metric(grow(ids), grow(oods)).item() == pytest.approx(metric(ids, oods).item(), abs=1e-7)


@settings(deadline=None)
@given(scores, scores)
def test_average_precision_agrees_with_scikit_learn(ids: Tensor, oods: Tensor) -> None:
    labels, values = label_scores(ids, oods)
    assert aupr_out(ids, oods).item() == pytest.approx(average_precision_score(labels, values), abs=1e-12)
    assert aupr_in(ids, oods).item() == pytest.approx(average_precision_score(1 - labels, -values), abs=1e-12)


@settings(deadline=None)
@given(scores, scores, rates)
def test_fpr_is_where_the_roc_curve_first_reaches_the_rate(ids: Tensor, oods: Tensor, rate: float) -> None:
    labels, values = label_scores(ids, oods)
    for positive, target, score in (("id", 1 - labels, -values), ("ood", labels, values)):
        false, true, _ = roc_curve(target, score, drop_intermediate=False)
        first = np.argmax(true >= rate - 1e-12)
        assert fpr_at(ids, oods, rate, positive=positive).item() == pytest.approx(false[first], abs=1e-12)  # type: ignore


@settings(deadline=None)
@given(scores, scores, rates)
def test_fpr_with_ood_positive_is_the_other_one_upside_down(ids: Tensor, oods: Tensor, rate: float) -> None:
    assert torch.equal(fpr_at(ids, oods, rate, positive="ood"), fpr_at(-oods, -ids, rate))


def test_fpr_of_a_hand_counted_case() -> None:
    ids = torch.arange(1.0, 21.0)  # the 19th smallest of twenty is 19
    oods = torch.tensor([18.5, 19.0, 19.01, 19.5, 30.0])
    assert fpr_at(ids, oods).item() == pytest.approx(2 / 5)  # 18.5 and 19 pass for in-distribution
    assert fpr_at(ids, oods, positive="ood").item() == pytest.approx(2 / 20)  # all five are kept at 18.5: 19 and 20
    assert fpr_at(ids, oods, 0.6, positive="ood").item() == pytest.approx(1 / 20)  # three are kept at 19.01: 20


def test_rate_that_is_a_whole_number_of_scores_is_not_rounded_up() -> None:
    ids = torch.arange(100.0)  # 0.55 * 100 = 55.00000000000001
    assert fpr_at(ids, torch.tensor([54.0, 54.5]), 0.55).item() == 0.5
    assert fpr_at(ids, torch.tensor([54.0, 54.5]), 0.55 * (1 + 3e-12)).item() == 1.0  # twelve digits, and no fewer: the 56th


def test_separated_sets_are_perfect_and_reversed_sets_are_worst() -> None:
    low, high = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, torch.inf])
    assert [m(low, high).item() for m in METRICS] == [1.0, 0.0, 1.0, 1.0]
    assert auroc(high, low).item() == 0.0
    assert fpr_at(high, low).item() == 1.0
    assert fpr_at(high, low, positive="ood").item() == 1.0


def test_constant_scores_tell_nothing() -> None:
    ids, oods = torch.full((6,), -torch.inf), torch.full((2,), -torch.inf)
    assert [m(ids, oods).item() for m in METRICS] == [0.5, 1.0, 0.75, 0.25]


def test_pairs_beyond_float32_are_counted_exactly() -> None:
    # 5000² pairs, one of them lost: float32 cannot count 24,999,999
    ids = torch.arange(5000.0).double()
    oods = torch.full((5000,), 6000.0).double()
    oods[0] = 4998.5
    assert auroc(ids, oods).item() == 24_999_999 / 25_000_000


@pytest.mark.parametrize("metric", METRICS)
def test_result_has_the_dtype_of_the_scores_and_at_least_float32(metric: Callable[..., Tensor]) -> None:
    f32, f64 = torch.arange(4.0), torch.arange(4.0).double()
    assert metric(f32, f32).dtype == torch.float32
    assert metric(f32, f64).dtype == torch.float64
    assert metric(f32.half(), f32.half()).dtype == torch.float32
    assert metric(f32.long(), f32.long()).dtype == torch.float32


def test_strided_scores_count_like_contiguous_ones() -> None:
    table = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert auroc(table[:, 0], table[:, 1]) == auroc(table[:, 0].contiguous(), table[:, 1].contiguous())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["id_scores", "ood_scores"])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (torch.zeros(2, 3), ShapeError, r"Expected `{}` to be 1-D, but got shape \(2, 3\); pass `{}\.flatten\(\)`"),
        (torch.tensor(1.0), ShapeError, r"Expected `{}` to be 1-D, but got shape \(\)"),
        (torch.zeros(0), DataError, r"Expected `{}` to hold at least one value, but it is empty"),
        (
            torch.tensor([0.0, torch.nan]),
            DataError,
            r"Expected `{}` to be free of NaN, but 1 of 2 values are NaN",
        ),
    ],
)
def test_bad_scores_are_refused_by_name(
    metric: Callable[..., Tensor], name: str, bad: Tensor, error: type[Exception], message: str
) -> None:
    arguments = {"id_scores": torch.zeros(2), "ood_scores": torch.zeros(2), name: bad}
    with pytest.raises(error, match=message.replace("{}", name)):
        metric(**arguments)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.01, 95, float("nan")])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"`rate` to be a number above 0 and at most 1, but got"):
        fpr_at(torch.zeros(2), torch.zeros(2), rate)


def test_unknown_positive_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`positive` to be one of \['id', 'ood'\].*, but got 'oods'"):
        fpr_at(torch.zeros(2), torch.zeros(2), positive="oods")  # type: ignore
