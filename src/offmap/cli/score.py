"""`offmap score`: a table of any length in, a table of scores out; or a folder of tables or images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from offmap.cli import options as opt
from offmap.cli.folder import Progress, ScoreResult, ScoreSpec, Shard, file_digest, list_shards, score_folder
from offmap.cli.options import UsageError, load_guard, option, print_note, print_result, usage_errors
from offmap.data.tables.images import FILE, IMAGE, SUFFIXES, ImageTable, ImageTransform
from offmap.data.tables.schema import ColumnError, Schema, find_columns
from offmap.data.tables.table import STDOUT, Table, find_suffix, open_table, write_table
from offmap.detector import Result
from offmap.distributed.jobs import Pool
from offmap.errors import DataError
from offmap.guard import Guard
from offmap.progress import bar

Data = Annotated[
    Path, typer.Argument(metavar="DATA", help="Table (.csv, .csv.gz, .parquet or .npz), or folder of tables or images.")
]
Out = Annotated[
    Path, option("Output .parquet, .csv or .npz, or - for CSV on standard output; a folder for folders.", None, "--out", "-o")
]


def score(
    guard: opt.GuardPath,
    data: Data,
    out: Out,
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
    image: Annotated[str | None, option("Images: input shape of the model, such as 3x32x32; they are resized.", "CxHxW")] = None,
    mean: Annotated[str | None, option("Images: per-channel mean for normalisation (pixels are 0 to 1).", "M,…")] = None,
    std: Annotated[str | None, option("Images: per-channel std for normalisation.", "S,…")] = None,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Score every row of a table, or of a folder.

    Writes score, OOD flag, p-value and prediction of each row, of a table of any length. Finds columns by name, in any order.
    The output file appears once it is complete. A folder gives one file for each table, or for every 256 images, in --out.

    \b
    Examples:
      offmap score guard.safetensors new.parquet --model my_module:make_model -o scores.parquet
      offmap score guard.safetensors new.csv --model my_module:make_model --keep id -o - | sort -t, -k2 -g
      offmap score guard.safetensors days/ --model my_module:make_model --engine ray --jobs 8 -o scores/
    """  # noqa: D301
    shards, pool, transform, to_stdout = list[Shard](), None, None, str(out) == STDOUT
    with usage_errors():
        if data.is_dir():
            pool = Pool(engine, jobs, address)
            shards, ignored = list_shards(data)
            if ignored:
                print_note(f"{len(ignored)} files of {data} are left out, such as {ignored[0]}.", quiet)
            if shards[0].files[0].lower().endswith(SUFFIXES):
                if keep or drop or separator:
                    raise UsageError(f"Expected --keep, --drop and --separator with tables, but {data} holds images.")
                transform = _parse_transform(data, image, mean, std)
            elif image or mean or std:
                raise UsageError(f"Expected --image, --mean and --std with images, but {data} holds tables.")
        elif (engine, jobs, address, resume, image, mean, std) != ("local", 1, None, False, None, None, None):
            flags = "--engine ray, --jobs, --resume, --image, --mean and --std"
            raise UsageError(f"Expected {flags} with a folder, but {data} is not one.")
        else:
            _ = (find_suffix(data), to_stdout or find_suffix(out, to_write=True))
            if not to_stdout and out.exists() and data.exists() and out.samefile(data):
                raise UsageError(f"Expected --out to be another file than the data, but both are {out}.")
    loaded, schema = load_guard(guard, model, weights or (), trust_model)
    spec = ScoreSpec(data, out, file_digest(guard) if shards else "", schema, tuple(keep or ()), tuple(drop or ()), separator)
    start, show = time.perf_counter(), False if quiet else None
    if pool is not None:
        spec = replace(spec, data=data.absolute(), out=out.absolute(), transform=transform)
        results = _score_folder(loaded, spec, shards, pool, resume, show)
    else:
        results = [_score_table(loaded, spec, show)]
    seconds, rows, flagged = time.perf_counter() - start, sum(r.rows for r in results), sum(r.off_map for r in results)
    unused = list(dict.fromkeys(name for result in results for name in result.unused))
    if unused:
        names = ", ".join(unused[:8]) + ", …" * (len(unused) > 8)
        print_note(f"{'Some tables have' if shards else f'{data} has'} columns that the guard does not use: {names}.", quiet)
    failed = {file: reason for result in results for file, reason in result.failed.items()}
    for file, reason in failed.items():
        typer.echo(f"Failed: {file}: {reason}", err=True)
    record = {"out": out, "rows": rows, "off_map": flagged, "threshold": loaded.threshold, "seconds": seconds}
    record |= {"rows_per_second": rows / seconds, "calibrated": not loaded.calibration.seen}
    text = f"{rows:,} rows scored in {seconds:.1f} s, {flagged:,} ({100 * flagged / max(1, rows):.1f} %) off the map."
    if shards:
        record |= {"files": sum(r.rows > 0 for r in results), "before": sum(r.reused for r in results), "failed": failed}
        text = f"{rows:,} rows in {record['files']} files, {record['before']} kept from an earlier run, {seconds:.1f} s, "
        text += f"{flagged:,} rows off the map, {len(failed)} files failed."
    if loaded.calibration.seen:
        text += " Threshold and p-values are uncalibrated: the model was trained on the rows that set them."
    if to_stdout:
        print_note(text, quiet)
    else:
        print_result(as_json, record, f"{text} The scores are {'in' if shards else 'at'} {out}")
    if failed:
        raise typer.Exit(1)


