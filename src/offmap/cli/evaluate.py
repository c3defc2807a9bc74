"""`offmap evaluate`: how well a guard tells OOD tables from an in-distribution one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import offmap
from offmap.cli.load import load_guard
from offmap.cli.options import Drop, GuardFile, Json, Misuse, Net, Separator, TrustNet, Weights, misused, tell
from offmap.cli.show import drawn
from offmap.data.tables.schema import ColumnError, Schema, find_columns
from offmap.data.tables.table import find_suffix, open_table
from offmap.evaluation import Evaluation
from offmap.guard import Guard
from offmap.report.page import check_path
from offmap.table import Table


def evaluate(
    guard: GuardFile,
    test: Annotated[Path, typer.Option(help="an in-distribution table with its target.", show_default=False)],
    ood: Annotated[list[str], typer.Option(metavar="NAME=FILE", help="An OOD table; may be repeated.", show_default=False)],
    report: Annotated[Path | None, typer.Option(help="Also write one self-contained HTML page.")] = None,
    net: Net = None,
    weights: Weights = None,
    trust_net: TrustNet = False,
    target: Annotated[str | None, typer.Option(help="The column of the target, for guards that do not remember it.")] = None,
    drop: Drop = None,
    separator: Separator = None,
    as_json: Json = False,
) -> None:
    """Measure a guard: how well OOD rows are told apart, how good predictions on in-distribution rows are.

    \b
    Example:
      offmap evaluate guard.safetensors --net my_module:make_net --test test.parquet --ood north=north.parquet --report page.html
    """  # noqa: D301
    if report is not None:
        check_path(report)
    sets = _sets(ood)
    with misused():
        for path in (test, *sets.values()):
            find_suffix(path)
    loaded, schema = load_guard(guard, net, weights, trust_net)
    with misused(ColumnError):
        schema = _aimed(schema, test, target, separator)
        x, columns = schema.read(test, separator, drop=drop or [])
        strange = {name: schema.read(path, separator, targets=False, drop=drop or [])[0] for name, path in sets.items()}
    familiar = (x, schema.encode_targets(columns, test, numeric=not loaded.likelihood.classifies))
    found = offmap.evaluate(loaded, familiar, strange)
    if report is not None:
        title = f"How OOD is {', '.join(sets)}?"
        offmap.write_page(found, report, title=title, columns=schema.inputs or (), classes=schema.classes or ())
    flagged = {name: float((scores > loaded.threshold).float().mean()) for name, scores in found.scores["guard"].items()}
    quality, detection = _tables(found, flagged)
    if not as_json:
        console = Console(width=None if Console().is_terminal else 120)
        console.print(drawn(detection, f"OOD rows told from {test.name}"))
        console.print(drawn(quality, f"Predictions on {test.name}"))
    rows = {name: len(scores) for name, scores in found.scores["guard"].items()}
    results = {row["set"]: {k: v for k, v in row.items() if k not in ("scorer", "set")} for row in found.rows}
    record = {"rows": rows, "threshold": loaded.threshold, "flagged": flagged, "metrics": results, "report": report}
    tell(as_json, record, f"{_words(flagged, loaded)}{f' The page is at {report}' if report else ''}")


def _sets(given: Sequence[str]) -> dict[str, Path]:
    """NAME=FILE; a file alone is named like itself."""
    result: dict[str, Path] = {}
    for text in given:
        name, mark, file = text.partition("=")
        path = Path(file if mark else text)
        name = name if mark else path.name.partition(".")[0]
        if not name or not str(path) or name == "test" or name in result:
            raise Misuse(f"Expected --ood as NAME=FILE, each name once and none of them 'test', but got {text!r}.")
        result[name] = path
    return result


def _aimed(schema: Schema, test: Path, target: str | None, separator: str | None) -> Schema:
    """The schema with a target: remembered, named, or the last column."""
    if schema.targets and target is None:
        return schema
    with open_table(test, separator) as table:
        chosen = find_columns(table, target, "--target") if target else table.names[-1:]
    return Schema(schema.inputs, tuple(chosen), schema.classes)


def _tables(found: Evaluation, flagged: dict[str, float]) -> tuple[Table, Table]:
    """Quality on in-distribution rows, clipped and wide; and detection, a row for each OOD set."""
    test = next(row for row in found.rows if row["set"] == "test")
    names = [name for name in test if name not in ("scorer", "set") and not name.startswith("wide_")]
    quality = [{"": name, "clipped": _number(test[name]), "wide": _number(test.get(f"wide_{name}"))} for name in names]
    words = {"auroc": "AUROC", "fpr95": "FPR@95", "aupr_in": "AUPR in", "aupr_out": "AUPR out"}
    detection = [
        {"set": row["set"], "flagged": f"{flagged[row['set']]:.1%}", **{words[name]: _number(row[name]) for name in words}}
        for row in found.rows
        if row["set"] != "test"
    ]
    return Table(quality), Table(detection)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def _words(flagged: dict[str, float], guard: Guard) -> str:
    sets = ", ".join(f"{share:.1%} of {name}" for name, share in flagged.items() if name != "test")
    return (
        f"At the threshold {guard.threshold:.4g} the guard flags {sets}, and {flagged['test']:.1%} of the in-distribution rows."
    )
