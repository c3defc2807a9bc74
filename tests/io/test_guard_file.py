"""Guard files: what is written is what is read, and nothing else is read."""

from __future__ import annotations

import copy
import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import offmap
from offmap.atomic import checksum
from offmap.errors import ConfigError, FileError, ModelError
from offmap.io.guard_file import GuardFile
from offmap.posterior.noise import Noise, Uniform
from trained import Reshaped, binary, binary_classifier, classes, classifier, inputs, quick, regression, regressor
from zoo import Through

SOURCE = Path(offmap.__file__).parent

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "regression": (regressor, regression, {}),
    "identity": (regressor, regression, {"basis": "identity"}),
    "log-variance": (lambda: regressor(log_variance=True), regression, {}),
    "two targets": (lambda: regressor(targets=2), lambda n, s: regression(n, s, 2), {}),
    "classes": (classifier, classes, {}),
    "binary": (binary_classifier, binary, {}),
    "ensemble": (lambda: [regressor(0), regressor(1)], regression, {}),
    "ensemble of classifiers, identity": (lambda: [classifier(0), classifier(1)], classes, {"basis": "identity"}),
    "some random weights": (regressor, regression, {"params": "0.*"}),
    "ensemble, some random weights": (lambda: [regressor(0), regressor(1)], regression, {"params": "2.*"}),
    "normal noise": (regressor, regression, {"noise": "normal"}),
    "own width": (regressor, regression, {"noise": Uniform(1.0)}),
    "refined": (regressor, regression, {"solver": "refine", "steps": 5, "check_every": 5}),
    "float64": (lambda: regressor().double(), regression, {}),
    "bfloat16": (lambda: regressor().bfloat16(), regression, {}),
    "epistemic": (regressor, regression, {"score": "epistemic", "seed": 3, "draws": 5, "chunk_size": 2}),
    "calibrated apart": (regressor, regression, {"calibration": regression(40, 9)}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_guard_answers_to_the_bit(case: str, tmp_path: Path) -> None:
    build, data, options = CASES[case]
    guard = quick(build(), data(40, 0), data(40, 1), **options)
    guard.save(tmp_path / "guard.safetensors")
    again = offmap.load(tmp_path / "guard.safetensors", build())
    x = inputs(21, 5)
    before, after = guard(x), again(x)
    for name, value in vars(before).items():
        other = getattr(after, name)
        assert other is None if value is None else torch.equal(value, other), name
    assert torch.equal(guard.samples(x, 4), again.samples(x, 4))
    if before.mean is not None:
        for level in (0.5, 0.9):
            assert torch.equal(guard.interval(x, level).lower, again.interval(x, level).lower)
            assert torch.equal(guard.interval(x, level).upper, again.interval(x, level).upper)
    else:
        assert torch.equal(guard.prediction_set(x, 0.9), again.prediction_set(x, 0.9))
    for name in ("threshold", "clip", "draws", "seed", "target"):
        assert getattr(again, name) == getattr(guard, name), name
    assert str(again.summary()) == str(guard.summary())
    # NaN losses make the histories unequal as they are
    assert repr(again.history) == repr(guard.history)
    # what was read can be written again, to the same bytes
    again.save(tmp_path / "twice")
    assert (tmp_path / "twice").read_bytes() == (tmp_path / "guard.safetensors").read_bytes()


def test_a_loaded_guard_can_be_calibrated_and_evaluated(tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    guard.save(tmp_path / "g")
    again = offmap.load(tmp_path / "g", regressor()).calibrate(regression(50, 3))
    assert again.threshold == guard.calibrate(regression(50, 3)).threshold


def test_a_guard_with_a_picked_output_asks_for_the_same_function(tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), output_fn=lambda out: out)
    guard.save(tmp_path / "g")
    with pytest.raises(ConfigError, match="was fitted with an `output_fn` of your own: pass the same function to `load`"):
        offmap.load(tmp_path / "g", regressor())
    again = offmap.load(tmp_path / "g", regressor(), output_fn=lambda out: out)
    assert torch.equal(again.score(inputs(9, 5)), guard.score(inputs(9, 5)))


def test_several_nets_may_come_as_a_tuple_or_a_module_list(tmp_path: Path) -> None:
    nets = [regressor(0), regressor(1)]
    guard = quick(nets, regression(40, 0), regression(40, 1))
    guard.save(tmp_path / "g")
    for given_nets in (tuple(nets), nn.ModuleList(nets)):
        again = offmap.load(tmp_path / "g", given_nets)
        assert torch.equal(again.score(inputs(9, 5)), guard.score(inputs(9, 5)))


# ----------------------------------------------------------------------------------------------------- other models


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guard") / "guard.safetensors"
    quick(regressor(), regression(40, 0), regression(40, 1)).save(path)
    return path


def _without_bias() -> nn.Module:
    net = regressor()
    net[0] = nn.Linear(3, 12, bias=False)
    return net


def _with(index: int, layer: nn.Module) -> nn.Module:
    net = regressor()
    net[index] = layer
    return net


OTHERS: dict[str, tuple[Any, str]] = {
    "shape": (lambda: _with(2, nn.Linear(12, 2)), r"another architecture: `2.weight` was \(1, 12\) .* is \(2, 12\) .*member 0"),
    "dtype": (lambda: regressor().double(), r"`0.weight` was \(12, 3\) torch.float32 at fit time and is \(12, 3\) torch.float64"),
    "less": (_without_bias, r"another architecture: `0.bias` was \(12,\) torch.float32 at fit time and is nothing now"),
    "more": (lambda: _with(1, nn.Sequential(nn.ReLU(), nn.BatchNorm1d(12))), "`1` was ReLU at fit time and is Sequential now"),
    "names": (lambda: Reshaped(regressor(), 1), "`0.weight` was .* at fit time and is nothing now"),
    "activation": (lambda: _with(1, nn.Tanh()), "architecture: module `1` was ReLU at fit time and is Tanh now .member 0"),
    "number": (lambda: [regressor(), regressor()], "was fitted on 1 models, but got 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("strict", [True, False])
def test_another_architecture_is_refused_with_the_first_difference(saved: Path, case: str, strict: bool) -> None:
    build, message = OTHERS[case]
    with pytest.raises(FileError, match=message):
        offmap.load(saved, build(), strict=strict)


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_other_weights_are_refused_by_name_unless_allowed(saved: Path, name: str) -> None:
    net = regressor()
    with torch.no_grad():
        net.get_parameter(name).view(-1)[-1] += 1e-6
    with pytest.raises(
        FileError, match=f"was fitted on other weights: `{name}` differs .member 0.. Load the weights of fit time, or"
    ):
        offmap.load(saved, net)
    again = offmap.load(saved, net, strict=False)
    x = inputs(9, 5)
    torch.testing.assert_close(again.score(x), offmap.load(saved, regressor()).score(x), rtol=1e-3, atol=0)


def test_other_buffers_are_refused_too(tmp_path: Path) -> None:
    net = nn.Sequential(*regressor()[:2], nn.BatchNorm1d(12), nn.Linear(12, 1)).eval()
    quick(net, regression(40, 0), regression(40, 1)).save(tmp_path / "g")
    other = copy.deepcopy(net)
    other[2].running_mean.add_(0.1)
    with pytest.raises(FileError, match="other weights: `2.running_mean` differs"):
        offmap.load(tmp_path / "g", other)


def test_members_in_another_order_are_refused(tmp_path: Path) -> None:
    nets = [regressor(0), regressor(1)]
    quick(nets, regression(40, 0), regression(40, 1)).save(tmp_path / "g")
    with pytest.raises(FileError, match="other weights: `0.weight` differs .member 0."):
        offmap.load(tmp_path / "g", nets[::-1])
    with pytest.raises(FileError, match="other weights: `0.weight` differs .member 1."):
        offmap.load(tmp_path / "g", [nets[0], regressor(2)])
    with pytest.raises(FileError, match="was fitted on 2 models, but got 1"):
        offmap.load(tmp_path / "g", nets[0])


@pytest.mark.parametrize("nets", [None, "net", [], nn.Linear])
def test_what_is_no_model_is_refused(saved: Path, nets: Any) -> None:
    with pytest.raises(ModelError, match="Expected a torch.nn.Module or a list of them, but got"):
        offmap.load(saved, nets)


# ----------------------------------------------------------------------------------------------------- other files


def _safetensors(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)


def _torch_save(path: Path) -> None:
    torch.save(regressor().state_dict(), path)


FOREIGN: dict[str, Any] = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: path.write_bytes(b"\x03"),
    "text": lambda path: path.write_text("threshold: 3.0\n" * 50),
    "json": lambda path: path.write_text(json.dumps({"format": "offmap-guard-2"})),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "random bytes": lambda path: path.write_bytes(bytes(torch.randint(0, 256, (4000,)).tolist())),
    "huge header": lambda path: path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}" * 100),
    "bare header": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}"),
    "header is a list": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
    "other safetensors": _safetensors,
    "torch.save": _torch_save,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_no_guard_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    FOREIGN[kind](path)
    with pytest.raises(FileError, match=r"is damaged or not a guard file .*Save the guard again|is not a guard file") as caught:
        offmap.load(path, regressor())
    assert str(path) in str(caught.value)


def test_a_guard_of_another_version_is_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmap.io.guard_file.FORMAT", "offmap-guard-99")
    with pytest.raises(FileError, match="not a guard file of this version: expected 'offmap-guard-99', but got 'offmap-guard-8'"):
        offmap.load(saved, regressor())


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="Cannot read .*nothing: No such file or directory"):
        offmap.load(tmp_path / "nothing", regressor())
    with pytest.raises(FileError, match="Cannot read .*: Is a directory"):
        offmap.load(tmp_path, regressor())


