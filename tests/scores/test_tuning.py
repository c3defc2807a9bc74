"""Weights of the default score: chosen by cuts of training rows, the same ones always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.errors import ConfigError, DataError, FileError, ShapeError
from offmap.metrics import auroc
from offmap.scores.combine import Measured, choose_weights, list_clusters, list_directions, list_halves, mix_columns
from offmap.scores.distance import Ellipsoid, KNNDistance
from offmap.scores.score import Cut, Features
from offmap.scores.terms import TERMS, Disagreement, ratio_without
from trained import classes, classifier, inputs, quick, regression, regressor

TRAIN, VALID = regression(120, 0), regression(110, 1)


def measure_cuts(kind: str, aurocs: list[float]) -> Measured:
    cut = Cut(kind, kind, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool))
    return Measured(cut, torch.zeros(0, 0), torch.tensor(aurocs, dtype=torch.float64))


def test_weights_follow_the_formula() -> None:
    table = {"beyond": [90.0, 74.0, 58.0], "class": [60.0, 100.0, 84.0]}
    found = choose_weights([measure_cuts(kind, row) for kind, row in table.items()], 3)
    wanted = torch.zeros(3, dtype=torch.float64)
    for (_, row), scale in zip(table.items(), (8, 32), strict=True):  # what the model has learned to tell apart tells less
        values = torch.tensor(row, dtype=torch.float64)
        wanted += (values.max() - 50) * ((values - values.max()) / scale).exp()
    torch.testing.assert_close(found, wanted / wanted.sum())  # one cut of each kind: nothing to resample


def test_a_kind_that_nothing_sees_says_little_and_what_cannot_be_told_is_neutral() -> None:
    seen, unseen = measure_cuts("beyond", [95.0, 60.0]), measure_cuts("between", [40.0, 51.0])
    alone, both = choose_weights([seen], 2), choose_weights([seen, unseen], 2)
    assert abs(float(both[0] - alone[0])) < 0.03
    found = choose_weights([measure_cuts("class", [90.0, float("nan"), 70.0])], 3)
    assert found[0] > found[1] > found[2]


def test_cuts_that_contradict_each_other_pull_weights_towards_equal_ones() -> None:
    sure = choose_weights([measure_cuts("beyond", [90.0, 60.0]) for _ in range(9)], 2)
    torn = choose_weights([measure_cuts("beyond", [90.0, 60.0]), *(measure_cuts("beyond", [55.0, 85.0]) for _ in range(1))], 2)
    assert abs(float(torn[0]) - 0.5) < abs(float(sure[0]) - 0.5)
    assert choose_weights([], 4).tolist() == [0.25] * 4


def test_distances_without_a_cut_are_those_of_a_space_fitted_without_it() -> None:
    rows, held = inputs(90, 3), torch.zeros(90, dtype=torch.bool)
    held[:20] = True
    cut = Cut("beyond", "", held, torch.zeros_like(held))
    space = KNNDistance.fit(rows, standardized=False)
    refitted = KNNDistance.fit(rows[20:], standardized=False)
    values = ratio_without(space, rows, cut)
    raw = torch.cat([refitted.log_ratio(rows[:20]), refitted.log_ratio(rows[20:], torch.arange(70))])
    torch.testing.assert_close(values, (raw - raw[20:].mean()) / raw[20:].std(), rtol=1e-3, atol=1e-3)


def test_draws_that_ignore_leverage_are_not_credited_with_what_it_sees() -> None:
    rows = torch.cat([inputs(150, 4), 8 + inputs(50, 5)])
    held = torch.arange(200) >= 150
    cut = Cut("beyond", "far", held, ~held & (torch.arange(200) % 2 == 0))
    features = Features(inputs=rows, members=1, likelihood=offmap.Gaussian(), layer_inputs=[{"0.weight": rows}])
    term, seen = Disagreement(), {}
    term.names = ["0.weight"]
    for explained in (1.0, 0.3, 0.0):
        term.explained = explained
        values = term.measure_without(features, cut)
        assert values[cut.half].isnan().all()
        seen[explained] = float(auroc(values[cut.kept & ~cut.half], values[held]))
    assert seen[1.0] > 0.99
    assert seen[1.0] > seen[0.3] > seen[0.0]
    assert abs(seen[0.0] - 0.5) < 0.15  # noise alone


def test_a_fit_measures_how_leverage_explains_the_disagreement() -> None:
    guard = quick(regressor(), TRAIN, VALID, solver="closed-form")
    term = guard.score_module.parts["disagreement"]
    assert 0.5 < term.explained <= 1.0  # of the closed form, to first order it is the leverage
    assert term.names == ["2.weight"]


def test_an_ellipsoid_is_the_whitened_length() -> None:
    rows = inputs(400, 3) @ torch.tensor([[2.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.7]])
    space = Ellipsoid.fit(rows)
    gap = rows.double() - rows.double().mean(0)
    cov = gap.mT @ gap / len(rows)
    expected = (gap @ torch.linalg.inv(cov) * gap).sum(1).sqrt().log()
    torch.testing.assert_close(space.log_ratio(rows), expected, rtol=1e-4, atol=1e-4)
    assert Ellipsoid.fit(torch.ones(9, 2)) is None


def test_unseen_rows_are_on_the_scale_of_few_training_rows() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    data = [
        (x[rows], net(x[rows]).detach()) for rows in (slice(0, 80), slice(80, 120))
    ]  # 64 layer inputs of 80 rows, 40 to validate
    values = offmap.fit(net, *data, solver="closed-form", draws=8, progress=False).terms(x[120:])["whitened"]
    assert abs(float(values.mean())) < 0.7
    assert 0.4 < float(values.std()) < 1.6


def test_the_outer_and_the_inner_half_are_all_rows() -> None:
    halves = {name: held for _, name, held in list_halves("column 0", torch.arange(100.0))}
    outer, inner = halves.values()
    assert list(halves) == ["beyond the data, outer half of column 0", "between the data, inner half of column 0"]
    assert inner.nonzero().flatten().tolist() == list(range(25, 75))
    assert torch.equal(outer, ~inner)
    assert list_halves("column 1", (torch.arange(100.0) > 97).float()) == []  # equal values make no halves
    assert [int(held.sum()) for _, _, held in list_halves("column 2", torch.arange(99.0) % 3)] == [66, 33]
    assert sum(int(held.sum()) for _, _, held in list_clusters(inputs(100, 0))) == 100
    assert list_directions(inputs(50, 0).double(), torch.arange(3))[0][0] == "principal axis 1"


def test_units_order_and_sign_of_columns_choose_the_same_cuts() -> None:
    x = inputs(80, 4).double()
    x[:, 0] = x[:, 0].exp()
    turned = (1000 * x + 3)[:, [2, 0, 1]]
    for (_, along), (_, again) in zip(list_directions(x, torch.arange(3)), list_directions(turned, torch.arange(3)), strict=True):
        torch.testing.assert_close(along.argsort(), again.argsort())


def test_tables_are_cut_along_numbers_alone_and_words_do_not_hide_them() -> None:
    numbers, words = inputs(160, 5)[:, :2], torch.eye(12)[torch.arange(160) % 12]
    x = torch.cat([words[:, :5], numbers[:, :1], words[:, 5:], numbers[:, 1:]], 1)  # columns 5 and 13 are the numbers
    guard = quick(nn.Linear(14, 1), (x[:120], x[:120, 5]), (x[120:], x[120:, 5]))
    cuts = [s["name"] for s in guard.score_module.figures["shifts"] if s["kind"] in ("beyond", "between")]
    assert {name.rpartition(" ")[2] for name in cuts if "column" in name} == {"5", "13"}
    alone = dict(list_directions(numbers[:120].double(), torch.arange(2)))
    among = dict(list_directions(x[:120].double(), torch.tensor([5, 13])))
    for name in ("principal axis 1", "random direction 1"):  # as of a table without the words
        torch.testing.assert_close(among[name], alone[name])


def test_a_fit_chooses_the_same_weights_again_and_files_keep_them(tmp_path: Path) -> None:
    first, again = (quick(regressor(), TRAIN, VALID) for _ in range(2))
    assert torch.equal(first.score_module.weights, again.score_module.weights)
    assert first.score_module.figures == again.score_module.figures
    assert first.score_module.weights.unique().numel() > 1
    first.save(tmp_path / "guard")
    loaded = offmap.load(tmp_path / "guard", regressor())
    assert torch.equal(loaded.score_module.weights, first.score_module.weights)
    assert loaded.score_module.figures == first.score_module.figures


def test_a_term_that_tells_nothing_gets_the_smallest_weight() -> None:
    torch.manual_seed(0)
    y = torch.arange(240) % 3
    x = torch.cat([3.0 * torch.nn.functional.one_hot(y, 3) + 0.3 * torch.randn(240, 3), 9 * torch.randn(240, 20)], 1)
    net = nn.Sequential(nn.Linear(23, 3, bias=False), nn.Identity(), nn.Linear(3, 3))
    with torch.no_grad():
        net[0].weight.zero_()[:, :3] = torch.eye(3)
        net[2].weight.copy_(2 * torch.eye(3))
        net[2].bias.zero_()
    guard = offmap.fit(net, (x[:120], y[:120]), (x[120:], y[120:]), solver="closed-form", draws=8, progress=False)
    classes_seen = [shift for shift in guard.assess().shifts if shift.kind == "class"]
    assert len(classes_seen) == 3
    assert all(shift.terms["last-layer"] > shift.terms["inputs"] for shift in classes_seen)
    assert not any({"energy", "gen"} & set(shift.terms) for shift in classes_seen)  # the model has logits for these classes


# ------------------------------------------------------------------------------------------------------------- options


def test_equal_and_pinned_weights_are_as_asked() -> None:
    equal = quick(regressor(), TRAIN, VALID, score="equal")
    assert equal.score_module.weights.tolist() == pytest.approx([0.25] * 4)
    pinned = quick(regressor(), TRAIN, VALID, score={"inputs": 3, "disagreement": 1.0})
    x = inputs(9, 5)
    terms = equal.terms(x)
    wanted = 0.75 * terms["inputs"] + 0.25 * terms["disagreement"]
    torch.testing.assert_close(pinned.score(x), wanted, rtol=1e-5, atol=1e-5)
    one = quick(regressor(), TRAIN, VALID, score="inputs")
    torch.testing.assert_close(one.score(x), terms["inputs"])


@pytest.mark.parametrize("name", sorted(TERMS))
def test_every_term_serves_alone_in_guard_file_and_graph(name: str, tmp_path: Path) -> None:
    guard = quick(classifier(), classes(120, 0), classes(110, 1), score={name: 1.0})
    x = torch.cat([inputs(30, 5), 9 * inputs(30, 6)])
    scores = guard.score(x)
    assert scores.isfinite().all()
    guard.save(tmp_path / "guard.safetensors")
    assert torch.equal(offmap.load(tmp_path / "guard.safetensors", classifier()).score(x), scores)
    exported = guard.export(tmp_path / "guard.pt2", x)
    assert exported is not None


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ({"inputs": -1}, "Expected the weight of 'inputs' in `score` to be a number ≥ 0, but got -1"),
        ({"inputs": 0.0}, "Expected `score` to have a term of positive weight, but it has none"),
        ({"imputs": 1.0}, r"Expected `a term of `score`` to be one of .*did you mean 'inputs'\?\), but got 'imputs'"),
        ({"energy": 1.0}, "three or more training rows of a classifier, with one class per row, for score='energy'"),
    ],
)
def test_weights_that_cannot_be_are_refused(score: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quick(regressor(), TRAIN, VALID, score=score)


def test_groups_are_held_out_in_turn() -> None:
    sites = ["north", "south", "west"] * 40
    guard = quick(regressor(), TRAIN, VALID, groups=sites)
    names = [shift.name for shift in guard.assess().shifts if shift.kind == "group"]
    assert names == ["group north", "group south", "group west"]
    alone = quick(regressor(), TRAIN, VALID, groups=["a"] * 119 + ["b"])
    assert not any(shift.kind == "group" for shift in alone.assess().shifts)  # one row is no group, and all rows are none
    with pytest.raises(ConfigError, match="Expected `valid`, for rows of `train` stand in for it, where `groups` names"):
        quick(regressor(), TRAIN, None, groups=sites)
    with pytest.raises(ShapeError, match="Expected a label in `groups` for each of 120 rows of `train`, but got 7"):
        quick(regressor(), TRAIN, VALID, groups=sites[:7])
    with pytest.raises(DataError, match="Expected a label for each row in `groups`, but some are missing"):
        quick(regressor(), TRAIN, VALID, groups=[*["a"] * 119, None])


def test_few_or_equal_rows_and_lone_classes_shrink_the_pool_and_never_fail() -> None:
    few = quick(regressor(), tuple(t[:12] for t in TRAIN), VALID)
    assert few.score_module.weights.tolist() == pytest.approx([0.25] * 4)  # too few rows to cut
    x, y = classes(60, 0)
    lone = torch.cat([y[:59] % 2, torch.tensor([2])])
    assert quick(classifier(), (x, lone), classes(110, 1)).score(x).isfinite().all()
    same = quick(regressor(), (torch.ones(60, 3), TRAIN[1][:60]), VALID)
    assert same.score(inputs(5, 0)).shape == (5,)


def test_a_file_with_a_term_of_another_version_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offmap.scores import score as module

    quick(regressor(), TRAIN, VALID).save(tmp_path / "guard")
    monkeypatch.delitem(module.SCORES, "whitened")
    with pytest.raises(FileError, match="the term 'whitened' of the score, which this version of offmap does not have"):
        offmap.load(tmp_path / "guard", regressor())


# ------------------------------------------------------------------------------------------------------------ figures


def test_mixed_columns_keep_their_values() -> None:
    rows = inputs(50, 2)
    mixed = mix_columns(rows, 3)
    assert torch.equal(mixed.sort(0).values, rows.sort(0).values)
    assert torch.equal(mixed[:, 1:], rows[:, 1:])
    assert not torch.equal(mixed[:, 0], rows[:, 0])


@pytest.mark.parametrize("form", ["images", "tokens"])
def test_images_and_tokens_are_corrupted_in_their_own_ways(form: str) -> None:
    torch.manual_seed(0)
    y = torch.arange(240) % 3
    data: Any
    net: nn.Module
    if form == "images":
        x = torch.randn(240, 1, 6, 6) + y.view(-1, 1, 1, 1)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
        data = [(x[:120], y[:120]), (x[120:], y[120:])]
        wanted = ["noise", "blur", "half the contrast"]
    else:
        ids = torch.randint(20, (240, 6))
        mask = torch.ones_like(ids)

        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.body, self.out = nn.Embedding(20, 6), nn.Linear(6, 5), nn.Linear(5, 3)

            def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
                return self.out(self.body(self.embed(input_ids)).tanh().mean(1))

        net = Tokens().eval()
        data = [({"input_ids": ids[s], "attention_mask": mask[s], "labels": y[s]}) for s in (slice(120), slice(120, None))]
        wanted = ["a third of the tokens from other rows"]
    guard = offmap.fit(net, *data, draws=8, solver="closed-form", progress=False)
    found = [shift.name for shift in guard.assess().shifts if shift.kind == "corruption"]
    assert found == wanted
    if form == "tokens":
        assert guard.score_module.reads.layers == ("body.weight", "out.weight")  # the first gets tokens: their mean


def test_an_assessed_cut_is_what_the_terms_see_of_it() -> None:
    guard = quick(regressor(), TRAIN, VALID)
    for shift in guard.assess().shifts:
        assert 0 <= shift.auroc <= 100
        assert 0 <= shift.flagged <= 100
        assert set(shift.terms) == set(guard.score_module.parts)
        assert min(shift.terms.values()) - 15 <= shift.auroc <= max(shift.terms.values()) + 15
    far = auroc(guard.score(VALID[0]), guard.score(20 * VALID[0]))
    assert float(far) > 0.95
