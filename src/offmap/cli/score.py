"""`offmap score`: a table of any length in, a table of scores out; or a folder of tables or images."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from offmap.cli.models import GuardSource
from offmap.cli.options import (
    Address,
    Drop,
    EngineName,
    GuardFile,
    Jobs,
    Json,
    Net,
    Quiet,
    Separator,
    TrustNet,
    UsageError,
    Weights,
    format_names,
    print_note,
    print_result,
    usage_errors,
)
from offmap.cli.score_folder import Folder, FolderError, JobResult, JobSpec, Progress, file_digest, list_shards, score_folder
from offmap.cli.score_rows import ScoreOptions, score_rows, select_columns
from offmap.data.tables.images import ImageTransform
from offmap.data.tables.schema import ColumnError
from offmap.data.tables.table import STDOUT, find_suffix, open_table, write_table
from offmap.distributed.jobs import Pool
from offmap.errors import ConfigError
from offmap.progress import bar

Out = Annotated[
    Path,
    typer.Option("--out", "-o", help="Output .parquet, .csv or .npz; - for CSV on standard output. For a folder, a folder."),
]


def score(
    guard: GuardFile,
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="Table (.csv, .csv.gz, .parquet or .npz), or a folder of tables or of images."),
    ],
    out: Out,
    net: Net = None,
    weights: Weights = None,
    trust_net: TrustNet = False,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Column to copy to the output, such as an id (repeatable).")
    ] = None,
    drop: Drop = None,
    separator: Separator = None,
    engine: EngineName = "local",
    jobs: Jobs = 1,
    address: Address = None,
    resume: Annotated[bool, typer.Option("--resume", help="Folders: keep the scores that are finished in --out.")] = False,
    image: Annotated[
        str | None,
        typer.Option(metavar="CxHxW", help="Images: input shape of the model, such as 3x32x32; images are resized to it."),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="M,…", help="Images: per-channel mean for normalisation (pixels are 0 to 1).")
    ] = None,
    std: Annotated[str | None, typer.Option(metavar="S,…", help="Images: per-channel std for normalisation.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Score the rows of a table of any length: write score, OOD flag, p-value and prediction of each row.

    Columns are found by their names at fit time, in any order. The output file appears only once it is complete. A folder gives
    one file of scores for each table, or for every 256 images, in the folder --out.

    \b
    Examples:
      offmap score guard.safetensors new.parquet --net my_module:make_net -o scores.parquet
      offmap score guard.safetensors new.csv --net my_module:make_net --keep id -o - | sort -t, -k2 -g
      offmap score guard.safetensors days/ --net my_module:make_net --engine ray --jobs 8 -o scores/
    """  # noqa: D301
    with usage_errors():
        pool = Pool(engine, jobs, address)
    source = GuardSource(guard, net, tuple(weights or ()), trust_net)
    if data.is_dir():
        folder = list_shards(data)
        transform = _parse_transform(folder, data, image, mean, std)
        options = ScoreOptions(tuple(keep or ()), tuple(drop or ()), separator, transform)
        _score_folder(source, data, out, folder, options, pool, resume, quiet, as_json)
    elif pool.in_process and not (resume or image or mean or std):
        _score_table(source, data, out, ScoreOptions(tuple(keep or ()), tuple(drop or ()), separator), quiet, as_json)
    else:
        raise UsageError(f"Expected --engine ray, --jobs, --resume, --image, --mean and --std with a folder, but {data} is none.")