def test_a_file_cut_at_any_place_is_refused(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = {0, 1, 7, 8, 9, 100, header // 2, header - 1, header, header + 1, len(content) // 2, len(content) - 1}
    for place in sorted(places):
        (tmp_path / "cut").write_bytes(content[:place])
        with pytest.raises(FileError, match="is damaged or not a guard file"):
            offmap.load(tmp_path / "cut", regressor())
    (tmp_path / "long").write_bytes(content + b"\0")
    with pytest.raises(FileError, match="is damaged or not a guard file"):
        offmap.load(tmp_path / "long", regressor())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), part=st.sampled_from(["length", "header", "data"]))
def test_a_single_flipped_bit_anywhere_is_noticed(saved: Path, tmp_path: Path, place: float, bit: int, part: str) -> None:
    content = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    start, stop = {"length": (0, 8), "header": (8, header), "data": (header, len(content))}[part]
    content[start + int(place * (stop - start))] ^= 1 << bit
    (tmp_path / "flipped").write_bytes(content)
    with pytest.raises(FileError, match="is damaged|is not a guard file"):
        offmap.load(tmp_path / "flipped", regressor())


def test_swapped_tensors_are_noticed(saved: Path, tmp_path: Path) -> None:
    # a file that safetensors finds sound, with other numbers under the same header
    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors["calibration.scores"] = tensors["calibration.scores"].flip(0)
    save_file(tensors, tmp_path / "other", metadata)
    with pytest.raises(FileError, match="is damaged or not a guard file .its checksum does not fit.. Save the guard again"):
        offmap.load(tmp_path / "other", regressor())


