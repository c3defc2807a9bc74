"""CityCam: vehicles counted on webcam images, with cameras, large vehicles or weather that the net has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offmap.atomic import cache_folder
from offmap.errors import ConfigError, DataError, nearest
from offmap.progress import bar
from offmap_bench.tasks.citycam_frames import BUSES, Damaged, Frame, Run, frames, judge, runs
from offmap_bench.tasks.download import data_folder
from offmap_bench.tasks.features import Extractor, standard
from offmap_bench.tasks.pretrained import resnet50
from offmap_bench.tasks.task import Pair, Task, tensor
from offmap_bench.tasks.uci import moments, split

SITE = "https://www.citycam-cmu.com"

CAMERAS = ("928", "846", "691", "551", "511", "495", "410", "403", "398", "253")
"""For the camera shift: half of them are in-distribution."""

BUS_CAMERAS = ("398", "403", "410", "495")
WEATHER_CAMERAS = ("164", "166", "572")
DAY, HOUR = date(2016, 2, 23), 14
"""Of the weather shift: what was seen before this hour is in-distribution, what was seen later is OOD."""

LEAST = 10
"""In-distribution frames."""

Rule = Callable[[Run, Frame], bool | None]
"""Whether a frame is OOD; None: it is no part of the shift."""


@dataclass(frozen=True)
class Shift:
    """A task and where its rows come from: `frames[part][i]` is the image of row i, for train, valid, test and ood.

    Targets are vehicles, less `centre` and divided by `unit`, mean and standard deviation of the training part.
    """

    task: Task
    frames: dict[str, list[Frame]] = field(repr=False)
    centre: float
    unit: float


def citycam(shift: str, seed: int = 0, folder: str | Path | None = None, **options: Any) -> Task:
    """The task of a shift, "camera", "bigbus" or "weather"; see `load`."""
    return load(shift, seed, folder, **options).task


def load(
    shift: str, seed: int = 0, folder: str | Path | None = None, *, backbone: nn.Module | None = None,
    preprocess: Callable[[Any], Tensor] = standard, batch_size: int = 64, cache: str | Path | None = None,
    show: bool | None = None,
) -> Shift:  # fmt: skip
    """The paper's protocol (section 7.3). Inputs are what `backbone` says of a frame, as they are; the target is how many
    vehicles are on it. A tenth of the in-distribution frames is for testing, a twentieth of the rest for validation, by `seed`.

    - "camera": five of ten cameras, at random by `seed`, are in-distribution, the others OOD.
    - "bigbus": four cameras are in-distribution; their frames that a large vehicle hides, in the folder `bigbus`, are OOD.
    - "weather": three cameras on one day, in-distribution before 14 h.

    `folder` holds one folder for each camera; by default it is `citycam` below the folder that OFFMAP_DATA names. `backbone` is
    any module, with `preprocess` from a Pillow image to what it is given; by default ResNet-50 (see `backbone.resnet50`). Its
    features are kept below `cache`, by default OFFMAP_CACHE. Damaged frames are left out, each with a warning that names it.
    """
    if shift not in SHIFTS:
        raise ConfigError(f"Expected the name of a shift of CityCam to be {nearest(shift, SHIFTS)}, but got {shift!r}.")
    root = data_folder() / "citycam" if folder is None else Path(folder)
    cameras, rule = SHIFTS[shift](seed)
    sequences = find_runs(root, cameras)
    extract = Extractor(
        resnet50() if backbone is None else backbone, Path(cache or cache_folder()) / "citycam", preprocess, batch_size
    )
    damaged: list[str] = []
    parts = [part for run in sequences if (part := select_frames(run, rule, damaged))]
    rows, x = extract_features(parts, extract, damaged, show)
    judge(damaged, sum(len(run.images) for run in sequences), root)
    return split_shift(shift, rows, x, seed, root)


def camera_rule(seed: int) -> tuple[Sequence[str], Rule]:
    """Five cameras are in-distribution; the choice is that of the authors' code."""
    in_distribution = set(np.random.RandomState(seed).choice(CAMERAS, len(CAMERAS) // 2, replace=False).tolist())
    return CAMERAS, lambda run, frame: None if run.buses else frame.camera not in in_distribution


def bigbus_rule(seed: int) -> tuple[Sequence[str], Rule]:
    """Sequences of large vehicles are OOD."""
    return (*BUS_CAMERAS, BUSES), lambda run, frame: run.buses


def weather_rule(seed: int) -> tuple[Sequence[str], Rule]:
    """One day, OOD from an hour on."""

    def is_ood(run: Run, frame: Frame) -> bool | None:
        if frame.time is None:
            raise Damaged("its <time> cannot be read")
        return None if run.buses or frame.time.date() != DAY else frame.time.hour >= HOUR

    return WEATHER_CAMERAS, is_ood


SHIFTS: dict[str, Callable[[int], tuple[Sequence[str], Rule]]] = {
    "camera": camera_rule,
    "bigbus": bigbus_rule,
    "weather": weather_rule,
}


def find_runs(root: Path, cameras: Sequence[str]) -> list[Run]:
    """The sequences of the cameras; a large vehicle's that lies in two places is taken once."""
    by_camera = {camera: runs(root, camera) for camera in cameras}
    sequences = [run for group in by_camera.values() for run in group]
    covered = {run.camera for run in sequences} | ({BUSES} if any(run.buses for run in sequences) else set())
    lost = [camera for camera in cameras if camera not in covered]
    if lost:
        raise DataError(
            f"Expected frames of CityCam at {root}/<camera>/<sequence>/000001.jpg, each with an .xml, but there are none for "
            f"{', '.join(lost)}. Get the data set from {SITE} and unpack it there, or set OFFMAP_DATA to the folder that has it "
            "in its folder `citycam`."
        )
    seen: set[str] = set()
    return [run for run in sequences if not run.buses or not (run.folder.name in seen or seen.add(run.folder.name))]


def select_frames(run: Run, rule: Rule, damaged: list[str]) -> list[tuple[Frame, bool]]:
    """The frames of a sequence that are part of the shift, and whether they are OOD."""
    part: list[tuple[Frame, bool]] = []
    for frame in frames(run, damaged):
        try:
            ood = rule(run, frame)
        except Damaged as error:
            damaged.append(f"{frame.image.with_suffix('.xml')}: {error}")
            continue
        if ood is not None:
            part.append((frame, ood))
    return part


def extract_features(
    parts: Sequence[list[tuple[Frame, bool]]], extract: Extractor, damaged: list[str], show: bool | None
) -> tuple[list[tuple[Frame, bool]], Tensor]:
    """The frames whose images can be read, and their features, (n, D): one file of the cache for each sequence."""
    rows: list[tuple[Frame, bool]] = []
    blocks: list[Tensor] = []
    total = sum(map(len, parts))
    with bar("CityCam", total, show=show) as advance:
        done = 0
        for part in parts:
            images = [frame.image for frame, _ in part]
            block, failures = extract(images, f"{part[0][0].camera}-{images[0].parent.name}")
            damaged += [f"{images[place]}: {reason}" for place, reason in failures.items()]
            rows += [row for place, row in enumerate(part) if place not in failures]
            blocks += [block] if len(block) else []
            done += len(part)
            advance(done)
    return rows, torch.cat(blocks) if blocks else torch.zeros(0, 0)


def split_shift(shift: str, rows: Sequence[tuple[Frame, bool]], x: Tensor, seed: int, root: Path) -> Shift:
    """The task: in-distribution rows in three parts, OOD rows in the order of their files."""
    ood = np.array([side for _, side in rows], dtype=bool)
    count, ood_count = int((~ood).sum()), int(ood.sum())
    if count < LEAST or not ood_count:
        raise DataError(
            f"Expected {LEAST} in-distribution frames and an OOD one for the {shift} shift of CityCam below {root}, but "
            f"got {count} and {ood_count}."
        )
    train, valid, test = split(np.flatnonzero(~ood), seed)
    places = {"train": train, "valid": valid, "test": test, "ood": np.flatnonzero(ood)}
    vehicles = np.array([frame.vehicles for frame, _ in rows], dtype=np.float64)
    centre, unit = (float(value) for value in moments(vehicles[train]))

    def part(name: str) -> Pair:
        return x[torch.from_numpy(places[name])], tensor((vehicles[places[name]] - centre) / unit)

    sets = {shift: part("ood")[0]}
    task = Task(f"citycam/{shift}", part("train"), part("valid"), part("test"), sets, likelihood="gaussian", outputs=2)
    return Shift(task, {name: [rows[i][0] for i in index.tolist()] for name, index in places.items()}, centre, unit)
