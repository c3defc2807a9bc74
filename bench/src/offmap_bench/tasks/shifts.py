"""Tasks with natural shifts: tables, text, speech and photographs, each with OOD rows that its users may meet.

A folder holds the files as `text/clinc150_full.json.gz`, `tables/<name>.csv.gz`, `audio/spoken_digits_8k.npz` and
`images/caltech101_160_jpeg.npz`; by default it is the one that OFFMAP_DATA names.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from offmap.checks import require
from offmap.errors import DataError
from offmap_bench.cache import cache_folder
from offmap_bench.nets.encoders import encode_images, encode_texts, tokenize
from offmap_bench.tasks.features import cached_features
from offmap_bench.tasks.images import array
from offmap_bench.tasks.tabular import read_gzip
from offmap_bench.tasks.task import Array, Index, Pair, Task, data_root, split, table_task

MOST = 2_000
"""Rows of an OOD set, at most."""

# ------------------------------------------------------------------------------------------------ tables


def bike(seed: int = 0, folder: str | Path | None = None) -> Task:
    """Bicycles rented in an hour, as log(1 + n), by time of day and weather; neither date nor season is an input.

    In-distribution are spring, summer and autumn without rain or snow. OOD are winter, and rain and snow of the other seasons.
    """
    table = read_columns("bike_hour", folder)
    day, week = (2 * math.pi * table[name] / period for name, period in (("hr", 24), ("weekday", 7)))
    names = ("workingday", "holiday", "weathersit", "temp", "atemp", "hum", "windspeed")
    x = np.stack([np.sin(day), np.cos(day), np.sin(week), np.cos(week), *(table[name] for name in names)], 1)
    winter, wet = table["season"] == 1, table["weathersit"] >= 3
    ood = {"winter": winter & ~wet, "rain and snow": ~winter & wet}
    return cut_table("tables/bike/season", x, np.log1p(table["cnt"]), ~winter & ~wet, ood, seed)


def elec2(seed: int = 0, folder: str | Path | None = None) -> Task:
    """Whether the price of electricity in New South Wales is above its mean of the last day, by time, prices, demand, transfer.

    In-distribution are 36 weeks from the opening of the market with Victoria, OOD twelve weeks of the winter after them, and
    the last seven weeks. There are 336 half-hours in a week.
    """
    table = read_columns("elec2", folder)
    x = np.stack([column for name, column in table.items() if name != "class"], 1)
    week = (np.arange(len(x)) - 17_472) // 336  # 17,472: the first whole week with prices of Victoria
    known, ood = (week >= 0) & (week < 36), {"next winter": (week >= 57) & (week < 69), "last weeks": week >= 75}
    return cut_table("tables/elec2/later", x, table["class"].astype(np.int64), known, ood, seed)


def cut_table(
    name: str, x: Array, y: NDArray[Any], known: NDArray[np.bool_], ood: Mapping[str, NDArray[np.bool_]], seed: int
) -> Task:
    """Split the known rows at random."""
    parts = split(np.flatnonzero(known), seed, shares=(0.15, 0.15))
    others = {label: some(np.flatnonzero(rows), MOST, seed) for label, rows in ood.items()}
    return table_task(name, x, y, parts, others, likelihood="categorical" if y.dtype.kind == "i" else "gaussian")


def some(rows: Index, most: int, seed: int) -> Index:
    """At most so many of the rows, at random by the seed, in order."""
    return np.sort(np.random.RandomState(seed).permutation(rows)[:most])


def read_columns(name: str, folder: str | Path | None = None) -> dict[str, Array]:
    """Columns of `tables/<name>.csv.gz`, all of numbers; those of dates count days."""
    rows = list(csv.reader(io.StringIO(read_text(f"tables/{name}.csv.gz", folder))))
    days: dict[str, int] = {}
    try:
        return {
            name: np.array([days.setdefault(v, len(days)) if "/" in v else float(v) for v in values], np.float64)
            for name, *values in zip(*rows, strict=True)
        }
    except ValueError as error:
        raise DataError(f"Expected numbers below a header in tables/{name}.csv.gz, but it cannot be read: {error}.") from error


def read_text(name: str, folder: str | Path | None) -> str:
    """What a gzip file holds, as text."""
    path = find_file(name, folder)
    try:
        return read_gzip(path).decode("utf-8")
    except (OSError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise DataError(f"Expected gzip-compressed text at {path}, but it cannot be read: {error}.") from error


def find_file(name: str, folder: str | Path | None) -> Path:
    """The path of a file, which must be there."""
    path = (Path(folder) if folder is not None else data_root(name)) / name
    if not path.exists():
        raise DataError(f"Expected the data set at {path}, but there is no such file. Put it there, or set OFFMAP_DATA.")
    return path


# ------------------------------------------------------------------------------------------------ text

LENGTH = 24
"""Tokens of a text; one of a hundred has more, and is cut."""
TEXTS = {"train": 20, "val": 5, "test": 5}
"""Texts of each intent in the task of the whole encoder."""
UNKNOWN_TEXTS = 500


def clinc(seed: int = 0, folder: str | Path | None = None) -> Task:
    """150 intents of short requests, as embeddings of the sentence encoder, (n, 384); OOD are requests with no such intent."""
    texts, targets = read_clinc(folder)

    def embed(part: str) -> Tensor:
        key = hashlib.sha256(json.dumps(texts[part]).encode()).hexdigest()[:16]
        path = cache_folder() / "features" / f"clinc150-{part}-{key}.safetensors"
        return cached_features(path, lambda: encode_texts(texts[part]))

    train, valid, test = ((embed(part), targets[part]) for part in ("train", "val", "test"))
    ood = {"out of scope": embed("oos_test")}
    return Task("text/clinc150/head", train, valid, test, ood, likelihood="categorical", outputs=150)


def clinc_tokens(seed: int = 0, folder: str | Path | None = None) -> Task:
    """The same as tokens, {"input_ids", "attention_mask"}, for encoder and head together: fewer texts, at random by the seed."""
    texts, targets = read_clinc(folder)

    def part(name: str) -> Pair:
        rows = some_of_each(targets[name], TEXTS[name], seed)
        return tokenize([texts[name][row] for row in rows], LENGTH), targets[name][rows]

    chosen = some(np.arange(len(texts["oos_test"])), UNKNOWN_TEXTS, seed)
    ood: dict[str, Any] = {"out of scope": tokenize([texts["oos_test"][row] for row in chosen], LENGTH)}
    name = "text/clinc150/encoder"
    return Task(name, part("train"), part("val"), part("test"), ood, likelihood="categorical", outputs=150)


def read_clinc(folder: str | Path | None = None) -> tuple[dict[str, list[str]], dict[str, Tensor]]:
    """Texts of every part, and the numbers of their intents by name; texts out of scope have none."""
    content: dict[str, list[list[str]]] = json.loads(read_text("text/clinc150_full.json.gz", folder))
    number = {intent: place for place, intent in enumerate(sorted({intent for _, intent in content["train"]}))}
    texts = {part: [text for text, _ in rows] for part, rows in content.items()}
    return texts, {part: torch.tensor([number.get(intent, -1) for _, intent in rows]) for part, rows in content.items()}


def some_of_each(targets: Tensor, count: int, seed: int) -> Tensor:
    """Rows of at most so many examples of each class, at random by the seed, in order."""
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(targets)))
    return torch.cat([order[targets[order] == number][:count] for number in targets.unique()]).sort().values


# ------------------------------------------------------------------------------------------------ speech

RATE, WINDOW, HOP, FRAMES, BANDS = 8_000, 256, 128, 48, 40
"""Spectrograms: samples in a second, in a window and between two; windows (0.77 s) and bands of a picture."""
KNOWN_DIGITS, KNOWN_SPEAKERS = 7, 4


def spoken_digits(unseen: str, seed: int = 0, folder: str | Path | None = None) -> Task:
    """Which digit is said, by the spectrogram, (n, 1, 40, 48). Either three of ten digits are OOD or two of six speakers."""
    x, labels = read_speech(folder)
    values = np.unique(labels["digit" if unseen == "digits" else "speaker"])
    known = np.sort(np.random.RandomState(seed).permutation(values)[: KNOWN_DIGITS if unseen == "digits" else KNOWN_SPEAKERS])
    is_known = np.isin(labels["digit" if unseen == "digits" else "speaker"], known)
    classes = known if unseen == "digits" else np.unique(labels["digit"])
    y = np.searchsorted(classes, labels["digit"])
    rows = [torch.from_numpy(part) for part in split(np.flatnonzero(is_known), seed, shares=(0.2, 0.15))]
    mean, scale = x[rows[0]].mean(), x[rows[0]].std()
    x, y = (x - mean) / scale, torch.from_numpy(y.astype(np.int64))
    train, valid, test = ((x[part], y[part]) for part in rows)
    ood = {f"unseen {unseen}": x[torch.from_numpy(~is_known)]}
    return Task(f"sound/digits/unseen-{unseen}", train, valid, test, ood, likelihood="categorical", outputs=len(classes))


def read_speech(folder: str | Path | None = None) -> tuple[Tensor, dict[str, NDArray[Any]]]:
    """Spectrograms (n, 1, 40, 48) of all recordings, cut or filled with silence at the end; and who says what."""
    path = find_file("audio/spoken_digits_8k.npz", folder)
    samples, lengths = torch.from_numpy(array(path, "samples").astype(np.float32) / 32_768), array(path, "lengths")
    size = HOP * (FRAMES - 1) + WINDOW
    waves = torch.stack([F.pad(wave[:size], (0, max(0, size - len(wave)))) for wave in samples.split(lengths.tolist())])
    return log_mel(waves)[:, None], {name: array(path, name) for name in ("digit", "speaker")}


def log_mel(waves: Tensor) -> Tensor:
    """The logarithm of the power in bands of equal width in mel, (n, samples) -> (n, bands, windows)."""
    spectrum = torch.stft(waves, WINDOW, HOP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
    return (mel_bands() @ spectrum.abs().square()).add(1e-6).log()


def mel_bands() -> Tensor:
    """Triangular weights of the frequencies of a window in each band, (bands, frequencies)."""
    mel = torch.linspace(0, 2595 * math.log10(1 + RATE / 2 / 700), BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    frequencies = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    rise = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rise, fall).clamp(min=0)


# ------------------------------------------------------------------------------------------------ photographs

KNOWN_OBJECTS = 80
PHOTOS = {"train": 20, "valid": 4, "test": 6}
"""Photographs of each known class, of 30."""
FEW_PHOTOS = {"train": 5, "valid": 2, "test": 3}
"""The same for the whole net."""
FEW_UNKNOWN, FEW_CORRUPTED = 210, 120
SIDE = 224


def caltech(seed: int = 0, folder: str | Path | None = None) -> Task:
    """Photographs of 80 objects, others with every seed, as features of the image encoder, (n, 1280).

    OOD are 21 other objects, pictures of anything, and test photographs that are blurred, noisy or of low contrast.
    """
    rows, y = choose_photos(seed, folder)
    path = find_file(CALTECH, folder)
    x = photo_features(path)

    def corrupt(name: str) -> Tensor:
        at = cache_folder() / "features" / f"caltech101-{name}-{seed}-{photo_key(path)}.safetensors"
        return cached_features(at, lambda: encode_images(CORRUPTIONS[name](read_photos(path, rows["test"]))))

    train, valid, test = ((x[rows[part]], y[rows[part]]) for part in PHOTOS)
    ood = {name: x[rows[name]] for name in ("unknown classes", "background")} | {name: corrupt(name) for name in CORRUPTIONS}
    return Task("images/caltech101/head", train, valid, test, ood, likelihood="categorical", outputs=KNOWN_OBJECTS)


def caltech_pixels(seed: int = 0, folder: str | Path | None = None) -> Task:
    """Fewer of the same photographs, (n, 3, 224, 224), pixels from -1 to 1, for encoder and head together."""
    rows, y = choose_photos(seed, folder)
    path, chosen = find_file(CALTECH, folder), {part: rows[part] for part in PHOTOS}
    for part, count in FEW_PHOTOS.items():
        chosen[part] = chosen[part][some_of_each(y[chosen[part]], count, seed)]
    train, valid, test = ((read_photos(path, chosen[part]), y[chosen[part]]) for part in PHOTOS)
    unknown = rows["unknown classes"][:: len(rows["unknown classes"]) // FEW_UNKNOWN]
    changed = read_photos(path, rows["test"][:: len(rows["test"]) // FEW_CORRUPTED])
    ood = {"unknown classes": read_photos(path, unknown), "background": read_photos(path, rows["background"])}
    ood |= {name: change(changed) for name, change in CORRUPTIONS.items()}
    return Task("images/caltech101", train, valid, test, ood, likelihood="categorical", outputs=KNOWN_OBJECTS)


CALTECH = "images/caltech101_160_jpeg.npz"


def choose_photos(seed: int, folder: str | Path | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of the photographs of every part, and the numbers of all classes: known ones anew from 0, others below it."""
    path = find_file(CALTECH, folder)
    labels, names = array(path, "label"), array(path, "classes")
    background = int(np.flatnonzero(names == "BACKGROUND_Google")[0])
    objects = np.random.RandomState(seed).permutation([n for n in range(len(names)) if n != background])
    number = torch.full((len(names),), -1)
    number[torch.from_numpy(np.sort(objects[:KNOWN_OBJECTS]))] = torch.arange(KNOWN_OBJECTS)
    y, rows, start = number[torch.from_numpy(labels.astype(np.int64))], dict[str, Tensor](), 0
    order = torch.from_numpy(np.random.RandomState(seed + 1).permutation(len(y)))
    for part, count in PHOTOS.items():
        places = [order[y[order] == known][start : start + count] for known in range(KNOWN_OBJECTS)]
        rows[part], start = torch.cat(places).sort().values, start + count
    is_background = torch.from_numpy(labels == background)
    ood = {"unknown classes": (y < 0) & ~is_background, "background": is_background}
    return rows | {name: chosen.nonzero()[:, 0] for name, chosen in ood.items()}, y


