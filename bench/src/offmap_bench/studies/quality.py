"""How well OOD inputs are found, over seeds: the plans of the demo."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from offmap_bench.demo.run import DIGITS, PLANS, Plan, run
from offmap_bench.runner.table import SHOW, format_table, spread
from offmap_bench.studies.study import Runs, Study
from offmap_bench.tasks.synthetic import digits

SEEDS = range(5)


def measure(plan: Plan, seed: int) -> dict[str, dict[str, float]]:
    """Detection on every OOD set and quality on test data, by method; the digits are split anew for every seed."""
    plan = replace(plan, task=partial(digits, seed=seed)) if plan is DIGITS else plan
    numbers: dict[str, dict[str, float]] = {}
    for row in run(plan, seed).evaluation.rows:
        mine = numbers.setdefault(row["scorer"], {})
        if row["set"] == "test":
            mine |= {name: round(row[name], 5) for name in ("rmse", "accuracy", "nll", "ece") if name in row}
        else:
            mine |= {f"{name} {row['set']}": round(row[name], 5) for name in ("auroc", "fpr95")}
    return numbers


def fields(runs: Runs) -> dict[str, Any]:
    return {"seeds": len(SEEDS), "tables": "\n\n".join(f"## {plan.title}\n\n{format_plan(plan, runs)}" for plan in PLANS)}


def format_plan(plan: Plan, runs: Runs) -> str:
    """Tabulate the mean ± standard deviation over seeds."""
    seeds = [numbers for cell, numbers in runs.items() if cell.startswith(f"{plan.title}, seed")]
    columns = list(dict.fromkeys(name for numbers in seeds for values in numbers.values() for name in values))

    def cell(method: str, name: str) -> str:
        values = [numbers[method][name] for numbers in seeds if name in numbers[method]]
        shown = "percent" if name.startswith(("auroc", "fpr95", "accuracy", "ece")) else "plain"
        return spread(values, SHOW[shown]) if values else ""

    return format_table(["method", *columns], [[method, *(cell(method, name) for name in columns)] for method in seeds[0]])


STUDY = Study("quality", lambda: {f"{p.title}, seed {s}": partial(measure, p, s) for s in SEEDS for p in PLANS}, fields)
