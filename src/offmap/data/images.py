"""Image classification with strange images near and far: MNIST and CIFAR-10, pixels from 0 to 1, (N, channels, side, side).

A folder holds `<file>.npz`, arrays of bytes: grey images (N, H, W), colour images (N, H, W, 3), and classes (N,). Strange images
are brought to the form of the familiar ones: resized (bilinear, antialiased), grey ones repeated in every channel, coloured ones
weighed into one (ITU-R 601).
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import Any
from zlib import error as ZlibError

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from offmap.data.task import Pair, Task
from offmap.errors import ConfigError, DataError, nearest

GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Source:
    """Where images are: a file, the names of its arrays, and one, if any, that marks classes to leave out."""

    file: str
    x: str = "x"
    y: str = "y"
    without: str | None = None


SOURCES = {
    "mnist train": Source("mnist", "x_train", "y_train"),
    "mnist": Source("mnist", "x_test", "y_test"),
    "fashion": Source("fashion_mnist", "x_test", "y_test"),
    "notmnist": Source("notmnist_test"),
    "omniglot": Source("omniglot_small_28"),
    "cifar10 train": Source("cifar10_train20k"),
    "cifar10": Source("cifar10_test"),
    "tinyimagenet": Source("tinyimagenet_val5k_32"),
    "tinyimagenet apart": Source("tinyimagenet_val5k_32", without="cifar10_overlap"),
    "textures": Source("dtd10_32"),
    "scenes": Source("scenes_intel_test_32"),
}


@dataclass(frozen=True)
class Setting:
    """Familiar images and the strange ones beside them: {name: source}. `valid` images are kept from training or test ones."""

    form: tuple[int, int, int]
    train: str
    test: str
    near: dict[str, str]
    far: dict[str, str]
    valid: int
    valid_from: str


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
}  # fmt: skip
CLASSES = 10
KNOWN = 6
"""Classes that an open-set task shows in training; the other four are strange."""


def images(name: str, seed: int = 0, folder: str | Path | None = None, *, rows: int | None = None) -> Task:
    """MNIST (validation: 5,000 training images, at random by `seed`) or CIFAR-10 (20,000 training images; validation: the first
    2,000 test images, because given nets have seen all training ones; testing: the other 8,000), with near and far strange ones.

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
    strange = {label: pair(source, setting.form, folder, rows)[0] for label, source in (setting.near | setting.far).items()}
    return Task(
        name=f"images/{name}",
        train=rest if setting.valid_from == "train" else train,  # pyright: ignore[reportArgumentType]
        valid=valid,  # pyright: ignore[reportArgumentType]
        test=rest if setting.valid_from == "test" else test,  # pyright: ignore[reportArgumentType]
        ood=strange,
        likelihood="categorical",
        outputs=CLASSES,
    )


def open_set(name: str, seed: int = 0, folder: str | Path | None = None, *, rows: int | None = None) -> Task:
    """Six of the ten classes of `images(name)`, at random by `seed` and numbered anew, are familiar; test images of the other
    four are strange.
    """
    whole = images(name, seed, folder, rows=rows)
    known = np.sort(np.random.RandomState(seed).permutation(CLASSES)[:KNOWN])
    number = torch.full((CLASSES,), -1)
    number[torch.from_numpy(known)] = torch.arange(KNOWN)

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
        outputs=KNOWN,
    )


def setting_of(name: str) -> Setting:
    """The setting of that name, whose `near` and `far` say which strange images are which."""
    if name not in SETTINGS:
        raise ConfigError(f"Expected the name of an image task to be {nearest(name, SETTINGS)}, but got {name!r}.")
    return SETTINGS[name]


def pair(source: str, form: tuple[int, int, int], folder: str | Path | None = None, rows: int | None = None) -> Pair:
    """Images of a source in the form (channels, height, width), and their classes."""
    at = SOURCES[source]
    path = image_folder(folder) / f"{at.file}.npz"
    x, y = array(path, at.x, rows), array(path, at.y, rows)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3) or y.shape != x.shape[:1]:
        raise DataError(
            f"Expected images (N, H, W) or (N, H, W, 3) of dtype uint8 and N classes at {path}, but `{at.x}` is {x.shape} of "
            f"dtype {x.dtype} and `{at.y}` is {y.shape}."
        )
    if at.without is not None:
        kept = ~array(path, at.without)[y]
        x, y = x[kept], y[kept]
    return shaped(torch.from_numpy(x), form), torch.from_numpy(y.astype(np.int64))


def shaped(x: Tensor, form: tuple[int, int, int], step: int = 1024) -> Tensor:
    """Bytes (N, H, W) or (N, H, W, 3) as float32 from 0 to 1 in the form (channels, height, width): (N, *form).

    >>> shaped(torch.full((2, 4, 4, 3), 255, dtype=torch.uint8), (1, 2, 2)).flatten()
    tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """
    whole = torch.empty((len(x), *form))
    for start in range(0, len(x), step):
        part = x[start : start + step].float() / 255
        part = part.unsqueeze(1) if part.ndim == 3 else part.movedim(3, 1)
        if part.shape[1] != form[0]:
            part = (part * torch.tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True) if form[0] == 1 else part
        if part.shape[2:] != form[1:]:
            part = F.interpolate(part, form[1:], mode="bilinear", antialias=True)
        whole[start : start + step] = part.expand(-1, *form)
    return whole


def array(path: Path, name: str, rows: int | None = None) -> NDArray[Any]:
    """One array of an npz file, or its first rows: the rest is not even unpacked."""
    try:
        with zipfile.ZipFile(path) as file, file.open(f"{name}.npy") as stream:
            if rows is None:
                return np.lib.format.read_array(stream, allow_pickle=False)
            version = np.lib.format.read_magic(stream)
            head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, columns, dtype = head(stream)
            if columns or dtype.hasobject:
                raise ValueError(f"`{name}` is not a plain array in rows")
            shape = (min(rows, shape[0]), *shape[1:])
            return np.frombuffer(stream.read(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
    except FileNotFoundError as error:
        raise DataError(
            f"Expected images at {path}, but there is no such file. Put it there, or set OFFMAP_DATA to the folder that has it "
            "in its folder `images`."
        ) from error
    except KeyError as error:
        raise DataError(f"Expected an array `{name}` at {path}, but it has none.") from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, LZMAError, ZlibError) as error:
        raise DataError(f"Expected an npz file with an array `{name}` at {path}, but it cannot be read: {error}.") from error


def image_folder(folder: str | Path | None) -> Path:
    """The given folder, or `images` below OFFMAP_DATA."""
    return Path(folder) if folder is not None else data_root("images/<file>.npz") / "images"


def data_root(holds: str) -> Path:
    """The folder that OFFMAP_DATA names."""
    root = os.environ.get("OFFMAP_DATA")
    if not root:
        raise DataError(
            f"Expected OFFMAP_DATA to name the folder of downloaded data sets, but it is not set. Set it to a folder that holds "
            f"`{holds}`, or pass `folder=`."
        )
    return Path(root)
