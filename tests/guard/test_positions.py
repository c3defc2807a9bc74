"""Scores and verdicts of dense outputs: padding left out, ignored targets, coverage per position, batches of any length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import offmap
from offmap.detector import concat_results, reduce_positions
from offmap.errors import DataError
from offmap.likelihoods import Bernoulli, Categorical, Gaussian, Prediction
from offmap.likelihoods.likelihood import sample_position
from offmap.scores.score import find_unpadded
from trained import inputs, quick

WORDS, CLASSES = 12, 3


class Tagger(nn.Module):
    """(B, T) tokens with their mask -> (B, T, C) logits; every word sees the mean of the words that are no padding."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS, 8), nn.Linear(16, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words, kept = self.words(input_ids), attention_mask.unsqueeze(-1).float()
        context = (words * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)
        return self.out(torch.cat([words, context.expand_as(words)], -1))


class Labels(Tagger):
    """Several labels of one text, (B, C)."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask)[:, 0]


def text(rows: int, length: int, seed: int = 0, *, pad: int = 0) -> dict[str, Tensor]:
    """Texts of 1 to `length` words, and `pad` places of padding more."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, length + pad), generator=generator)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(length + pad) < lengths).long()}


def tag(x: dict[str, Tensor]) -> Tensor:
    return (x["input_ids"] % CLASSES).masked_fill(x["attention_mask"] == 0, -100)


