"""Measure the speed and memory of contestants: races, the bare-GEMM bound, claims, and their records."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from offmap_bench.paths import RECORDS
from offmap_bench.runner.store import significant

THEMES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("themes.toml").read_text(encoding="utf-8"))
GEMM = "a bare GEMM of the same FLOPs"
SIDE, PRODUCTS = 1024, 10
"""The bare GEMM: ten float32 products of 1024 × 1024 × 1024."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of every turn: of the processor, and on the wall.

    On an idle core the two agree. On a shared one the wall clock also counts waiting, more of it the longer a contestant runs:
    ratios of processor time are the fair ones.
    """

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.cpu)

    def times(self, factor: float) -> Timing:
        return Timing([factor * seconds for seconds in self.cpu], [factor * seconds for seconds in self.wall])

    def run(self, work: Work) -> None:
        """Take one more turn."""
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)


def race(
    works: Mapping[str, Work], *, rounds: int, at_most: Mapping[str, int] | None = None, gemm: Mapping[str, Work] | None = None
) -> dict[str, Timing]:
    """Run contestants in turns, so that a busy machine slows all of them alike.

    Args:
        works: What each contestant runs, by name.
        rounds: Turns of each, after one unmeasured turn.
        at_most: Fewer turns, and no unmeasured one, for slow contestants.
        gemm: {label: work}; adds the time that a bare GEMM of the work's FLOPs takes, under the label.
    """
    contestants = {**works, "gemm": multiply()} if gemm else works
    limits = dict.fromkeys(contestants, rounds) | dict(at_most or {})
    timings = {name: Timing() for name in contestants}
    for name, run in contestants.items():
        if limits[name] == rounds:
            run()
    for turn in range(rounds):
        for name, run in contestants.items():
            if turn < limits[name]:
                timings[name].run(run)
    product = timings.pop("gemm", Timing())
    return timings | {label: least_time(product, count_flops(work)) for label, work in (gemm or {}).items()}


def repeat(calls: int, call: Work) -> Work:
    return lambda: [call() for _ in range(calls)]


def count_flops(work: Work) -> int:
    """Count the FLOPs of all matrix products and convolutions, forwards and backwards, also under `vmap`.

    Eigenvectors, random numbers and elementwise work are left out.

    >>> count_flops(lambda: torch.zeros(3, 4) @ torch.zeros(4, 5))
    120
    """
    aten: Any = torch.ops.aten  # what torch's counter lacks: products added in place, and attention on the CPU
    missing = {each: lambda to, a, b, *_, **__: 2 * math.prod(a) * b[-1] for each in (aten.addmm_, aten.baddbmm_)}
    missing[aten._scaled_dot_product_flash_attention_for_cpu] = lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    with FlopCounterMode(display=False, custom_mapping=missing) as counter:
        work()
    return counter.get_total_flops()


def multiply() -> Work:
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    return repeat(PRODUCTS, lambda: torch.mm(a, b))


def least_time(product: Timing, flops: float) -> Timing:
    """Return the time of so many FLOPs at the rate of `multiply`."""
    return product.times(flops / (PRODUCTS * 2 * SIDE**3))


def peak_memory(process: int | str = "self", *, reset: bool = False) -> float:
    """Return the high-water mark of a process's resident memory in MB, 0 if it is gone; `reset` first lowers it to the present.

    `ru_maxrss` starts with the parent's mark, and importing torch raises it: what a call adds would drown.
    """
    folder = Path(f"/proc/{process}")
    try:
        if reset:
            (folder / "clear_refs").write_text("5")
        status = (folder / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM:")), 0.0)


@dataclass(frozen=True)
class Measurement:
    """Best and median of several turns, in s, ms, MB or rows/s; `wall` is the best on the wall clock."""

    what: str
    unit: str
    best: float
    median: float
    wall: float | None = None


def measurements(timings: Mapping[str, Timing], unit: str = "s", per: float = 1.0) -> list[Measurement]:
    """Best, median and wall time of each, divided by the `per` equal parts that a turn consists of."""
    factor = (1.0 if unit == "s" else 1e3) / per
    return [
        Measurement(what, unit, factor * t.best, factor * statistics.median(t.cpu), factor * min(t.wall))
        for what, t in timings.items()
    ]


def once(what: str, unit: str, value: float, wall: float | None = None) -> Measurement:
    return Measurement(what, unit, value, value, wall)


@dataclass(frozen=True)
class Claim:
    what: str
    value: float
    sense: str  # "at least" or "at most"
    target: float

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.sense == "at least" else self.value <= self.target


def at_most(claims: Iterable[tuple[str, float, float]]) -> list[Claim]:
    """Claims that values are at most their targets: (what, value, target)."""
    return [Claim(what, value, "at most", target) for what, value, target in claims]


def describe_machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    machine = {"processor": names[0] if names else platform.processor(), "processors": os.cpu_count()}
    versions = {name: version(name) for name in ("offmap", "torch", "maxwent")}
    return machine | {"threads": torch.get_num_threads(), "python": platform.python_version()} | versions


@dataclass(frozen=True)
class Record:
    """One run of a theme; `values` fill the theme's text in `themes.toml`."""

    theme: str
    rounds: int
    measurements: list[Measurement]
    claims: list[Claim] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=describe_machine)

    def write(self) -> None:
        """Write `records/THEME.json`, numbers with four significant digits."""
        fields = asdict(self) | {"claims": [asdict(claim) | {"met": claim.met} for claim in self.claims]}
        text = json.dumps(significant(fields, 4), indent=1, ensure_ascii=False) + "\n"
        (RECORDS / f"{self.theme}.json").write_text(text, encoding="utf-8")


def record(theme: str, rounds: int, timings: Mapping[str, Timing], unit: str = "s", per: float = 1.0) -> Record:
    """Measurements of a race, with the claims that `themes.toml` makes of their ratios."""
    claims = [
        Claim(what, timings[longer].best / timings[less].best, sense, target)
        for what, longer, less, sense, target in THEMES[theme].get("claims", [])
    ]
    return Record(theme, rounds, measurements(timings, unit, per), claims)


def read(theme: str) -> Record | None:
    """Read the record of a theme, if there is one."""
    if not (path := RECORDS / f"{theme}.json").exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    claims = [Claim(c["what"], c["value"], c["sense"], c["target"]) for c in fields["claims"]]
    return Record(**fields | {"claims": claims, "measurements": [Measurement(**m) for m in fields["measurements"]]})
