"""What is cached of work, trained models and features of images: when cut or changed, it is named and made again."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checks.trust import Check
from faults.damage import damage
from faults.places import shared_folder
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner.base_models import Recipe, models
from offmap_bench.runner.run import captured_warnings
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.features import Extractor


def _hosts(folder: Path) -> list[Tensor]:
    recipe = Recipe(hidden=(6,), members=2, training=deep_ensemble.Config(steps=4, check_every=2))
    return [p.detach() for net in models(task("regression", 0), 0, recipe, folder) for p in net.parameters()]


def _features(folder: Path) -> list[Tensor]:
    backbone = nn.Sequential(nn.AvgPool2d(16), nn.Flatten())
    return [Extractor(backbone, folder)(_images(), "frames")[0]]


@cache
def _images() -> list[Path]:
    image, folder = pytest.importorskip("PIL.Image"), shared_folder()
    for number in range(3):
        pixels = np.random.RandomState(number).randint(0, 256, (20, 30, 3)).astype(np.uint8)
        image.fromarray(pixels).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


KINDS = {"models": _hosts, "features": _features}


@cache
def _make(kind: str) -> tuple[Path, list[Tensor], bytes]:
    """The file's name, what was made, and the file."""
    folder = shared_folder()
    made = KINDS[kind](folder)
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path.relative_to(folder), made, path.read_bytes()


def trial(seed: int, folder: Path) -> str:
    rng = random.Random(seed)
    kind = rng.choice(sorted(KINDS))
    name, expected, whole = _make(kind)
    what, content = damage(whole, seed, rng)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with captured_warnings() as said:
        found = KINDS[kind](folder)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (sentence,) = said
    assert str(path) in sentence
    with captured_warnings() as said:
        assert all(torch.equal(a, b) for a, b in zip(KINDS[kind](folder), expected, strict=True))
    assert said == []
    return f"{kind} {what}, named and made again"


CHECK = Check(
    "Trained models and features on disk that were cut or changed are named, and made again.", trial, limit=60.0, quick=8
)
