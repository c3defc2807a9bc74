"""How much of a guard's detection its distilled head keeps, and what it costs: all UCI tasks and the digits."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

import offmap
from offmap.metrics import auroc
from offmap.random import sample
from offmap_bench.runner.base_models import models
from offmap_bench.runner.images import time_work
from offmap_bench.runner.table import format_seconds, format_table, percent
from offmap_bench.speed.measure import race
from offmap_bench.studies.study import Runs, Study
from offmap_bench.tasks.catalog import expand, task

TASKS = [*expand(["uci/*/extrapolation", "uci/*/interpolation"]), "digits"]
SEEDS = (0, 1)
ROWS, TIMED, TARGET = 2000, 1000, 0.97


def measure(name: str, seed: int) -> dict[str, float]:
    """One model, its guard by default settings, and the head."""
    data = task(name, seed)
    net, ood = models(data, seed)[0], next(iter(data.ood.values()))
    sets = [x[sample(len(x), min(len(x), ROWS), "one pass", name)] for x in (data.test[0], ood)]
    guard = offmap.fit(net, data.train, data.valid, seed=seed, progress=False)
    head, seconds = time_work(lambda: offmap.distill(guard, data.train, data.valid, seed=seed))
    values = {"seconds to teach": seconds}
    scorers = {"guard": guard.score, "one pass": head.score}
    values |= {f"auroc {what}": float(auroc(*(score(x) for x in sets))) for what, score in scorers.items()}
    x = torch.cat(sets)
    x = x[torch.arange(TIMED) % len(x)]
    with torch.no_grad():
        works = {what: partial(score, x) for what, score in {**scorers, "plain": net}.items()}
        values |= {f"ms {what}": 1e3 * t.best for what, t in race(works, rounds=7, at_most={"guard": 3}).items()}
    values["false alarms"] = float((head.score(sets[0]) > head.threshold).double().mean())
    return values


def fields(runs: Runs) -> dict[str, Any]:
    by_seed = {seed: {cell: run for cell, run in runs.items() if cell.endswith(f"seed {seed}")} for seed in SEEDS}
    return {
        "summary": "\n\n".join(summarize(seed, mine) for seed, mine in by_seed.items() if mine),
        **{f"table{seed}": format_tasks(mine) for seed, mine in by_seed.items()},
    }


def format_tasks(runs: Runs) -> str:
    """Tabulate a row per task; ratios below the target in bold."""
    rows: list[list[str]] = []
    for cell, run in runs.items():
        ratio = run["auroc one pass"] / run["auroc guard"]
        share = f"{percent(ratio)} %" if ratio >= TARGET else f"**{percent(ratio)} %**"
        values = [run[f"ms {what}"] for what in ("plain", "one pass", "guard")]
        shown = [percent(run["auroc guard"]), percent(run["auroc one pass"]), share, *map(format_seconds, values)]
        rows.append([cell.partition(",")[0], *shown, f"{values[1] / values[0]:.1f}"])
    return format_table(["task", "guard", "head", "ratio", "network, ms", "head, ms", "guard, ms", "× network"], rows)


def summarize(seed: int, runs: Runs) -> str:
    ratios = {cell: run["auroc one pass"] / run["auroc guard"] for cell, run in runs.items()}
    below = [f"{cell.partition(',')[0]} ({percent(share)} %)" for cell, share in ratios.items() if share < TARGET]
    pairs = (("ms one pass", "ms plain"), ("ms guard", "ms one pass"))
    cost, gain = (statistics.median(run[a] / run[b] for run in runs.values()) for a, b in pairs)
    seconds = statistics.median(run["seconds to teach"] for run in runs.values())
    return (
        f"Seed {seed}: {percent(statistics.mean(ratios.values()))} % of the guard's AUROC on average over {len(runs)} tasks, "
        f"{len(runs) - len(below)} of them at 97 % or above{'; below: ' + ', '.join(below) if below else ''}. "
        f"A thousand rows cost {cost:.1f} forward passes of the network (median), 1/{gain:.0f} of the guard's time; "
        f"teaching the head takes {seconds:.1f} s of the processor."
    )


STUDY = Study("distill", lambda: {f"{name}, seed {s}": partial(measure, name, s) for s in SEEDS for name in TASKS}, fields)
