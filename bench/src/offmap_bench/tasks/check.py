"""What tasks need, whether it is there, and how to get it where it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from offmap.errors import OffmapError
from offmap_bench.cache import read
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.citycam import REMEDY, Frame, cache_of, find_frames
from offmap_bench.tasks.download import offline
from offmap_bench.tasks.features import Extractor, open_image, standard
from offmap_bench.tasks.pretrained import RESNET50, resnet50, resnet50_path, weights

READY, LATER, MISSING = "ready", "later", "missing"


@dataclass(frozen=True)
class Finding:
    """What a task needs: "ready", "later" where a run makes it or manages without, "missing" where no run can start."""

    what: str
    state: str
    text: str


def check_task(name: str, seed: int = 0) -> list[Finding]:
    """Look for all that a task needs: CityCam without computing features, others by loading them, small downloads included.

    >>> check_task("moons")
    [Finding(what='data', state='ready', text='200 rows to train on')]
    """
    if name.startswith("citycam/"):
        return check_citycam(name.removeprefix("citycam/"), seed)
    nets = [part for part in name.split("/") if part.startswith("resnet")]
    findings = [probe("data", lambda: f"{len(task(name, seed).train[1]):,} rows to train on")]
    return findings + [probe("weights", lambda net=net: f"{len(weights(f'cifar10_{net}'))} tensors of {net}") for net in nets]


def probe(what: str, load: Callable[[], str]) -> Finding:
    """Return the words of `load`, or those of its error, which hold the remedy."""
    try:
        return Finding(what, READY, load())
    except OffmapError as error:
        return Finding(what, MISSING, str(error))


def check_citycam(
    shift: str, seed: int = 0, folder: str | Path | None = None, *, backbone: nn.Module | None = None,
    preprocess: Callable[[Any], Tensor] = standard, cache: str | Path | None = None,
) -> list[Finding]:  # fmt: skip
    """Look for cameras, annotations, images, weights and cached features of a shift; arguments are those of `citycam.load`."""
    found = find_frames(shift, seed, folder)
    if found.lost:
        frames = Finding("cameras", MISSING, f"no frames of {', '.join(found.lost)} below {found.root}. {REMEDY}")
    else:
        frames = Finding("cameras", READY, f"{found.images} frames of all {len(found.cameras)} below {found.root}")
    net, given = check_weights(backbone)
    extract = None if net is None else Extractor(net, cache_of(cache), preprocess)
    features, unreadable = check_features(found.parts, extract, cache_of(cache))
    many = len(found.damaged) + len(unreadable) > 0.1 * found.images
    damage = [describe_damage(*each, many=many) for each in (("annotations", found.damaged), ("images", unreadable))]
    return [frames, *(damage if found.images else ()), given, *([features] if found.parts else [])]


def describe_damage(what: str, damaged: Sequence[str], *, many: bool) -> Finding:
    """Count the files that cannot be used, and name the first ten; `many`: too many for a run."""
    if not damaged:
        return Finding(what, READY, "all can be read")
    more = f"; and {len(damaged) - 10} more" if len(damaged) > 10 else ""
    then = "a run refuses so many" if many else "a run leaves them out"
    text = f"{len(damaged)} cannot be used, {then}: {'; '.join(damaged[:10])}{more}. Get these files again."
    return Finding(what, MISSING if many else LATER, text)


def check_weights(backbone: nn.Module | None) -> tuple[nn.Module | None, Finding]:
    """The backbone, without a download, and what there is to say of its weights."""
    path = resnet50_path()
    if backbone is not None:
        return backbone, Finding("weights", READY, f"those of the {type(backbone).__name__} given")
    if not path.exists():
        state, then = (MISSING, "OFFMAP_OFFLINE forbids to download it") if offline() else (LATER, "a run downloads it, 98 MB")
        return None, Finding("weights", state, f"no file at {path}: {then}. By hand, put {RESNET50} there.")
    try:
        return resnet50(path), Finding("weights", READY, str(path))
    except OffmapError as error:
        return None, Finding("weights", MISSING, str(error))


def check_features(
    parts: Mapping[str, Sequence[tuple[Frame, bool]]], extract: Extractor | None, cache: Path
) -> tuple[Finding, list[str]]:
    """Whether each sequence has cached features, and the images that cannot be read; images with features are not read again."""
    unreadable, counts = list[str](), Counter[str]()
    for name, part in parts.items():
        images = [frame.image for frame, _ in part]
        cached = None if extract is None else read(extract.path(images, name))
        failures = (
            cached[0] if cached else {i: why for i, image in enumerate(images) if isinstance(why := open_image(image), str)}
        )
        unreadable += [f"{images[int(place)]}: {why}" for place, why in failures.items()]
        others = any(cache.glob(f"{name}-{'[0-9a-f]' * 20}.safetensors"))
        counts["current" if cached else "stale" if others else "absent"] += 1
    if counts["current"] == len(parts):
        return Finding("features", READY, f"of all {len(parts)} sequences in {cache}"), unreadable
    if extract is None:
        text = (
            f"{counts['stale']} of {len(parts)} sequences have some in {cache}; whether they are current, the weights will tell"
        )
    else:
        text = (
            f"{counts['current']} of {len(parts)} sequences are current in {cache}, {counts['stale']} were made from other "
            f"images, weights or preprocessing, {counts['absent']} are absent; a run computes what is not current"
        )
    return Finding("features", LATER, text), unreadable
