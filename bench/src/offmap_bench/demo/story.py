"""The page of the demo: one section per task with panels, tables and words. Every number comes from the run."""

from __future__ import annotations

import platform
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offmap._version import __version__
from offmap.checks import require
from offmap.distributed.jobs import Pool
from offmap.report.page import MAP, Panel, Section, check_path, gallery, legend, paragraphs, render, table, write
from offmap.table import Table
from offmap_bench.demo.run import ENSEMBLE, JOINED, NEAREST, PLAIN, PLANS, SCALING, SVD, SVD5, Plan, Result, quick, run
from offmap_bench.report.panels import CLASSES, SETS, TOP, image_panel, roc_gallery, score_panels, view_panel
from offmap_bench.runner.plan import read_packaged

TEXTS: dict[str, str] = tomllib.loads(read_packaged("templates")["demo"])
ON_TOP = (SCALING, SVD, SVD5, JOINED)  # fitted around nets that are trained already


def demo(
    out: Path,
    *,
    seed: int = 0,
    fast: bool = False,
    workers: int = 1,
    report: Callable[[str, str], None] = lambda title, doing: None,
) -> tuple[Path, list[Result]]:
    """Run all plans and write the page to `out`; `fast` takes a few seconds. `report` is called with a title and what begins."""
    check_path(out)
    require("sklearn", "sklearn")
    require("matplotlib", "figures")
    start, plans = time.perf_counter(), [quick(plan) for plan in PLANS] if fast else list(PLANS)
    jobs = [(write_chapter, (plan, seed)) for plan in plans]
    chapters = Pool(workers=workers).run_jobs(jobs, report=lambda n, doing: report(plans[n].title, doing))
    versions = {"offmap": __version__, "torch": torch.__version__, "python": platform.python_version()}
    seconds = time.perf_counter() - start
    foot = TEXTS["foot"].format(seed=seed, quick=" --quick" * fast, seconds=seconds, **versions)
    page = render("Off the map", TEXTS["lead"], [section for _, section in chapters], foot=foot)
    return write(page, out), [result for result, _ in chapters]


def write_chapter(plan: Plan, seed: int, report: Callable[[str], None]) -> tuple[Result, Section]:
    result = run(plan, seed, report)
    report("Drawing")
    return result, describe(result)


def tabulate(result: Result) -> Table:
    """Return detection on every OOD set, quality on test data, and seconds, as text."""
    title, key = ("RMSE", "rmse") if result.task.likelihood == "gaussian" else ("accuracy", "accuracy")
    by_scorer = {(row["scorer"], row["set"]): row for row in result.evaluation.rows}
    several = len(result.task.ood) > 1
    lines: list[dict[str, str]] = []
    for method in result.evaluation.scores:
        line = {"method": method}
        for name, measure in (("AUROC", "auroc"), ("FPR@95", "fpr95")):
            for ood in result.task.ood:
                line[f"{name} {ood}" if several else name] = f"{100 * by_scorer[method, ood][measure]:.1f}"
        value = by_scorer.get((method, "test"), {}).get(key)
        line[title] = "–" if value is None else f"{value:.4f}" if key == "rmse" else f"{100 * value:.1f}"
        line["fit, s"] = f"{'+' if method in ON_TOP else ''}{result.seconds[method]:.1f}"
        lines.append(line)
    return Table(lines)


def describe(result: Result) -> Section:
    tell = {"gaussian": describe_regression, "bernoulli": describe_moons, "categorical": describe_digits}[result.task.likelihood]
    numbers, ends = tabulate(result), {"AUROC": "max", "FPR@95": "min", "RMSE": "min", "accuracy": "max"}
    best = {c: end for c in numbers.columns for word, end in ends.items() if c.startswith(word)}
    sets = ["test data (in-distribution)", *result.task.ood]
    key = [("area", f"var(--{shade})", words) for shade, words in zip(SETS, sets, strict=False)]
    key.append(("line 3 3", "var(--ink)", "threshold: 5 % of validation rows score higher"))
    panels = score_panels(result.evaluation, thresholds=result.thresholds, alone=[JOINED, NEAREST], least=result.plan.least)
    plain = ", which is the plain net" if result.clip == 0 else ""
    clip = "no clip at all" if result.clip is None else f"a clip of {result.clip:g}{plain}"
    name, fields, heading, drawing = tell(result)
    fields["clip"] = f"For its own predictions, the guard chose {clip} on validation data."
    body = [
        paragraphs(TEXTS[name].format(**fields)) + f"<h3>{heading}</h3>" + drawing,
        "<h3>Numbers</h3>", table(numbers, best=best, dots=True), paragraphs(TEXTS["note"], "note"),
        "<h3>Scores</h3>", paragraphs(TEXTS["scores"]), gallery(panels, legend=legend(key)),
        "<h3>ROC curves</h3>", roc_gallery(result.evaluation),
    ]  # fmt: skip
    return Section(result.plan.title, "\n".join(body))


