"""The whole demo: run the plans, tell the story, write the page."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from offmap.distributed.jobs import Pool
from offmap.extras import require
from offmap.report.page import Section, check_path, render, write
from offmap_bench.demo.run import METHODS, PLANS, Plan, Result, quick, run
from offmap_bench.demo.story import section

Report = Callable[[str, str], None]
"""Told (title of the task, what is about to be done)."""

STAGES = len(METHODS) + 2
"""Reports per task."""

LEAD = """offmap tells when a neural network is off the map of its training data. It draws many networks that all explain the
training data and reads how much they disagree: little on in-distribution inputs, a lot elsewhere. This page compares it with the
usual methods on three small data sets, in the manner of figure 1 of the MaxWEnt paper."""


@dataclass(frozen=True)
class Shown:
    """Where the page is, and what is in it."""

    page: Path
    results: list[Result]


def demo(out: Path, *, seed: int = 0, fast: bool = False, workers: int = 1, report: Report = lambda title, doing: None) -> Shown:
    """Run all plans and write the page to `out`; `fast` takes a few seconds and shows little but that it runs."""
    check_path(out)
    require("sklearn", "sklearn")
    require("matplotlib", "figures")
    start = time.perf_counter()
    plans: list[Plan] = [quick(plan) for plan in PLANS] if fast else list(PLANS)
    jobs = [(chapter, (plan, seed)) for plan in plans]
    chapters: list[tuple[Result, Section]] = Pool(workers=workers).run_jobs(
        jobs, report=lambda n, doing: report(plans[n].title, doing)
    )
    page = render("Off the map", LEAD, [s for _, s in chapters], foot=_foot(seed, fast, time.perf_counter() - start))
    return Shown(write(page, out), [result for result, _ in chapters])


def chapter(plan: Plan, seed: int, report: Callable[[str], None]) -> tuple[Result, Section]:
    """One task from its data to its part of the page."""
    result = run(plan, seed, report)
    report("Drawing")
    return result, section(result)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _foot(seed: int, fast: bool, seconds: float) -> str:
    from offmap import __version__

    command = f"offmap demo --seed {seed}{' --quick' if fast else ''}"
    return f"""Made by `{command}` in {seconds:.0f} s with offmap {__version__}, torch {torch.__version__} and
    Python {platform.python_version()}. Models are small ReLU nets; guards use 50 draws per net and
    the paper's scores: the variance of the mixture for regression, the entropy of the mean
    prediction for classification."""
