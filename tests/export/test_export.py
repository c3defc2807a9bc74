"""Exported graphs: ONNX Runtime gives the guard's numbers and verdicts, for any number of rows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import offmap
from offmap.detector import Calibration
from offmap.errors import ConfigError, FileError, ModelError
from offmap.export.module import PValue, fitting_draws, freeze_draws, guard_module, with_weights
from offmap.export.onnx import ExportTask, compare, verify_checksum
from offmap.metrics import auroc
from offmap.model.forward import forward
from offmap_bench.nets.lenet import lenet
from offmap_bench.nets.resnet import resnet
from trained import classes, classifier, inputs, model, quick, regression, regressor


def run(path: Path, *arrays: Tensor) -> dict[str, Tensor]:
    """What ONNX Runtime makes of these inputs, by the name of the output."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    feed = {node.name: each.numpy() for node, each in zip(session.get_inputs(), arrays, strict=True)}
    return {name: torch.from_numpy(value) for name, value in zip(names, session.run(names, feed), strict=True)}


def check_same(outputs: dict[str, Tensor], result: offmap.Result, score: float = 1e-4) -> None:
    """Numbers to 1e-4, and every verdict; p-values may jump by a rank or two."""
    wanted = (*(("mean", "std") if result.mean is not None else ("probs",)), "score", "ood", "p_value")
    assert tuple(name for name in outputs if name != "terms") == (*wanted, "threshold")
    for name in wanted:
        near = score if name == "score" else 0.03 if name == "p_value" else 1e-4
        torch.testing.assert_close(outputs[name], getattr(result, name), rtol=near, atol=near)


@pytest.fixture(autouse=True)
def _same_models() -> None:
    """A score beside the threshold may fall on either side of it in a file: which one must not depend on the day."""
    torch.manual_seed(0)


