"""What is left of a guard's detection in one pass, and what it costs: all UCI tasks and the digits, `docs/distill.md`.

`python -m offmap_bench.studies.distill` runs what is missing in the record; `python -m offmap_bench.studies.distill table` only writes the page.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import offmap
from offmap.metrics import auroc
from offmap.random import sample
from offmap_bench.paths import DOCS, RECORDS, ROOT
from offmap_bench.runner.base_models import models
from offmap_bench.speed.measure import race
from offmap_bench.studies.moments import disagreement
from offmap_bench.tasks.catalog import expand, task

RECORD, PAGE = RECORDS / "one_pass.json", DOCS / "one_pass.md"
TASKS = [*expand(["uci/*/extrapolation", "uci/*/interpolation"]), "digits"]
SEEDS = (0, 1)
ROWS, TIMED, TARGET = 2000, 1000, 0.97

PART = ROOT / "offmap_bench.speed" / "one_pass.md"


def main() -> None:
    """Run what the record lacks, then write the page."""
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"runs": {}}
    if sys.argv[1:] != ["table"]:
        for key, name, seed in ((f"{name}, seed {seed}", name, seed) for seed in SEEDS for name in TASKS):
            if key not in kept["runs"]:
                kept["runs"][key] = run(name, seed)
                kept["versions"] = {package: version(package) for package in ("offmap", "torch")}
                print(key, json.dumps(kept["runs"][key]), flush=True)
                RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept["runs"]), encoding="utf-8")
    print(f"The page is {PAGE}")


def run(name: str, seed: int) -> dict[str, float]:
    """One model, its guard by default settings, the head and the moments."""
    data = task(name, seed)
    net = models(data, seed)[0]
    strange = next(iter(data.ood.values()))
    sets = [x[sample(len(x), min(len(x), ROWS), "one pass", name)] for x in (data.test[0], strange)]
    guard = offmap.fit(net, data.train, data.valid, seed=seed, progress=False)
    start = time.process_time()
    quick = offmap.distill(guard, data.train, data.valid, seed=seed)
    taught = time.process_time() - start
    moments = disagreement(guard)
    scores = {"guard": guard.score, "one pass": quick.score, "moments": moments}
    found = {f"auroc {what}": float(auroc(*(score(x) for x in sets))) for what, score in scores.items()}
    x = torch.cat(sets)
    x = x[torch.arange(TIMED) % len(x)]
    found |= {f"ms {what}": spent for what, spent in timed({**scores, "plain": net}, x).items()}
    alarms = float((quick.score(sets[0]) > quick.threshold).double().mean())
    found |= {"seconds to teach": taught, "false alarms": alarms}
    return {what: float(f"{value:.4g}") for what, value in found.items()}


def timed(scores: dict[str, Any], x: Tensor) -> dict[str, float]:
    """Milliseconds of the processor for these rows, the best of some turns."""
    with torch.no_grad():
        found = race({what: lambda score=score: score(x) for what, score in scores.items()}, rounds=7, at_most={"guard": 3})
    return {what: 1e3 * timing.best for what, timing in found.items()}


def page(runs: dict[str, dict[str, float]]) -> str:
    """The words of `distill.md` beside this file, with tables where it says so."""
    words = PART.read_text(encoding="utf-8")
    for seed in SEEDS:
        words = words.replace(f"<!-- table {seed} -->", table({k: r for k, r in runs.items() if k.endswith(f"seed {seed}")}))
    return words.replace("<!-- summary -->", summary(runs))


def table(runs: dict[str, dict[str, float]]) -> str:
    """A row per task."""
    head = ["task", "guard", "one pass", "ratio", "moments alone", "ratio", "plain ms", "one pass ms", "guard ms", "× plain"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for key, r in runs.items():
        guard = r["auroc guard"]
        told = [f"{100 * guard:.1f}"]
        for what in ("one pass", "moments"):
            told += [f"{100 * r[f'auroc {what}']:.1f}", ratio(r[f"auroc {what}"] / guard)]
        told += [milliseconds(r[f"ms {what}"]) for what in ("plain", "one pass", "guard")]
        lines.append([key.partition(",")[0], *told, f"{r['ms one pass'] / r['ms plain']:.1f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def milliseconds(value: float) -> str:
    """Two digits, or none behind the point."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def ratio(value: float) -> str:
    """In per cent; in bold below the target."""
    return f"{100 * value:.1f} %" if value >= TARGET else f"**{100 * value:.1f} %**"


def summary(runs: dict[str, dict[str, float]]) -> str:
    """A sentence per seed, from the numbers."""
    said: list[str] = []
    for seed in SEEDS:
        mine = {k: r for k, r in runs.items() if k.endswith(f"seed {seed}")}
        if not mine:
            continue
        kept = {k: r["auroc one pass"] / r["auroc guard"] for k, r in mine.items()}
        below = [f"{k.partition(',')[0]} ({100 * v:.1f} %)" for k, v in kept.items() if v < TARGET]
        cost = statistics.median(r["ms one pass"] / r["ms plain"] for r in mine.values())
        gain = statistics.median(r["ms guard"] / r["ms one pass"] for r in mine.values())
        teach = statistics.median(r["seconds to teach"] for r in mine.values())
        less = f"; below: {', '.join(below)}" if below else ""
        said.append(
            f"Seed {seed}: {100 * statistics.mean(kept.values()):.1f} % of the guard's AUROC on average over {len(mine)} tasks, "
            f"{len(mine) - len(below)} of them at 97 % or above{less}. A thousand rows cost {cost:.1f} plain passes (median), "
            f"1/{gain:.0f} of the guard's time; the head is taught in {teach:.1f} s of the processor."
        )
    return "\n\n".join(said)


if __name__ == "__main__":
    main()
