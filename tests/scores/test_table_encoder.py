"""Columns that stand for words, and missing values, have a place of their own in the distance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.data.batch import flatten_codes
from offmap.errors import ConfigError, DataError, FileError, ModelError
from offmap.likelihoods import Gaussian
from offmap.metrics import auroc
from offmap.scores.distance import KNNDistance, TableEncoder, find_groups
from offmap.scores.score import Features
from offmap.scores.terms import InputDistance


def numbers(n: int, width: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def words(n: int, shares: list[float], seed: int = 0) -> Tensor:
    return torch.multinomial(torch.tensor(shares), n, replacement=True, generator=torch.Generator().manual_seed(seed))


SHARES = [0.5, 0.3, 0.15, 0.04, 0.01]


def table(n: int, seed: int = 0) -> Tensor:
    """Two numbers, a variable of five words and a flag of 2 %."""
    flag = words(n, [0.98, 0.02], seed + 2)
    return torch.cat([numbers(n, 2, seed), F.one_hot(words(n, SHARES, seed + 1), 5).float(), flag[:, None].float()], 1)


def encoder_of(rows: Tensor, *args: Any, **options: Any) -> TableEncoder:
    encoder = TableEncoder.fit(rows, *args, **options)
    assert encoder is not None
    return encoder


def apart(encoder: TableEncoder, a: Tensor, b: Tensor) -> float:
    return float((encoder(a[None]) - encoder(b[None])).norm())


def test_another_word_is_as_far_as_two_random_rows_in_a_number_whatever_its_share() -> None:
    rows = table(2000)
    encoder = encoder_of(rows)
    standard = (rows[:1000, 0] - rows[1000:, 0]).square().mean().sqrt() / rows[:, 0].std()
    for a, b in ((0, 1), (0, 4), (3, 4)):
        row = torch.cat([torch.zeros(2), F.one_hot(torch.tensor(a), 5), torch.zeros(1)])
        other = torch.cat([torch.zeros(2), F.one_hot(torch.tensor(b), 5), torch.zeros(1)])
        assert apart(encoder, row, other) == pytest.approx(2**0.5) == pytest.approx(float(standard), abs=0.1)
    flagged = row.clone()
    flagged[-1] = 1
    assert apart(encoder, row, flagged) == pytest.approx(2**0.5)


def test_it_does_not_matter_whether_the_table_was_standardised_before() -> None:
    rows = table(500)
    scaled = (rows - rows.mean(0)) / rows.std(0, correction=0)
    own, other = encoder_of(rows)(rows), encoder_of(scaled)(scaled)
    torch.testing.assert_close(torch.pdist(own), torch.pdist(other), rtol=1e-4, atol=1e-4)


def test_a_word_never_seen_is_far_and_the_less_the_more_often_words_are_new() -> None:
    rows = table(2000)
    unseen = rows[0].clone()
    unseen[2:7] = 0
    assert apart(encoder_of(rows), rows[0], unseen) > 10
    new = torch.cat([rows[:100, :2], torch.eye(100)], 1)  # every row has a word of its own
    unseen = new[0].clone()
    unseen[2:] = 0
    assert apart(encoder_of(new), new[0], unseen) < 2


def test_groups_are_runs_of_columns_of_which_every_row_has_one() -> None:
    one, two = (F.one_hot(words(200, SHARES[:3], seed), 3).bool() for seed in (3, 4))
    flag = torch.arange(200)[:, None] % 7 == 0
    found = [group.tolist() for group in find_groups(torch.cat([flag, one, two, ~flag[:, :0]], 1))]
    assert found == [[1, 2, 3], [4, 5, 6]]
    assert find_groups(flag) == []


def test_columns_of_numbers_need_no_encoder_and_whole_numbers_of_few_values_are_numbers() -> None:
    assert TableEncoder.fit(numbers(50)) is None
    assert TableEncoder.fit(torch.cat([numbers(50), torch.arange(50)[:, None] % 3.0, torch.ones(50, 1)], 1)) is None


def test_rare_words_do_not_drown_a_number() -> None:
    shares = [0.9] + [0.1 / 9] * 9
    train, test = (
        torch.cat([numbers(2000, 2, s), *(F.one_hot(words(2000, shares, 100 * s + i), 10).float() for i in range(12))], 1)
        for s in (1, 2)
    )
    far = test.clone()
    far[:, 0] = 3.5
    before, after = KNNDistance.fit(train, standardized=True), InputDistance.fit_rows([train], allow_nan=False)
    assert before is not None
    assert after is not None
    test_scores, far_scores = (after(Features(rows, Gaussian(), 1)) for rows in (test, far))
    assert auroc(before(test), before(far)) < 0.8 < 0.95 < auroc(test_scores, far_scores)


# ------------------------------------------------------------------------------------------------------------ guards


class Imputing(nn.Module):
    """A net that marks missing numbers, with an embedding of words if there are some."""

    def __init__(self, width: int, count: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(count, 3) if count else None
        self.net = nn.Sequential(nn.Linear(2 * width + 3 * bool(count), 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, code: Tensor | None = None) -> Tensor:
        marked = torch.cat([torch.nan_to_num(x), x.isnan().to(x)], 1)
        return self.net(marked if self.embedding is None else torch.cat([marked, self.embedding(code[:, 0])], 1))


def fit(model: nn.Module, x: Any, **options: Any) -> offmap.Guard:
    def take(part: slice) -> Any:
        return tuple(t[part] for t in x) if isinstance(x, tuple) else x[part]

    y = torch.nan_to_num((x[0] if isinstance(x, tuple) else x)[:, 0])
    cut = len(y) * 3 // 4
    options = {"solver": "closed-form", "draws": 10, "progress": False, "params": "last-layer"} | options
    return offmap.fit(model, (take(slice(cut)), y[:cut]), (take(slice(cut, None)), y[cut:]), **options)


def inputs_of(guard: offmap.Guard, x: Any) -> Tensor:
    return guard.terms(x)["inputs"]


def run_onnx(path: Path, x: Any) -> dict[str, Any]:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path))
    tensors = x if isinstance(x, tuple) else (x,)
    feed = {node.name: t.numpy() for node, t in zip(session.get_inputs(), tensors, strict=True)}
    return dict(zip([node.name for node in session.get_outputs()], session.run(None, feed), strict=True))


def test_guards_tell_which_columns_are_indicators_and_keep_them_in_file_and_graph(tmp_path: Path) -> None:
    x, model = table(400), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    guard = fit(model, x)
    assert any("6 of 8 columns are indicators" in note and ": 2, 3, 4" in note for note in guard.summary().notes)
    named = replace(guard, about={"inputs": ["a", "b", "job_1", "job_2", "job_3", "job_4", "job_5", "married"]})
    assert any("job_1, job_2, job_3, job_4, job_5, married" in note for note in named.summary().notes)
    unseen = x[:20].clone()
    unseen[:, 2:7] = 0
    assert bool((inputs_of(guard, unseen) > inputs_of(guard, x[300:]).max()).all())
    guard.save(tmp_path / "guard.safetensors")
    assert torch.equal(offmap.load(tmp_path / "guard.safetensors", model).score(unseen), guard.score(unseen))
    guard.export(tmp_path / "guard.onnx", x[300:])
    np.testing.assert_allclose(run_onnx(tmp_path / "guard.onnx", unseen)["score"], guard.score(unseen).numpy(), rtol=1e-4)


def test_a_layer_that_gets_the_inputs_standardised_is_not_compared_a_second_time() -> None:
    x = table(400)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, rows: Tensor) -> Tensor:
            return self.net((rows - x.mean(0)) / x.std(0))

    assert fit(Scaled(), x).score_module.reads.layers == ("net.2.weight",)
    assert fit(nn.Linear(8, 1), x).score_module.reads.layers == ("weight",)  # there is no other


def missing_rows(n: int = 400) -> Tensor:
    x = numbers(n, 3)
    x[::3, 1] = torch.nan
    return x


def test_missing_values_are_refused_by_default_and_the_sentence_names_the_option() -> None:
    x = missing_rows()
    with pytest.raises(DataError, match=r"row 0 of `train` holds NaN .* `allow_nan=True`"):
        fit(Imputing(3), x)
    with pytest.raises(ConfigError, match="`allow_nan` to be True or False"):
        fit(Imputing(3), x, allow_nan="yes")
    guard = fit(Imputing(3), numbers(400, 3))
    with pytest.raises(DataError, match="allow_nan=True"):
        guard(x)


def test_models_must_handle_the_missing_values_they_are_said_to() -> None:
    x, plain = missing_rows(), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(ModelError, match="handles missing values.*nan_to_num"):
        fit(plain, x, allow_nan=True)
    infinite = x.clone()
    infinite[5, 0] = torch.inf
    with pytest.raises(DataError, match="row 5 of `train` holds infinite"):
        fit(Imputing(3), infinite, allow_nan=True)


def test_missing_counts_as_another_value_and_is_far_where_none_was_missing(tmp_path: Path) -> None:
    x, model = missing_rows(), Imputing(3)
    guard = fit(model, x, allow_nan=True)
    assert any("1 of 3 columns are missing in some rows" in note and note.endswith(": 1") for note in guard.summary().notes)
    never = x[300:].clone()
    never[:, 2] = torch.nan
    usual = inputs_of(guard, x[300:])
    assert bool((inputs_of(guard, never) > usual.max()).all())
    assert bool(guard.score(never).isfinite().all())
    assert float(usual[::3].mean()) == pytest.approx(float(usual.mean()), abs=0.5)  # rows 300, 303, … miss a number
    guard.save(tmp_path / "guard.safetensors")
    loaded = offmap.load(tmp_path / "guard.safetensors", model)
    assert loaded.place.allow_nan
    assert torch.equal(loaded.score(never), guard.score(never))
    guard.export(tmp_path / "guard.onnx", x[300:])
    for rows in (x[300:], never):
        np.testing.assert_allclose(
            run_onnx(tmp_path / "guard.onnx", rows)["score"], guard.score(rows).numpy(), rtol=1e-4, atol=1e-4
        )


def test_missing_values_pass_through_guards_over_other_predictives() -> None:
    x = missing_rows()
    y = torch.nan_to_num(x[:, 0])
    other = fit(Imputing(3), x, allow_nan=True).predictive
    guard = offmap.guard(other, (x[:100], y[:100]), train=(x[100:], y[100:]), allow_nan=True)
    assert bool(guard.score(x).isfinite().all())


def test_whole_numbers_beside_a_table_are_categories(tmp_path: Path) -> None:
    x, code = numbers(400), words(400, [*SHARES[:4], 0.0])[:, None]
    guard = fit(Imputing(2, 5), (x, code))
    assert any("1 whole-number columns are categories" in note for note in guard.summary().notes)
    unseen = (x[300:], torch.full_like(code[300:], 4))
    assert bool((inputs_of(guard, unseen) > inputs_of(guard, (x[300:], code[300:])).max()).all())
    guard.export(tmp_path / "guard.onnx", (x[300:], code[300:]))
    np.testing.assert_allclose(run_onnx(tmp_path / "guard.onnx", unseen)["score"], guard.score(unseen).numpy(), rtol=1e-4)


def test_ids_masks_and_tokens_are_no_categories() -> None:
    x, ids = numbers(400), torch.arange(400)[:, None]
    encoder = TableEncoder.fit(x, ids)
    assert encoder is None  # every row has its own
    assert flatten_codes((x, x > 0)) is None
    assert flatten_codes({"input_ids": ids, "x": x}) is None
    assert flatten_codes({"x": x, "job": ids[:, 0]}).shape == (400, 1)  # pyright: ignore[reportOptionalMemberAccess]
    assert flatten_codes(x) is None


def test_a_damaged_encoder_is_refused(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), table(400)
    guard = fit(model, x)
    encoder = next(module for module in guard.score_module.modules() if isinstance(module, TableEncoder))
    encoder.unit = encoder.unit[:3]
    guard.save(tmp_path / "guard.safetensors")
    with pytest.raises(FileError, match="encoder.unit"):
        offmap.load(tmp_path / "guard.safetensors", model)
