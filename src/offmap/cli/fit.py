"""`offmap fit`: from a net, its weights and a table to a guard file."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

import offmap
from offmap.cli.models import nets_of
from offmap.cli.options import Json, Misuse, NeededNet, Quiet, Separator, Weights, misused, tell
from offmap.data.tables.schema import Array, Column, ColumnError, Schema
from offmap.data.tables.table import find_suffix, open_table
from offmap.errors import DataError, ModelError, OffmapError, nearest
from offmap.model.forward import first_tensor
from offmap.report.page import check_path

FIELDS = {field.name for field in fields(offmap.Config)} - {"basis", "solver", "params", "parameterization"}
"""What `--set` may name; the first three have options of their own, the last is code."""

Name = Literal["gaussian", "categorical", "bernoulli"]


def fit(
    net: NeededNet,
    train: Annotated[Path, typer.Option(metavar="FILE", help="A table: .csv, .csv.gz, .parquet or .npz.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the guard.", show_default=False)],
    weights: Weights = None,
    valid: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sets risk, clip and threshold; else a tenth of --train.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help="For the threshold alone: it is exact then.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="To predict; by default the last. Repeatable.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="No input; repeatable.")] = None,
    classes: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Words of the target in the net's order; else sorted.")
    ] = None,
    likelihood: Annotated[Name | None, typer.Option(help="By default told from the target and what the net gives.")] = None,
    basis: Annotated[Literal["svd", "identity"] | None, typer.Option(help="By default that of --config.")] = None,
    solver: Annotated[Literal["refine", "closed-form", "sgd"] | None, typer.Option(help="By default that of --config.")] = None,
    score: Annotated[Literal["default", "paper", "epistemic", "distance"], typer.Option(help="What is OOD.")] = "default",
    config: Annotated[Literal["default", "paper", "reference"], typer.Option(help="Where options start from.")] = "default",
    params: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Random parameters: all, matrices, last-layer, or names with *.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Nets drawn for a score.")] = 50,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any field of offmap.Config, as JSON or a word.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws, order of rows, split.")] = 0,
    separator: Separator = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Fit a guard around trained nets and write it to a file.

    Columns are remembered by name, in the guard file, so that `offmap score` finds them in any order. Rows go into the net as
    they are in the table: scaling belongs into the net.

    \b
    Example:
      offmap fit --net my_module:make_net --weights w.safetensors --train train.parquet --valid valid.parquet -o guard.safetensors
    """  # noqa: D301
    check_path(out)
    if quiet:
        logging.getLogger("offmap").setLevel(logging.ERROR)
    options: dict[str, Any] = _settings(setting or []) | {"basis": basis, "solver": solver, "params": _one(params or [])}
    options |= {"likelihood": likelihood, "score": score, "config": config, "draws": draws, "seed": seed}
    files = {name: path for name, path in {"train": train, "valid": valid, "calibration": calibration}.items() if path}
    with misused():
        for path in files.values():
            find_suffix(path)
    nets = nets_of(net, weights or [])
    words = tuple(word.strip() for word in classes.split(",")) if classes else None
    with open_table(train, separator) as table, misused(ColumnError):
        schema = Schema.choose(table, target or [], drop or [])
    schema, parts = Asked(nets, net, files, separator, likelihood, words).parts(schema)
    with misused():
        guard = offmap.fit(_one(nets), **parts, progress=False if quiet else None, **options)
    # beside the guard is where the weights are looked for; an absolute path would tell of the user's home
    paths = [Path(os.path.relpath(path, out.absolute().parent)).as_posix() for path in weights or []]
    replace(guard, about=schema.to_dict() | {"net": net, "weights": paths}).save(out)
    record = {"guard": out, "net": net, "members": len(nets), "rows": {name: len(y) for name, (_, y) in parts.items()}}
    law = type(guard.likelihood).__name__.lower()
    record |= schema.to_dict() | {"likelihood": law, "score": score, "threshold": guard.threshold, "clip": guard.clip}
    tell(as_json, record, _told(record))


