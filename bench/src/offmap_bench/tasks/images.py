"""Image classification with OOD images near and far, pixels from 0 to 1, (N, channels, side, side).

A folder holds `<file>.npz`, arrays of bytes: grey images (N, H, W), colour images (N, H, W, 3), and classes (N,); or a folder
`<file>` with a folder of images for every class. OOD images take the form of the in-distribution ones: resized (bilinear,
antialiased), grey ones repeated in every channel, coloured ones weighed into one (ITU-R 601).
"""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from offmap_bench.tasks.features import open_image
from offmap_bench.tasks.tabular import check_size
from offmap_bench.tasks.task import Pair, Task, check_name, data_root

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("images.toml").read_text(encoding="utf-8"))
SOURCES, OPENOOD = _TABLES["sources"], _TABLES["openood"]


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


SETTINGS = {name: Setting(**fields | {"form": tuple(fields["form"])}) for name, fields in _TABLES["settings"].items()}
FEW = {"train": 5_000, "valid": 500, "test": 500, "OOD": 500}
"""Images of each part of a small task."""
MEDIUM = {"train": 10_000, "valid": 2_000, "test": 2_000, "OOD": 1_000}
"""Images of each part of a task that is scored by slow methods too."""


def images(name: str, seed: int = 0, folder: str | Path | None = None, *, rows: int | None = None, ood: bool = True) -> Task:
    """MNIST (validation: 5,000 training images, at random by `seed`) or CIFAR-10 (20,000 training images; validation: the first
    2,000 test images, because given nets have seen all training ones; testing: the other 8,000), with near and far OOD ones.

    `folder` is by default `images` below the folder that OFFMAP_DATA names; only the first `rows` images of every file are read.
    """
    setting = setting_of(name)
    train, test = (read_pair(source, setting.form, folder, rows) for source in (setting.train, setting.test))
    from_train = setting.valid_from == "train"
    x, y = train if from_train else test
    cut = setting.valid if len(y) > setting.valid else len(y) // 4
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(y))) if from_train else torch.arange(len(y))
    valid, rest = ((x[part], y[part]) for part in (order[:cut], order[cut:].sort().values))
    others = setting.near | setting.far if ood else {}
    sets = {label: read_pair(source, setting.form, folder, rows)[0] for label, source in others.items()}
    train, test = (rest, test) if from_train else (train, rest)
    return Task(f"images/{name}", train, valid, test, sets, likelihood="categorical", outputs=setting.classes)


def open_set(name: str, seed: int = 0, folder: str | Path | None = None, *, rows: int | None = None) -> Task:
    """Some of the classes of `images(name)` (six of ten), at random by `seed` and numbered anew, are in-distribution; test images
    of the others are OOD.
    """
    setting, task = setting_of(name), images(name, seed, folder, rows=rows, ood=False)
    classes = np.sort(np.random.RandomState(seed).permutation(setting.classes)[: setting.known])
    number = torch.full((setting.classes,), -1)
    number[torch.from_numpy(classes)] = torch.arange(setting.known)

    def renumber(part: Pair) -> Pair:
        x, y = part[0], number[part[1]]
        return x[y >= 0], y[y >= 0]

    train, valid, test = (renumber(part) for part in (task.train, task.valid, task.test))
    ood = {"unknown classes": task.test[0][number[task.test[1]] < 0]}
    return Task(f"images/{name}/open", train, valid, test, ood, likelihood="categorical", outputs=setting.known)


