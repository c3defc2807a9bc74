"""Promises and what trials of them showed: `python -m offmap_bench.checks.trust run [NAME ...]`, `... retry`, `... again`, `... page`.

`run` continues each check of `bench/tests/faults` where its record in `bench/records/trust/` ends; `retry` runs the failed trials
on record once more, after a mend; `again` repeats a seeded tenth of the trials on record, and keeps what came of it in
`bench/records/trust-again.json`; `page`, and `again` at its end, writes `docs/trust.md` from the records. Trials run in a
process of their own: one that hangs or crashes is a failure of that seed, and the next one goes on. `--patience 10` waits ten
times as long before it calls that a hang, for machines that are busy with other work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from offmap.io.atomic import write_whole
from offmap_bench.checks import covered, mutants
from offmap_bench.paths import DOCS, RECORDS, ROOT

PAGE = DOCS / "trust.md"
FOLDER = RECORDS / "trust"
REPEATED = RECORDS / "trust-again.json"
FUZZED = RECORDS / "fuzz"
sys.path[:0] = [str(ROOT / "tests")]  # as in pytest

CHECKS: tuple[str, ...] = (
    "damaged_guard", "damaged_checkpoint", "damaged_record", "damaged_scores", "damaged_export", "damaged_cache",
    "killed_fit", "killed_bench", "killed_score", "killed_rank", "no_room", "whole_calls", "single_precision", "rescaled",
    "degenerate", "same_bits", "soak", "changed_bytes", "hostile_files",
)  # fmt: skip
"""Modules of `bench/tests/faults`, in the order of the page."""


INTRODUCTION = """# Trust

Made by `python -m offmap_bench.checks.trust page` from the records of `make trust-run`. A trial is a seed of a module in `bench/tests/faults`;
hangs and crashes count as failures. `make trust` repeats a seeded tenth of the trials, and `make test` the first few of each.
*Repeated* are those of the last `make trust`, and how many of them failed then. Times are of the wall clock, beside whatever else
the machine did.
"""


FUZZING = """## Fuzzing

What parses bytes, fed by atheris (`make fuzz`) with inputs bred for the branches that they reach, beginning with valid ones. Any
error but one of ours is a crash, as are twenty seconds or three gigabytes. Readers named "header" get texts in files
whose checksum is right.
"""


@dataclass(frozen=True)
class Check:
    """A promise and a trial of it.

    `trial(seed, folder)` starts from an empty folder and says in a word or two how it ended ("killed, resumed"); it raises an
    AssertionError where the promise does not hold. One that takes longer than `limit` seconds counts as a hang.
    """

    promise: str
    trial: Callable[[int, Path], str]
    trials: int = 200
    limit: float = 120.0
    quick: int = 2  # the trials that `make test` runs


@dataclass
class Outcomes:
    """What the trials 0 … done − 1 of a check gave."""

    done: int = 0
    endings: dict[str, int] = field(default_factory=dict[str, int])
    failures: dict[str, str] = field(default_factory=dict[str, str])  # {seed: the last line of what it said}
    seconds: float = 0.0

    def add(self, seed: int, ending: str, failure: str | None, seconds: float) -> None:
        """Count one more trial."""
        self.done = seed + 1
        self.seconds = round(self.seconds + seconds, 2)
        if failure is None:
            self.endings[ending] = self.endings.get(ending, 0) + 1
        else:
            self.failures[str(seed)] = failure


@dataclass(frozen=True)
class Repetition:
    """What a part of the trials of a check gave when they were run again."""

    trials: int = 0
    failures: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


def check_of(name: str) -> Check:
    """The `CHECK` of a module of `bench/tests/faults`."""
    return import_module(f"faults.{name}").CHECK


def read(name: str) -> Outcomes:
    """The record of a check, empty where there is none yet."""
    path = FOLDER / f"{name}.json"
    return Outcomes(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Outcomes()


def write(name: str, outcomes: Outcomes) -> None:
    """Keep it, whole or not at all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_whole(FOLDER / f"{name}.json", (json.dumps(asdict(outcomes), indent=1, ensure_ascii=False) + "\n").encode())


def repetitions() -> dict[str, Repetition]:
    """What `again` kept, by check."""
    found = json.loads(REPEATED.read_text(encoding="utf-8")) if REPEATED.exists() else {}
    return {name: Repetition(**found[name]) for name in CHECKS if name in found}


# -------------------------------------------------------------------------------------------------------- trials


def try_seeds(name: str, seeds: list[int], patience: float = 1.0) -> Iterator[tuple[int, str, str | None, float]]:
    """Yield (seed, ending, failure or None, seconds) of each, from a process that is replaced when it hangs or dies."""
    check, worker = check_of(name), None
    for seed in seeds:
        worker = worker or _Worker(name)
        start = time.monotonic()
        ending, failure = worker.run(seed, patience * check.limit)
        if failure is not None and failure.startswith(("hang", "crash")):
            worker.stop()
            worker = None
        yield seed, ending, failure, time.monotonic() - start
    if worker:
        worker.stop()