def read_photos(path: Path, rows: Tensor) -> Tensor:
    """Photographs in the size and the range of the image encoder: (n, 3, 224, 224) from -1 to 1."""
    data, ends = read_bytes(path)
    image = require("PIL.Image", "images")

    def read_photo(row: int) -> Tensor:
        picture = image.open(io.BytesIO(data[ends[row] : ends[row + 1]].tobytes()), formats=("JPEG",)).convert("RGB")
        return torch.from_numpy(np.asarray(picture.resize((SIDE, SIDE), image.Resampling.BICUBIC)).copy()).movedim(2, 0)

    return torch.stack([read_photo(row) for row in rows.tolist()]).float().div(127.5).sub(1)


@lru_cache(maxsize=1)
def read_bytes(path: Path) -> tuple[NDArray[np.uint8], Index]:
    """The JPEG files of all photographs one after another, and where each begins."""
    return array(path, "data"), np.concatenate([[0], np.cumsum(array(path, "lengths"), dtype=np.int64)])


@cache
def photo_key(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)[0].tobytes()).hexdigest()[:16]


def photo_features(path: Path) -> Tensor:
    """Features of all photographs, (n, 1280), some at a time."""

    def compute() -> Tensor:
        every = torch.arange(len(read_bytes(path)[1]) - 1)
        return torch.cat([encode_images(read_photos(path, rows)) for rows in every.split(256)])

    return cached_features(cache_folder() / "features" / f"caltech101-{photo_key(path)}.safetensors", compute)


