"""The default score: terms in standard deviations over in-distribution rows, and their weighted mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import offmap
from offmap.data.batch import flatten_inputs
from offmap.errors import ConfigError, ModelError, ShapeError
from offmap.likelihoods import Gaussian, Likelihood, Prediction
from offmap.scores.combine import CombinedScore, DistanceScore
from offmap.scores.distance import KNNDistance, ZScore, compute_log_ratio
from offmap.scores.score import PaperScore
from offmap.scores.terms import LayerDistance, directions, log_uncertainty, project
from trained import classes, classifier, inputs, quick, regression, regressor

TRAIN, VALID = regression(60, 0), regression(40, 1)
X, FAR = inputs(9, 5), 20 * inputs(9, 6)


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), TRAIN, VALID)


def uncertain(guard: offmap.Guard, x: Any) -> Tensor:
    return log_uncertainty(guard.likelihood, guard.sampler.outputs(x, None), guard.predictive.members)


def distances_of(guard: offmap.Guard) -> offmap.Guard:
    terms = {name: term for name, term in guard.score_module.items if not term.reads.draws and not term.reads.base}
    return replace(guard, score_module=DistanceScore(terms))


def z(own: Tensor, values: Tensor) -> Tensor:
    return ((values - own.mean()) / own.std(correction=0)).clamp_min(-1)


# --------------------------------------------------------------------------------------------------------- the score


def test_the_score_is_the_weighted_mean_of_its_terms(guard: offmap.Guard) -> None:
    terms, weights = guard.terms(X), guard.score_module.weights
    assert list(terms) == ["disagreement", "inputs", "layers", "whitened"]
    disagreement = z(uncertain(guard, TRAIN[0]), uncertain(guard, X))  # 40 validation rows are few: training rows set the scale
    torch.testing.assert_close(terms["disagreement"], disagreement.float(), rtol=1e-4, atol=1e-5)
    joined = sum(w * values.double() for w, values in zip(weights, terms.values(), strict=True))
    torch.testing.assert_close(guard.score(X), joined.float(), rtol=1e-4, atol=1e-5)
    assert float(weights.sum()) == pytest.approx(1)
    alone = distances_of(guard)
    torch.testing.assert_close(alone.score(X), torch.stack(list(alone.terms(X).values())).mean(0), rtol=1e-5, atol=1e-6)


def test_a_hundred_validation_rows_set_the_scales() -> None:
    valid = regression(100, 7)
    made = quick(regressor(), TRAIN, valid)
    disagreement = z(uncertain(made, valid[0]), uncertain(made, X))
    torch.testing.assert_close(made.terms(X)["disagreement"], disagreement.float(), rtol=1e-4, atol=1e-5)
    space = made.score_module.parts["inputs"].space
    torch.testing.assert_close(space.zscore.mean, space.log_ratio(valid[0]).mean())


def test_a_space_counts_as_its_own_rows_see_each_other() -> None:
    space = KNNDistance.fit(TRAIN[0], standardized=True)
    own = []
    for i in range(60):  # every row beside the others alone: the nearest of each part counts
        parts = [[n for n in range(part, 60, space.parts) if n != i] for part in range(space.parts)]
        gaps = [torch.linalg.vector_norm(space.rows[part].double() - space.rows[i].double(), dim=1) for part in parts]
        numbers = torch.tensor([[part[int(gap.argmin())] for part, gap in zip(parts, gaps, strict=True)]])
        distances = torch.stack([gap.min() for gap in gaps])[None]
        own.append(compute_log_ratio(distances, numbers, space.spacings)[0])
        torch.testing.assert_close(distances.mean(), space.spacings[i], rtol=1e-5, atol=0)
    assert space.parts == 7
    torch.testing.assert_close(space.zscore.mean, torch.stack(own).mean(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(space.zscore.std, torch.stack(own).std(correction=0), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(space.rows.std(0, correction=0), torch.ones(3))


@pytest.mark.parametrize("score", ["default", "distance"])
def test_scores_are_finite_and_higher_far_away(score: str) -> None:
    for net, train, valid in [(regressor(), TRAIN, VALID), (classifier(), classes(60, 0), classes(40, 1))]:
        made = quick(net, train, valid, score=score)
        near, far = made.score(X), made.score(FAR)
        assert near.isfinite().all()
        assert far.isfinite().all()
        assert far.min() > near.median()
        assert made(FAR).ood.float().mean() > 0.8


class Units(nn.Module):
    """A model that counts its inputs in other units around another zero."""

    def __init__(self, unit: list[float], zero: float) -> None:
        super().__init__()
        self.net = regressor()
        self.register_buffer("unit", torch.tensor(unit))
        self.zero = zero

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.zero) / self.unit)


def test_units_and_origin_of_inputs_change_no_score() -> None:
    found = []
    for unit, zero in [([2.0, 2.0, 2.0], 0.0), ([2000.0, 2.0, 2.0], 0.0), ([2.0, 2.0, 2.0], 100.0)]:
        put = lambda x, unit=unit, zero=zero: x * torch.tensor(unit) + zero  # noqa: E731
        found.append(quick(Units(unit, zero), (put(TRAIN[0]), TRAIN[1]), (put(VALID[0]), VALID[1])).score(put(X)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[2], found[0], rtol=1e-2, atol=1e-2)  # float32 has five digits left of x + 100


def test_the_order_of_members_and_a_factor_of_their_disagreement_change_nothing() -> None:
    likelihood, outputs = (
        Gaussian(1, noise=torch.tensor([0.1])),
        torch.randn(3, 8, 9, 1) * torch.tensor([1.0, 5.0, 40.0])[:, None, None, None],
    )
    values = log_uncertainty(likelihood, outputs.flatten(0, 1), 3)
    torch.testing.assert_close(log_uncertainty(likelihood, outputs[[2, 0, 1]].flatten(0, 1), 3), values)
    larger = log_uncertainty(likelihood, 7 * outputs.flatten(0, 1), 3)
    torch.testing.assert_close(ZScore.fit(larger)(larger), ZScore.fit(values)(values), rtol=1e-4, atol=1e-4)
    assert (ZScore.fit(torch.full((9,), 3.0))(values) == 0).all()  # what tells in-distribution rows nothing apart


def test_a_classifier_that_is_sure_of_itself_far_away_is_not_trusted() -> None:
    made = quick(classifier(), classes(80, 0), classes(60, 1), draws=10)
    far = 200 * inputs(30, 6)
    assert made.sampler.outputs(far, None).softmax(-1).amax(-1).median() > 0.999  # every draw is sure
    assert made.score(far).min() > made.score(inputs(30, 5)).max()


def test_members_that_are_not_random_disagree_with_each_other() -> None:
    outputs = torch.tensor([0.0, 2.0])[:, None, None].expand(2, 4, 1)
    assert (log_uncertainty(Gaussian(1, noise=torch.tensor([0.1])), outputs, 2) == 0).all()  # log of variance 1


def test_an_ensemble_has_one_score_of_all_its_members() -> None:
    made = quick([regressor(s) for s in range(3)], TRAIN, VALID)
    each = [log_uncertainty(made.likelihood, part, 1) for part in made.sampler.outputs(X, None).unflatten(0, (3, -1))]
    torch.testing.assert_close(uncertain(made, X), torch.stack(each).mean(0))
    assert made.score(FAR).min() > made.score(X).median()


def test_layers_of_all_members_are_compared_side_by_side() -> None:
    nets = [regressor(s) for s in range(2)]  # 24 numbers side by side: none is projected
    made = quick(nets, TRAIN, VALID)
    with torch.no_grad():
        # the inputs of the second matrix of every member
        each = [torch.cat([net[:2](x) for net in nets], 1) for x in (TRAIN[0], X)]
    assert made.score_module.reads.layers[0] == "2.weight"
    size = (each[0] - each[0].mean(0)).square().sum(1).mean().sqrt()
    narrow = directions(each[0].shape[1], made.score_module.parts["layers"].most)
    rows, x = (project(part / size, narrow) for part in each)
    expected = KNNDistance.fit(rows, standardized=False)(x).float()
    torch.testing.assert_close(made.terms(X)["layers"], expected, rtol=1e-4, atol=1e-4)
    turned = quick(nets[::-1], TRAIN, VALID)
    distances, others = (g.terms(X)["layers"] for g in (made, turned))
    torch.testing.assert_close(distances, others)


def test_wide_layers_keep_their_distances_to_a_few_per_cent() -> None:
    wide = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0))
    narrow = project(wide, directions(5000, 256))
    apart, kept = (torch.pdist(rows) for rows in (wide, narrow))
    assert kept.shape == apart.shape
    assert ((kept / apart).log().abs() < 0.25).all()
    assert abs(float((kept / apart).mean()) - 1) < 0.02
    torch.testing.assert_close(project(wide[3:4], directions(5000, 256)), narrow[3:4], rtol=1e-3, atol=1e-3)


def test_without_training_data_the_default_is_the_papers_score(guard: offmap.Guard) -> None:
    bare, paper = (offmap.guard(guard.predictive, VALID, score=s, draws=8) for s in ("default", "paper"))
    assert torch.equal(bare.score(X), paper.score(X))
    assert isinstance(bare.score_module, PaperScore)
    made = offmap.guard(guard.predictive, VALID, train=TRAIN, draws=8)
    torch.testing.assert_close(made.score(X), guard.score(X), rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="Expected `train=` for score='distance': it compares inputs with training rows"):
        offmap.guard(guard.predictive, VALID, score="distance")


# ------------------------------------------------------------------------------------------------------- whatever model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_give_nearly_the_same_scores(guard: offmap.Guard, dtype: torch.dtype) -> None:
    made = quick(regressor().to(dtype), TRAIN, VALID)
    found = made.score(X)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.float(), guard.score(X), rtol=0, atol=0.2 if dtype != torch.float64 else 1e-3)


def test_a_row_alone_has_the_score_it_has_in_a_batch(guard: offmap.Guard) -> None:
    alone = torch.cat([guard.score(row[None]) for row in X])
    torch.testing.assert_close(alone, guard.score(X), rtol=1e-4, atol=1e-4)
    many = inputs(1025, 8)  # the last block is one row
    torch.testing.assert_close(guard.score(many)[-1:], guard.score(many[-1:]), rtol=1e-4, atol=1e-4)


class Words(nn.Module):
    """Token ids (B, T) to classes: no inputs that are numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.out = nn.Embedding(20, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.body(self.embed(ids).mean(1)).tanh())


