"""`offmap score`: a table of any length in, a table of scores out; or a folder of tables or images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from offmap.cli import options as opt
from offmap.cli import scoring
from offmap.cli.models import GuardSource
from offmap.cli.options import UsageError, option, print_note, print_result, usage_errors
from offmap.cli.scoring import ScoreOptions, Shard
from offmap.data.tables.images import SUFFIXES, ImageTransform
from offmap.data.tables.schema import ColumnError
from offmap.data.tables.table import STDOUT, find_suffix, open_table
from offmap.distributed.jobs import Pool
from offmap.progress import bar

Data = Annotated[
    Path, typer.Argument(metavar="DATA", help="Table (.csv, .csv.gz, .parquet or .npz), or folder of tables or images.")
]


def score(
    guard: opt.GuardFile,
    data: Data,
    out: Annotated[
        Path, option("Output .parquet, .csv or .npz, or - for CSV on standard output; a folder for folders.", None, "--out", "-o")
    ],
    model: opt.Model = None,
    weights: opt.Weights = None,
    trust_model: opt.TrustModel = False,
    keep: Annotated[list[str] | None, option("Column to copy to the output, such as an id (repeatable).", "COLUMN")] = None,
    drop: opt.Drop = None,
    separator: opt.Separator = None,
    engine: opt.EngineName = "local",
    jobs: opt.Jobs = 1,
    address: opt.Address = None,
    resume: Annotated[bool, option("Folders: keep the scores that are finished in --out.", None, "--resume")] = False,
    image: Annotated[
        str | None, option("Images: input shape of the model, such as 3x32x32; images are resized.", "CxHxW")
    ] = None,
    mean: Annotated[str | None, option("Images: per-channel mean for normalisation (pixels are 0 to 1).", "M,…")] = None,
    std: Annotated[str | None, option("Images: per-channel std for normalisation.", "S,…")] = None,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Score the rows of a table of any length: write score, OOD flag, p-value and prediction of each row.

    Columns are found by their names at fit time, in any order. The output file appears only once it is complete. A folder gives
    one file of scores for each table, or for every 256 images, in the folder --out.

    \b
    Examples:
      offmap score guard.safetensors new.parquet --model my_module:make_model -o scores.parquet
      offmap score guard.safetensors new.csv --model my_module:make_model --keep id -o - | sort -t, -k2 -g
      offmap score guard.safetensors days/ --model my_module:make_model --engine ray --jobs 8 -o scores/
    """  # noqa: D301
    source = GuardSource(guard, model, tuple(weights or ()), trust_model)
    options = ScoreOptions(tuple(keep or ()), tuple(drop or ()), separator)
    if not data.is_dir() and (engine, jobs, address, resume, image, mean, std) == ("local", 1, None, False, None, None, None):
        return _score_table(source, data, out, options, quiet, as_json)
    with usage_errors():
        pool = Pool(engine, jobs, address)
    if not data.is_dir():
        raise UsageError(f"Expected --engine ray, --jobs, --resume, --image, --mean and --std with a folder, but {data} is none.")
    shards, ignored = scoring.list_shards(data)
    if ignored:
        print_note(f"{len(ignored)} files of {data} are left out, such as {ignored[0]}.", quiet)
    transform = _parse_transform(shards, data, options, image, mean, std)
    _score_folder(source, data, out, shards, replace(options, transform=transform), pool, resume, quiet, as_json)


def _score_table(source: GuardSource, data: Path, out: Path, options: ScoreOptions, quiet: bool, as_json: bool) -> None:
    to_stdout = str(out) == STDOUT
    with usage_errors():
        _ = (find_suffix(data), to_stdout or find_suffix(out, to_write=True))
    if not to_stdout and out.exists() and data.exists() and out.samefile(data):
        raise UsageError(f"Expected --out to be another file than the data, but both are {out}.")
    guard, schema = source.load()
    start = time.perf_counter()
    with open_table(data, options.separator) as table, bar("Scoring", table.rows(0), show=False if quiet else None) as advance:

        def report(rows: int) -> None:
            advance(rows, f"{rows / (time.perf_counter() - start):,.0f} rows/s", total=table.rows(rows))

        with usage_errors(ColumnError):
            result = scoring.score_table(guard, schema, table, out, options, report)
    seconds, rows, flagged = time.perf_counter() - start, result.rows, result.off_map
    _note_unused(f"{data} has", [result], quiet)
    record = {"out": None if to_stdout else out, "rows": rows, "off_map": flagged, "threshold": guard.threshold}
    text = f"{rows:,} rows scored in {seconds:.1f} s, {flagged:,} ({flagged / rows:.1%}) off the map."
    if to_stdout:
        print_note(text, quiet)
    else:
        record |= {"seconds": seconds, "rows_per_second": rows / seconds}
        print_result(as_json, record, f"{text} The scores are at {out}")


