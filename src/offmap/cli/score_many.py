"""`offmap score` of a folder: what is asked, what is told meanwhile and at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import typer

from offmap.cli.load import load_guard
from offmap.cli.options import Misuse, misused, note, tell
from offmap.cli.score_folder import Folder, FolderError, read_folder
from offmap.cli.score_jobs import Done, Order, Progress, digest, score_folder
from offmap.data.tables.images import ImageTransform
from offmap.distributed.pool import Pool
from offmap.errors import ConfigError
from offmap.progress import bar


@dataclass(frozen=True)
class Ask:
    """What `offmap score` is asked of tables and folders alike."""

    guard: Path
    net: str | None
    weights: tuple[Path, ...]
    trust_net: bool
    keep: tuple[str, ...]
    drop: tuple[str, ...]
    separator: str | None
    quiet: bool
    as_json: bool


def score_all(
    ask: Ask, data: Path, out: Path, *, pool: Pool, resume: bool, image: tuple[str | None, str | None, str | None]
) -> None:
    """Score a folder. What failed is listed at the end, exit code 1; the rest is done all the same."""
    folder = read_folder(data)
    form = _form(folder, data, *image)
    if folder.images and (ask.keep or ask.drop or ask.separator):
        raise Misuse(f"Expected --keep, --drop and --separator with tables, but {data} holds images.")
    if folder.others:
        note(f"{len(folder.others)} files of {data} are left out, such as {folder.others[0]}.", ask.quiet)
    guard, schema = load_guard(ask.guard, ask.net, ask.weights, ask.trust_net)
    order = Order(data.absolute(), out.absolute(), digest(ask.guard), schema, ask.keep, ask.drop, ask.separator, form)
    start = time.perf_counter()
    with bar("Scoring", len(folder.pieces), show=False if ask.quiet else None) as advance:
        seen: dict[int, Progress] = {}

        def heard(number: int, progress: Progress) -> None:
            seen[number] = progress
            speed = sum(each.rows for each in seen.values()) / max(time.perf_counter() - start, 1e-9)
            advance(sum(each.ended for each in seen.values()), f"{speed:,.0f} rows/s", total=len(folder.pieces))

        with misused(FolderError):
            done = score_folder(guard, order, folder, pool=pool, resume=resume, report=heard)
    _tell(ask, out, done, guard.threshold, time.perf_counter() - start)


def _tell(ask: Ask, out: Path, done: list[Done], threshold: float, seconds: float) -> None:
    rows, flagged, before = sum(d.rows for d in done), sum(d.off_map for d in done), sum(d.before for d in done)
    failed = {file: why for each in done for file, why in each.failed.items()}
    spare = sorted({name for each in done for name in each.spare})
    if spare:
        more = ", …" * (len(spare) > 8)
        note(f"Some tables have columns that the guard does not use: {', '.join(spare[:8])}{more}.", ask.quiet)
    for file, why in failed.items():
        typer.echo(f"Failed: {file}: {why}", err=True)
    files = sum(d.rows > 0 for d in done)
    record = {
        "out": out, "files": files, "before": before, "rows": rows, "off_map": flagged, "threshold": threshold,
        "seconds": seconds, "rows_per_second": rows / seconds, "failed": failed,
    }  # fmt: skip
    text = f"{rows:,} rows in {files} files, {before} of them there before, {seconds:.1f} s, {flagged:,} rows off the map"
    tell(ask.as_json, record, f"{text}, {len(failed)} inputs failed. The scores are in {out}")
    if failed:
        raise typer.Exit(1)


def _form(folder: Folder, data: Path, image: str | None, mean: str | None, std: str | None) -> ImageTransform | None:
    """How images become inputs: the user says it, for a guard does not know."""
    if not folder.images:
        if image or mean or std:
            raise Misuse(f"Expected --image, --mean and --std with images, but {data} holds tables.")
        return None
    if image is None:
        raise Misuse(f"{data} holds images: pass what the net takes as --image CxHxW, such as --image 3x32x32.")
    try:
        channels, height, width = (int(number) for number in image.lower().split("x"))
        numbers = [tuple(float(number) for number in (text or "").split(",") if number.strip()) for text in (mean, std)]
        return ImageTransform((channels, height, width), *numbers)
    except ConfigError as error:
        raise Misuse(str(error)) from error
    except ValueError as error:
        raise Misuse(
            f"Expected --image as CxHxW, such as 3x32x32, --mean and --std as numbers with commas, but got {image!r}, {mean!r} "
            f"and {std!r}."
        ) from error
