"""Guard files that lie, with the right checksum: what they say is looked at before anything is built of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

import offmap
from offmap.atomic import HEADER, checksum
from offmap.errors import ConfigError, FileError
from offmap.io.guard_file import GuardFile
from trained import inputs, quick, regression, regressor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("guards") / "guard.safetensors"
    quick(regressor(), regression(60), regression(30, seed=1)).save(path)
    return path.read_bytes()


def header_of(content: bytes) -> dict[str, Any]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["offmap"].partition(" ")[2])


def write_file(path: Path, header: Any, tensors: dict[str, Tensor]) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    path.write_bytes(to_bytes(tensors, metadata={"offmap": f"{checksum(text, tensors)} {text}"}))
    return path


LIES: dict[str, tuple[str, Any]] = {
    "too many draws": ("guard", {"draws": 10**9}),
    "one draw": ("guard", {"draws": 1}),
    "a score of no name": ("score", {"name": 3}),
    "a negative clip": ("guard", {"clip": -1.0}),
    "a clip of NaN": ("guard", {"clip": float("nan")}),
    "another key": ("guard", {"output_fn": "x"}),
    "no chunk": ("model", {"chunk_size": 0}),
    "a batch of text": ("model", {"batch_size": "8"}),
    "false alarms": ("calibration", {"false_alarms": 2}),
    "a frame of fractions": ("views", {"0.weight": {"view": [1.5], "outs": [], "axes": [], "blocks": []}}),
    "fields of the likelihood": ("likelihood", {"config": [1]}),
    "history": ("history", {"risk": "none"}),
    "notes": ("guard", {"notes": [1]}),
    "terms": ("score", {"config": None}),
    "models": ("models", [{"0.weight": "x"}]),
}


@pytest.mark.parametrize("case", LIES)
def test_a_header_that_makes_no_sense_is_refused_by_the_name_of_what_is_wrong(case: str, saved: bytes, tmp_path: Path) -> None:
    key, lie = LIES[case]
    header = header_of(saved)
    header[key] = {**header[key], **lie} if isinstance(lie, dict) and isinstance(header[key], dict) else lie
    path = write_file(tmp_path / "guard", header, load_bytes(saved))
    with pytest.raises(FileError, match=f"{re.escape(str(path))} is damaged or not a guard file: invalid header field '{key}'"):
        offmap.load(path, regressor())
    with pytest.raises(FileError, match=f"invalid header field '{key}'"):
        GuardFile.read(path)


@pytest.mark.parametrize("key", ["guard", "model", "history", "custom_output_fn"])
def test_a_header_that_lacks_something_is_refused(key: str, saved: bytes, tmp_path: Path) -> None:
    header = {name: value for name, value in header_of(saved).items() if name != key}
    with pytest.raises(FileError, match=f"invalid header field '{key}'"):
        offmap.load(write_file(tmp_path / "guard", header, load_bytes(saved)), regressor())


@pytest.mark.parametrize("text", ["", "[", "3", "null", "[]", "[" * 100_000, '{"format": 3}'])
def test_a_header_that_is_none_is_refused(text: str, saved: bytes, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is damaged or not a guard file|is not a guard file of this version"):
        offmap.load(write_file(tmp_path / "guard", text, load_bytes(saved)), regressor())


CHANGES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "scale of another shape": ("raw_scale.0.weight", lambda t: t[:, :5]),
    "scale of whole numbers": ("raw_scale.0.weight", lambda t: t.long()),
    "scale of NaN": ("raw_scale.2.bias", lambda t: t * torch.nan),
    "infinite scale": ("raw_scale.2.bias", lambda t: t + torch.inf),
    "rotation of another width": ("rotation.0.weight", lambda t: t[..., :2, :2]),
    "rotation that is no square": ("rotation.0.weight", lambda t: t[..., :2]),
    "no scores": ("calibration.scores", lambda t: t[:0]),
    "scores of NaN": ("calibration.scores", lambda t: t * torch.nan),
    "in-distribution rows of another width": ("score.parts.inputs.space.rows", lambda t: t[:, :2]),
    "a number of spacings": ("score.parts.inputs.space.spacings", lambda t: t[:7]),
    "three numbers as a scale": ("score.parts.disagreement.zscore.mean", lambda t: t.expand(3)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(case: str, saved: bytes, tmp_path: Path) -> None:
    name, change = CHANGES[case]
    tensors = load_bytes(saved)
    tensors[name] = change(tensors[name]).contiguous()
    with pytest.raises(FileError, match=r"is damaged or not a guard file: `[\w.]+`, \(.*\), does not fit. Save the guard again"):
        offmap.load(write_file(tmp_path / "guard", header_of(saved), tensors), regressor())


def test_a_tensor_that_is_missing_or_unknown_is_refused(saved: bytes, tmp_path: Path) -> None:
    for change in ({"calibration.residuals": None}, {"../harm": torch.ones(2)}, {"rotation.0.bias": torch.ones(1, 1, 1, 1, 1)}):
        tensors = {n: t for n, t in {**load_bytes(saved), **change}.items() if t is not None}
        with pytest.raises(FileError, match="is damaged or not a guard file"):
            offmap.load(write_file(tmp_path / "guard", header_of(saved), tensors), regressor())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("noise", {"name": "uniform", "state": {"half_width": 0}}),
        ("likelihood", {"name": "gaussian", "config": {"targets": [1]}}),
    ],
)
def test_noise_and_likelihood_that_cannot_be_built_are_refused(key: str, value: Any, saved: bytes, tmp_path: Path) -> None:
    path = write_file(tmp_path / "guard", header_of(saved) | {key: value}, load_bytes(saved))
    with pytest.raises((FileError, ConfigError), match="is damaged or not a guard file|Expected `half_width`"):
        offmap.load(path, regressor())


def test_a_score_that_is_not_registered_is_refused(saved: bytes, tmp_path: Path) -> None:
    path = write_file(tmp_path / "guard", header_of(saved) | {"score": {"name": "__class__", "config": {}}}, load_bytes(saved))
    with pytest.raises(FileError, match="was fitted with the score '__class__', which is not registered: import the module that"):
        offmap.load(path, regressor())


def test_a_long_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "guard"
    path.write_bytes((HEADER + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(FileError, match=rf"is damaged or not a guard file \(a header of {HEADER + 1} bytes\)"):
        offmap.load(path, regressor())


def test_what_could_not_be_read_is_not_written(saved: bytes, tmp_path: Path) -> None:
    (tmp_path / "guard").write_bytes(saved)
    guard = offmap.load(tmp_path / "guard", regressor())
    assert guard.score(inputs(3)).isfinite().all()
    object.__setattr__(guard, "about", {"text": "x" * HEADER})
    with pytest.raises(ConfigError, match="Expected plain and short values in `about`, .* but got a header of .* letters"):
        guard.save(tmp_path / "other")
