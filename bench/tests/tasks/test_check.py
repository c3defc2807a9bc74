"""What a plan needs, checked on a generated copy of CityCam and on tasks without files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from citycams import FRAMES, Brightness, Copy, to_tensor, write_copy
from offmap.atomic import seal, write_whole
from offmap_bench.cli.bench import bench
from offmap_bench.tasks.check import Finding, check_citycam
from offmap_bench.tasks.citycam import cache_of, list_images, load
from offmap_bench.tasks.features import Extractor


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return write_copy(tmp_path_factory.mktemp("citycam"))


@pytest.fixture
def fresh(whole: Copy, tmp_path: Path) -> Path:
    """A copy of the copy, to be damaged."""
    return Path(shutil.copytree(whole.root, tmp_path / "data" / "citycam"))


def look(root: Path, cache: Path, shift: str = "weather") -> dict[str, Finding]:
    return {f.what: f for f in check_citycam(shift, 0, root, backbone=Brightness(), preprocess=to_tensor, cache=cache)}


def run(root: Path, cache: Path) -> torch.Tensor:
    return load("weather", 0, root, backbone=Brightness(), preprocess=to_tensor, cache=cache).task.train[0]


def test_a_complete_copy_is_ready_and_its_features_come_with_a_run(fresh: Path, tmp_path: Path) -> None:
    before = look(fresh, tmp_path)
    assert {name: finding.state for name, finding in before.items()} == {
        "cameras": "ready", "annotations": "ready", "images": "ready", "weights": "ready", "features": "later",
    }  # fmt: skip
    assert before["cameras"].text == f"{15 * FRAMES} frames of all 3 below {fresh}"
    assert "0 of 12 sequences are current" in before["features"].text
    assert not (tmp_path / "citycam").exists()  # nothing was computed
    run(fresh, tmp_path)
    assert look(fresh, tmp_path)["features"] == Finding("features", "ready", f"of all 12 sequences in {tmp_path / 'citycam'}")
    image = fresh / "164" / "164-20160223-09" / "000002.jpg"
    image.write_bytes(image.read_bytes() + b"\0")
    after = look(fresh, tmp_path)["features"]
    assert "11 of 12 sequences are current" in after.text
    assert "1 were made from other images, weights or preprocessing, 0 are absent; a run computes" in after.text


def test_missing_cameras_are_named(fresh: Path, tmp_path: Path) -> None:
    shutil.rmtree(fresh / "164")
    finding = look(fresh, tmp_path)["cameras"]
    assert finding.state == "missing"
    assert finding.text.startswith(f"no frames of 164 below {fresh}. Get the data set from https://www.citycam-cmu.com")


@pytest.mark.parametrize("cached", [False, True])
def test_files_that_a_run_leaves_out_are_named(cached: bool, fresh: Path, tmp_path: Path) -> None:
    folder = fresh / "166" / "166-20160223-13"
    (folder / "000002.xml").unlink()
    (folder / "000003.jpg").write_bytes(b"")
    if cached:
        run(fresh, tmp_path)
    found = look(fresh, tmp_path)
    assert found["annotations"].state == found["images"].state == "later"
    assert (
        f"1 cannot be used, a run leaves them out: {folder / '000002.xml'}: there is no such file." in found["annotations"].text
    )
    assert f"1 cannot be used, a run leaves them out: {folder / '000003.jpg'}: cannot be read" in found["images"].text


def test_so_many_damaged_files_that_a_run_refuses_are_counted(fresh: Path, tmp_path: Path) -> None:
    for path in sorted((fresh / "164").rglob("*.xml"))[:12]:
        path.unlink()
    finding = look(fresh, tmp_path)["annotations"]
    assert finding.state == "missing"
    assert finding.text.startswith("12 cannot be used, a run refuses so many: ")
    assert finding.text.endswith("; and 2 more. Get these files again.")


def test_the_command_says_what_is_missing(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_DATA", str(fresh.parent))
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path))
    command = ["check", "citycam", "--tasks", "citycam/weather"]
    write_whole(tmp_path / "citycam" / f"164-164-20160223-09-{'0' * 20}.safetensors", b"")
    result = CliRunner().invoke(bench, command)
    assert result.exit_code == 1  # the tests forbid downloads
    path = fresh.parent / "weights" / "resnet50-0676ba61.pth"
    assert f"weights: missing, no file at {path}: OFFMAP_OFFLINE forbids to download it. By hand, put https" in result.output
    assert "features: later, 1 of 12 sequences have some in" in result.output
    assert result.output.endswith("0 of 1 tasks can run.\n")
    monkeypatch.delenv("OFFMAP_OFFLINE")
    result = CliRunner().invoke(bench, command)
    assert result.exit_code == 0
    assert f"weights: later, no file at {path}: a run downloads it, 98 MB." in result.output
    path.parent.mkdir()
    path.write_bytes(b"no weights")
    result = CliRunner().invoke(bench, [*command, "--json"])
    assert json.loads(result.output)["missing"] == ["citycam/weather"]
    assert f"Expected the weights of ResNet-50 at {path}, but it cannot be read" in result.output


def test_other_tasks_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_DATA", str(tmp_path))
    plan = tmp_path / "plan.toml"
    tasks = '["moons", "uci/concrete/*", "images/cifar10/resnet20"]'
    plan.write_text(f'name = "plan"\nseeds = [0]\ntasks = {tasks}\n[[method]]\nname = "nearest"\n')
    result = CliRunner().invoke(bench, ["check", str(plan)])
    assert result.exit_code == 1
    assert "moons\n  data: ready, 200 rows to train on\n" in result.output
    assert f"data: missing, Expected the data set at {tmp_path}/uci/concrete.csv.gz" in result.output
    assert f"weights: missing, Expected trained weights at {tmp_path}/weights/cifar10_resnet20.pt" in result.output
    assert "1 of 4 tasks can run." in result.output


class Elsewhere(torch.nn.Identity):
    """Stands for a backbone that has computed its features elsewhere."""


def test_features_computed_elsewhere_can_be_brought(whole: Copy, tmp_path: Path) -> None:
    extract, brought = Extractor(Elsewhere(), cache_of(tmp_path), to_tensor), {}
    for name, images in list_images("weather", 0, whole.root).items():
        brought[images[0].parent] = features = torch.full((FRAMES, 3), float(len(brought)))
        write_whole(extract.path(images, name), seal({}, {"features": features}))
    shift = load("weather", 0, whole.root, backbone=Elsewhere(), preprocess=to_tensor, cache=tmp_path)
    for part in ("train", "valid", "test"):
        x = getattr(shift.task, part)[0]
        assert torch.equal(x, torch.stack([brought[frame.image.parent][0] for frame in shift.frames[part]]))