def thin_out(make_task: Callable[[int], Task], sizes: Mapping[str, int], suffix: str, seed: int = 0) -> Task:
    """At most so many images of every part of a task, at even distances; its net is the one of the whole task."""
    task = make_task(seed)

    def some(part: str, x: Tensor) -> Tensor:
        return x[torch.arange(min(sizes[part], len(x))) * len(x) // min(sizes[part], len(x))]

    train, valid, test = ((some(p, getattr(task, p)[0]), some(p, getattr(task, p)[1])) for p in ("train", "valid", "test"))
    ood = {label: some("OOD", x) for label, x in task.ood.items()}
    return replace(task, name=f"{task.name}/{suffix}", train=train, valid=valid, test=test, ood=ood)


def rename_task(make_task: Callable[[int], Task], name: str, seed: int = 0) -> Task:
    """The same task under another name, which may say more, such as whose net is to be used."""
    return replace(make_task(seed), name=name)


def setting_of(name: str) -> Setting:
    """The setting of that name, whose `near` and `far` say which OOD images are which."""
    return SETTINGS[check_name("the name of an image task to be", name, SETTINGS)]


# ------------------------------------------------------------------------------------------------ files


def read_pair(source: str, form: tuple[int, int, int], folder: str | Path | None = None, rows: int | None = None) -> Pair:
    """Images of a source in the form (channels, height, width), and their classes."""
    at: dict[str, str] = {"x": "x", "y": "y"} | (SOURCES | OPENOOD)[source]
    root = Path(folder) if folder is not None else data_root("images/<file>.npz") / "images"
    if (root / at["file"]).is_dir():
        return read_folder(root / at["file"], form, rows)
    path = root / f"{at['file']}.npz"
    x, y = array(path, at["x"], rows), array(path, at["y"], rows)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3) or y.shape != x.shape[:1]:
        raise DataError(
            f"Expected images (N, H, W) or (N, H, W, 3) of dtype uint8 and N classes at {path}, but `{at['x']}` is {x.shape} of "
            f"dtype {x.dtype} and `{at['y']}` is {y.shape}."
        )
    if "without" in at:
        shown = ~array(path, at["without"])[y]
        x, y = x[shown], y[shown]
    return resize_images(torch.from_numpy(x), form), torch.from_numpy(y.astype(np.int64))


def read_folder(folder: Path, form: tuple[int, int, int], rows: int | None = None) -> Pair:
    """Images `<class>/<any>.png` or .jpg, by name, the middle square of each in the form; classes are numbered by name.

    Of more than `rows` images, so many at even distances are read.
    """
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(path, number) for number, name in enumerate(classes)
             for path in sorted((folder / name).rglob("*")) if path.suffix.lower() in (".png", ".jpg", ".jpeg")]  # fmt: skip
    if not files:
        raise DataError(f"Expected images at {folder}/<class>/<name>.png or .jpg, but there are none.")
    if rows is not None and len(files) > rows:
        files = [files[place * len(files) // rows] for place in range(rows)]
    return torch.cat([read_image(path, form) for path, _ in files]), torch.tensor([number for _, number in files])


def read_image(path: Path, form: tuple[int, int, int]) -> Tensor:
    """The middle square of an image, (1, *form)."""
    image = open_image(path)
    if isinstance(image, str):
        raise DataError(f"Expected an image at {path}, but it {image}. Replace or remove it.")
    side, width, height = min(image.size), *image.size
    left, top = (width - side) // 2, (height - side) // 2
    pixels = np.asarray(image.crop((left, top, left + side, top + side)))
    return resize_images(torch.from_numpy(pixels.copy())[None], form)


def array(path: Path, name: str, rows: int | None = None) -> NDArray[Any]:
    """One array of an npz file, or its first rows."""
    try:
        with zipfile.ZipFile(path) as file, file.open(f"{name}.npy") as stream:
            check_size(path, file.getinfo(f"{name}.npy").file_size)
            return np.lib.format.read_array(stream, allow_pickle=False)[:rows]
    except FileNotFoundError as error:
        raise DataError(
            f"Expected images at {path}, but there is no such file. Put it there, or set OFFMAP_DATA to the folder that has it "
            f"in its folder `images`; a folder `{path.stem}` of images, `<class>/<name>.png`, will do as well."
        ) from error
    except KeyError as error:
        raise DataError(f"Expected an array `{name}` at {path}, but it has none.") from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, LZMAError, ZlibError) as error:
        raise DataError(f"Expected an npz file with an array `{name}` at {path}, but it cannot be read: {error}.") from error
