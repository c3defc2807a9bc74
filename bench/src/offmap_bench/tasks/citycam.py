"""CityCam: vehicles counted on webcam images, with cameras, large vehicles or weather that the net has not seen.

On disk a frame is `<camera>/<sequence>/NNNNNN.jpg`, and beside it is its annotation, `NNNNNN.xml`.
"""

from __future__ import annotations

import logging
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offmap.errors import DataError
from offmap.progress import bar
from offmap_bench.cache import cache_folder
from offmap_bench.tasks.download import data_folder
from offmap_bench.tasks.features import Extractor, standard
from offmap_bench.tasks.pretrained import resnet50
from offmap_bench.tasks.task import Pair, Task, check_name, moments, split, tensor

logger = logging.getLogger("offmap")

CAMERAS = ("928", "846", "691", "551", "511", "495", "410", "403", "398", "253")
"""For the camera shift: half of them are in-distribution."""

BUS_CAMERAS = ("398", "403", "410", "495")
WEATHER_CAMERAS = ("164", "166", "572")
BUSES = "bigbus"
"""The folder of frames that a large vehicle hides; sequences named like it in a camera's folder belong to it too."""

REMEDY = (
    "Get the data set from https://www.citycam-cmu.com and unpack it there, or set OFFMAP_DATA to the folder that has it in its "
    "folder `citycam`."
)


class Damaged(Exception):
    """A file that cannot be used, and why."""


@dataclass(frozen=True)
class Frame:
    """One image and what its annotation says; `time` is None where that is not a time."""

    image: Path
    camera: str
    time: datetime | None
    weather: str
    flow: str
    vehicles: int


@dataclass(frozen=True)
class Run:
    """A sequence: the images of one folder, in the order of their names; `buses` if a large vehicle hides them."""

    folder: Path
    camera: str
    images: tuple[str, ...]
    buses: bool


Rule = Callable[[Run, Frame], bool | None]
"""Whether a frame is OOD; None: it is no part of the shift."""