class _Worker:
    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(name, theirs))
        self.process.start()
        theirs.close()
        self.pipe.recv()  # imports are no part of a trial

    def run(self, seed: int, limit: float) -> tuple[str, str | None]:
        try:
            self.pipe.send(seed)
            if self.pipe.poll(limit):
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return "", f"crash: exit code {self.process.exitcode}"
        return "", f"hang: over {limit:g} s"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def _work(name: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    check = check_of(name)
    pipe.send("ready")
    while True:
        try:
            seed = pipe.recv()
        except EOFError:  # nobody asks any more
            return
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = check.trial(seed, Path(folder)), None
        except BaseException as error:
            result = "", "".join(traceback.format_exception_only(error)).strip()[-2000:]
        pipe.send(result)


# ------------------------------------------------------------------------------------------------------ commands


def run(names: list[str], minutes: float, patience: float = 1.0) -> int:
    """Go on with each check until its trials are done or the time is up; the number of failures."""
    end = time.monotonic() + 60 * minutes
    for name in names:
        outcomes, check = read(name), check_of(name)
        for outcome in try_seeds(name, list(range(outcomes.done, check.trials)), patience):
            outcomes.add(*outcome)
            write(name, outcomes)
            print(f"{name} {outcomes.done}/{check.trials}: {outcome[1] or outcome[2]}", flush=True)
            if time.monotonic() > end:
                return sum(len(read(n).failures) for n in names)
    return sum(len(read(n).failures) for n in names)


def retry(names: list[str], patience: float = 1.0) -> int:
    """Run the failed trials on record once more, and keep how they end now; the number that still fail."""
    for name in names:
        outcomes = read(name)
        for seed, ending, failure, seconds in try_seeds(name, sorted(map(int, outcomes.failures)), patience):
            done = outcomes.done
            del outcomes.failures[str(seed)]
            outcomes.add(seed, ending, failure, seconds)
            outcomes.done = done
            write(name, outcomes)
            print(f"{name}, seed {seed}: {ending or failure}", flush=True)
    return sum(len(read(n).failures) for n in names)


def again(names: list[str], share: float = 0.1, seed: int = 0, patience: float = 1.0) -> int:
    """Repeat a seeded part of the trials on record, and keep what came of it; the number that fail now."""
    failed = 0
    for name in names:
        done = read(name).done
        if seeds := sorted(random.Random(seed).sample(range(done), min(done, max(1, round(share * done))))):
            start = time.monotonic()
            failures = {str(s): failure for s, _, failure, _ in try_seeds(name, seeds, patience) if failure is not None}
            found = repetitions() | {name: Repetition(len(seeds), failures, round(time.monotonic() - start, 1))}
            ordered = {each: asdict(found[each]) for each in CHECKS if each in found}
            write_whole(REPEATED, (json.dumps(ordered, indent=1, ensure_ascii=False) + "\n").encode())
            print(f"{name}: {len(seeds)} of {done} trials again, {len(failures)} failed {failures or ''}", flush=True)
            failed += len(failures)
    return failed


def page() -> str:
    """Promises, trials, and how they ended."""
    columns = ("promise", "trials", "how they ended", "failures", "seconds each", "repeated", "failures then")
    lines = [f"| {' | '.join(columns)} |", "|---|--:|---|--:|--:|--:|--:|"]
    repeated = repetitions()
    for name in CHECKS:
        found, then = read(name), repeated.get(name, Repetition())
        endings = ", ".join(f"{ending}: {count:,}" for ending, count in sorted(found.endings.items()))
        each = f"{found.seconds / found.done:.2f}" if found.done else "–"
        again = f"{then.trials:,} | {len(then.failures)}" if then.trials else "– | –"
        counted = f"{found.done:,} | {endings} | {len(found.failures)} | {each} | {again}"
        lines.append(f"| {check_of(name).promise} (`{name}`) | {counted} |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n" + _in_all(repeated) + fuzzed() + covered.section() + mutants.section()


def _in_all(repeated: dict[str, Repetition]) -> str:
    """All trials in one line."""
    done = [read(name) for name in CHECKS]
    told = f"In all {sum(d.done for d in done):,} trials and {sum(len(d.failures) for d in done):,} failures"
    if repeated:
        trials, failures = (sum(n) for n in zip(*((r.trials, len(r.failures)) for r in repeated.values()), strict=True))
        minutes = sum(r.seconds for r in repeated.values()) / 60
        told += f"; repeated {trials:,}, with {failures:,} failures, in {minutes:.0f} minutes"
    return f"\n{told}.\n"


def fuzzed() -> str:
    """What fuzzing showed, reader by reader."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FUZZED.glob("*.json"))}
    if not found:
        return ""
    lines = ["", FUZZING, "| reader | inputs | minutes | crashes | peak MB |", "|---|--:|--:|--:|--:|"]
    for name, each in [*found.items(), ("all", _together(list(found.values())))]:
        numbers = (f"{each['executions']:,}", f"{each['seconds'] / 60:.1f}", str(len(each["crashes"])), str(each["peak_mb"]))
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def _together(records: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(each[key] for each in records) for key in ("executions", "seconds")}
    return sums | {"crashes": [c for each in records for c in each["crashes"]], "peak_mb": max(e["peak_mb"] for e in records)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.checks.trust", description=__doc__)
    parser.add_argument("command", choices=["run", "retry", "again", "page"])
    parser.add_argument("names", nargs="*", default=[], help=f"all by default: {', '.join(CHECKS)}")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next trial after so long")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limit that a trial may take")
    asked = parser.parse_args()
    names = asked.names or list(CHECKS)
    commands: dict[str, Callable[[], int]] = {
        "run": lambda: run(names, asked.minutes, asked.patience),
        "retry": lambda: retry(names, asked.patience),
        "again": lambda: again(names, patience=asked.patience),
        "page": lambda: 0,
    }
    failed = commands[asked.command]()
    if asked.command in ("again", "page"):
        PAGE.write_text(page(), encoding="utf-8")
        print(f"The page is {PAGE}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
