"""What the options of `offmap.fit` do: basis, random parameters, solver, draws and clip, on UCI tables.

`python -m offmap_bench.studies.options` runs what the record lacks, task by task, and writes `docs/options.md`; with `table` it only
writes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import offmap
from offmap import evaluation
from offmap.data import batches, gather
from offmap.guard import Guard
from offmap.metrics import auroc
from offmap_bench.paths import DOCS, RECORDS
from offmap_bench.runner.base_models import models
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.task import Task

RECORD = RECORDS / "options.json"
PAGE = DOCS / "options.md"
TABLES = ("yacht", "energy", "concrete", "wine", "kin8nm")
MODES = ("extrapolation", "interpolation")
ROWS = 1000
DRAWS = (5, 10, 20, 50, 100, 200)
BASE = "defaults"
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "basis='identity'": {"basis": "identity"},
    "solver='closed-form'": {"solver": "closed-form"},
    "where='matrices'": {"params": "matrices"},
    "where='last-layer'": {"params": "last-layer"},
}

INTRODUCTION = """# What the options do

Made by `python -m offmap_bench.studies.options` from `bench/records/options.json`: {tables} of the UCI tables
({names}), in both modes, split 0, the first of the five 3 × 100 nets of the [UCI benchmark](uci.md), at most {rows} test rows
and {rows} OOD rows. One option differs from the defaults at a time. *Disagreement* is AUROC with `score="epistemic"`,
*default* with the default score, which adds distances and hides much of what an option does; *NLL* and *RMSE* are of clipped
predictions on test rows, in units of the training targets' standard deviation. One net, one split, five tables: directions, not
digits.
"""


def main() -> None:
    """Run the tasks that the record lacks, then write the page."""
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"tasks": {}}
    if sys.argv[1:] != ["table"]:
        torch.set_num_threads(1)
        for name in (f"uci/{table}/{mode}" for table in TABLES for mode in MODES):
            if name not in kept["tasks"]:
                print(name, flush=True)
                kept["tasks"][name] = measured(task(name, 0))
                kept["versions"] = {package: version(package) for package in ("offmap", "torch")}
                RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept["tasks"]), encoding="utf-8")
    print(f"The page is {PAGE}")


def measured(data: Task) -> dict[str, Any]:
    """All numbers of one task: of every variant, and of the defaults by draws and by clip."""
    net = models(data, 0)[0]
    (strange,) = data.ood.values()
    parts = {"test": chosen(data.test[0]), "OOD": chosen(strange)}
    found: dict[str, Any] = {}
    for name, options in VARIANTS.items():
        before = time.process_time()
        guard = offmap.fit(net, data.train, data.valid, progress=False, **options)
        seconds = time.process_time() - before
        found[name] = detection(guard, parts) | quality(guard, data) | {"seconds": round(seconds, 2)}
        if name == BASE:
            found["draws"] = {str(n): detection(replace(guard, draws=n), parts) for n in DRAWS}
            found["clip"] = {
                str(label): quality(replace(guard, clip=clip), data)
                for label, clip in (("chosen", guard.clip), ("none", None), ("0", 0.0))
            }
    return found


def chosen(x: Tensor) -> Tensor:
    """At most so many rows, always the same."""
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:ROWS]]


def detection(guard: Guard, parts: dict[str, Tensor]) -> dict[str, float]:
    """AUROC by disagreement alone, and by the default score."""
    guards = {"disagreement": replace(guard, score_with="epistemic", familiar=None), "default": guard}
    return {n: round(float(auroc(g.score(parts["test"]), g.score(parts["OOD"]))), 4) for n, g in guards.items()}


def quality(guard: Guard, data: Task) -> dict[str, float]:
    """NLL and RMSE of predictions on test rows."""
    found = evaluation.quality(guard, gather(batches(data.test, guard.place, name="test")))
    return {name: round(float(found[name]), 4) for name in ("nll", "rmse")}


def page(tasks: dict[str, Any]) -> str:
    """Three tables: means over the tasks of each mode."""
    head = INTRODUCTION.format(tables=len(TABLES), names=", ".join(TABLES), rows=f"{ROWS:,}")
    columns = ["disagreement, extrapolation", "disagreement, interpolation", "default, extrapolation", "default, interpolation"]

    def numbers(*keys: str) -> list[str]:
        at = [[per_cent(mean(tasks, mode, *keys, score)) for mode in MODES] for score in ("disagreement", "default")]
        return [cell for pair in at for cell in pair]

    options = [
        [f"`{n}`" if n != BASE else n, *numbers(n), *(f"{mean(tasks, '', n, k):.3f}" for k in ("nll", "rmse")),
         f"{mean(tasks, '', n, 'seconds'):.1f}"] for n in VARIANTS
    ]  # fmt: skip
    draws = [[str(n), *numbers("draws", str(n))] for n in DRAWS]
    clips = {"chosen": "chosen on validation data", "none": "none: the wide distribution", "0": "0: the net itself"}
    clipped = [[words, *(f"{mean(tasks, '', 'clip', c, k):.3f}" for k in ("nll", "rmse"))] for c, words in clips.items()]
    parts = [
        ("One option at a time", ["option", *columns, "NLL", "RMSE", "fit, s"], options),
        ("How many draws", ["draws", *columns], draws),
        ("What the clip does to predictions", ["clip", "NLL", "RMSE"], clipped),
    ]
    return "\n".join([head, *(f"## {title}\n\n{markdown(header, rows)}\n" for title, header, rows in parts)])


def mean(tasks: dict[str, Any], mode: str, *keys: str) -> float:
    """The mean of one number over the tasks of a mode ("": of both)."""
    values: list[float] = []
    for name, found in tasks.items():
        if name.endswith(mode):
            for key in keys:
                found = found[key]
            values.append(float(found))
    return statistics.fmean(values)


def per_cent(value: float) -> str:
    return f"{100 * value:.1f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
