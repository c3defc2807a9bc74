"""`offmap evaluate`: how well a guard separates OOD tables from an in-distribution one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import offmap
from offmap.cli import options as opt
from offmap.cli.options import UsageError, load_guard, option, print_result, usage_errors
from offmap.data.tables.schema import ColumnError, find_columns
from offmap.data.tables.table import find_suffix, open_table
from offmap.evaluation import Evaluation
from offmap.report.page import check_path
from offmap.table import Table

METRICS = {"auroc": "AUROC", "fpr95": "FPR@95", "aupr_in": "AUPR in", "aupr_out": "AUPR out"}


def evaluate(
    guard: opt.GuardPath,
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
    """Measure how well a guard detects and predicts.

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
    loaded, schema = load_guard(guard, model, weights or (), trust_model)
    with usage_errors(ColumnError):
        if target is not None or not schema.targets:
            with open_table(test, separator) as table:
                targets = find_columns(table, target, "--target") if target else table.names[-1:]
            schema = replace(schema, targets=tuple(targets))
        x, columns = schema.read(test, separator, drop=drop or [])
        ood_rows = {name: schema.read(path, separator, targets=False, drop=drop or [])[0] for name, path in files.items()}
    y = schema.encode_targets(columns, test, numeric=not loaded.likelihood.classifies)
    evaluation = offmap.evaluate(loaded, (x, y), ood_rows)
    if report is not None:
        title = f"How OOD is {', '.join(files)}?"
        offmap.write_page(evaluation, report, title=title, columns=schema.inputs or (), classes=schema.classes or ())
    scores, threshold = evaluation.scores["guard"], loaded.threshold
    flagged = {name: float((values > threshold).float().mean()) for name, values in scores.items()}
    if not as_json:
        _print_tables(evaluation, flagged, test.name)
    metrics = {row["set"]: {k: v for k, v in row.items() if k not in ("scorer", "set")} for row in evaluation.rows}
    record = {"rows": {name: len(values) for name, values in scores.items()}, "threshold": threshold, "flagged": flagged}
    record["calibrated"] = not loaded.calibration.seen
    shares = ", ".join(f"{100 * share:.1f} % of {name}" for name, share in flagged.items() if name != "test")
    false = f"{100 * flagged['test']:.1f} % of the in-distribution rows"
    text = f"At the threshold {threshold:.4g} the guard flags {shares}, and {false}."
    page = f" The page is at {report}" if report else ""
    print_result(as_json, record | {"metrics": metrics, "report": report}, text + page)


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


def _print_tables(evaluation: Evaluation, flagged: dict[str, float], name: str) -> None:
    """Print detection, a row for each OOD set, and the quality of predictions from clipped and unclipped draws."""
    rows = {row["set"]: row for row in evaluation.rows}
    test = rows.pop("test")
    detection = [
        {"set": each, "flagged": f"{100 * flagged[each]:.1f} %", **{METRICS[key]: _format(row[key]) for key in METRICS}}
        for each, row in rows.items()
    ]
    names = [key for key in test if key not in ("scorer", "set") and not key.startswith("wide_")]
    quality = [{"": key, "clipped": _format(test[key]), "unclipped": _format(test.get(f"wide_{key}"))} for key in names]
    typer.echo(f"OOD rows separated from {name}\n{Table(detection)}\n\nPredictions on {name}\n{Table(quality)}\n")


def _format(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"