class Sequences(nn.Module):
    """A Transformer encoder layer over (B, T, 8), then a linear layer over the mean of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def label_rows(shape: tuple[int, ...], n: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(n) % 3


def mix_rows(x: Tensor) -> Tensor:
    """In-distribution rows, and rows that are far away."""
    return torch.cat([x, 20 + 5 * x])


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one regressor": (lambda: regressor(log_variance=True), regression, {}),
    "two regressors": (lambda: [regressor(0), regressor(1)], regression, {"params": "2.*"}),
    "classifier": (classifier, classes, {}),
    "transformer": (Sequences, lambda n, s: label_rows((5, 8), n, s), {"draws": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_onnx_runtime_gives_the_guards_numbers_and_verdicts_for_any_number_of_rows(case: str, tmp_path: Path) -> None:
    build, data, options = CASES[case]
    guard = quick(build(), data(40, 0), data(40, 1), **options)
    info = guard.export(tmp_path / "g.onnx", data(6, 2)[0])
    for rows in (1, 2, 17):
        x = mix_rows(data(rows, 5)[0])
        check_same(run(tmp_path / "g.onnx", x), guard(x))
    assert (info.exact, info.draws, info.changed) == (True, guard.draws, 0)
    assert info.difference < 1e-4
    assert info.size == (tmp_path / "g.onnx").stat().st_size
    assert set(info.milliseconds or {}) == {1, 32}
    facts = {each.key: each.value for each in onnx.load(tmp_path / "g.onnx").metadata_props}
    assert float(facts["offmap.threshold"]) == guard.threshold
    content = (tmp_path / "g.onnx").read_bytes()
    verify_checksum(content, tmp_path / "g.onnx")
    with pytest.raises(FileError, match="g.onnx has a wrong checksum: damaged, changed, or not written by"):
        verify_checksum(content.replace(b"offmap.threshold", b"offmap.Threshold"), tmp_path / "g.onnx")


@pytest.mark.parametrize(("seed", "gap"), [(0, 150.0), (1, 40.0)])  # of logits; 150 is below the floor of disagreement
def test_a_confident_classifier_exports_for_its_tiny_disagreement_is_no_rounding(seed: int, gap: float, tmp_path: Path) -> None:
    x, y = classes(300, seed)
    sure = model(x, gap * nn.functional.one_hot(y, 3), hidden=64, seed=seed)
    guard = quick(sure, (x, y), classes(300, seed + 10), draws=50)
    assert guard.likelihood.epistemic(guard.samples(x).double()).median() < 1e-5
    info = guard.export(tmp_path / "g.onnx", x)
    assert (info.changed, info.difference < 1e-4) == (0, True)
    new = torch.cat([inputs(300, seed + 20), 4 * inputs(50, seed + 30)])
    check_same(run(tmp_path / "g.onnx", new), guard(new))


@pytest.mark.parametrize("score", ["default", "epistemic", "distance", lambda outputs: outputs.var(0).sum(1)])
@pytest.mark.parametrize("build", [lambda: regressor(targets=2), lambda: [regressor(0, 2), regressor(1, 2)]])
def test_the_module_answers_as_the_guard_does(score: Any, build: Any) -> None:
    guard = quick(build(), regression(40, 0, 2), regression(40, 1, 2), score=score)
    x = mix_rows(inputs(9, 3))
    check_same(guard_module(guard, x)(x), guard(x))


def test_verdicts_of_ood_rows_are_the_guards_too() -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    x = mix_rows(inputs(9, 5))
    ood = guard_module(guard, x)(x)["ood"]
    assert ood[9:].all()
    assert not ood[:9].all()


def test_a_row_between_two_neighbours_is_no_reason_to_refuse() -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    rows = torch.cat([inputs(30, 5), torch.zeros(1, 3)])
    module = guard_module(guard, rows)
    assert not module.score.ties(module.run(rows)[0]).any()
    near = module.score.parts["inputs"].space
    near.rows = torch.cat([near.rows[:1].expand(11, 3), near.rows[11:]])  # eleven neighbours at one place
    near.prepare()
    there = (near.rows[:1].double() * near.unit + near.centre).float()
    assert near.ties(there).tolist() == [True]


def test_a_classifier_of_images_exports_in_one_pass_with_all_its_draws(tmp_path: Path) -> None:
    x, y = label_rows((1, 12, 12), 40)
    guard = quick(lenet(3, side=12), (x, y), label_rows((1, 12, 12), 40, 1), draws=50)
    info = guard.export(tmp_path / "g.onnx", x[:3])
    assert info.draws == 50
    graph = onnx.load(tmp_path / "g.onnx").graph
    assert sum(node.op_type == "Conv" for node in graph.node) == 2  # LeNet has two
    x = mix_rows(x[:5])
    check_same(run(tmp_path / "g.onnx", x), guard(x))


@pytest.mark.parametrize("score", ["default", "epistemic", "distance"])
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("params", [None, "matrices"])
def test_the_module_answers_as_a_guard_of_images_does(score: str, members: int, params: str | None) -> None:
    x, y = label_rows((1, 12, 12), 40)
    models = [lenet(3, side=12, seed=seed) for seed in range(members)]
    guard = quick(models, (x, y), label_rows((1, 12, 12), 40, 1), draws=3, score=score, params=params)
    x = mix_rows(x[:5])
    check_same(guard_module(guard, x)(x), guard(x))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"params": "all", "score": "epistemic", "draws": 10}])
def test_resnet_20_exports(options: dict[str, Any], tmp_path: Path) -> None:
    x, y = label_rows((3, 32, 32), 40)
    guard = quick(resnet(3), (x, y), label_rows((3, 32, 32), 40, 1), **{"draws": 50, **options})
    info = guard.export(tmp_path / "g.onnx", x[:3])
    assert info.draws == guard.draws
    x = mix_rows(x[:5])
    check_same(run(tmp_path / "g.onnx", x), guard(x), 2e-3)  # of noise in an untrained net, the last digit of a pixel moves 4e-4


def test_a_pt2_file_answers_without_this_library(tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), score="epistemic")
    info = guard.export(tmp_path / "g.pt2", inputs(6, 2))
    x = mix_rows(inputs(5, 3))
    check_same(torch.export.load(tmp_path / "g.pt2").module()(x), guard(x))
    assert info.milliseconds is None


class Tagger(nn.Module):
    """A class for every token, of ids and an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.words(input_ids) * attention_mask.unsqueeze(-1)
        return self.head(h + h.mean(1, keepdim=True)).movedim(-1, 1)