@pytest.mark.parametrize("size", [0, 2, 1_000])
def test_numbers_of_the_likelihood_are_as_many_as_targets(saved: Path, tmp_path: Path, size: int) -> None:
    """Also in a file whose checksum is right."""
    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = file.metadata()["offmap"].partition(" ")[2]
    name = next(name for name in tensors if name.startswith("likelihood."))
    tensors[name] = torch.ones(size)
    save_file(tensors, tmp_path / "other", {"offmap": f"{checksum(text, tensors)} {text}"})
    with pytest.raises(FileError, match="is damaged or not a guard file"):
        offmap.load(tmp_path / "other", regressor())


# --------------------------------------------------------------------------------------------------------- writing


SPACE = ("rows", "centre", "unit", "spacings", "zscore.mean", "zscore.std")


def test_files_hold_scales_and_no_weights_of_the_model(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        names = set(file.keys())
    assert names == {
        "calibration.residuals", "calibration.scores", "likelihood.noise", "likelihood.units",
        "raw_scale.0.weight", "raw_scale.0.bias", "raw_scale.2.weight", "raw_scale.2.bias",
        "rotation.0.weight", "rotation.2.weight", "score.parts.disagreement.zscore.mean", "score.parts.disagreement.zscore.std",
        *(f"score.parts.{space}.space.{field}" for space in ("inputs", "layers") for field in SPACE),
        *(f"score.parts.whitened.space.{field}" for field in ("centre", "whitening", "zscore.mean", "zscore.std")),
        *(f"score.parts.{term}.sizes" for term in ("layers", "whitened")),
        "score.parts.inputs.centre", "score.parts.inputs.unit", "score.weights",
    }  # fmt: skip


@pytest.mark.parametrize("score", ["paper", "epistemic"])
def test_files_of_guards_that_compare_nothing_hold_no_training_rows(score: str, tmp_path: Path) -> None:
    quick(regressor(), regression(40, 0), regression(40, 1), score=score).save(tmp_path / "guard")
    with safe_open(tmp_path / "guard", "pt") as file:
        assert not any(name.startswith("score.") for name in file.keys())  # noqa: SIM118


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    with pytest.raises(
        FileError, match="Cannot write .*: No such file or directory. Check that the folder exists and is writable"
    ):
        guard.save(tmp_path / "no" / "such" / "guard")
    with pytest.raises(FileError, match="Cannot write .*directory"):
        guard.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(FileError, match="Cannot write .*: Not a directory"):
        guard.save(tmp_path / "file" / "guard")
    assert list(tmp_path.parent.glob(".*.part")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(FileError, match="Cannot write .*: Permission denied. Check that the folder exists and is writable"):
        quick(regressor(), regression(40, 0), regression(40, 1)).save(tmp_path / "g")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    path = tmp_path / "guard"
    guard.save(path)
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(f"offmap.atomic.os.{step}", fail)
    other = guard.calibrate(regression(50, 3))
    if isinstance(error, OSError):
        with pytest.raises(FileError, match="Cannot write .*guard: No space left on device.*nothing was changed"):
            other.save(path)
    else:
        with pytest.raises(KeyboardInterrupt):
            other.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    guard.save(tmp_path / "g")
    other = guard.calibrate(regression(50, 3))
    other.save(str(tmp_path / "g"))
    assert offmap.load(str(tmp_path / "g"), regressor()).threshold == other.threshold
    assert list(tmp_path.iterdir()) == [tmp_path / "g"]


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        quick(regressor(), regression(40, 0), regression(40, 1)).save(tmp_path / "g")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "g").stat().st_mode) == 0o644


