"""Trials of the promises: `python -m checks.trust run [NAME ...]`, `... retry`, `... again`, `... page`.

`run` continues each check of `bench/tests/faults` where its record in `bench/records/trust.jsonl` ends; `retry` runs the failed
trials on record once more, after a fix; `again` repeats a seeded tenth of the trials on record; `page`, and `again` at its end,
writes `docs/results/trust.md`. Trials run in a process of their own: one that hangs or crashes is a failure of that seed, and the
next goes on. `--patience 10` waits ten times as long before it calls that a hang, for machines that are busy with other work.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from checks import coverage, mutants, records
from offmap_bench.paths import RESULTS, ROOT
from offmap_bench.studies.study import fill

PAGE = RESULTS / "trust.md"
sys.path.insert(0, str(ROOT / "tests"))  # as in pytest

CHECKS: tuple[str, ...] = (
    "damaged_guard", "damaged_checkpoint", "damaged_record", "damaged_scores", "damaged_export", "damaged_cache",
    "killed_fit", "killed_bench", "killed_score", "killed_rank", "no_room", "whole_calls", "single_precision", "rescaled",
    "degenerate", "same_bits", "soak", "changed_bytes", "hostile_files",
)  # fmt: skip
"""Modules of `bench/tests/faults`, in the order of the page."""


@dataclass(frozen=True)
class Check:
    """A promise and a trial of it.

    `trial(seed, folder)` starts from an empty folder and returns in a word or two how it ended ("killed, resumed"); it raises an
    AssertionError where the promise does not hold. One that takes longer than `limit` seconds counts as a hang.
    """

    promise: str
    trial: Callable[[int, Path], str]
    trials: int = 200
    limit: float = 120.0
    quick: int = 2  # the trials that `make test` runs


@dataclass
class Outcomes:
    """What the trials 0 … done − 1 of a check gave, and a part of them when they were repeated."""

    name: str
    done: int = 0
    endings: dict[str, int] = field(default_factory=dict[str, int])
    failures: dict[str, str] = field(default_factory=dict[str, str])  # {seed: the last line of its error}
    seconds: float = 0.0
    repeated: dict[str, Any] | None = None  # {"trials": ..., "failures": {seed: error}, "seconds": ...}

    def add(self, seed: int, ending: str, failure: str | None, seconds: float) -> None:
        self.done = max(self.done, seed + 1)
        self.seconds = round(self.seconds + seconds, 2)
        self.failures.pop(str(seed), None)
        if failure is None:
            self.endings[ending] = self.endings.get(ending, 0) + 1
        else:
            self.failures[str(seed)] = failure


def check_of(name: str) -> Check:
    """Import the `CHECK` of a module of `bench/tests/faults`."""
    return import_module(f"faults.{name}").CHECK


def read(name: str) -> Outcomes:
    """Read the record of a check, empty where there is none yet."""
    return Outcomes(**next((entry for entry in records.read("trust") if entry["name"] == name), {"name": name}))


def write(outcomes: Outcomes) -> None:
    entries = {entry["name"]: entry for entry in records.read("trust")} | {outcomes.name: asdict(outcomes)}
    records.write("trust", (entries[name] for name in CHECKS if name in entries))


def try_seeds(name: str, seeds: list[int], patience: float = 1.0) -> Iterator[tuple[int, str, str | None, float]]:
    """Yield (seed, ending, failure or None, seconds) of each, from a process that is replaced when it hangs or dies."""
    limit, pool = patience * check_of(name).limit, None
    try:
        for seed in seeds:
            if pool is None:
                pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=check_of, initargs=(name,))
                pool.submit(abs, 0).result()  # imports are no part of a trial
            start = time.monotonic()
            try:
                ending, failure = pool.submit(try_seed, name, seed).result(limit)
            except (TimeoutError, BrokenProcessPool) as error:
                ending, failure = "", f"hang: over {limit:g} s" if isinstance(error, TimeoutError) else "crash: the process ended"
                for child in multiprocessing.active_children():
                    child.kill()
                pool = pool.shutdown()
            yield seed, ending, failure, time.monotonic() - start
    finally:
        if pool:
            pool.shutdown()


def try_seed(name: str, seed: int) -> tuple[str, str | None]:
    """In a process of its own: how a trial ended, or the last line of its error."""
    import torch

    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return check_of(name).trial(seed, Path(folder)), None
    except BaseException as error:
        return "", "".join(traceback.format_exception_only(error)).strip()[-2000:]


def run(names: list[str], minutes: float = float("inf"), patience: float = 1.0, *, failed: bool = False) -> int:
    """Go on with each check, or run its failed trials again, until the time is up; return the number of failures on record."""
    end = time.monotonic() + 60 * minutes
    for name in names:
        outcomes, check = read(name), check_of(name)
        seeds = sorted(map(int, outcomes.failures)) if failed else list(range(outcomes.done, check.trials))
        for outcome in try_seeds(name, seeds, patience):
            outcomes.add(*outcome)
            write(outcomes)
            print(f"{name}, seed {outcome[0]} of {check.trials}: {outcome[1] or outcome[2]}", flush=True)
            if time.monotonic() > end:
                break
    return sum(len(read(n).failures) for n in names)


def again(names: list[str], share: float = 0.1, seed: int = 0, patience: float = 1.0) -> int:
    """Repeat a seeded part of the trials on record; return the number that fail now."""
    total = 0
    for name in names:
        outcomes = read(name)
        done = outcomes.done
        if seeds := sorted(random.Random(seed).sample(range(done), min(done, max(1, round(share * done))))):
            start = time.monotonic()
            failures = {str(s): failure for s, _, failure, _ in try_seeds(name, seeds, patience) if failure is not None}
            outcomes.repeated = {"trials": len(seeds), "failures": failures, "seconds": round(time.monotonic() - start, 1)}
            write(outcomes)
            print(f"{name}: {len(seeds)} of {done} trials again, {len(failures)} failed {failures or ''}", flush=True)
            total += len(failures)
    return total


def page() -> str:
    """Promises, trials and how they ended; fuzzing, coverage and mutants."""
    rows, every = list[str](), [read(name) for name in CHECKS]
    for outcomes in every:
        endings = ", ".join(f"{ending}: {count:,}" for ending, count in sorted(outcomes.endings.items()))
        each = f"{outcomes.seconds / outcomes.done:.2f}" if outcomes.done else "–"
        then = f"{outcomes.repeated['trials']:,} | {len(outcomes.repeated['failures'])}" if outcomes.repeated else "– | –"
        counts = f"{outcomes.done:,} | {endings} | {len(outcomes.failures)} | {each} | {then}"
        rows.append(f"| {check_of(outcomes.name).promise} (`{outcomes.name}`) | {counts} |")
    total = f"In all {sum(o.done for o in every):,} trials and {sum(len(o.failures) for o in every):,} failures"
    if repeated := [o.repeated for o in every if o.repeated]:
        trials, failures = sum(r["trials"] for r in repeated), sum(len(r["failures"]) for r in repeated)
        minutes = sum(r["seconds"] for r in repeated) / 60
        total += f"; repeated {trials:,}, with {failures:,} failures, in {minutes:.0f} minutes"
    tables = {"fuzzing": fuzz_table(), "coverage": coverage.table(), "mutants": mutants.table()}
    return fill("trust", trials="\n".join(rows), total=total, **tables)


def fuzz_table() -> str:
    entries = records.read("fuzz")
    total = {"name": "all", **{key: sum(entry[key] for entry in entries) for key in ("executions", "seconds")}}
    total["crashes"] = [crash for entry in entries for crash in entry["crashes"]]
    total["peak_mb"] = max((entry["peak_mb"] for entry in entries), default=0)
    keys, rows = ("name", "executions", "seconds", "crashes", "peak_mb"), list[str]()
    for name, runs, seconds, crashes, peak in (map(entry.get, keys) for entry in [*entries, total]):
        rows.append(f"| {name.replace('_', ' ')} | {runs:,} | {seconds / 60:.1f} | {len(crashes)} | {peak} |")
    return "\n".join(["| reader | inputs | minutes | crashes | peak MB |", "|---|--:|--:|--:|--:|", *rows])


def write_page() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"The page is {PAGE}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checks.trust", description=__doc__)
    parser.add_argument("command", choices=["run", "retry", "again", "page"])
    parser.add_argument("names", nargs="*", default=[], help=f"all by default: {', '.join(CHECKS)}")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next trial after so long")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limit that a trial may take")
    asked = parser.parse_args()
    names, failures = asked.names or list(CHECKS), 0
    if asked.command in ("run", "retry"):
        failures = run(names, asked.minutes, asked.patience, failed=asked.command == "retry")
    elif asked.command == "again":
        failures = again(names, patience=asked.patience)
    if asked.command in ("again", "page"):
        write_page()
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