def blur(images: Tensor, width: float = 3.0) -> Tensor:
    """A Gaussian blur, of the width of the third severity in ImageNet-C."""
    places = torch.arange(-9.0, 10.0)
    kernel = places.square().div(-2 * width**2).exp()
    kernel = (kernel / kernel.sum()).repeat(images.shape[1], 1)
    wide = F.pad(images, (9, 9, 9, 9), mode="reflect")
    rows = F.conv2d(wide, kernel[:, None, :, None], groups=images.shape[1])
    return F.conv2d(rows, kernel[:, None, None, :], groups=images.shape[1])


def add_noise(images: Tensor, scale: float = 0.36) -> Tensor:
    """Gaussian noise, of the same severity; pixels stay between -1 and 1."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + scale * noise).clamp(-1, 1)


def lower_contrast(images: Tensor, share: float = 0.2) -> Tensor:
    """Each image drawn towards its mean, by the same severity."""
    mean = images.mean((2, 3), keepdim=True)
    return mean + share * (images - mean)


CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {"blur": blur, "noise": add_noise, "contrast": lower_contrast}

SHIFT_TASKS: dict[str, Callable[[int], Task]] = {
    "tables/bike/season": bike,
    "tables/elec2/later": elec2,
    "text/clinc150/head": clinc,
    "text/clinc150/encoder": clinc_tokens,
    "sound/digits/unseen-digits": partial(spoken_digits, "digits"),
    "sound/digits/unseen-speakers": partial(spoken_digits, "speakers"),
    "images/caltech101/head": caltech,
    "images/caltech101": caltech_pixels,
}