def camera_rule(seed: int) -> tuple[Sequence[str], Rule]:
    """Five cameras are in-distribution; the choice is that of the authors' code."""
    in_distribution = set(np.random.RandomState(seed).choice(CAMERAS, len(CAMERAS) // 2, replace=False).tolist())
    return CAMERAS, lambda run, frame: None if run.buses else frame.camera not in in_distribution


def is_later(run: Run, frame: Frame) -> bool | None:
    """Whether a frame of one day was seen from 14 h on."""
    if frame.time is None:
        raise Damaged("its <time> cannot be read")
    return None if run.buses or frame.time.date() != date(2016, 2, 23) else frame.time.hour >= 14


SHIFTS: dict[str, Callable[[int], tuple[Sequence[str], Rule]]] = {
    "camera": camera_rule,
    "bigbus": lambda seed: ((*BUS_CAMERAS, BUSES), lambda run, frame: run.buses),
    "weather": lambda seed: (WEATHER_CAMERAS, is_later),
}
"""The cameras of a shift and its rule, by seed."""


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
    found = find_frames(shift, seed, folder)
    if found.lost:
        raise DataError(
            f"Expected frames of CityCam at {found.root}/<camera>/<sequence>/000001.jpg, each with an .xml, but there are none "
            f"for {', '.join(found.lost)}. {REMEDY}"
        )
    extract = Extractor(resnet50() if backbone is None else backbone, cache_of(cache), preprocess, batch_size)
    damaged = list(found.damaged)
    rows, x = extract_features(found.parts, extract, damaged, show)
    report_damage(damaged, found.images, found.root)
    return split_shift(shift, rows, x, seed, found.root)


@dataclass(frozen=True)
class Found:
    """What lies below `root`: the cameras of a shift, those without frames, all images, and the frames of each sequence."""

    root: Path
    cameras: Sequence[str]
    lost: list[str]
    images: int
    parts: dict[str, list[tuple[Frame, bool]]]  # by the name of the file of features: frames, and whether they are OOD
    damaged: list[str]  # annotations that cannot be used, and why


def find_frames(shift: str, seed: int = 0, folder: str | Path | None = None) -> Found:
    """Read the annotations of a shift; arguments are those of `load`."""
    check_name("the name of a shift of CityCam to be", shift, SHIFTS)
    root = data_folder() / "citycam" if folder is None else Path(folder)
    cameras, rule = SHIFTS[shift](seed)
    sequences, damaged = find_runs(root, cameras), list[str]()
    covered = {run.camera for run in sequences} | ({BUSES} if any(run.buses for run in sequences) else set())
    names = ["+".join(run.folder.relative_to(root / run.camera).parts) for run in sequences]
    parts = {f"{run.camera}-{name}": select_frames(run, rule, damaged) for name, run in zip(names, sequences, strict=True)}
    return Found(
        root, cameras, [camera for camera in cameras if camera not in covered], sum(len(run.images) for run in sequences),
        {name: part for name, part in parts.items() if part}, damaged,
    )  # fmt: skip


def list_images(shift: str, seed: int = 0, folder: str | Path | None = None) -> dict[str, list[Path]]:
    """Return the images of every file of cached features, by its name without the key."""
    return {name: [frame.image for frame, _ in part] for name, part in find_frames(shift, seed, folder).parts.items()}


def cache_of(cache: str | Path | None) -> Path:
    """Return the folder of cached features."""
    return Path(cache or cache_folder()) / "citycam"


def find_runs(root: Path, cameras: Sequence[str]) -> list[Run]:
    """The sequences of the cameras; a large vehicle's that lies in two places is taken once."""
    folders: set[str] = set()
    sequences = [run for camera in cameras for run in runs(root, camera)]
    return [run for run in sequences if not run.buses or not (run.folder.name in folders or folders.add(run.folder.name))]


def runs(root: Path, camera: str) -> list[Run]:
    """The sequences of a camera, those of large vehicles included, in the order of their names; none if it has no folder."""
    sequences: list[Run] = []
    for folder, inner, files in os.walk(root / camera):
        inner.sort()
        images = tuple(sorted(name for name in files if re.fullmatch(r"\d{6}\.jpg", name, re.IGNORECASE)))
        if images:
            name = Path(folder).name.lower().replace("_", "")
            sequences.append(Run(Path(folder), camera, images, camera == BUSES or BUSES in name))
    return sequences


def select_frames(run: Run, rule: Rule, damaged: list[str]) -> list[tuple[Frame, bool]]:
    """The frames of a sequence that are part of the shift, and whether they are OOD; unusable files are added to `damaged`."""
    part: list[tuple[Frame, bool]] = []
    for image in (run.folder / name for name in run.images):
        try:
            frame = read_frame(image, run.camera)
            ood = rule(run, frame)
        except Damaged as error:
            damaged.append(f"{image.with_suffix('.xml')}: {error}")
            continue
        if ood is not None:
            part.append((frame, ood))
    return part


def read_frame(image: Path, camera: str) -> Frame:
    """One image with its annotation; the number of vehicles is that of its `<vehicle>` elements."""
    root = read_annotation(image.with_suffix(".xml"))
    time, weather, flow = ((root.findtext(tag) or "").strip() for tag in ("time", "weather", "flow"))
    return Frame(image, camera, parse_time(time), weather, flow, sum(1 for _ in root.iter("vehicle")))


def read_annotation(path: Path) -> ET.Element:
    """The XML of one file. An `&` that begins no character reference stands for itself, as in some files of the data set.

    Document types, and so entities, are refused: they are the way to make a small file grow without bound.
    """
    try:
        if path.stat().st_size > 4_000_000:  # real ones have a few thousand
            raise Damaged("larger than 4000000 bytes")
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise Damaged("there is no such file") from None
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise Damaged("declares a document type or entities, which are refused")
    try:
        return ET.fromstring(re.sub(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9a-fA-F]+);)", "&amp;", text))
    except (ET.ParseError, ValueError) as error:
        raise Damaged(f"is no XML ({error})") from error


def parse_time(text: str) -> datetime | None:
    """A time such as "2016/02/23 09:00:01", whatever separates its numbers.

    >>> parse_time("2016/02/23 14:05:09"), parse_time("noon")
    (datetime.datetime(2016, 2, 23, 14, 5, 9), None)
    """
    match = re.fullmatch(r"\s*(\d{4})\D(\d{1,2})\D(\d{1,2})\D+(\d{1,2})\D(\d{1,2})(?:\D(\d{1,2}))?\s*", text)
    try:
        return datetime.fromisoformat("{:0>4}-{:0>2}-{:0>2} {:0>2}:{:0>2}:{:0>2}".format(*match.groups("0"))) if match else None
    except ValueError:
        return None


def report_damage(damaged: Sequence[str], total: int, root: Path) -> None:
    """Name the damaged files, one line each; too many of them are an error."""
    if len(damaged) > 0.1 * total:  # then the folder is not the data set
        raise DataError(f"Expected CityCam below {root}, but {len(damaged)} of {total} are damaged, the first {damaged[0]}.")
    for line in damaged[:10]:
        logger.warning("A frame of CityCam is left out: %s.", line)
    if len(damaged) > 10:
        logger.warning("%d more frames of CityCam are left out.", len(damaged) - 10)


def extract_features(
    parts: Mapping[str, list[tuple[Frame, bool]]], extract: Extractor, damaged: list[str], show: bool | None
) -> tuple[list[tuple[Frame, bool]], Tensor]:
    """The frames whose images can be read, and their features, (n, D): one file of the cache for each sequence."""
    rows, blocks, done = list[tuple[Frame, bool]](), list[Tensor](), 0
    with bar("CityCam", sum(map(len, parts.values())), show=show) as advance:
        for name, part in parts.items():
            images = [frame.image for frame, _ in part]
            block, failures = extract(images, name)
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
    if count < 10 or not ood_count:
        raise DataError(f"Expected 10 in-distribution frames and an OOD one below {root}, but got {count} and {ood_count}.")
    train, valid, test = split(np.flatnonzero(~ood), seed)
    places = {"train": train, "valid": valid, "test": test, "ood": np.flatnonzero(ood)}
    vehicles = np.array([frame.vehicles for frame, _ in rows], dtype=np.float64)
    centre, unit = (float(value) for value in moments(vehicles[train]))

    def part(name: str) -> Pair:
        return x[torch.from_numpy(places[name])], tensor((vehicles[places[name]] - centre) / unit)

    sets = {shift: part("ood")[0]}
    task = Task(f"citycam/{shift}", part("train"), part("valid"), part("test"), sets, likelihood="gaussian", outputs=2, unit=unit)
    return Shift(task, {name: [rows[i][0] for i in index.tolist()] for name, index in places.items()}, centre, unit)