def tag_rows(n: int, seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.randint(2, 7, (n, 1), generator=chance)
    return {"input_ids": torch.randint(0, 10, (n, 6), generator=chance), "attention_mask": mask.long()}


def test_named_inputs_keep_their_names_and_padding_does_not_count(tmp_path: Path) -> None:
    x, held = tag_rows(40, 0), tag_rows(40, 1)
    guard = quick(Tagger(), (x, x["input_ids"] % 3), (held, held["input_ids"] % 3), draws=3)
    info = guard.export(tmp_path / "g.onnx", tag_rows(5, 2))
    assert info.inputs == ("input_ids", "attention_mask")
    x = tag_rows(9, 3)
    check_same(run(tmp_path / "g.onnx", *x.values()), guard(x))


@pytest.mark.parametrize("batched", [True, False])
def test_frozen_draws_are_the_draws(batched: bool) -> None:
    guard = quick(
        [regressor(0), regressor(1)], regression(40), regression(40, 1), params="0.*", output_fn=None if batched else _same
    )
    predictive = with_weights(guard.predictive)
    frozen = freeze_draws(predictive, 3, clip=0.05, seed=guard.seed)
    assert (frozen.layers is not None) == batched
    weights = predictive.q.draw(range(3), seed=guard.seed, clip=0.05)
    x = inputs(7, 5)
    torch.testing.assert_close(frozen(x), forward(predictive.model.module, weights, x, loop=True), rtol=1e-5, atol=1e-6)


def _same(output: Tensor) -> Tensor:
    return output


@pytest.mark.parametrize("score", ["default", "paper"])
def test_p_values_terms_and_threshold_are_outputs(score: str, tmp_path: Path) -> None:
    groups = torch.arange(200) // 5  # whole groups weigh the same, however many rows each has
    guard = quick(regressor(), regression(40, 0), regression(40, 1), score=score).calibrate(regression(200, 4), groups=groups)
    guard = replace(guard, about={"inputs": ["a", "b", "c"]})
    x = torch.cat([regression(200, 4)[0], 3 * inputs(50, 5)])
    for path in (tmp_path / "g.onnx", tmp_path / "g.pt2")[score == "paper" :]:
        guard.export(path, x[:6])
        outputs = run(path, x) if path.suffix == ".onnx" else torch.export.load(path).module()(x)
        torch.testing.assert_close(outputs["p_value"], guard.calibration.p_value(outputs["score"]))
        assert len(outputs["p_value"].unique()) > 50
        assert float(outputs["threshold"]) == pytest.approx(guard.threshold)
        names = list(guard.terms(x)) if score == "default" else []
        assert ("terms" in outputs) == bool(names)
        if names:
            torch.testing.assert_close(outputs["terms"], torch.stack(list(guard.terms(x).values()), 1), rtol=1e-4, atol=1e-4)
    if score == "paper":
        return
    facts = {each.key: each.value for each in onnx.load(tmp_path / "g.onnx").metadata_props}
    read = [json.loads(facts[f"offmap.{key}"]) for key in ("terms", "columns", "calibrated", "calibration_rows")]
    assert read == [names, ["a", "b", "c"], True, 40]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 9, 10, 99, 100])
def test_the_graphs_p_values_are_the_calibrations_for_any_number_of_rows_and_ties(n: int) -> None:
    scores = torch.randint(0, 12, (n,), generator=torch.Generator().manual_seed(n)).float()
    for calibration in (Calibration(scores), Calibration(torch.cat([scores, torch.tensor([torch.inf])]))):
        x = torch.cat([torch.linspace(-1, 13, 57), torch.tensor([torch.inf])])
        assert torch.equal(PValue(calibration, torch.float32)(x), calibration.p_value(x))


def test_fewer_draws_get_a_threshold_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = quick(regressor(), regression(40, 0), regression(200, 1), score="epistemic")
    other = replace(guard, draws=3)
    info = guard.export(tmp_path / "g.pt2", inputs(6, 2), draws=3)  # rows of the fit are scored anew
    assert (info.exact, info.draws, info.threshold) == (True, 3, other.calibrate(regression(200, 1)).threshold)
    for calibration in (regression(200, 4), regression(200, 4)[0]):
        info = guard.export(tmp_path / "g.pt2", inputs(6, 2), draws=3, calibration=calibration)
        assert (info.exact, info.threshold, caplog.records) == (True, other.calibrate(regression(200, 4)).threshold, [])
    guard.save(tmp_path / "g.safetensors")
    loaded = offmap.load(tmp_path / "g.safetensors", regressor())
    x = inputs(60, 2)
    with caplog.at_level(logging.WARNING):
        moved = loaded.export(tmp_path / "g.pt2", x, draws=3)
    assert not moved.exact
    assert "threshold belongs to 8 draws, the file has 3, and the guard keeps no calibration rows" in caplog.text
    outputs = torch.export.load(tmp_path / "g.pt2").module()(x)
    shift = (outputs["score"] - guard.score(x)).median()
    assert moved.threshold == pytest.approx(guard.threshold + float(shift), abs=1e-5)