def _score_table(guard: Guard, spec: ScoreSpec, show: bool | None) -> ScoreResult:
    start = time.perf_counter()
    with open_table(spec.data, spec.separator) as table, bar("Scoring", table.rows(0), show=show) as advance:

        def report(rows: int) -> None:
            advance(rows, f"{rows / (time.perf_counter() - start):,.0f} rows/s", total=table.rows(rows))

        with usage_errors(ColumnError):
            return score_table(guard, spec, table, spec.out, report)


def score_table(guard: Guard, spec: ScoreSpec, table: Table, out: Path, report: Callable[[int], None]) -> ScoreResult:
    """Score a table block by block and write a row of scores for each of its rows; `report` gets their number."""
    images, rows, flagged = isinstance(table, ImageTable), 0, 0
    inputs, unused = ((IMAGE,), []) if images else spec.schema.find_inputs(table, spec.drop)
    keep = [FILE] if images else [column for name in spec.keep for column in find_columns(table, name, "--keep")]
    with write_table(out) as write:
        for block in table.blocks(inputs, keep, allow_nan=spec.schema.allow_nan):
            result = guard(torch.from_numpy(block.x))
            scores, copied = result_columns(result, spec.schema), {name: _to_array(values) for name, values in block.raw.items()}
            if scores.keys() & copied.keys():
                raise ColumnError(f"Expected --keep to name other columns than the output has already, {', '.join(scores)}.")
            write(copied | scores)
            rows, flagged = rows + len(block.x), flagged + int(result.ood.sum())
            report(rows)
        if not rows:
            raise DataError(f"Expected rows in {table.path}, but there are none.")
    kept = set(keep)
    return ScoreResult(rows, flagged, unused=tuple(name for name in unused if name not in kept))


def result_columns(result: Result, schema: Schema) -> dict[str, NDArray[Any]]:
    """Return the columns of the output, (n,) each: score, ood and p_value, then mean and std, or label and probabilities.

    Several targets have a mean and a std each. Predictions at several positions are left out.
    """
    columns = {"score": result.score, "ood": result.ood, "p_value": result.p_value}
    for name, values in (("mean", result.mean), ("std", result.std)):
        values = values.squeeze(1) if values is not None and values.shape[1:] == (1,) else values
        if values is not None and values.ndim == 1:
            columns[name] = values
        elif values is not None and values.ndim == 2:
            labels = schema.targets if len(schema.targets) == values.shape[1] else range(values.shape[1])
            columns |= {f"{name}_{label}": column for label, column in zip(labels, values.unbind(1), strict=True)}
    if result.probs is not None and result.label is not None and result.probs.ndim == 2:
        columns["label"], labels = result.label, schema.classes or range(result.probs.shape[1])
        columns |= {f"probability_{label}": column for label, column in zip(labels, result.probs.unbind(1), strict=True)}
    arrays: dict[str, NDArray[Any]] = {name: values.detach().cpu().numpy() for name, values in columns.items()}
    return arrays | ({"label": np.array(schema.classes)[arrays["label"]]} if schema.classes and "label" in arrays else {})


def _to_array(values: list[Any]) -> NDArray[Any]:
    """Convert a copied column: numbers of one type, else words."""
    types = {type(value) for value in values}
    numeric = types <= {bool} or types <= {int} or types <= {int, float}
    return np.array(values) if numeric else np.array(["" if value is None else str(value) for value in values])


def _score_folder(
    guard: Guard, spec: ScoreSpec, shards: list[Shard], pool: Pool, resume: bool, show: bool | None
) -> list[ScoreResult]:
    start, latest = time.perf_counter(), dict[int, Progress]()
    with bar("Scoring", len(shards), show=show) as advance:

        def report(number: int, progress: Progress) -> None:
            latest[number] = progress
            speed = sum(p.rows for p in latest.values()) / (time.perf_counter() - start)
            advance(sum(p.finished for p in latest.values()), f"{speed:,.0f} rows/s", total=len(shards))

        return score_folder(guard, spec, shards, score_table, pool=pool, resume=resume, report=report)


def _parse_transform(data: Path, image: str | None, mean: str | None, std: str | None) -> ImageTransform:
    """Parse how images become inputs; the user has to say it, for a guard does not store it."""
    if image is None:
        raise UsageError(f"{data} holds images: pass what the model takes as --image CxHxW, such as --image 3x32x32.")
    try:
        channels, height, width = (int(number) for number in image.lower().split("x"))
        numbers = [tuple(float(number) for number in (text or "").split(",") if number.strip()) for text in (mean, std)]
    except ValueError as error:
        raise UsageError(
            f"Expected --image like 3x32x32 and --mean, --std like 0.5,0.5,0.5, but got {image!r}, {mean!r} and {std!r}."
        ) from error
    return ImageTransform((channels, height, width), *numbers)
