"""`offmap evaluate`: how well a guard separates OOD tables from an in-distribution one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import offmap
from offmap.cli import options as opt
from offmap.cli.models import GuardSource
from offmap.cli.options import UsageError, option, print_result, usage_errors
from offmap.data.tables.schema import ColumnError, Schema, find_columns
from offmap.data.tables.table import find_suffix, open_table
from offmap.evaluation import Evaluation
from offmap.report.page import check_path
from offmap.table import Table

METRICS = {"auroc": "AUROC", "fpr95": "FPR@95", "aupr_in": "AUPR in", "aupr_out": "AUPR out"}


def evaluate(
    guard: opt.GuardFile,
    test: Annotated[Path, option("In-distribution table with its target.", "FILE")],
    ood: Annotated[list[str], option("OOD table (repeatable).", "NAME=FILE")],
    report: Annotated[Path | None, option("HTML page to write, self-contained.", "FILE")] = None,
    model: opt.Model = None,
    weights: opt.Weights = None,
    trust_model: opt.TrustModel = False,
    target: Annotated[str | None, option("Target, for guards fitted in Python (default: the last column).", "COLUMN")] = None,
    drop: opt.Drop = None,
    separator: opt.Separator = None,
    as_json: opt.Json = False,
) -> None:
    """Measure how well a guard detects OOD rows, and how well it predicts in-distribution rows.

    \b
    Example:
      offmap evaluate guard.safetensors --model my_module:make_model --test test.parquet --ood north=north.csv --report page.html
    """  # noqa: D301
    if report is not None:
        check_path(report)
    files = _parse_sets(ood)
    with usage_errors():
        for path in (test, *files.values()):
            find_suffix(path)
    loaded, schema = GuardSource(guard, model, weights or (), trust_model).load()
    with usage_errors(ColumnError):
        schema = _choose_target(schema, test, target, separator)
        x, columns = schema.read(test, separator, drop=drop or [])
        ood_rows = {name: schema.read(path, separator, targets=False, drop=drop or [])[0] for name, path in files.items()}
    y = schema.encode_targets(columns, test, numeric=not loaded.likelihood.classifies)
    evaluation = offmap.evaluate(loaded, (x, y), ood_rows)
    if report is not None:
        title = f"How OOD is {', '.join(files)}?"
        offmap.write_page(evaluation, report, title=title, columns=schema.inputs or (), classes=schema.classes or ())
    scores = evaluation.scores["guard"]
    flagged = {name: float((values > loaded.threshold).float().mean()) for name, values in scores.items()}
    if not as_json:
        _print_tables(evaluation, flagged, test.name)
    metrics = {row["set"]: {k: v for k, v in row.items() if k not in ("scorer", "set")} for row in evaluation.rows}
    record = {
        "rows": {name: len(values) for name, values in scores.items()}, "threshold": loaded.threshold, "flagged": flagged,
        "metrics": metrics, "report": report,
    }  # fmt: skip
    shares = ", ".join(f"{share:.1%} of {name}" for name, share in flagged.items() if name != "test")
    text = (
        f"At the threshold {loaded.threshold:.4g} the guard flags {shares}, "
        f"and {flagged['test']:.1%} of the in-distribution rows."
    )
    print_result(as_json, record, text + (f" The page is at {report}" if report else ""))


def _parse_sets(texts: Sequence[str]) -> dict[str, Path]:
    """Parse NAME=FILE; a file alone is named like itself."""
    sets: dict[str, Path] = {}
    for text in texts:
        name, mark, file = text.partition("=")
        path = Path(file if mark else text)
        name = name if mark else path.name.partition(".")[0]
        if not name or not str(path) or name == "test" or name in sets:
            raise UsageError(f"Expected --ood as NAME=FILE, each name once and none of them 'test', but got {text!r}.")
        sets[name] = path
    return sets


def _choose_target(schema: Schema, test: Path, target: str | None, separator: str | None) -> Schema:
    """Add a target to a schema that has none, or replace it: the column of that name, or the last one."""
    if schema.targets and target is None:
        return schema
    with open_table(test, separator) as table:
        targets = find_columns(table, target, "--target") if target else table.names[-1:]
    return Schema(schema.inputs, tuple(targets), schema.classes)


def _print_tables(evaluation: Evaluation, flagged: dict[str, float], name: str) -> None:
    """Print detection, a row for each OOD set, and the quality of predictions, clipped and wide."""
    test = next(row for row in evaluation.rows if row["set"] == "test")
    detection = [
        {"set": row["set"], "flagged": f"{flagged[row['set']]:.1%}", **{METRICS[key]: _format(row[key]) for key in METRICS}}
        for row in evaluation.rows
        if row["set"] != "test"
    ]
    names = [key for key in test if key not in ("scorer", "set") and not key.startswith("wide_")]
    quality = [{"": key, "clipped": _format(test[key]), "wide": _format(test.get(f"wide_{key}"))} for key in names]
    typer.echo(f"OOD rows separated from {name}\n{Table(detection)}\n\nPredictions on {name}\n{Table(quality)}\n")


def _format(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"