def _score_folder(
    source: GuardSource, data: Path, out: Path, shards: list[Shard], options: ScoreOptions, pool: Pool, resume: bool,
    quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Score a folder. Files that fail are listed at the end, with exit code 1; the others are scored all the same."""
    guard, schema = source.load()
    spec = scoring.JobSpec(data.absolute(), out.absolute(), scoring.file_digest(source.path), schema, options)
    start, latest = time.perf_counter(), dict[int, scoring.Progress]()
    with bar("Scoring", len(shards), show=False if quiet else None) as advance, usage_errors(scoring.FolderError):

        def report(number: int, progress: scoring.Progress) -> None:
            latest[number] = progress
            speed = sum(p.rows for p in latest.values()) / (time.perf_counter() - start)
            advance(sum(p.finished for p in latest.values()), f"{speed:,.0f} rows/s", total=len(shards))

        results = scoring.score_folder(guard, spec, shards, pool=pool, resume=resume, report=report)
    seconds = time.perf_counter() - start
    _note_unused("Some tables have", results, quiet)
    failed = {file: reason for result in results for file, reason in result.failed.items()}
    for file, reason in failed.items():
        typer.echo(f"Failed: {file}: {reason}", err=True)
    rows, flagged, files = sum(r.rows for r in results), sum(r.off_map for r in results), sum(r.rows > 0 for r in results)
    record = {"out": out, "files": files, "before": sum(r.reused for r in results), "rows": rows, "off_map": flagged}
    text = (
        f"{rows:,} rows in {files} files, {record['before']} of them there before, {seconds:.1f} s, {flagged:,} rows off the map"
    )
    record |= {"threshold": guard.threshold, "seconds": seconds, "rows_per_second": rows / seconds, "failed": failed}
    print_result(as_json, record, f"{text}, {len(failed)} inputs failed. The scores are in {out}")
    if failed:
        raise typer.Exit(1)


def _note_unused(subject: str, results: Sequence[scoring.JobResult], quiet: bool) -> None:
    unused = list(dict.fromkeys(name for result in results for name in result.unused))
    if unused:
        names = ", ".join(unused[:8]) + ", …" * (len(unused) > 8)
        print_note(f"{subject} columns that the guard does not use: {names}.", quiet)


def _parse_transform(
    shards: Sequence[Shard], data: Path, options: ScoreOptions, image: str | None, mean: str | None, std: str | None
) -> ImageTransform | None:
    """Parse how images become inputs; the user has to say it, for a guard does not store it."""
    if not shards[0].files[0].lower().endswith(SUFFIXES):
        if image or mean or std:
            raise UsageError(f"Expected --image, --mean and --std with images, but {data} holds tables.")
        return None
    if image is None:
        raise UsageError(f"{data} holds images: pass what the model takes as --image CxHxW, such as --image 3x32x32.")
    if options != ScoreOptions():
        raise UsageError(f"Expected --keep, --drop and --separator with tables, but {data} holds images.")
    try:
        channels, height, width = (int(number) for number in image.lower().split("x"))
        numbers = [tuple(float(number) for number in (text or "").split(",") if number.strip()) for text in (mean, std)]
    except ValueError as error:
        raise UsageError(
            f"Expected --image as CxHxW, such as 3x32x32, --mean and --std as numbers with commas, but got {image!r}, {mean!r} "
            f"and {std!r}."
        ) from error
    with usage_errors():
        return ImageTransform((channels, height, width), *numbers)
