"""CityCam from a generated copy of its folders."""

from __future__ import annotations

import logging
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from citycams import FRAMES, Brightness, Copy, to_tensor, write_copy
from offmap.errors import ConfigError, DataError
from offmap_bench.runner.plan import cells, parse
from offmap_bench.runner.run import Bench
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.citycam import CAMERAS, Shift, citycam, load


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return write_copy(tmp_path_factory.mktemp("citycam"))


@pytest.fixture
def fresh(whole: Copy, tmp_path: Path) -> Path:
    """A copy of the copy, to be damaged."""
    return Path(shutil.copytree(whole.root, tmp_path / "citycam"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def get(shift: str, root: Path, cache: Path, seed: int = 0, **options) -> Shift:
    return load(shift, seed, root, **{"backbone": Brightness(), "preprocess": to_tensor, "cache": cache, **options})


def cameras(shift: Shift, *parts: str) -> set[str]:
    return {frame.camera for part in parts for frame in shift.frames[part]}


ID_PARTS = ("train", "valid", "test")


def test_five_cameras_are_in_distribution_and_five_ood(whole: Copy, cache: Path) -> None:
    shift = get("camera", whole.root, cache)
    known, ood = cameras(shift, *ID_PARTS), cameras(shift, "ood")
    assert len(known) == len(ood) == 5
    assert known | ood == set(CAMERAS)
    assert known == {"253", "398", "511", "691", "846"}  # those of the authors' code for this seed
    assert [len(shift.frames[part]) for part in (*ID_PARTS, "ood")] == [51, 3, 6, 60]
    other = get("camera", whole.root, cache, seed=1)
    assert cameras(other, "ood") != ood


def test_large_vehicles_are_ood_wherever_they_lie(whole: Copy, cache: Path) -> None:
    shift = get("bigbus", whole.root, cache)
    assert cameras(shift, *ID_PARTS) == {"398", "403", "410", "495"}
    folders = {frame.image.parent.name for frame in shift.frames["ood"]}
    assert folders == {"398-big_bus-mask1", "bigbus-403", "bigbus-410", "bigbus-495"}
    assert not any("bus" in str(frame.image.relative_to(whole.root)) for part in ID_PARTS for frame in shift.frames[part])


def test_a_large_vehicle_that_lies_in_two_places_counts_once(fresh: Path, cache: Path) -> None:
    before = len(get("bigbus", fresh, cache).frames["ood"])
    shutil.copytree(fresh / "398" / "398-big_bus-mask1", fresh / "bigbus" / "398-big_bus-mask1")
    assert len(get("bigbus", fresh, cache).frames["ood"]) == before == 4 * FRAMES


def test_the_weather_shift_is_one_day_cut_at_two(whole: Copy, cache: Path) -> None:
    shift = get("weather", whole.root, cache)
    times = {part: [frame.time for frame in shift.frames[part]] for part in shift.frames}
    assert all(time.date() == datetime(2016, 2, 23).date() for part in times.values() for time in part)
    assert {time.hour for part in ID_PARTS for time in times[part]} == {9, 13}
    assert {time.hour for time in times["ood"]} == {14, 17}
    assert {frame.weather for frame in shift.frames["ood"] if frame.time.hour == 17} == {"Rain"}
    assert {frame.flow for frame in shift.frames["ood"]} == {"0"}


@pytest.mark.parametrize("name", ["camera", "bigbus", "weather"])
def test_rows_targets_and_frames_belong_together(name: str, whole: Copy, cache: Path) -> None:
    shift = get(name, whole.root, cache)
    task = shift.task
    assert task.name == f"citycam/{name}"
    assert (task.likelihood, task.outputs, task.inputs) == ("gaussian", 2, 2)
    line = np.polyfit(task.train[0][:, 0].numpy(), task.train[1].numpy() * shift.unit + shift.centre, 1)
    for part in ID_PARTS:
        x, y = getattr(task, part)
        drawn = torch.tensor([float(whole.counts[frame.image]) for frame in shift.frames[part]])
        assert [frame.vehicles for frame in shift.frames[part]] == drawn.tolist()
        torch.testing.assert_close(y * shift.unit + shift.centre, drawn)
        assert np.abs(np.polyval(line, x[:, 0].numpy()) - drawn.numpy()).max() < 1  # each row has the image of its frame
    ood = torch.tensor([float(frame.vehicles) for frame in shift.frames["ood"]])
    assert len(task.ood[name]) == len(ood)
    torch.testing.assert_close(task.train[1].std(correction=0), torch.tensor(1.0))
    images = [frame.image for part in shift.frames.values() for frame in part]
    assert len(images) == len(set(images))


def test_the_seed_splits_and_the_order_of_batches_does_not_matter(whole: Copy, cache: Path) -> None:
    first = get("weather", whole.root, cache)
    again = get("weather", whole.root, cache / "other", batch_size=1)
    torch.testing.assert_close(first.task.train[0], again.task.train[0])
    assert first.frames == again.frames
    assert first.frames["train"] != get("weather", whole.root, cache, seed=1).frames["train"]


def test_features_are_kept_until_an_image_the_backbone_or_the_preprocessing_changes(fresh: Path, cache: Path) -> None:
    def note_call(backbone: Brightness, preprocess=to_tensor) -> int:
        get("weather", fresh, cache, backbone=backbone, preprocess=preprocess)
        return backbone.seen

    assert note_call(Brightness()) == 12 * FRAMES
    assert note_call(Brightness()) == 0
    os.utime(fresh / "164" / "164-20160223-09" / "000002.jpg", (1, 1))
    assert note_call(Brightness()) == FRAMES
    other = Brightness()
    with torch.no_grad():
        other.scale[0] = 3.0
    assert note_call(other) == 12 * FRAMES
    assert note_call(Brightness(), lambda image: to_tensor(image).flip(0)) == 12 * FRAMES
    assert note_call(Brightness(), lambda image: to_tensor(image).flip(0)) == 0


def test_a_damaged_cache_is_computed_again(whole: Copy, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = get("weather", whole.root, cache)
    for file in (cache / "citycam").iterdir():
        file.write_bytes(file.read_bytes()[:50])
    with caplog.at_level(logging.WARNING, "offmap"):
        again = get("weather", whole.root, cache)
    torch.testing.assert_close(first.task.train[0], again.task.train[0])
    assert "cannot be read" in caplog.text
    assert "is made again" in caplog.text


def test_the_backbone_is_left_in_the_mode_it_came_in(whole: Copy, cache: Path) -> None:
    backbone = Brightness().train()
    backbone.drop.eval()
    get("weather", whole.root, cache, backbone=backbone)
    assert backbone.training
    assert not backbone.drop.training


BOMB = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><annotation><flow>&c;</flow></annotation>'


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("000002.xml", b"<annotation><time>2016/02/23 09:00:00</time><vehicle>", "is no XML .no element found"),
        ("000002.xml", b"", "is no XML"),
        ("000002.xml", b"\x00\xff" * 40, "is no XML"),
        ("000002.xml", BOMB.encode(), "declares a document type or entities, which are refused"),
        ("000002.xml", BOMB.encode("utf-16"), "is no XML"),
        ("000002.xml", b" " * 5_000_000, "larger than 4000000 bytes"),
        ("000002.xml", b"<annotation><time>noon</time></annotation>", "its <time> cannot be read"),
        ("000002.xml", None, "there is no such file"),
        ("000002.jpg", b"", "cannot be read .cannot identify image file"),
        ("000002.jpg", b"GIF89a" + b"\0" * 50, "cannot be read .cannot identify image file"),
    ],
    ids=["open", "empty", "binary", "bomb", "hidden bomb", "large", "no time", "missing", "no image", "another format"],
)
def test_a_damaged_frame_is_left_out_and_named(
    file: str, content: bytes | None, reason: str, fresh: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fresh / "166" / "166-20160223-13" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING, "offmap"):
            shift = get("weather", fresh, cache)
        assert len(caplog.messages) == 1
        assert f"A frame of CityCam is left out: {path}: " in caplog.text
        assert re.search(reason, caplog.text)
        assert sum(map(len, shift.frames.values())) == 12 * FRAMES - 1
        assert path.with_suffix(".jpg") not in [frame.image for part in shift.frames.values() for frame in part]
        assert len(shift.task.ood["weather"]) == 6 * FRAMES


def test_an_image_cut_short_is_left_out(fresh: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = fresh / "572" / "572-20160223-14" / "000001.jpg"
    path.write_bytes(path.read_bytes()[:600])
    with caplog.at_level(logging.WARNING, "offmap"):
        shift = get("weather", fresh, cache)
    assert f"{path}: cannot be read" in caplog.text
    assert len(shift.task.ood["weather"]) == 6 * FRAMES - 1


def test_many_damaged_frames_are_an_error(fresh: Path, cache: Path) -> None:
    for path in sorted((fresh / "164").rglob("*.xml"))[:12]:
        path.write_text("<annotation>")
    with pytest.raises(DataError, match="but 12 of 90 are damaged, the first .*000001.xml: is no XML"):
        get("weather", fresh, cache)


def test_missing_cameras_are_named_with_where_they_belong(fresh: Path, cache: Path) -> None:
    shutil.rmtree(fresh / "928")
    shutil.rmtree(fresh / "551")
    with pytest.raises(
        DataError, match=f"{fresh}/<camera>/.* none for 928, 551. Get the data set from https://.* OFFMAP_DATA"
    ) as e:
        get("camera", fresh, cache)
    assert "\n" not in str(e.value)


def test_without_the_data_set_one_line_says_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"{tmp_path}/citycam/<camera>/<sequence>/000001.jpg, .* none for 164, 166, 572"):
        citycam("weather")


def test_without_weights_one_line_says_where_they_belong(whole: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_DATA", str(tmp_path))
    (tmp_path / "citycam").symlink_to(whole.root)
    with pytest.raises(DataError, match=f"{tmp_path}/weights/resnet50-0676ba61.pth, but .* Put https://download.pytorch.org"):
        task_of("citycam/weather")


def test_too_few_frames_are_counted(fresh: Path, cache: Path) -> None:
    for hour in (14, 17):
        for camera in ("164", "166", "572"):
            shutil.rmtree(fresh / camera / f"{camera}-20160223-{hour}")
    with pytest.raises(DataError, match="Expected 10 in-distribution frames and an OOD one .* but got 36 and 0"):
        get("weather", fresh, cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess": lambda image: image}, "`preprocess` to give a tensor for a Pillow image, but got Image"),
        ({"preprocess": lambda image: torch.rand(3, 4, 4)}, "two calls differ"),
        ({"backbone": torch.nn.Flatten(0)}, r"a tensor \(B, D\) for a batch of 6 images, but got \(95040,\)"),
    ],
)
def test_backbones_that_do_not_fit_are_refused(options: dict, message: str, whole: Copy, cache: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        get("weather", whole.root, cache, **options)


def test_features_that_are_not_finite_are_refused(whole: Copy, cache: Path) -> None:
    backbone = Brightness()
    torch.nn.init.constant_(backbone.scale, float("nan"))
    with pytest.raises(DataError, match="Expected finite features"):
        get("weather", whole.root, cache, backbone=backbone)


def test_unknown_shifts_get_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'weather'.*but got 'wether'"):
        citycam("wether", folder=tmp_path)


PLAN = """
name = "citycam"
seeds = [0]
tasks = ["citycam/weather"]
[defaults]
hidden = [10]
steps = 30
check_every = 10
[[method]]
name = "deep_ensemble"
members = 5
"""


def test_a_plan_runs_on_the_copy(whole: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_DATA", str(tmp_path))
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("offmap_bench.tasks.citycam.resnet50", Brightness)  # the published weights are not at hand
    (tmp_path / "citycam").symlink_to(whole.root)
    bench = Bench()
    for cell in cells(parse(PLAN, "citycam.toml")):
        record = bench.run(cell)
        assert record.status == "ok", record.traceback
        assert 0 <= record.metrics[cell.task.rpartition("/")[2]]["auroc"] <= 1
