"""CityCam's frames as they lie on disk: `<camera>/<sequence>/NNNNNN.jpg`, and beside each an annotation, `NNNNNN.xml`."""

from __future__ import annotations

import logging
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from offmap.errors import DataError

logger = logging.getLogger("offmap")

BUSES = "bigbus"
"""The folder of frames that a large vehicle hides; sequences named like it in a camera's folder belong to it too."""

LARGEST = 4_000_000
"""Bytes of an annotation; real ones have a few thousand."""

TOLERATED = 0.1
"""Share of damaged frames that are left out with a warning; with more of them, the folder is not the data set."""

NAMED = 10
"""How many damaged files are named one by one."""

NAME = re.compile(r"\d{6}\.jpg", re.IGNORECASE)
STRAY = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9a-fA-F]+);)")
MOMENT = re.compile(r"\s*(\d{4})\D(\d{1,2})\D(\d{1,2})\D+(\d{1,2})\D(\d{1,2})(?:\D(\d{1,2}))?\s*")


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


def runs(root: Path, camera: str) -> list[Run]:
    """The sequences of a camera, those of large vehicles included, in the order of their names; none if it has no folder."""
    found: list[Run] = []
    for folder, inner, files in os.walk(root / camera):
        inner.sort()
        images = tuple(sorted(name for name in files if NAME.fullmatch(name)))
        if images:
            name = Path(folder).name.lower().replace("_", "")
            found.append(Run(Path(folder), camera, images, camera == BUSES or BUSES in name))
    return found


def frames(run: Run, damaged: list[str]) -> list[Frame]:
    """The frames of a sequence; those without a readable annotation are told to `damaged`."""
    found: list[Frame] = []
    for name in run.images:
        image = run.folder / name
        try:
            found.append(frame(image, run.camera))
        except Damaged as error:
            damaged.append(f"{image.with_suffix('.xml')}: {error}")
    return found


def frame(image: Path, camera: str) -> Frame:
    """One image with its annotation; the number of vehicles is that of its `<vehicle>` elements."""
    root = annotation(image.with_suffix(".xml"))
    time, weather, flow = ((root.findtext(tag) or "").strip() for tag in ("time", "weather", "flow"))
    return Frame(image, camera, moment(time), weather, flow, sum(1 for _ in root.iter("vehicle")))


def annotation(path: Path) -> ET.Element:
    """The XML of one file. An `&` that begins no character reference stands for itself, as in some files of the data set.

    Document types, and so entities, are refused: they are the way to make a small file grow without bound.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise Damaged(f"larger than {LARGEST} bytes")
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise Damaged("there is no such file") from None
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise Damaged("declares a document type or entities, which are refused")
    try:
        return ET.fromstring(STRAY.sub("&amp;", text))
    except (ET.ParseError, ValueError) as error:
        raise Damaged(f"is no XML ({error})") from error


def moment(text: str) -> datetime | None:
    """A time such as "2016/02/23 09:00:01", whatever separates its numbers.

    >>> moment("2016/02/23 14:05:09"), moment("noon")
    (datetime.datetime(2016, 2, 23, 14, 5, 9), None)
    """
    found = MOMENT.fullmatch(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(number or 0) for number in found.groups())
    try:
        return datetime(year, month, day, hour, minute, second)
    except ValueError:
        return None


def judge(damaged: Sequence[str], total: int, root: Path) -> None:
    """Name the damaged files, one line each; too many of them are an error."""
    if len(damaged) > TOLERATED * total:
        raise DataError(
            f"Expected frames of CityCam below {root}, but {len(damaged)} of {total} are damaged, the first of them {damaged[0]}."
        )
    for line in damaged[:NAMED]:
        logger.warning("A frame of CityCam is left out: %s.", line)
    if len(damaged) > NAMED:
        logger.warning("%d more frames of CityCam are left out.", len(damaged) - NAMED)
