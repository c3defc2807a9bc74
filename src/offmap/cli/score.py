"""`offmap score`: a table of any length in, a table of scores out; or a folder of tables or images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offmap.cli.load import load_guard
from offmap.cli.options import (
    Address,
    Drop,
    EngineName,
    GuardFile,
    Jobs,
    Json,
    Misuse,
    Net,
    Quiet,
    Separator,
    TrustNet,
    Weights,
    misused,
    note,
    tell,
)
from offmap.cli.score_many import Ask, score_all
from offmap.cli.score_rows import choose, score_rows
from offmap.data.tables import table
from offmap.data.tables.schema import ColumnError, Schema
from offmap.data.tables.table import STDOUT, Table, find_suffix, write_table
from offmap.distributed.pool import Pool
from offmap.guard import Guard
from offmap.progress import bar


def score(
    guard: GuardFile,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A table: .csv, .csv.gz, .parquet or .npz; or a folder of them, or of images.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="A .parquet, .csv or .npz; - is CSV to standard output. For a folder, an empty folder.",
            show_default=False,
        ),
    ],
    net: Net = None,
    weights: Weights = None,
    trust_net: TrustNet = False,
    keep: Annotated[
        list[str] | None, typer.Option(help="A column to copy to the output, such as an id; may be repeated.")
    ] = None,
    drop: Drop = None,
    separator: Separator = None,
    engine: EngineName = "local",
    jobs: Jobs = 1,
    address: Address = None,
    resume: Annotated[bool, typer.Option("--resume", help="Folders: keep finished scores in --out, make the others.")] = False,
    image: Annotated[
        str | None,
        typer.Option(metavar="CxHxW", help="Images: what the net takes, such as 3x32x32; they are resized.", show_default=False),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="M,…", help="Images: taken from pixels of 0 to 1, one for each channel.")
    ] = None,
    std: Annotated[str | None, typer.Option(metavar="S,…", help="Images: what is left is divided by it.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Score the rows of a table, however long, and write score, verdict, p-value and prediction of each.

    Columns are found by the names of fit time, in any order. The output is written whole or not at all. Of a folder, each table
    has a file of scores in the folder --out; images have one for every 256, with their names.

    \b
    Examples:
      offmap score guard.safetensors new.parquet --net my_module:make_net -o scores.parquet
      offmap score guard.safetensors new.csv --net my_module:make_net --keep id -o - | sort -t, -k2 -g
      offmap score guard.safetensors days/ --net my_module:make_net --engine ray --jobs 8 -o scores/
    """  # noqa: D301
    with misused():
        pool = Pool(engine, jobs, address)
    ask = Ask(guard, net, tuple(weights or ()), trust_net, tuple(keep or ()), tuple(drop or ()), separator, quiet, as_json)
    if data.is_dir():
        score_all(ask, data, out, pool=pool, resume=resume, image=(image, mean, std))
        return
    if not pool.here or resume or image or mean or std:
        raise Misuse(f"Expected --engine ray, --jobs, --resume, --image, --mean and --std with a folder, but {data} is none.")
    _score_one(ask, data, out)


def _score_one(ask: Ask, data: Path, out: Path) -> None:
    piped = str(out) == STDOUT
    with misused():
        _ = (find_suffix(data), piped or find_suffix(out, to_write=True))
    if not piped and out.exists() and data.exists() and out.samefile(data):
        raise Misuse(f"Expected --out to be another file than the data, but both are {out}.")
    loaded, schema = load_guard(ask.guard, ask.net, ask.weights, ask.trust_net)
    start = time.perf_counter()
    with table.open_table(data, ask.separator) as file, misused(ColumnError):
        rows, flagged = _scored(loaded, schema, file, out, ask.keep, ask.drop, ask.quiet)
    seconds = time.perf_counter() - start
    record = {
        "out": None if piped else out, "rows": rows, "off_map": flagged, "threshold": loaded.threshold, "seconds": seconds,
        "rows_per_second": rows / seconds,
    }  # fmt: skip
    text = f"{rows:,} rows scored in {seconds:.1f} s, {flagged:,} ({flagged / rows:.1%}) off the map."
    if piped:
        note(text, ask.quiet)
    else:
        tell(ask.as_json, record, f"{text} The scores are at {out}")


def _scored(
    guard: Guard, schema: Schema, data: Table, out: Path, keep: Sequence[str], drop: Sequence[str], quiet: bool
) -> tuple[int, int]:
    """How many rows were written, and how many of them are off the map."""
    chosen = choose(data, schema, keep, drop)
    if chosen.spare:
        more = ", …" * (len(chosen.spare) > 8)
        note(f"{data.path} has columns that the guard does not use: {', '.join(chosen.spare[:8])}{more}.", quiet)
    with write_table(out) as write, bar("Scoring", data.rows(0), show=False if quiet else None) as advance:
        start = time.perf_counter()

        def heard(rows: int) -> None:
            speed = rows / max(time.perf_counter() - start, 1e-9)
            advance(rows, f"{speed:,.0f} rows/s", total=data.rows(rows))

        return score_rows(guard, schema, data, chosen, write, heard)
