"""Small changes to the code, and whether a test notices: `python -m offmap_bench.checks.mutants run`, `... again`, `... left`.

`run` draws mutants (`bench/src/offmap_bench/mutating.py`) in an order set by a seed and gives each to the tests that reach its line, as
`offmap_bench.checks.covered` saw them, the room's own tests first, for at most `BUDGET` seconds of the processor; a mutant that no test
fails in that time has survived (`bench/src/offmap_bench/mutant_trial.py`). A test that fails without any change too kills nothing. `again`
gives survivors to the tests once more, after new tests and `covered`; `left` lists survivors that nothing explains.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice

from offmap_bench.checks.covered import ROOT, Reach, own, write
from offmap_bench.checks.mutant_trial import BUDGET, Bench
from offmap_bench.checks.mutating import Mutant, difference, digest, drawn, mutated, read, subjects
from offmap_bench.paths import RECORDS

FOLDER = RECORDS / "mutants"
EXPLAINED = ROOT / "offmap_bench.speed" / "mutants.toml"


@dataclass(frozen=True)
class Fate:
    """What became of a mutant: "killed" `by` a test, "hung" or "survived"; `source` is the digest of the file that it changed."""

    mutant: Mutant
    end: str
    by: str
    tests: int
    before: str
    after: str
    source: str

    @property
    def change(self) -> tuple[str, str, str]:
        """The file, and the line before and after."""
        return self.mutant.file, self.before, self.after


def recorded() -> list[Fate]:
    """What is on record, of files as they were then."""
    paths = sorted(FOLDER.glob("*.json"))
    return [fate_of(entry) for path in paths for entry in json.loads(path.read_text(encoding="utf-8"))]


def fates() -> dict[Mutant, Fate]:
    """What is on record, of files as they are now."""
    present = set(subjects())
    found = (fate for fate in recorded() if fate.mutant.file in present)
    return {fate.mutant: fate for fate in found if fate.source == digest(fate.mutant.file)}


def fate_of(entry: dict[str, object]) -> Fate:
    return Fate(**{**entry, "mutant": Mutant(**entry["mutant"])})  # type: ignore[arg-type]


def keep(known: dict[Mutant, Fate]) -> None:
    """Writes the records, a file for each module."""
    for file in {mutant.file for mutant in known}:
        entries = [asdict(fate) for fate in known.values() if fate.mutant.file == file]
        text = "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n"
        write(FOLDER / f"{file.removesuffix('.py').replace('/', '.')}.json", text)


HEAVY = (
    "pytest", "hypothesis", "torch", "torch._dynamo", "torch.distributed", "torch.testing", "numpy.testing", "safetensors.torch",
    "sklearn.metrics", "scipy.stats",
)  # fmt: skip


def judge(chosen: Iterable[Mutant], minutes: float, budget: float = BUDGET) -> None:
    """Tries mutants one after the other, and records how each ends."""
    for name in HEAVY:
        import_module(name)  # once here, and found there by every forked process
    rooms = [place for file in subjects() for place in own(file)[0] if (ROOT / place).exists()]
    reach, bench, known, deadline = Reach(), Bench(rooms, budget), fates(), time.monotonic() + 60 * minutes
    for mutant in chosen:
        if time.monotonic() > deadline:
            return
        text, tests, began = mutated(mutant), reach.tests(mutant.file, mutant.line, 4 * budget), time.monotonic()
        end, by, count = bench.fate(mutant, text, tests)
        before, after = difference(read(mutant.file), text, mutant.line)
        known[mutant] = Fate(mutant, end, by, count, before, after, digest(mutant.file))
        keep({m: f for m, f in known.items() if m.file == mutant.file})
        print(f"{end:9} {mutant}  {count} tests, {time.monotonic() - began:.1f} s  {by}", flush=True)


def explained() -> dict[tuple[str, str, str], str]:
    """{(file, line before, line after): why no test can tell}, from `bench/src/offmap_bench/checks/mutants.toml`."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("mutant", []) if EXPLAINED.exists() else []
    return {(entry["file"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def left() -> list[Fate]:
    """Survivors on record that nothing explains."""
    reasons = explained()
    return [f for f in fates().values() if f.end == "survived" and f.change not in reasons]


def section() -> str:
    """The figures, as a part of the page of trials: a row for each file."""
    reasons, known = explained(), recorded()
    if not known:
        return ""
    lines = ["| file | mutants | killed | survived | explained |", "|---|--:|--:|--:|--:|"]
    for name in [*sorted({fate.mutant.file for fate in known}), "all"]:
        some = [fate for fate in known if name in (fate.mutant.file, "all")]
        survived = [fate for fate in some if fate.end == "survived"]
        counts = (
            len(some),
            f"{1 - len(survived) / len(some):.0%}",
            len(survived),
            sum(fate.change in reasons for fate in survived),
        )
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


INTRODUCTION = """
## Mutants

Small changes to the code (`make mutants`, by cosmic-ray), drawn by a seed, one at a place; each is given to the tests that reach
its line, for at most ten seconds of the processor. Changes inside annotations are left out. Why no test can tell a survivor from
the code is written in `bench/src/offmap_bench/checks/mutants.toml`.
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.checks.mutants", description=__doc__)
    parser.add_argument("command", choices=["run", "again", "left"])
    parser.add_argument("files", nargs="*", default=[], help="all by default, else some below src/offmap: core/noise.py")
    parser.add_argument("--count", type=int, default=600, help="so many of the drawn mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop before the next mutant after so long")
    parser.add_argument("--budget", type=float, default=BUDGET, help="so many seconds of the processor for a mutant")
    asked = parser.parse_args()
    if asked.command == "left":
        for fate in left():
            print(f"{fate.mutant}  ({fate.tests} tests)\n  - {fate.before}\n  + {fate.after}")
        return
    if asked.command == "again":
        chosen = [fate.mutant for fate in left()]
    else:
        known = fates()
        chosen = (mutant for mutant in islice(drawn(asked.seed), asked.count) if mutant not in known)
    judge((mutant for mutant in chosen if not asked.files or mutant.file in asked.files), asked.minutes, asked.budget)


if __name__ == "__main__":
    main()
