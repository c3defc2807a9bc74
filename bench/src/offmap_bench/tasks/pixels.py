"""Pixels from files: `<file>.npz` with arrays of bytes, or a folder `<file>` with a folder of pictures for every class."""

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
from numpy.typing import NDArray
from torch import Tensor

from offmap.data.tables.images import resize_images
from offmap.errors import DataError
from offmap_bench.tasks.columns import check_size
from offmap_bench.tasks.features import opened
from offmap_bench.tasks.task import Pair

SUFFIXES = (".png", ".jpg", ".jpeg")


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

OPENOOD = {
    "cifar10 all": Source("cifar10_train"),
    "cifar100 train": Source("cifar100_train"),
    "cifar100": Source("cifar100_test"),
    "svhn": Source("svhn_test"),
    "places365": Source("places365_test"),
    "dtd": Source("dtd"),
    "tin train": Source("tinyimagenet_train"),
    "tin": Source("tinyimagenet_test"),
}
"""What the whole of OpenOOD needs beside the others, from a user's folder."""


def pair(source: str, form: tuple[int, int, int], folder: str | Path | None = None, rows: int | None = None) -> Pair:
    """Images of a source in the form (channels, height, width), and their classes."""
    at = (SOURCES | OPENOOD)[source]
    pictures = image_folder(folder) / at.file
    if pictures.is_dir():
        return pictured(pictures, form, rows)
    path = pictures.with_name(f"{at.file}.npz")
    x, y = array(path, at.x, rows), array(path, at.y, rows)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3) or y.shape != x.shape[:1]:
        raise DataError(
            f"Expected images (N, H, W) or (N, H, W, 3) of dtype uint8 and N classes at {path}, but `{at.x}` is {x.shape} of "
            f"dtype {x.dtype} and `{at.y}` is {y.shape}."
        )
    if at.without is not None:
        kept = ~array(path, at.without)[y]
        x, y = x[kept], y[kept]
    return resize_images(torch.from_numpy(x), form), torch.from_numpy(y.astype(np.int64))


def pictured(folder: Path, form: tuple[int, int, int], rows: int | None = None) -> Pair:
    """Pictures `<class>/<any>.png` or .jpg, by name, the middle square of each in the form; classes are numbered by name.

    Of more than `rows` pictures, so many at even distances are read.
    """
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(path, number) for number, name in enumerate(classes)
             for path in sorted((folder / name).rglob("*")) if path.suffix.lower() in SUFFIXES]  # fmt: skip
    if not files:
        raise DataError(f"Expected pictures at {folder}/<class>/<name>.png or .jpg, but there are none.")
    if rows is not None and len(files) > rows:
        files = [files[place * len(files) // rows] for place in range(rows)]
    return torch.cat([one_picture(path, form) for path, _ in files]), torch.tensor([number for _, number in files])


def one_picture(path: Path, form: tuple[int, int, int]) -> Tensor:
    """The middle square of a picture, (1, *form)."""
    image = opened(path)
    if isinstance(image, str):
        raise DataError(f"Expected a picture at {path}, but it {image}. Replace or remove it.")
    side, width, height = min(image.size), *image.size
    left, top = (width - side) // 2, (height - side) // 2
    pixels = np.asarray(image.crop((left, top, left + side, top + side)))
    return resize_images(torch.from_numpy(pixels.copy())[None], form)


def array(path: Path, name: str, rows: int | None = None) -> NDArray[Any]:
    """One array of an npz file, or its first rows: the rest is not even unpacked."""
    try:
        with zipfile.ZipFile(path) as file, file.open(f"{name}.npy") as stream:
            if rows is None:
                check_size(path, file.getinfo(f"{name}.npy").file_size)
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
            f"in its folder `images`; a folder `{path.stem}` of pictures, `<class>/<name>.png`, will do as well."
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