class Words(nn.Module):
    """A number for each row of a table of numbers and words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, numbers: Tensor, words: Tensor) -> Tensor:
        return self.head(torch.cat([numbers, self.words(words)], 1))


def make_words(n: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = regression(n, seed)
    return (x, torch.arange(n) % 10), y


def test_several_inputs_calibrate_with_and_without_targets_and_keep_all_draws(tmp_path: Path) -> None:
    guard = quick(Words().eval(), make_words(60, 0), make_words(60, 1), score="epistemic", draws=12)
    rows, y = make_words(100, 2)
    files = [
        guard.export(tmp_path / f"{place}.pt2", rows, calibration=calibration)
        for place, calibration in enumerate([rows, (rows, y)])
    ]
    assert [info.draws for info in files] == [12, 12]  # more than ten, though the model runs once for each
    assert files[0].threshold == files[1].threshold == guard.calibrate((rows, y)).threshold
    assert files[0].inputs == ("numbers", "words")


def test_draws_are_left_out_where_they_would_make_the_file_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), draws=50)
    guard = replace(guard, clip=0.1)
    numbers = 2 * sum(p.numel() for p in regressor().parameters())
    for limit, draws in ((1 << 20, 50), (30 * 4 * numbers, 30), (1, 10)):
        monkeypatch.setattr("offmap.export.module.LARGEST", limit)
        assert fitting_draws(guard, half=False) == draws


def test_half_precision_halves_the_weights_and_costs_next_to_nothing(tmp_path: Path) -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    id_rows, ood_rows = x[y < 8], x[y >= 8]  # eights and nines are off the map
    y = y[y < 8]
    digits_model = model(id_rows[:600], 6.0 * nn.functional.one_hot(y[:600]).float(), hidden=100)
    guard = quick(digits_model, (id_rows[:600], y[:600]), (id_rows[600:900], y[600:900]), score="epistemic")
    info = guard.export(tmp_path / "half.onnx", id_rows[:30], half=True)
    numbers = sum(tensor.numel() for tensor in guard_module(guard, x[:2]).buffers())
    assert info.size < 0.7 * 4 * numbers  # bytes in full precision
    assert 1e-6 < info.difference < 1e-2
    areas = [
        auroc(score(id_rows[900:]), score(ood_rows)) for score in (guard.score, lambda x: run(tmp_path / "half.onnx", x)["score"])
    ]
    assert areas[0] > 0.8
    assert abs(areas[0] - areas[1]) < 1e-3


def test_scores_that_differ_while_predictions_agree_are_judged_by_order_and_verdicts() -> None:
    score, calibration = torch.linspace(0, 4, 100), Calibration(torch.linspace(0, 2, 100))
    expected = {"mean": score, "score": score, "ood": score > 2, "p_value": calibration.p_value(score)}
    task = ExportTask(nn.Identity(), (), (), (), expected, calibration, None, {"half": False, "threshold": 2.0})
    vars(task)["rounding_errors"] = {"mean": 0.0, "score": 0.0}

    def disagreement_of(noise: Tensor, mean: float = 0.0) -> tuple[float, int]:
        moved = score + noise
        outputs = {"mean": score + mean, "score": moved, "ood": moved > 2, "p_value": calibration.p_value(moved)}
        return compare(task, outputs, "the file")

    signs = torch.arange(100) % 2 * 2.0 - 1
    assert disagreement_of(0.002 * signs) == (pytest.approx(0.002, abs=1e-4), 0)  # rounding that a logarithm magnifies
    with pytest.raises(ModelError, match=r"`score` of the file is up to .*rank correlation .* while predictions agree.*double"):
        disagreement_of(0.1 * signs * (score < 1.5))
    with pytest.raises(ModelError, match="but 50 of the file differ"):
        disagreement_of(torch.full((100,), 2.1))
    with pytest.raises(ModelError, match="`mean` of the file is up to .* something else than its inputs and weights"):
        disagreement_of(0.002 * signs, 0.01)


class Branching(nn.Sequential):
    """Asks a number which way to go."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else -super().forward(x)