def words(n: int, seed: int, length: int = 4) -> dict[str, Tensor]:
    return {"ids": torch.randint(20, (n, length), generator=torch.Generator().manual_seed(seed))}


def test_token_ids_are_compared_in_layers_alone() -> None:
    made = quick(Words(), (words(50, 0), torch.arange(50) % 3), (words(40, 1), torch.arange(40) % 3))
    assert "inputs" not in made.score_module.parts
    assert made.score_module.reads.layers == ("body.weight", "out.weight")
    assert made.score(words(7, 2, length=9)).isfinite().all()  # of any length


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = regressor()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.net(torch.cat([a, b], 1))


def test_tuples_and_dicts_in_any_order_give_one_score(guard: offmap.Guard) -> None:
    split = lambda x: {"a": x[:, :1], "b": x[:, 1:]}  # noqa: E731
    made = quick(Two(), (split(TRAIN[0]), TRAIN[1]), (split(VALID[0]), VALID[1]))
    near, there = (distances_of(g) for g in (guard, made))  # draws differ: noise goes by a weight's name
    torch.testing.assert_close(there.score(split(X)), near.score(X), rtol=1e-4, atol=1e-4)
    assert torch.equal(made.score(dict(reversed(split(X).items()))), made.score(split(X)))
    torch.testing.assert_close(made.score(tuple(split(X).values())), made.score(split(X)))


