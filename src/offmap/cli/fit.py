"""`offmap fit`: from a model, its weights and a table to a guard file."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

import offmap
from offmap.assessment import can_assess
from offmap.cli import options as opt
from offmap.cli.options import UsageError, load_models, option, print_result, usage_errors
from offmap.data.tables.schema import Array, Column, ColumnError, Schema, find_columns
from offmap.data.tables.table import MISSING, find_suffix, open_table
from offmap.errors import DataError, ModelError, OffmapError, first_line, nearest
from offmap.likelihoods import LIKELIHOODS
from offmap.model.forward import first_tensor
from offmap.report.page import check_path

SETTINGS = {field.name for field in fields(offmap.Config)} - {"basis", "solver", "params"}
"""What `--set` accepts; the others have options of their own."""

SolverName = Literal["refine", "closed-form", "sgd"]


def fit(
    model: opt.RequiredModel,
    train: Annotated[Path, option("Training table: .csv, .csv.gz, .parquet or .npz.", "FILE")],
    out: Annotated[Path, option("Guard file to write.", "FILE", "--out", "-o")],
    weights: opt.Weights = None,
    valid: Annotated[
        Path | None, option("Validation table, rows the model has not seen (default: 10 % of --train).", "FILE")
    ] = None,
    calibration: Annotated[Path | None, option("Table for the threshold alone, which is then exact.", "FILE")] = None,
    target: Annotated[list[str] | None, option("Column to predict (default: the last one; repeatable).", "COLUMN")] = None,
    drop: Annotated[list[str] | None, option("Column to exclude from the inputs (repeatable).", "COLUMN")] = None,
    classes: Annotated[str | None, option("Class names in the order of the model's outputs (default: sorted).", "A,B,…")] = None,
    likelihood: Annotated[str | None, option("Likelihood, such as gaussian (default: inferred from the target).", "NAME")] = None,
    basis: Annotated[Literal["svd", "identity"] | None, option("Axes of the noise (default: as --config).")] = None,
    solver: Annotated[SolverName | None, option("How the noise is sized; closed-form is fastest (default: as --config).")] = None,
    score: Annotated[
        str, option("OOD score: default, equal, distance, epistemic, paper, or a registered one.", "NAME")
    ] = "default",
    config: Annotated[Literal["default", "paper", "reference"], option("Preset settings.")] = "default",
    params: Annotated[list[str] | None, option("Random parameters: all, matrices, last-layer, names with *.", "PATTERN")] = None,
    false_alarms: Annotated[float, option("Fraction of in-distribution rows that may be flagged.")] = 0.05,
    groups: Annotated[
        str | None,
        option(
            "Column that names the run, day or site of each row. Whole groups of --calibration, or else --valid, set the "
            "threshold; groups of --train are left out in turn to choose the weights of the score.",
            "COLUMN",
        ),
    ] = None,
    allow_nan: Annotated[
        bool, option("Accept missing input values, which the model itself imputes or marks.", None, "--allow-nan")
    ] = False,
    draws: Annotated[int, option("Weight samples for a score.", min=1)] = 50,
    setting: Annotated[list[str] | None, option("Field of offmap.Config, as JSON or a word.", "NAME=VALUE", "--set")] = None,
    seed: Annotated[int, option("Random seed.")] = 0,
    separator: opt.Separator = None,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Fit a guard around trained models and save it.

    Prints what the guard can see. The guard file stores the names of the columns, so `offmap score` finds them in any order. Rows
    go into the model as they are in the table: put scaling into the model.

    \b
    Example:
      offmap fit --model my_module:make_model --weights w.safetensors --train train.csv --valid valid.csv -o guard.safetensors
    """  # noqa: D301
    check_path(out)
    if quiet:
        logging.getLogger("offmap").setLevel(logging.ERROR)
    options: dict[str, Any] = _parse_settings(setting or []) | {"basis": basis, "solver": solver}
    options |= {"params": params[0] if params and len(params) == 1 else params or None, "likelihood": likelihood}
    options |= {"score": score, "config": config, "draws": draws, "seed": seed, "false_alarms": false_alarms}
    options |= {"allow_nan": allow_nan}
    files = {name: path for name, path in {"train": train, "valid": valid, "calibration": calibration}.items() if path}
    with usage_errors():
        for path in files.values():
            find_suffix(path)
    models = load_models(model, weights or [])
    if likelihood is not None and likelihood not in LIKELIHOODS:
        raise UsageError(f"Expected --likelihood to be {nearest(likelihood, LIKELIHOODS)}, but got {likelihood!r}.")
    with open_table(train, separator) as table, usage_errors(ColumnError):
        train_groups = [name for name in table.names if name == groups]
        schema = replace(Schema.choose(table, target or [], [*(drop or []), *train_groups]), allow_nan=allow_nan)
    group_labels = None if groups is None else _read_groups(groups, calibration or valid, separator)
    if valid is not None and train_groups:
        options["groups"] = _read_groups(train_groups[0], train, separator)
    tables = {name: schema.read(path, separator) for name, path in files.items()}
    outputs = _count_outputs(models[0], tables["train"][0], train, model)
    numeric = len(schema.targets) > 1 or (likelihood is not None and not LIKELIHOODS[likelihood].classifies)
    if not numeric:
        ((name, values),) = tables["train"][1].items()
        labels, numeric = _find_classes(values, outputs, likelihood, classes)
        if labels is not None and len(labels) != outputs:
            raise DataError(
                f"Expected {outputs} classes in the target {name!r} of {train}, as many as {model} tells apart, but "
                f"got {len(labels)}: {', '.join(labels[:10])}. Name all with --classes, in the model's order."
            )
        schema = replace(schema, classes=labels)
    data = {name: (x, schema.encode_targets(y, files[name], numeric=numeric)) for name, (x, y) in tables.items()}
    with usage_errors():
        fitted = {name: pair for name, pair in data.items() if group_labels is None or name != "calibration"}
        guard = offmap.fit(models if len(models) > 1 else models[0], **fitted, progress=False if quiet else None, **options)
        if group_labels is not None:
            seen = guard.calibration.seen and calibration is None
            guard = guard.calibrate(data["calibration" if calibration else "valid"], false_alarms, groups=group_labels)
            seen = seen or guard.calibration.seen
            guard = replace(guard, calibration=replace(guard.calibration, exact=calibration is not None, seen=seen))
    # relative to the guard, where weights are looked for; an absolute path would tell of the user's home
    paths = [Path(os.path.relpath(path, out.absolute().parent)).as_posix() for path in weights or []]
    guard = replace(guard, about=schema.to_dict() | {"model": model, "weights": paths})
    guard.save(out)
    assessment = guard.assess() if can_assess(guard) else None
    record = {"guard": out, "model": model, "members": len(models), "rows": {name: len(y) for name, (_, y) in data.items()}}
    record |= schema.to_dict() | {"likelihood": type(guard.likelihood).__name__.lower(), "score": score}
    record |= {"threshold": guard.threshold, "calibrated": not guard.calibration.seen, "clip": guard.clip}
    record["assessment"] = None if assessment is None else assessment.to_dict()
    seen = "" if assessment is None else f"\n\nWhat this guard can see, from in-distribution data alone\n{assessment}"
    print_result(as_json, record, _describe(record) + seen)