def _score_table(source: GuardSource, data: Path, out: Path, options: ScoreOptions, quiet: bool, as_json: bool) -> None:
    to_stdout = str(out) == STDOUT
    with usage_errors():
        _ = (find_suffix(data), to_stdout or find_suffix(out, to_write=True))
    if not to_stdout and out.exists() and data.exists() and out.samefile(data):
        raise UsageError(f"Expected --out to be another file than the data, but both are {out}.")
    guard, schema = source.load()
    start = time.perf_counter()
    with open_table(data, options.separator) as table, usage_errors(ColumnError):
        columns = select_columns(table, schema, options)
        if columns.unused:
            print_note(f"{data} has columns that the guard does not use: {format_names([*columns.unused])}.", quiet)
        with write_table(out) as write, bar("Scoring", table.rows(0), show=False if quiet else None) as advance:

            def report(rows: int) -> None:
                speed = rows / max(time.perf_counter() - start, 1e-9)
                advance(rows, f"{speed:,.0f} rows/s", total=table.rows(rows))

            rows, flagged = score_rows(guard, schema, table, columns, write, report)
    seconds = time.perf_counter() - start
    record = {
        "out": None if to_stdout else out, "rows": rows, "off_map": flagged, "threshold": guard.threshold, "seconds": seconds,
        "rows_per_second": rows / seconds,
    }  # fmt: skip
    text = f"{rows:,} rows scored in {seconds:.1f} s, {flagged:,} ({flagged / rows:.1%}) off the map."
    if to_stdout:
        print_note(text, quiet)
    else:
        print_result(as_json, record, f"{text} The scores are at {out}")


def _score_folder(
    source: GuardSource,
    data: Path,
    out: Path,
    folder: Folder,
    options: ScoreOptions,
    pool: Pool,
    resume: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    if folder.images and (options.keep or options.drop or options.separator):
        raise UsageError(f"Expected --keep, --drop and --separator with tables, but {data} holds images.")
    if folder.ignored:
        print_note(f"{len(folder.ignored)} files of {data} are left out, such as {folder.ignored[0]}.", quiet)
    guard, schema = source.load()
    spec = JobSpec(data.absolute(), out.absolute(), file_digest(source.path), schema, options)
    start, latest = time.perf_counter(), dict[int, Progress]()
    with bar("Scoring", len(folder.shards), show=False if quiet else None) as advance, usage_errors(FolderError):

        def report(number: int, progress: Progress) -> None:
            latest[number] = progress
            speed = sum(p.rows for p in latest.values()) / max(time.perf_counter() - start, 1e-9)
            advance(sum(p.finished for p in latest.values()), f"{speed:,.0f} rows/s", total=len(folder.shards))

        results = score_folder(guard, spec, folder.shards, pool=pool, resume=resume, report=report)
    _print_summary(results, out, guard.threshold, time.perf_counter() - start, quiet, as_json)


def _print_summary(results: list[JobResult], out: Path, threshold: float, seconds: float, quiet: bool, as_json: bool) -> None:
    """Print the totals; list the files that failed and exit with code 1 if there are any."""
    rows, flagged, reused = (sum(getattr(r, name) for r in results) for name in ("rows", "off_map", "reused"))
    failed = {file: reason for result in results for file, reason in result.failed.items()}
    unused = sorted({name for result in results for name in result.unused})
    if unused:
        print_note(f"Some tables have columns that the guard does not use: {format_names(unused)}.", quiet)
    for file, reason in failed.items():
        typer.echo(f"Failed: {file}: {reason}", err=True)
    files = sum(result.rows > 0 for result in results)
    record = {
        "out": out, "files": files, "before": reused, "rows": rows, "off_map": flagged, "threshold": threshold,
        "seconds": seconds, "rows_per_second": rows / seconds, "failed": failed,
    }  # fmt: skip
    text = f"{rows:,} rows in {files} files, {reused} of them there before, {seconds:.1f} s, {flagged:,} rows off the map"
    print_result(as_json, record, f"{text}, {len(failed)} inputs failed. The scores are in {out}")
    if failed:
        raise typer.Exit(1)


def _parse_transform(folder: Folder, data: Path, image: str | None, mean: str | None, std: str | None) -> ImageTransform | None:
    """Parse how images become inputs; the user has to say it, for a guard does not store it."""
    if not folder.images:
        if image or mean or std:
            raise UsageError(f"Expected --image, --mean and --std with images, but {data} holds tables.")
        return None
    if image is None:
        raise UsageError(f"{data} holds images: pass what the net takes as --image CxHxW, such as --image 3x32x32.")
    try:
        channels, height, width = (int(number) for number in image.lower().split("x"))
        numbers = [tuple(float(number) for number in (text or "").split(",") if number.strip()) for text in (mean, std)]
        return ImageTransform((channels, height, width), *numbers)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(
            f"Expected --image as CxHxW, such as 3x32x32, --mean and --std as numbers with commas, but got {image!r}, {mean!r} "
            f"and {std!r}."
        ) from error