def test_a_relative_path_is_written_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick(regressor(), regression(40, 0), regression(40, 1)).save("here")
    assert (tmp_path / "here").exists()


class Gaussian(offmap.Likelihood):
    """A likelihood of the user's, with an in-distribution name."""

    def nll(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (output[..., 0] - y).abs()

    def predict(self, outputs: torch.Tensor) -> offmap.Prediction:
        return offmap.Prediction(mean=outputs[..., 0].mean(0), std=outputs[..., 0].std(0) + 1)

    def score(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs[..., 0].var(0)

    def epistemic(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs[..., 0].var(0)


class OwnNoise(Noise):
    def variance(self) -> float:
        return 1.0

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.empty(shape).normal_(generator=generator)

    def entropy(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": lambda out: out[..., 0].var(0)},
         "with a score or likelihood of your own, register it: a file"),
        ({"likelihood": Gaussian()}, "with a score or likelihood of your own, register it: a file"),
        ({"noise": OwnNoise()}, "noise of your own cannot be saved: a file holds no code"),
    ],
)  # fmt: skip
def test_what_is_code_cannot_be_saved(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1), **options)
    with pytest.raises(ConfigError, match=message):
        guard.save(tmp_path / "g")
    assert list(tmp_path.iterdir()) == []


class Forest:
    """Some straight lines as the trees of a forest: neither layers nor weights are known."""

    members = 1

    def __init__(self, seed: int = 0) -> None:
        self.trees = torch.randn(50, 2, generator=torch.Generator().manual_seed(seed))

    def outputs(self, x: torch.Tensor, draws: int, *, clip: float | None, seed: int) -> torch.Tensor:
        return (self.trees[:draws, None] * x[:, :2]).sum(2, keepdim=True)


