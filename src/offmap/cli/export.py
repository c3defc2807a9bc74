"""`offmap export`: a guard file becomes an ONNX or torch.export file, checked before it is written."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from offmap.cli import options as opt
from offmap.cli.options import UsageError, load_guard, option, print_note, print_result, usage_errors
from offmap.data.tables.schema import Schema
from offmap.export.onnx import check_path
from offmap.random import generator

EXAMPLE_ROWS = 256
"""Rows that the file is checked on."""


def export(
    guard: opt.GuardPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output .onnx, for ONNX Runtime, or .pt2, for torch.")],
    model: opt.Model = None,
    weights: opt.Weights = None,
    trust_model: opt.TrustModel = False,
    draws: Annotated[
        int | None, option("Draws to freeze (default: the guard's, if they fit in 100 MB of weights).", min=2)
    ] = None,
    calibration: Annotated[
        Path | None, option("Table of in-distribution rows to calibrate on; needed for other --draws than the guard's.", "TABLE")
    ] = None,
    example: Annotated[
        Path | None, option("Table of rows to check the file on (default: of --calibration, else random numbers).", "TABLE")
    ] = None,
    half: Annotated[bool, option("Keep weights in half precision.", None, "--half")] = False,
    drop: opt.Drop = None,
    separator: opt.Separator = None,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Write a guard as one ONNX or torch graph.

    The graph gives prediction, score, verdict, p-value, terms and threshold of every row. It is checked on some rows before it is
    written: it must give the guard's numbers. `offmap serve` serves it.

    \b
    Examples:
      offmap export guard.safetensors guard.onnx --model my_module:make_model --example rows.csv
      offmap export guard.safetensors guard.onnx --model my_module:make_model --draws 10 --calibration fresh.parquet
    """  # noqa: D301
    with usage_errors():
        check_path(out)
    loaded, schema = load_guard(guard, model, weights or (), trust_model)
    if draws not in (None, loaded.draws) and calibration is None:
        raise UsageError(
            f"The threshold is for {loaded.draws} draws; for {draws}, pass in-distribution rows: --calibration TABLE."
        )

    def read(path: Path | None) -> Tensor | None:
        return None if path is None else torch.from_numpy(schema.read(path, separator, targets=False, drop=drop or ())[0])

    held, rows = read(calibration), read(example)
    rows = held if rows is None else rows
    rows, kind = (_random_rows(schema, guard), "random rows") if rows is None else (rows[:EXAMPLE_ROWS], "rows")
    info = loaded.export(out, rows, draws=draws, calibration=held, half=half)
    if held is None and not info.exact:
        print_note("The rate of false alarms is approximate: pass --calibration TABLE, in-distribution rows.", quiet)
    times = info.milliseconds and f"; {info.milliseconds[1]:.2g} ms for one row, {info.milliseconds[32]:.2g} in a batch of 32"
    text = f"Wrote {out}: {info.size / 1e6:.2f} MB, {info.draws} draws, {', '.join(info.inputs)} -> {', '.join(info.outputs)}; "
    text += f"threshold {info.threshold:.4g}. Tested on {len(rows)} {kind}: numbers within {info.difference:.1g} of the guard's, "
    text += f"{info.changed} verdicts differ{times or ''}."
    print_result(as_json, asdict(info) | {"checked_rows": len(rows)}, text)


def _random_rows(schema: Schema, guard: Path) -> Tensor:
    """Return standard normal rows of as many columns as at fit time."""
    if schema.inputs is None:
        raise UsageError(f"{guard} does not store its columns: pass some rows as --example TABLE.")
    return torch.randn(EXAMPLE_ROWS, len(schema.inputs), generator=generator("example"), device="cpu")
