"""A small copy of CityCam in its own layout: images on which vehicles are bright boxes, and their annotations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from offmap_bench.tasks.citycam import BUS_CAMERAS, CAMERAS, WEATHER_CAMERAS

WIDTH, HEIGHT = 88, 60
BOX = 8
FRAMES = 6
VEHICLE = """  <vehicle>
    <id>{id}</id>
    <bndbox><xmax>{right}</xmax><xmin>{left}</xmin><ymax>{bottom}</ymax><ymin>{top}</ymin></bndbox>
    <type>3</type>
    <direction>1</direction>
    <previous>0</previous>
  </vehicle>
"""
ANNOTATION = """<?xml version="1.0"?>
<annotation>
  <location>{place}</location>
  <time>{time}</time>
  <width>352</width>
  <height>240</height>
  <weather>{weather}</weather>
  <flow>0</flow>
{vehicles}</annotation>
"""


@dataclass
class Copy:
    """Where it is, and how many vehicles were drawn on each image."""

    root: Path
    counts: dict[Path, int]

    def sequence(self, folder: str, *, day: str = "2016/04/30", hour: int = 12, rain: bool = False, frames: int = FRAMES) -> None:
        """Frames of one folder, one a second; rain veils what is on them, and some annotations have a stray `&`."""
        place = self.root / folder
        place.mkdir(parents=True)
        rng = np.random.RandomState(sum(map(ord, folder)))
        for number in range(1, frames + 1):
            image = place / f"{number:06d}.jpg"
            count = int(rng.randint(0, 8))
            pixels = np.full((HEIGHT, WIDTH, 3), 40 + rng.randint(0, 2), dtype=np.uint8)
            vehicles = ""
            for i, cell in enumerate(rng.permutation(35)[:count]):
                left, top = 12 * (cell % 7) + 2, 12 * (cell // 7) + 2
                pixels[top : top + BOX, left : left + BOX] = 230
                vehicles += VEHICLE.format(id=i + 1, left=left, right=left + BOX, top=top, bottom=top + BOX)
            Image.fromarray(pixels // 2 + 60 if rain else pixels).save(image, quality=95)
            names = {"place": "5th & Main" if number % 3 == 0 else "5th &amp; Main", "weather": "Rain" if rain else "Sunny"}
            text = ANNOTATION.format(time=f"{day} {hour:02d}:00:{number:02d}", vehicles=vehicles, **names)
            image.with_suffix(".xml").write_text(text)
            self.counts[image] = count


def write_copy(root: Path) -> Copy:
    """All cameras of the three shifts, large vehicles in both places where the data set has them."""
    copy = Copy(root, {})
    for camera in CAMERAS:
        for day in (30, 31):
            copy.sequence(f"{camera}/{camera}-201605{day}-12", day=f"2016/05/{day}")
    copy.sequence("398/398-big_bus-mask1")
    for camera in BUS_CAMERAS[1:]:
        copy.sequence(f"bigbus/bigbus-{camera}")
    for camera in WEATHER_CAMERAS:
        copy.sequence(f"{camera}/{camera}-20160222-15", day="2016/02/22", hour=15)
        for hour in (9, 13, 14, 17):
            copy.sequence(f"{camera}/{camera}-20160223-{hour:02d}", day="2016/02/23", hour=hour, rain=hour >= 16)
    return copy


class Brightness(nn.Module):
    """A backbone whose first feature is the mean brightness, by which vehicles can be counted; it counts the images it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.drop = nn.Dropout(0.5)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        mean = x.mean((1, 2, 3))
        return self.drop(torch.stack([mean, x.amax((1, 2, 3))], 1) * self.scale)


def to_tensor(image: Image.Image) -> Tensor:
    """Pixels from 0 to 1, (3, h, w)."""
    return torch.from_numpy(np.array(image.resize((WIDTH, HEIGHT)), dtype=np.float32).transpose(2, 0, 1) / 255)