@pytest.mark.parametrize("options", [{"train": regression(60, 2)}, {"score": "epistemic", "seed": 3}])
def test_a_guard_over_any_predictive_is_saved_without_it(options: dict[str, Any], tmp_path: Path) -> None:
    guard = offmap.guard(Forest(), regression(40, 0), **options)
    guard.save(tmp_path / "g")
    again, x = offmap.load(tmp_path / "g", Forest()), inputs(21, 5)
    for name, value in vars(guard(x)).items():
        assert value is None or torch.equal(getattr(again(x), name), value), name
    torch.testing.assert_close(again.interval(x).lower, guard.interval(x).lower, rtol=0, atol=0)
    again.save(tmp_path / "g2")
    assert (tmp_path / "g").read_bytes() == (tmp_path / "g2").read_bytes()
    with pytest.raises(FileError, match=r"belongs to another predictive: .* Pass the one that the guard was made with, or"):
        offmap.load(tmp_path / "g", Forest(seed=1))
    offmap.load(tmp_path / "g", Forest(seed=1), strict=False)
    with pytest.raises(ConfigError, match="Expected `predictive` to have `members` and `outputs`, but got Sequential."):
        offmap.load(tmp_path / "g", regressor())
    if "train" not in options:  # nothing of the rows is in the file
        assert not torch.isin(GuardFile.read(tmp_path / "g").tensors["probe.inputs"], regression(40, 0)[0]).any()


def test_a_predictive_that_is_never_twice_the_same_is_loaded_unchecked(tmp_path: Path) -> None:
    class Restless(Forest):
        def outputs(self, x: torch.Tensor, draws: int, *, clip: float | None, seed: int) -> torch.Tensor:
            self.trees = self.trees + 0.01
            return super().outputs(x, draws, clip=clip, seed=seed)

    offmap.guard(Restless(), regression(40, 0)).save(tmp_path / "g")
    assert not any(name.startswith("probe") for name in GuardFile.read(tmp_path / "g").tensors)
    assert offmap.load(tmp_path / "g", Forest()).threshold < torch.inf


def test_no_file_is_read_by_running_it() -> None:
    words = ("pickle", "torch.load", "torch.save", "joblib", "marshal", "eval(", "exec(")
    harmless = (
        r"\.eval\(\)", r"safetensors\.torch", r"allow_pickle=False", r"import pickle", r"pickle\.UnpicklingError",
        r"torch\.load\([^()]*weights_only=True\)",
    )  # fmt: skip
    texts = {path.name: re.sub("|".join(harmless), "", path.read_text()) for path in SOURCE.rglob("*.py")}
    assert [(name, word) for name, text in texts.items() for word in words if word in text] == []


def test_a_model_that_keeps_its_activations_forgets_them_after_loading_too(tmp_path: Path) -> None:
    def keep(model: Through, x: torch.Tensor) -> torch.Tensor:
        model.kept = model.a(x).relu()
        return model.b(model.kept)

    net = Through(keep, a=nn.Linear(3, 8), b=nn.Linear(8, 1))
    guard = quick(net, regression(40, 0), regression(40, 1))
    guard.save(tmp_path / "guard.safetensors")
    again = offmap.load(tmp_path / "guard.safetensors", net)
    x = regression(6, 2)[0]
    assert torch.equal(again.score(x), guard.score(x))
    assert not hasattr(again.predictive.model.module, "kept")
    assert torch.equal(again.to("cpu").score(x), guard.score(x))


def test_what_a_guard_says_of_itself_is_kept_in_plain_values(tmp_path: Path) -> None:
    guard = quick(regressor(), regression(40, 0), regression(40, 1))
    guard.save(tmp_path / "silent")
    assert GuardFile.read(tmp_path / "silent").header.about == {}
    told = {"inputs": ["a", "b", "ü"], "net": "module:make", "classes": None}
    replace(guard, about=told).save(tmp_path / "told")
    header = GuardFile.read(tmp_path / "told").header
    assert (header.about, len(header.models)) == (told, 1)
    again = offmap.load(tmp_path / "told", regressor())
    assert again.about == told
    assert again.calibrate(regression(40, 2)).about == told
    with pytest.raises(
        ConfigError, match="Expected plain and short values in `about`, as JSON has them, but Object of type Linear"
    ):
        replace(guard, about={"net": nn.Linear(1, 1)}).save(tmp_path / "code")
    assert not (tmp_path / "code").exists()