def test_dense_outputs_are_not_compared() -> None:
    torch.manual_seed(0)
    x, y = inputs(40, 0, 16).reshape(40, 1, 4, 4), torch.randint(2, (40, 4, 4))
    net = nn.Conv2d(1, 2, 3, padding=1)
    made = quick(net, (x, y), (x, y))
    assert isinstance(made.score_module, PaperScore)
    assert torch.equal(made.score(x), quick(net, (x, y), (x, y), score="paper").score(x))
    with pytest.raises(
        ConfigError, match="Expected three or more training rows whose inputs or layers are one vector per example"
    ):
        quick(net, (x, y), (x, y), score="distance")


def test_wide_inputs_are_compared_in_layers_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 4097)
    made = quick(nn.Sequential(nn.Linear(4097, 4), nn.Tanh(), nn.Linear(4, 1)), (x, x[:, 0]), (x, x[:, 0]), basis="identity")
    assert "inputs" not in made.score_module.parts
    assert made.score_module.reads.layers == ("0.weight", "2.weight")
    assert (flatten_inputs(x[:, :4096]) is None, flatten_inputs(x)) == (False, None)


def test_series_beside_lengths_or_masks_are_no_vectors() -> None:
    x = torch.zeros(4, 3, 2)
    assert flatten_inputs(x).shape == (4, 6)
    assert flatten_inputs((x, torch.ones(4, dtype=torch.long))) is None
    assert flatten_inputs({"x": x, "attention_mask": torch.ones(4, 3)}) is None
    assert flatten_inputs((x[:, 0], torch.ones(4, dtype=torch.long))).shape == (4, 2)  # a table with a column of ids


def test_inputs_of_another_size_and_layers_without_inputs_are_refused(guard: offmap.Guard) -> None:
    wide = replace(guard, score_module=CombinedScore({"inputs": guard.score_module.parts["inputs"]}))
    with pytest.raises(
        ShapeError, match="Expected 3 numbers per input, as at fit time, but got 4. Bring inputs to one size, or fit"
    ):
        wide.score(inputs(5, 0, 4))
    lost = CombinedScore({"layers": LayerDistance({"0.bias": 3})})
    with pytest.raises(ModelError, match="Expected `0.bias` to get one row per example, as at fit time, but on these inputs"):
        replace(guard, score_module=lost).score(X)