class Unspoken(nn.Sequential):
    """Uses an operator that ONNX has no word for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * torch.special.bessel_j0(x))


def test_models_that_no_graph_can_hold_are_refused_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.onnx").write_text("before")
    for kind, message in (
        (Branching, "torch.export cannot trace this model: Could not guard on data-dependent expression .*Avoid Python branches"),
        (Unspoken, "ONNX cannot express this model: .*bessel_j0.*export to .pt2"),
    ):
        guard = quick(kind(*regressor()), regression(40, 0), regression(40, 1), score="epistemic", draws=2, chunk_size=1)
        with pytest.raises(ModelError, match=f"(?s){message}"):
            guard.export(tmp_path / "g.onnx", inputs(6, 2))
    assert [each.read_text() for each in tmp_path.iterdir()] == ["before"]  # nothing half-written, nothing lost
    assert capfd.readouterr() == ("", "")  # torch prints graphs that it cannot finish


def test_numbers_that_onnx_runtime_does_not_know_are_refused_with_the_remedy(tmp_path: Path) -> None:
    guard = quick(regressor().bfloat16(), regression(40, 0), regression(40, 1), score="epistemic", draws=2)
    with pytest.raises(ModelError, match=r"ONNX Runtime cannot run this model: .*Convert it with `model.float\(\)`"):
        guard.export(tmp_path / "g.onnx", inputs(6, 2))


class Elsewhere(nn.Module):
    """Reads its matrices without their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(3, 12), nn.Parameter(torch.ones(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() @ self.weight


def test_layers_that_a_graph_does_not_show_are_refused_with_the_remedy(tmp_path: Path) -> None:
    guard = quick(Elsewhere(), regression(40, 0), regression(40, 1), draws=2)
    with pytest.raises(
        ModelError,
        match="`weight`, .* belong to an nn.Linear for export, but it belongs to Elsewhere. Fit with score='epistemic'",
    ):
        guard.export(tmp_path / "g.onnx", inputs(6, 2))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("g.tflite", {}, ConfigError, "end in .onnx or .pt2, but got 'g.tflite'"),
        ("missing/g.onnx", {}, FileError, "Check that its folder exists"),
        ("g.onnx", {"draws": 1}, ConfigError, "`draws` to be a whole number ≥ 2 or None, but got 1"),
        ("g.onnx", {"draws": "3"}, ConfigError, "`draws` to be a whole number ≥ 2 or None, but got '3'"),
    ],
)
def test_bad_requests_are_refused_before_any_work(name: str, options: Any, error: Any, message: str, tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    with pytest.raises(error, match=message):
        guard.export(tmp_path / name, inputs(6, 2), **options)
    assert not list(tmp_path.iterdir())


def test_a_guard_without_weights_is_refused(tmp_path: Path) -> None:
    class Opaque:
        members = 1

        def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
            return x[:, 0].expand(draws, -1) + torch.arange(draws)[:, None]

    guard = offmap.guard(Opaque(), regression(40, 1), likelihood="gaussian")
    with pytest.raises(ConfigError, match="drawn weights to export, but got one over Opaque"):
        guard.export(tmp_path / "g.onnx", inputs(6, 2))


def test_a_table_model_that_is_no_plain_stack_is_one_batched_graph_where_it_can_be_traced(tmp_path: Path) -> None:
    class Moved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 0.1) / 2

    nodes: dict[str, int] = {}
    for name, layers in {"moved": [Moved(), nn.Linear(3, 8)], "norm": [nn.Linear(3, 8), nn.LayerNorm(8)]}.items():
        net = nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 1))
        guard = quick(net, regression(80, 0), regression(60, 1), draws=20)
        guard.export(tmp_path / "g.onnx", mix_rows(regression(20, 2)[0]))
        nodes[name] = len(onnx.load(tmp_path / "g.onnx").graph.node)
        for x in (mix_rows(regression(9, 3)[0]), regression(1, 4)[0]):
            check_same(run(tmp_path / "g.onnx", x), guard(x))
    assert nodes["moved"] + 100 < nodes["norm"]  # which goes through its 20 draws one after another
