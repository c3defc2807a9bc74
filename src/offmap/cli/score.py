"""`offmap score`: a table of any length in, a table of scores out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor

from offmap.cli.guards import load_guard
from offmap.cli.options import Drop, GuardFile, Json, Misuse, Net, Quiet, Separator, TrustNet, Weights, misused, note, tell
from offmap.cli.schema import Schema, columns_of
from offmap.data.stream import sink, table
from offmap.data.stream.block import Table
from offmap.errors import DataError
from offmap.guarding.answer import Answer
from offmap.guarding.guard import Guard
from offmap.progress import Advance, bar


def score(
    guard: GuardFile,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A table: .csv, .csv.gz, .parquet or .npz.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A .parquet, .csv or .npz; - is CSV to standard output.", show_default=False)
    ],
    net: Net = None,
    weights: Weights = None,
    trust_net: TrustNet = False,
    keep: Annotated[
        list[str] | None, typer.Option(help="A column to copy to the output, such as an id; may be repeated.")
    ] = None,
    drop: Drop = None,
    separator: Separator = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Score the rows of a table, however long, and write score, verdict, p-value and prediction of each.

    Columns are found by the names of fit time, in any order. The output is written whole or not at all.

    \b
    Examples:
      offmap score guard.safetensors new.parquet --net my_module:make_net -o scores.parquet
      offmap score guard.safetensors new.csv --net my_module:make_net --keep id -o - | sort -t, -k2 -g
    """  # noqa: D301
    piped = str(out) == sink.STDOUT
    with misused():
        _ = (table.ending_of(data), piped or sink.ending_of(out))
    if not piped and out.exists() and data.exists() and out.samefile(data):
        raise Misuse(f"Expected --out to be another file than the data, but both are {out}.")
    loaded, schema = load_guard(guard, net, weights, trust_net)
    start = time.perf_counter()
    with table.opened(data, separator) as file:
        rows, flagged = _scored(loaded, schema, file, out, keep or [], drop or [], quiet)
    seconds = time.perf_counter() - start
    record = {
        "out": None if piped else out, "rows": rows, "off_map": flagged, "threshold": loaded.threshold, "seconds": seconds,
        "rows_per_second": rows / seconds,
    }  # fmt: skip
    text = f"{rows:,} rows scored in {seconds:.1f} s, {flagged:,} ({flagged / rows:.1%}) off the map."
    if piped:
        note(text, quiet)
    else:
        tell(as_json, record, f"{text} The scores are at {out}")


def _scored(
    guard: Guard, schema: Schema, data: Table, out: Path, keep: Sequence[str], drop: Sequence[str], quiet: bool
) -> tuple[int, int]:
    """How many rows were written, and how many of them are off the map."""
    inputs, unused = schema.found(data, drop)
    kept = [each for name in keep for each in columns_of(data, name, "--keep")]
    spare = [name for name in unused if name not in kept]
    if spare:
        note(f"{data.path} has columns that the guard does not use: {', '.join(spare[:8])}{', …' * (len(spare) > 8)}.", quiet)
    rows = flagged = 0
    with sink.sink(out) as write, bar("Scoring", data.rows(0), show=False if quiet else None) as advance:
        start = time.perf_counter()
        for block in data.blocks(inputs, kept):
            answer = guard(torch.from_numpy(block.x))
            columns, copied = answered(answer, schema), {name: _raw(values) for name, values in block.raw.items()}
            if columns.keys() & copied.keys():
                raise Misuse(f"Expected --keep to name other columns than the output has already, {', '.join(columns)}.")
            write(copied | columns)
            rows, flagged = rows + len(block.x), flagged + int(answer.ood.sum())
            _show(advance, rows, data.rows(rows), time.perf_counter() - start)
        if not rows:
            raise DataError(f"Expected rows in {data.path}, but there are none.")
    return rows, flagged


def _show(advance: Advance, rows: int, total: int | None, seconds: float) -> None:
    advance(rows, f"{rows / max(seconds, 1e-9):,.0f} rows/s", total=total)


def answered(answer: Answer, schema: Schema) -> dict[str, NDArray[Any]]:
    """Columns of the output, (n,) each: score, ood and p_value, then mean and std, or label and a probability for each class.

    Several targets have a mean and a std each. Predictions at many positions are left out.
    """
    columns = {"score": _array(answer.score), "ood": _array(answer.ood), "p_value": _array(answer.p_value)}
    if answer.mean is not None and answer.std is not None:
        for name, values in (("mean", answer.mean), ("std", answer.std)):
            if values.ndim == 1 or values.shape[1:] == (1,):
                columns[name] = _array(values.reshape(-1))
            elif values.ndim == 2:
                labels = schema.targets if len(schema.targets) == values.shape[1] else range(values.shape[1])
                columns |= {f"{name}_{label}": _array(each) for label, each in zip(labels, values.unbind(1), strict=True)}
    if answer.probs is not None and answer.label is not None and answer.probs.ndim == 2:
        labels = schema.classes or range(answer.probs.shape[1])
        columns["label"] = _array(answer.label) if schema.classes is None else np.array(schema.classes)[_array(answer.label)]
        columns |= {f"probability_{label}": _array(each) for label, each in zip(labels, answer.probs.unbind(1), strict=True)}
    return columns


def _array(values: Tensor) -> NDArray[Any]:
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()


def _raw(values: list[Any]) -> NDArray[Any]:
    """A copied column: numbers of one kind, else words."""
    kinds = {type(value) for value in values}
    plain = kinds <= {bool} or kinds <= {int} or kinds <= {int, float}
    return np.array(values) if plain else np.array(["" if value is None else str(value) for value in values])