@dataclass(frozen=True)
class Asked:
    """Nets and tables, and what the user said of the target."""

    nets: Sequence[nn.Module]
    spec: str
    files: Mapping[str, Path]
    separator: str | None
    likelihood: Name | None
    classes: tuple[str, ...] | None

    def parts(self, schema: Schema) -> tuple[Schema, dict[str, Any]]:
        """The schema with its classes, and (inputs, targets) of all tables by name."""
        read = {name: schema.read(path, self.separator) for name, path in self.files.items()}
        x, columns = read["train"]
        schema, quantity = self.kind(schema, columns, self.outputs(x))
        parts = {
            name: (inputs, schema.encode_targets(columns, self.files[name], numeric=quantity))
            for name, (inputs, columns) in read.items()
        }
        return schema, parts

    def kind(self, schema: Schema, columns: Mapping[str, Column], outputs: int) -> tuple[Schema, bool]:
        """The schema with its classes, and whether the target is a quantity.

        Words are classes. Whole numbers are if all are below the number of outputs of the net, or 0 and 1 for one output.
        """
        values, several = next(iter(columns.values())), max(2, outputs)
        if len(columns) > 1 or self.likelihood == "gaussian":
            return schema, True
        if isinstance(values, list) or self.classes:
            words = sorted({str(word) for word in values}) if isinstance(values, list) else []
            given = self.classes or tuple(words)
            if len(given) != several:
                raise DataError(
                    f"Expected {several} classes in the target {schema.targets[0]!r} of {self.files['train']}, as many as "
                    f"{self.spec} tells apart, but got {len(given)}: {', '.join(given[:10])}. Name all with --classes, in the "
                    "net's order."
                )
            return replace(schema, classes=given), False
        small = bool((values == values.round()).all() and (values >= 0).all() and (values < several).all())
        return schema, not (small or self.likelihood in ("categorical", "bernoulli"))

    def outputs(self, x: Array) -> int:
        """How many numbers the first net gives for a row."""
        net = copy.deepcopy(self.nets[0])
        first = next((p for p in net.parameters() if p.is_floating_point()), torch.zeros((), device="cpu"))
        try:
            with torch.no_grad():
                output = first_tensor(net(torch.from_numpy(x[:2]).to(first)))
        except OffmapError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ModelError(
                f"The net of {self.spec} cannot be called with rows of {self.files['train']}, {tuple(x.shape[1:])} each: "
                f"{reason}. Choose the columns with --target and --drop."
            ) from error
        return output.shape[1] if output.ndim > 1 else 1


def _one(several: Sequence[Any]) -> Any:
    """The only one of several, all of them, or None."""
    return several[0] if len(several) == 1 else list(several) or None


def _settings(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, the value as JSON; what is none is a word.

    >>> _settings(["steps=100", "noise=normal", "entropy_weight=[1, 10]"])
    {'steps': 100, 'noise': 'normal', 'tradeoff': [1, 10]}
    """
    result: dict[str, Any] = {}
    for text in given:
        name, mark, value = text.partition("=")
        if not mark:
            raise Misuse(f"Expected --set as NAME=VALUE, such as steps=1000, but got {text!r}.")
        if name not in FIELDS:
            raise Misuse(f"Expected the name in --set {text} to be {nearest(name, FIELDS)}.")
        try:
            result[name] = json.loads(value)
        except json.JSONDecodeError:
            result[name] = value
    return result


def _told(record: Mapping[str, Any]) -> str:
    inputs, rows = record["inputs"], record["rows"]
    names = ", ".join(inputs[:6]) + (", …" if len(inputs) > 6 else "")
    finite = record["threshold"] < float("inf")
    kind = f" ({', '.join(record['classes'])})" if record["classes"] else ""
    lines = [
        f"The guard is at {record['guard']}",
        f"  net        {record['net']}, {record['members']} {'nets' if record['members'] > 1 else 'net'}",
        f"  inputs     {len(inputs)}: {names}",
        f"  target     {', '.join(record['targets'])}, {record['likelihood']}{kind}",
        f"  rows       {', '.join(f'{count:,} {name}' for name, count in rows.items())}",
        f"  threshold  {record['threshold']:.4g}: {'scores above it are off the map' if finite else 'nothing will be flagged'}",
        f"Next: offmap score {record['guard']} NEW.parquet --net {record['net']} -o scores.parquet",
    ]
    return "\n".join(lines)