Description = tuple[str, dict[str, Any], str, str]
"""The name of a text, its fields, a heading and the drawings below it."""


def describe_regression(result: Result) -> Description:
    key = legend([
        ("area", "var(--band)", "mean ± 2 standard deviations"), ("line", "var(--series4)", "mean prediction"),
        ("line 5 3", "var(--ink)", "true function"), ("dot", "var(--ink)", "training points"),
    ])  # fmt: skip
    fields: dict[str, Any] = {"rows": len(result.task.train[0])}
    for name, method in (("svd", SVD), ("plain", PLAIN)):
        median = {s: float(v.sqrt().median()) for s, v in result.evaluation.scores[method].items()}
        fields |= {f"{name}_{s}": times(median[s], median["test"]) for s in ("outside", "gap")}
        fields[f"{name}_test"] = f"{median['test']:.2g}"
    return "regression", fields, "Confidence bands", gallery(views(result), legend=key)


def times(value: float, base: float) -> str:
    """Write a ratio in words.

    >>> times(3.0, 2.0), times(2468.0, 1.0)
    ('1.5 times', '2,000 times')
    """
    ratio = value / base
    return f"{ratio:.2g} times" if ratio < 100 else f"{float(f'{ratio:.1g}'):,.0f} times"


def views(result: Result) -> list[Panel]:
    return [view_panel(view, result.task.train, name) for name, view in result.views.items()]


def describe_moons(result: Result) -> Description:
    key = legend([
        ("area", f"linear-gradient(90deg, {', '.join(MAP)})", "entropy, from 0 (certain) to log 2 (undecided)"),
        ("dot", CLASSES[0], "training points, first class"), ("dot", CLASSES[1], "training points, second class"),
    ])  # fmt: skip
    scores, order = result.evaluation.scores, (PLAIN, ENSEMBLE, SVD, SVD5)
    far, near = (shares([scores[m][s] > TOP / 2 for m in order]) for s in (*result.task.ood, "test"))
    return "moons", {"far": far, "near": near}, "Uncertainty maps", gallery(views(result), legend=key)


def describe_digits(result: Result) -> Description:
    name, images = next(iter(result.task.ood.items()))
    assert result.labels is not None
    scores, methods, panels = result.evaluation.scores, (PLAIN, SVD, SVD5), list[Panel]()
    order = scores[SVD][name].argsort(descending=True)
    ends = {"Unknown digits with the highest scores": order[:10], "Unknown digits with the lowest scores": order[-10:]}
    for title, part in ends.items():
        taken = [f"{int(label)}?" for label in result.labels[part]]
        svg = image_panel(images[part].reshape(-1, 8, 8).numpy(), taken)
        alt = f"{title}: {len(taken)} images, which the model calls {', '.join(taken)}."
        panels.append(Panel(svg, title, alt, "and what the model calls them"))
    alarms, false = (shares([scores[m][s] > result.thresholds[m] for m in methods]) for s in (name, "test"))
    area = {row["scorer"]: f"{100 * row['auroc']:.1f}" for row in result.evaluation.rows if row["set"] == name}
    fields: dict[str, Any] = {"rows": len(result.task.train[0]), "unknown": len(images), "alarms": alarms, "false": false}
    fields |= {"areas": join_words([area[m] for m in methods]), "nearest": area[NEAREST], "joined": area[JOINED]}
    return "digits", fields, "Highest and lowest scores of the MaxWEnt-SVD guard", gallery(panels, width="26rem")


def shares(flags: Sequence[Tensor]) -> str:
    return join_words([f"{100 * float(each.float().mean()):.0f} %" for each in flags])


def join_words(words: Sequence[str]) -> str:
    """Write a list in prose.

    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    return f"{', '.join(words[:-1])} and {words[-1]}"
