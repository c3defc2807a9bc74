"""How well OOD inputs are found, over seeds: the demo's plans, kept as one record and shown in `docs/quality.md` and README.

`python -m offmap_bench.studies.quality` runs what is missing in the record, seed by seed; `python -m offmap_bench.studies.quality table` only writes.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from offmap_bench.demo.plans import DIGITS, PLANS, Plan
from offmap_bench.demo.run import Result, run
from offmap_bench.paths import DOCS, RECORDS, ROOT
from offmap_bench.tasks.digits import digits

RECORD = RECORDS / "quality.json"
PAGE = DOCS / "quality.md"
SEEDS = range(5)

INTRODUCTION = """# Quality

Made by `python -m offmap_bench.studies.quality` from `bench/records/quality.json`: the plans of `offmap demo`
(`bench/src/offmap_bench/demo/plans.py`) over {seeds} seeds of nets (and of splits, for the digits), mean ± standard deviation; shares in per
cent. Guards use 50 draws per net and the paper's scores, but for the row that says otherwise: offmap's default score joins the
disagreement of the row above it with the distance to training rows. *RMSE* and *accuracy* are of clipped predictions on test
data; FPR@95 is the share of OOD inputs at or below the 95 % quantile of in-distribution scores. The nearest training row is the
honest baseline: on data of few dimensions it needs no network at all.
"""


def main() -> None:
    """Run the seeds that the record lacks, then write the tables."""
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"runs": {}}
    if sys.argv[1:] != ["table"]:
        for seed in SEEDS:
            for plan in PLANS:
                key = f"{plan.title}, seed {seed}"
                if key not in kept["runs"]:
                    print(key, flush=True)
                    kept["runs"][key] = measured(run(seeded(plan, seed), seed))
                    kept["versions"] = {name: version(name) for name in ("offmap", "torch")}
                    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pages = {plan.title: table(plan, kept["runs"]) for plan in PLANS}
    body = "\n\n".join(f"## {title}\n\n{lines}" for title, lines in pages.items())
    PAGE.write_text(INTRODUCTION.format(seeds=len(SEEDS)) + "\n" + body + "\n", encoding="utf-8")
    readme(pages[DIGITS.title])
    print(f"The page is {PAGE}")


def seeded(plan: Plan, seed: int) -> Plan:
    """The digits are split anew for every seed; the synthetic data are the paper's own."""
    return replace(plan, task=partial(digits, seed=seed)) if plan is DIGITS else plan


def measured(result: Result) -> dict[str, dict[str, float]]:
    """Numbers per method: detection on every OOD set, and quality on test data."""
    numbers: dict[str, dict[str, float]] = {}
    for row in result.evaluation.rows:
        mine = numbers.setdefault(row["scorer"], {})
        if row["set"] == "test":
            mine |= {name: round(row[name], 5) for name in ("rmse", "accuracy", "nll", "ece") if name in row}
        else:
            mine |= {f"{name} {row['set']}": round(row[name], 5) for name in ("auroc", "fpr95")}
    return numbers


def table(plan: Plan, runs: dict[str, Any]) -> str:
    """A markdown table of one task."""
    mine = [numbers for key, numbers in runs.items() if key.startswith(f"{plan.title}, seed")]
    columns = list(dict.fromkeys(name for numbers in mine for values in numbers.values() for name in values))
    head = [["method", *columns], ["---", *["---:"] * len(columns)]]
    rows = [[method, *(cell(name, [n[method].get(name) for n in mine]) for name in columns)] for method in mine[0]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [*head, *rows])


def cell(name: str, values: list[float | None]) -> str:
    """Mean ± standard deviation; shares in per cent."""
    known = [v for v in values if v is not None]
    if not known:
        return ""
    factor, digits_ = (100, 1) if name.startswith(("auroc", "fpr95", "accuracy", "ece")) else (1, 3)
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return f"{factor * statistics.mean(known):.{digits_}f} ± {factor * spread:.{digits_}f}"


def readme(lines: str) -> None:
    """Put one table between the README's markers."""
    path = ROOT / "README.md"
    before, _, rest = path.read_text(encoding="utf-8").partition("<!-- quality -->")
    _, _, after = rest.partition("<!-- /quality -->")
    words = """Handwritten digits, 0–4 known and 5–9 unknown, five seeds, per cent (`python -m offmap_bench.studies.quality`).
All rows but one have the paper's score. The last, the distance to the nearest training image, needs no network and is the baseline
to beat:"""
    path.write_text(f"{before}<!-- quality -->\n{words}\n\n{lines}\n<!-- /quality -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
