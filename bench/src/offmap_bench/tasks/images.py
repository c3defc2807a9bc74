"""Image classification with OOD images near and far, pixels from 0 to 1, (N, channels, side, side).

A folder holds `<file>.npz`, arrays of bytes: grey images (N, H, W), colour images (N, H, W, 3), and classes (N,); or a folder
`<file>` of pictures (`data/pixels.py`). OOD images are brought to the form of the in-distribution ones: resized (bilinear,
antialiased), grey ones repeated in every channel, coloured ones weighed into one (ITU-R 601).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offmap.errors import ConfigError, nearest
from offmap_bench.tasks.pixels import pair
from offmap_bench.tasks.task import Pair, Task


@dataclass(frozen=True)
class Setting:
    """In-distribution images and the OOD ones beside them: {name: source}. `valid` images are kept from training or test ones.

    Of the `classes`, an open-set task shows `known` in training; the others are OOD.
    """

    form: tuple[int, int, int]
    train: str
    test: str
    near: dict[str, str]
    far: dict[str, str]
    valid: int
    valid_from: str
    classes: int = 10
    known: int = 6


FAR = {"mnist": "mnist", "svhn": "svhn", "textures": "dtd", "places365": "places365"}

SETTINGS = {
    "mnist": Setting(
        (1, 28, 28), "mnist train", "mnist",
        {"notmnist": "notmnist", "fashion": "fashion"},
        {"cifar10": "cifar10", "tinyimagenet": "tinyimagenet", "textures": "textures", "scenes": "scenes"},
        5_000, "train",
    ),
    "cifar10": Setting(
        (3, 32, 32), "cifar10 train", "cifar10",
        {"tinyimagenet": "tinyimagenet apart"},
        {"mnist": "mnist", "textures": "textures", "scenes": "scenes"},
        2_000, "test",
    ),
    "openood-mnist": Setting(
        (1, 28, 28), "mnist train", "mnist",
        {"notmnist": "notmnist", "fashion": "fashion"},
        {"cifar10": "cifar10", "tin": "tin", "textures": "dtd", "places365": "places365"},
        5_000, "train",
    ),
    "openood-cifar10": Setting((3, 32, 32), "cifar10 all", "cifar10", {"cifar100": "cifar100", "tin": "tin"}, FAR, 1_000, "test"),
    "openood-cifar100": Setting(
        (3, 32, 32), "cifar100 train", "cifar100", {"cifar10": "cifar10", "tin": "tin"}, FAR, 1_000, "test", 100, 50
    ),
    "openood-tin": Setting((3, 64, 64), "tin train", "tin", {}, {}, 1_000, "test", 200, 20),
}  # fmt: skip
"""Tasks by name; those of OpenOOD need files that a user puts there, and the last is an open-set task only."""

FEW = {"train": 5_000, "valid": 500, "test": 500, "OOD": 500}
"""Images of each part of a small task."""


def images(name: str, seed: int = 0, folder: str | Path | None = None, *, rows: int | None = None, strange: bool = True) -> Task:
    """MNIST (validation: 5,000 training images, at random by `seed`) or CIFAR-10 (20,000 training images; validation: the first
    2,000 test images, because given nets have seen all training ones; testing: the other 8,000), with near and far OOD ones.

    `folder` is by default `images` below the folder that OFFMAP_DATA names; only the first `rows` images of every file are read.
    """
    setting = setting_of(name)
    train, test = (pair(source, setting.form, folder, rows) for source in (setting.train, setting.test))
    kept, cut = (train, setting.valid) if setting.valid_from == "train" else (test, setting.valid)
    if len(kept[1]) <= cut:
        cut = len(kept[1]) // 4
    order = torch.arange(len(kept[1]))
    if setting.valid_from == "train":
        order = torch.from_numpy(np.random.RandomState(seed).permutation(len(order)))
    valid, rest = (tuple(t[part] for t in kept) for part in (order[:cut], order[cut:].sort().values))
    others = setting.near | setting.far if strange else {}
    ood = {label: pair(source, setting.form, folder, rows)[0] for label, source in others.items()}
    return Task(
        name=f"images/{name}",
        train=rest if setting.valid_from == "train" else train,  # pyright: ignore[reportArgumentType]
        valid=valid,  # pyright: ignore[reportArgumentType]
        test=rest if setting.valid_from == "test" else test,  # pyright: ignore[reportArgumentType]
        ood=ood,
        likelihood="categorical",
        outputs=setting.classes,
    )


def open_set(name: str, seed: int = 0, folder: str | Path | None = None, *, rows: int | None = None) -> Task:
    """Some of the classes of `images(name)` (six of ten), at random by `seed` and numbered anew, are in-distribution; test images of the
    others are OOD.
    """
    setting, whole = setting_of(name), images(name, seed, folder, rows=rows, strange=False)
    known = np.sort(np.random.RandomState(seed).permutation(setting.classes)[: setting.known])
    number = torch.full((setting.classes,), -1)
    number[torch.from_numpy(known)] = torch.arange(setting.known)

    def familiar(part: Pair) -> Pair:
        x, y = part[0], number[part[1]]
        return x[y >= 0], y[y >= 0]

    return Task(
        name=f"images/{name}/open",
        train=familiar(whole.train),
        valid=familiar(whole.valid),
        test=familiar(whole.test),
        ood={"unknown classes": whole.test[0][number[whole.test[1]] < 0]},
        likelihood="categorical",
        outputs=setting.known,
    )


def few(whole: Callable[[int], Task], seed: int = 0) -> Task:
    """Some images of every part of a task, at even distances."""
    task = whole(seed)

    def some(part: str, x: Tensor) -> Tensor:
        return x[torch.arange(min(FEW[part], len(x))) * len(x) // min(FEW[part], len(x))]

    def both(part: str, rows: Pair) -> Pair:
        return some(part, rows[0]), some(part, rows[1])

    parts = {part: both(part, rows) for part, rows in (("train", task.train), ("valid", task.valid), ("test", task.test))}
    strange = {label: some("OOD", x) for label, x in task.ood.items()}
    return replace(task, name=f"{task.name}/few", ood=strange, **parts)


def renamed(whole: Callable[[int], Task], name: str, seed: int = 0) -> Task:
    """The same task under another name, which may say more, such as whose net is to be used."""
    return replace(whole(seed), name=name)


def setting_of(name: str) -> Setting:
    """The setting of that name, whose `near` and `far` say which OOD images are which."""
    if name not in SETTINGS:
        raise ConfigError(f"Expected the name of an image task to be {nearest(name, SETTINGS)}, but got {name!r}.")
    return SETTINGS[name]