def _read_groups(name: str, path: Path | None, separator: str | None) -> list[Any]:
    """Return the label of every row of a table: the one that calibrates, or the training table."""
    if path is None:
        raise UsageError("Expected --calibration or --valid beside --groups: whole groups that the model was not trained on.")
    with open_table(path, separator) as table, usage_errors(ColumnError):
        columns = find_columns(table, name, "--groups")
        if len(columns) > 1:
            raise ColumnError(f"Expected --groups to name one column of {path}, but {name!r} has {len(columns)}.")
        labels = [label for chunk in table.chunks(columns) for label in chunk[columns[0]]]
    return [None if str(label).strip().lower() in MISSING else label for label in labels]


def _find_classes(values: Column, outputs: int, likelihood: str | None, names: str | None) -> tuple[tuple[str, ...] | None, bool]:
    """Return the names of the classes, None if they are numbers already, and whether the target is a quantity instead.

    Words are classes. Whole numbers are if all are below the number of outputs of the model, or 0 and 1 for one output.
    """
    if names:
        return tuple(name.strip() for name in names.split(",")), False
    if isinstance(values, list):
        return tuple(sorted({str(word) for word in values})), False
    are_labels = bool((values == values.round()).all() and (values >= 0).all() and (values < outputs).all())
    return None, not (are_labels or likelihood is not None)


def _count_outputs(model: nn.Module, x: Array, path: Path, spec: str) -> int:
    """Return how many classes the model can tell apart: as many as it gives numbers for a row, two at least."""
    model = copy.deepcopy(model)
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros((), device="cpu"))
    try:
        with torch.no_grad():
            output = first_tensor(model(torch.from_numpy(x[:2]).to(first)))
    except OffmapError:
        raise
    except Exception as error:
        raise ModelError(
            f"The model of {spec} cannot be called with rows of {path}, {tuple(x.shape[1:])} each: {first_line(error)}. Choose "
            "the columns with --target and --drop."
        ) from error
    return max(2, output.shape[1]) if output.ndim > 1 else 2


def _parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE, the value as JSON, or else as a word.

    >>> _parse_settings(["steps=100", "noise=normal", "entropy_weight=[1, 10]"])
    {'steps': 100, 'noise': 'normal', 'entropy_weight': [1, 10]}
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark:
            raise UsageError(f"Expected --set as NAME=VALUE, such as steps=1000, but got {text!r}.")
        if name not in SETTINGS:
            raise UsageError(f"Expected the name in --set {text} to be {nearest(name, SETTINGS)}.")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def _describe(record: dict[str, Any]) -> str:
    inputs, members = record["inputs"], record["members"]
    classes = f" ({', '.join(record['classes'])})" if record["classes"] else ""
    meaning = "scores above it are off the map" if record["threshold"] < float("inf") else "nothing will be flagged"
    if not record["calibrated"]:
        meaning += "; uncalibrated: pass rows that the model has not seen as --valid or --calibration"
    return "\n".join([
        f"The guard is at {record['guard']}",
        f"  model      {record['model']}, {members} {'models' if members > 1 else 'model'}",
        f"  inputs     {len(inputs)}: {', '.join(inputs[:6])}{', …' if len(inputs) > 6 else ''}",
        f"  target     {', '.join(record['targets'])}, {record['likelihood']}{classes}",
        f"  rows       {', '.join(f'{count:,} {name}' for name, count in record['rows'].items())}",
        f"  threshold  {record['threshold']:.4g}: {meaning}",
        f"Next: offmap score {record['guard']} NEW.csv --model {record['model']} -o scores.csv",
    ])  # fmt: skip