class Breaks(nn.Module):
    """NaN, or infinite, for inputs beyond 10."""

    def __init__(self, bad: float) -> None:
        super().__init__()
        self.net, self.bad = regressor(), bad

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.where(x > 10, self.bad, x))


@pytest.mark.parametrize("score", ["default", "distance"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_the_model_breaks_on_is_infinitely_ood(bad: float, score: str) -> None:
    made = quick(Breaks(bad), TRAIN, VALID, score=score)
    x = X.clone()
    x[3] = 11.0
    found = made.score(x)
    assert found[3] == torch.inf
    assert found[:3].isfinite().all()
    assert made(x).ood[3]


class Laplace(Likelihood):
    """A likelihood of the user's own, whose score may be negative."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return (output[..., 0] - y).abs()

    def predict(self, outputs: Tensor) -> Prediction:
        return Prediction(mean=outputs[..., 0].mean(0), std=outputs[..., 0].std(0) + 1)

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].std(0).log()

    def epistemic(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)


def test_a_likelihood_of_the_user_joins_the_logarithm_of_its_epistemic() -> None:
    made = quick(regressor(), TRAIN, VALID, likelihood=Laplace())
    own, new = (Laplace().epistemic(made.sampler.outputs(x, None)).double().log() for x in (TRAIN[0], X))
    torch.testing.assert_close(made.terms(X)["disagreement"], z(own, new).float(), rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- whatever data


def test_constant_columns_and_copies_of_rows_leave_scores_finite() -> None:
    x = TRAIN[0].clone()
    x[:, 2] = 0.1
    made = quick(regressor(), (x[:6].repeat(9, 1), TRAIN[1][:6].repeat(9)), (x[:40], TRAIN[1][:40]))
    assert made.score_module.parts["inputs"].space.unit[2] == 1
    assert made.score(torch.cat([x, FAR])).isfinite().all()


def test_inputs_that_are_all_the_same_are_no_space() -> None:
    assert KNNDistance.fit(torch.full((9, 2), 0.1), standardized=True) is None
    rows = torch.cat([inputs(9), torch.full((2, 3), torch.nan)])
    assert KNNDistance.fit(rows, standardized=True).rows.shape == (9, 3)  # finite ones alone


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10, 11])
def test_few_training_rows_are_enough_from_three_on(count: int) -> None:
    few = TRAIN[0][:count], TRAIN[1][:count]
    made = quick(regressor(), few, VALID)
    assert isinstance(made.score_module, PaperScore) == (count < 3)
    assert made.score(torch.cat([X, few[0], FAR])).isfinite().all()
    if count < 3:
        with pytest.raises(ConfigError, match="Expected three or more training rows .*Pass score='paper'"):
            quick(regressor(), few, VALID, score="distance")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*TRAIN, strict=True))


def test_streams_give_the_same_score_and_leave_the_random_state(guard: offmap.Guard) -> None:
    state = torch.get_rng_state()
    made = [offmap.guard(guard.predictive, VALID, train=form, draws=8).score(X) for form in (
        TRAIN, TensorDataset(*TRAIN), DataLoader(TensorDataset(*TRAIN), batch_size=7), Stream(),
        DataLoader(Stream(), batch_size=9),
    )]  # fmt: skip
    assert all(torch.equal(found, made[0]) for found in made)
    shuffled = [
        offmap.guard(guard.predictive, VALID, train=DataLoader(TensorDataset(*TRAIN), shuffle=True), draws=8) for _ in "ab"
    ]
    assert torch.equal(shuffled[0].score(X), shuffled[1].score(X))
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------------------------------------------------- kept and moved


@pytest.mark.parametrize("score", ["default", "distance", "paper"])
def test_a_guard_with_reference_rows_survives_file_device_and_calibration(score: str, tmp_path: Path) -> None:
    nets = [regressor(s).double() for s in range(2)]
    made = quick(nets, TRAIN, VALID, score=score)
    made.save(tmp_path / "guard")
    again = offmap.load(tmp_path / "guard", nets)
    assert again.score_module.name == score
    assert torch.equal(again.score(X), made.score(X))
    assert torch.equal(made.to("cpu").score(X), made.score(X))
    other = made.calibrate(regression(40, 3))
    assert torch.equal(other.score(X), made.score(X))
    assert other.threshold != made.threshold


def test_scoring_leaves_model_random_state_and_inputs_alone(guard: offmap.Guard) -> None:
    net, x = guard.predictive.model.module, X.clone().requires_grad_()
    before, state = {n: t.clone() for n, t in net.state_dict().items()}, torch.get_rng_state()
    guard.score(x)
    assert torch.equal(x, X)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