def longer(x: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    return {name: nn.functional.pad(t, (0, by), value=5 if name == "input_ids" else 0) for name, t in x.items()}


def taggings(*lengths: int, rows: int = 10, seed: int = 0) -> DataLoader[Any]:
    parts = [text(rows, length, seed + i) for i, length in enumerate(lengths)]
    return DataLoader([{**x, "labels": tag(x)} for x in parts], batch_size=None)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def tagger() -> offmap.Guard:
    return quick(Tagger(), taggings(4, 7, 5), taggings(6, 3, 8, seed=10))


# ------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("score", ["paper", "epistemic"])
def test_scores_do_not_depend_on_the_amount_of_padding(tagger: offmap.Guard, reduce: str, score: str) -> None:
    made = quick(Tagger(), taggings(4, 7, 5), taggings(6, 3, 8, seed=10), score=score) if score != "paper" else tagger
    x = text(9, 6, seed=3)
    for by in (1, 5):
        torch.testing.assert_close(made.score(longer(x, by), reduce=reduce), made.score(x, reduce=reduce))


def test_padding_is_nan_in_the_map_and_left_out_of_the_reduction(tagger: offmap.Guard) -> None:
    x = text(9, 6, seed=3)
    result = tagger(x)
    kept = x["attention_mask"].bool()
    assert tagger.likelihood == Categorical(-1)
    assert torch.equal(~result.score_map.isnan(), kept)
    probs = tagger.samples(x, tagger.draws).softmax(-1).mean(0)
    entropy = torch.special.entr(probs).sum(-1)
    torch.testing.assert_close(result.score_map[kept], entropy[kept], rtol=1e-4, atol=1e-5)
    slow = torch.stack([row[k].mean() for row, k in zip(entropy, kept, strict=True)])
    torch.testing.assert_close(result.score, slow, rtol=1e-4, atol=1e-5)
    highest = torch.stack([row[k].max() for row, k in zip(entropy, kept, strict=True)])
    torch.testing.assert_close(tagger.score(x, reduce="max"), highest, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tagger.score(x, reduce=None), result.score_map, equal_nan=True)


def test_a_map_of_next_tokens_takes_the_last_columns_of_the_mask() -> None:
    x = text(30, 6)
    y = tag(x)[:, 1:]
    made = quick(Tagger(), (x, y), (x, y), output_fn=lambda output: output[:, :-1])
    map_ = made.score(x, reduce=None)
    assert map_.shape == (30, 5)
    seen = x["attention_mask"][:, 1:].bool()
    assert torch.equal(~map_.isnan(), seen)
    alone = ~seen.any(1)  # texts of one word say nothing of a next one
    assert alone.any()
    assert (made.score(x)[alone] == math.inf).all()
    assert made.score(x)[~alone].isfinite().all()


def test_several_labels_of_one_text_are_no_places_of_it() -> None:
    # as many labels as places: without a class axis, nothing tells them apart
    x = text(30, CLASSES)
    y = (x["input_ids"][:, :1] + torch.arange(CLASSES)) % 2
    made = quick(Labels(), (x, y), (x, y), likelihood="bernoulli")
    assert made.likelihood == Bernoulli(1)
    result = made(x)
    assert result.score_map.isfinite().all()
    assert result.probs.shape == (30, 2, CLASSES)


@pytest.mark.parametrize(("mask", "fits"), [((2, 5), True), ((2, 6), True), ((2, 7), False), ((2, 4), False), ((2, 1, 5), False)])
def test_a_mask_belongs_to_a_map_of_its_length_or_one_less(mask: tuple[int, ...], fits: bool) -> None:
    assert (find_unpadded({"attention_mask": torch.ones(mask)}, torch.zeros(2, 5)) is not None) == fits
    assert find_unpadded({"attention_mask": torch.ones(mask)}, torch.zeros(2, 5, 5)) is None
    assert find_unpadded((torch.zeros(2, 5), torch.ones(mask)), torch.zeros(2, 5)) is None


def test_reduction_keeps_infinite_scores_and_calls_nothing_infinite() -> None:
    scores = torch.tensor([[1.0, math.inf, math.nan], [math.nan] * 3, [-1.0, -3.0, math.nan]])
    assert reduce_positions(scores, "mean").tolist() == [math.inf, math.inf, -2.0]
    assert reduce_positions(scores, "max").tolist() == [math.inf, math.inf, -1.0]


# ------------------------------------------------------------------------------------------------- batches of any length


def test_batches_of_different_lengths_are_answered_at_the_longest(tagger: offmap.Guard) -> None:
    parts = [text(4, length, seed=length) for length in (5, 3, 8)]
    whole = tagger(DataLoader(parts, batch_size=None))  # pyright: ignore[reportArgumentType]
    assert whole.score_map.shape == whole.label.shape == (12, 8)
    assert whole.probs.shape == (12, CLASSES, 8)
    assert whole.score.shape == (12,)
    for i, part in enumerate(parts):
        here, alone = slice(4 * i, 4 * i + 4), tagger(part)
        length = part["input_ids"].shape[1]
        torch.testing.assert_close(whole.score[here], alone.score)
        torch.testing.assert_close(whole.probs[here, :, :length], alone.probs)
        assert torch.equal(whole.label[here, :length], alone.label)
        assert whole.probs[here, :, length:].isnan().all()
        assert (whole.label[here, length:] == -100).all()
    loader = DataLoader(parts, batch_size=None)  # pyright: ignore[reportArgumentType]
    assert tagger.samples(loader, 2).shape == (2, 12, 8, CLASSES)
    assert tagger.score(loader, reduce=None).shape == (12, 8)
    assert not tagger.prediction_set(loader)[4:8, :, 3:].any()


def test_labels_beside_the_inputs_are_put_aside(tagger: offmap.Guard) -> None:
    x = text(4, 5)
    assert torch.equal(tagger.score({**x, "labels": tag(x)}), tagger.score(x))


def test_a_recurrent_model_with_lengths_is_fitted_on_padded_batches() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.out = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 1)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            states = self.cell(x)[0]
            return self.out(states[torch.arange(len(x)), lengths - 1])

    def batch(length: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = inputs(8 * length, seed).reshape(8, length, 3)
        return (x, torch.randint(1, length + 1, (8,), generator=torch.Generator().manual_seed(seed))), x[:, 0, 0]

    def data(*lengths: int) -> DataLoader[Any]:
        return DataLoader([batch(n, n) for n in lengths], batch_size=None)  # pyright: ignore[reportArgumentType]

    made = quick(Reader(), data(4, 6, 5), data(6, 6, 6), chunk_size=1)
    found = made.score(data(3, 7))
    assert found.shape == (16,)
    torch.testing.assert_close(found[:8], made.score(batch(3, 3)[0]))


def test_a_guard_of_places_survives_a_file(tagger: offmap.Guard, tmp_path: Path) -> None:
    tagger.save(tmp_path / "guard.safetensors")
    again = offmap.load(tmp_path / "guard.safetensors", Tagger())
    assert again.likelihood == Categorical(-1)
    torch.testing.assert_close(again.score(text(5, 4)), tagger.score(text(5, 4)), rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------- pixels


class Painter(nn.Module):
    """(B, 1, H, W) -> (B, C, H, W)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def images(n: int = 30, seed: int = 0) -> Tensor:
    return inputs(n, seed, features=20).reshape(n, 1, 4, 5)


PIXELS: dict[str, tuple[int, Any, type, tuple[int, ...]]] = {
    "segmentation": (3, lambda x: (x[:, 0] > 0).long(), Categorical, (30, 4, 5)),
    "binary": (1, lambda x: x[:, 0] > 0, Bernoulli, (30, 4, 5)),
    "regression": (1, lambda x: x[:, 0].abs(), Gaussian, (30, 4, 5)),
    "variances": (2, lambda x: x[:, 0].abs(), Gaussian, (30, 4, 5)),
    "two channels": (2, lambda x: torch.cat([x, -x], 1), Gaussian, (30, 2, 4, 5)),
}


@pytest.mark.parametrize("kind", PIXELS)
def test_pixels_have_scores_predictions_and_conformal_answers(kind: str) -> None:
    outputs, truth, law, shape = PIXELS[kind]
    x, other = images(), images(seed=1)
    made = quick(Painter(outputs), (other, truth(other)), (x, truth(x)))
    assert type(made.likelihood) is law
    result = made(x)
    assert result.score_map.shape == (30, 4, 5)
    torch.testing.assert_close(result.score, result.score_map.mean((1, 2)))
    if law is Gaussian:
        interval = made.interval(x, 0.8)
        assert result.mean.shape == interval.lower.shape == interval.upper.shape == shape
        assert (interval.lower < interval.upper).all()
    else:
        assert result.label.shape == shape
        assert made.prediction_set(x, 0.8).shape == (30, 3 if kind == "segmentation" else 2, 4, 5)


def test_ood_pixels_are_found_where_they_are() -> None:
    x = images()
    made = quick(Painter(1), (x, x[:, 0].abs()), (x, x[:, 0].abs()))
    spoiled = x.clone()
    spoiled[:, 0, 1, 2] = 40.0
    map_ = made.score(spoiled, reduce=None)
    near = torch.zeros(4, 5, dtype=torch.bool)
    near[0:3, 1:4] = True  # what a 3 × 3 window sees
    assert torch.equal(map_[:, ~near], made.score(x, reduce=None)[:, ~near])
    assert (map_[:, 1, 2] > 2 * map_[:, ~near].amax(1)).all()


def test_ignored_pixels_change_nothing() -> None:
    x = images()
    y = (x[:, 0] > 0).long()
    held = y.clone()
    held[:, 0], held[3] = -100, -100
    made = quick(Painter(3), (x, held), (x, held))
    assert math.isfinite(made.history.max_risk[0])
    assert math.isfinite(made.history.final_risk[0])
    assert made.calibration.residuals.shape == (29,)  # nothing of row 3 counts
    assert made.calibration.scores.shape == (30,)
    other = held.clone()
    other[held != -100] = (1 - y)[held != -100]
    assert not torch.equal(quick(Painter(3), (x, other), (x, other)).calibration.residuals, made.calibration.residuals)
    with pytest.raises(DataError, match="at least one target that counts, but all of `valid` are -100"):
        made.calibrate((x, torch.full_like(y, -100)))


# -------------------------------------------------------------------------------------------------------------- coverage


def test_sets_and_intervals_cover_a_random_position_over_many_calibration_sets() -> None:
    # every image has a difficulty of its own: its pixels are far from independent
    @dataclass(frozen=True)
    class Flat:
        members: int = 1

        def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
            return x.expand(draws, *x.shape)

    def sample_rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        hard = torch.rand(n, 1, 1, generator=generator).square() * 3
        return torch.zeros(n, 1, 2, 3), hard * torch.randn(n, 2, 3, generator=generator)

    law, rounds, inside = Gaussian(noise=torch.ones(1)), 250, 0.0
    for seed in range(rounds):
        separate = sample_rows(39, 2 * seed)
        made = offmap.guard(
            Flat(), sample_rows(9, 9999), calibration=separate, likelihood=law, draws=2, clip=0.0, false_alarms=0.5
        )
        x, y = sample_rows(100, 2 * seed + 1)
        interval = made.interval(x, 0.9)
        inside += ((interval.lower <= y) & (y <= interval.upper)).float().mean().item() / rounds
    assert abs(inside - 0.9) < 0.013


def test_one_position_of_every_row_is_drawn_evenly_among_those_that_count() -> None:
    values = torch.arange(6.0).expand(6000, 6)
    kept = torch.tensor([True, False, True, True, False, True]).expand(6000, 6)
    shares = torch.bincount(sample_position(values, kept).long(), minlength=6) / 6000
    assert shares[[1, 4]].sum() == 0
    assert ((shares[[0, 2, 3, 5]] - 0.25).abs() < 0.03).all()


def test_residuals_of_outputs_without_positions_are_one_per_row_and_target() -> None:
    prediction = Prediction(mean=torch.zeros(4, 2), std=torch.ones(4, 2))
    assert Gaussian(2, False).residual(prediction, torch.ones(4, 2)).shape == (4, 2)
    classes = Prediction(probs=torch.tensor([[0.9, 0.1], [0.2, 0.8]]), label=torch.tensor([0, 1]))
    torch.testing.assert_close(Categorical().residual(classes, torch.tensor([1, -100])), torch.tensor([0.9]))


def test_joined_predictions_keep_bools_and_missing_fields() -> None:
    one = offmap.Result(score=torch.ones(1), ood=torch.tensor([True]), p_value=torch.ones(1), label=torch.tensor([[1, 2]]))
    two = offmap.Result(score=torch.ones(1), ood=torch.tensor([False]), p_value=torch.ones(1), label=torch.tensor([[3]]))
    whole = concat_results([one, two])
    assert whole.label.tolist() == [[1, 2], [3, -100]]
    assert whole.ood.tolist() == [True, False]
    assert whole.score_map is None
