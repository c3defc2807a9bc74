"""`docs/scale.md` from its record: what was measured, a model of it, and what the model says of larger things."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offmap_bench.paths import DOCS

PAGE = DOCS / "scale.md"

CORES, BANDWIDTH, LATENCY = 32, 1.25e9, 5e-5
"""A node of a cluster: so many cores like the one measured, 10 Gbit/s, 50 µs for an exchange."""

NODES = (1, 8, 64)
LIMIT, MOMENTS = 4096, 1 << 24
"""The largest fan-in with one basis, and numbers of second moments that are held at a time."""

VALID, DRAWS, SEARCH, STEPS, BATCH, CHECKS = 10_000, 50, 20 * 10 + 7 * 50, 500, 4_096, 10
"""Validation rows; draws; draws of all looks that a bisection would take; gradient steps, rows of each, and looks in between."""

NAMES = {
    "pass": "basis pass", "risk": "validation risk, {draws} draws", "step": "{steps} gradient steps",
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Processor seconds of a phase: `fixed`, the same on every rank, and `row` for each row of the data."""

    fixed: float
    row: float

    def among(self, rows: float, ranks: int, exchanges: float = 0.0) -> float:
        """Of one of so many ranks, with what its exchanges take."""
        return self.fixed + self.row * rows / ranks + exchanges


@dataclass(frozen=True)
class Case:
    """Something larger: rows, weights, and the fan-in of its square matrices."""

    title: str
    rows: float
    weights: float
    fan_in: int

    @property
    def matrices(self) -> float:
        return self.weights / self.fan_in**2

    @property
    def passes(self) -> int:
        """Groups of matrices whose second moments are held at a time."""
        return -(-round(self.matrices) // max(1, MOMENTS // self.fan_in**2))


CASES = (
    Case("1e9 rows, a model of 1e6 weights (fan-in 512)", 1e9, 1e6, 512),
    Case("1e6 rows, a model of 1e9 weights (fan-in 4,096)", 1e6, 1e9, 4096),
)


def costs(record: dict[str, Any]) -> dict[str, Cost]:
    """From a quarter of the rows and all of them, both in one process."""
    found: dict[str, Cost] = {}
    for name, rows in record["rows"].items():
        slope = (record["whole"][name] - record["quarter"][name]) / (0.75 * rows)
        found[name] = Cost(max(0.0, record["whole"][name] - slope * rows), slope)
    return found


def write(record: dict[str, Any]) -> Path:
    """Write the page."""
    found, d = costs(record), record["parameters"]
    per = per_weight(record, found)
    text = HEAD.format(
        d=f"{d:,}", width=record["width"], rows=record["rows"], draws=record["draws"], steps=record["steps"],
        costs=_table(["phase", "per row and weight", "beside rows, per weight"], _cost_rows(per)),
        checked=_table(["phase", "processes", "measured", "model", "measured / model", "exchanges", "sent by each"],
                       _checked(record, found)),
        worst=f"{max(r for r in _ratios(record, found)):.2f}", least=f"{min(r for r in _ratios(record, found)):.2f}",
        network=_network(record), again=f"{min(_again(record)):.2f} to {max(_again(record)):.2f}",
    )  # fmt: skip
    cases = "".join(_case(case, per) for case in CASES)
    PAGE.write_text(text + cases + TAIL.format(**record["machine"]), encoding="utf-8")
    return PAGE


def per_weight(record: dict[str, Any], found: dict[str, Cost]) -> dict[str, Cost]:
    """Seconds for one weight (and one draw, or one step), and for one row and weight."""
    d, times = record["parameters"], {"pass": 1, "risk": record["draws"], "step": record["steps"]}
    each = {name: Cost(cost.fixed / d / times[name], cost.row / d / times[name]) for name, cost in found.items()}
    told = record["score"]
    each["score"] = Cost(0.0, told["seconds"] / told["rows"] / told["draws"] / d)
    largest = max(record["eigh"], key=int)
    return each | {"eigh": Cost(record["eigh"][largest] / int(largest) ** 3, 0.0)}


def _cost_rows(per: dict[str, Cost]) -> list[list[str]]:
    words = {
        "pass": "basis pass", "risk": "validation risk, a draw", "step": "gradient step", "score": "scoring, a draw",
    }  # fmt: skip
    rows = [[word, f"{per[n].row * 1e12:.3g} ps", f"{per[n].fixed * 1e9:.3g} ns"] for n, word in words.items()]
    return [*rows, ["eigenvectors, per fan-in³", "", f"{per['eigh'].fixed * 1e9:.3g} ns"]]


def _checked(record: dict[str, Any], found: dict[str, Cost]) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, cost in found.items():
        for size, told in record["ranks"].items():
            model, measured = cost.among(record["rows"][name], int(size), _sending(told, name)), told[name]["cpu"]
            word = NAMES[name].format(**record)
            rows.append([word, size, f"{measured:.3g} s", f"{model:.3g} s", f"{measured / model:.2f}",
                         str(told[name]["exchanges"]), _size(told[name]["bytes"])])  # fmt: skip
    return rows


def _ratios(record: dict[str, Any], found: dict[str, Cost]) -> list[float]:
    several = [(int(size), told) for size, told in record["ranks"].items() if size != "1"]
    models = {(n, size): c.among(record["rows"][n], size, _sending(t, n)) for n, c in found.items() for size, t in several}
    return [told[n]["cpu"] / models[n, size] for n in found for size, told in several]


def _again(record: dict[str, Any]) -> list[float]:
    """The one process under torchrun against the one before."""
    return [record["ranks"]["1"][name]["cpu"] / seconds for name, seconds in record["whole"].items()]


def _sending(told: dict[str, Any], name: str) -> float:
    """Processor seconds of the exchanges of a phase."""
    network = told["network"]
    return network["call"] * told[name]["exchanges"] + network["byte"] * told[name]["bytes"] if network else 0.0


def _network(record: dict[str, Any]) -> str:
    told = {size: each["network"] for size, each in record["ranks"].items() if each["network"]}
    each = [
        f"{n['call_wall'] * 1e3:.2g} ms of the wall ({n['call'] * 1e3:.2g} ms of the processor) and moved "
        f"{1e-6 / n['byte_wall']:.3g} MB/s with {size} processes" for size, n in told.items()
    ]  # fmt: skip
    return ", ".join(each)


def _case(case: Case, per: dict[str, Cost]) -> str:
    d, squares = case.weights, case.matrices * case.fan_in**2
    rows: list[list[str]] = []
    for nodes in NODES:
        cores = nodes * CORES
        wire = 2 * (nodes - 1) / nodes / BANDWIDTH
        looked = per["pass"].row * case.rows * d / cores * case.passes + wire * 8 * squares
        eigen = per["eigh"].fixed * case.fan_in**3 * -(-case.matrices // cores) + wire * 2 * squares
        risk = DRAWS * d * per["risk"].fixed / CORES + per["risk"].row * VALID * DRAWS * d / cores
        search = SEARCH * d * per["risk"].fixed / CORES + per["risk"].row * VALID * SEARCH * d / cores
        step = per["step"].fixed * d / CORES + per["step"].row * BATCH * d / cores + (wire * 4 * d + LATENCY) * (nodes > 1)
        steps = STEPS * step + CHECKS * risk
        rows.append([str(nodes), *map(_time, (looked, eigen, search, steps, looked + eigen + search + steps))])
    sent = f"{_size(10 * squares)} once (second moments and bases), {_size(4 * d)} in every step"
    held = f"{_size(28 * d + 4 * squares + 8 * max(MOMENTS, case.fan_in**2))}"
    again = AGAIN.format(passes=case.passes, millions=round(MOMENTS / 2**20)) if case.passes > 1 else ""
    score = per["score"].row * DRAWS * d
    return CASE.format(
        title=case.title, sent=sent, held=held, again=again, score=_time(score), guard=_size(4 * d + 4 * squares),
        table=_table(["nodes", "basis pass", "eigenvectors", "closed form", f"{STEPS} steps", "all"], rows),
    )  # fmt: skip


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or unit == "ms":
            return f"{seconds / size:.3g} {unit}"
    return ""


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


HEAD = """# Past one machine

What a fit costs, measured on one core; how much of it more processes share; and what that says of things too large to measure
here. How to start several processes is in [the guide](guides/parallel.md). `python -m offmap_bench.speed.scale` measures and writes this
page.

## One process

A model of {d} weights (16-{width}-{width}-{width}-2, ReLU, float32) on one thread. Seconds of the processor, the best of three
turns, at two numbers of rows: the slope is what a row costs, the rest is what is done once whatever the rows (noise is drawn, φ
is stepped, the first inputs of each matrix are all multiplied). 1 ps is 10⁻¹² s.

{costs}

## Several processes

The model: what is done for rows is divided by the number N of processes; what is done for weights is done by each of them; and
exchanges take their latency, and their volume over the bandwidth:

    T(N) = fixed + rows · cost / N + exchanges · latency + volume / bandwidth

It was checked by runs of `torchrun` with 1, 2 and 4 processes on this machine, over {rows[pass]:,} training rows, {rows[risk]:,}
validation rows with {draws} draws, and {steps} steps of {rows[step]:,} rows. The machine has two cores and was busy with other
work: four processes cannot be quicker than two here, and the wall clock tells nothing. So what is compared are processor seconds,
those of the slowest rank, polling and heartbeats included; latency and bandwidth are counted in them as well.

{checked}

With two and four processes the measured time is {least} to {worst} times the model's; one process measured again is {again} times
itself. An exchange over loopback took {network}, at
best: processes that share a core wait for each other.

## Larger things

What follows is computed from the costs above, not measured. A node has 32 cores like the one measured here, and 10 Gbit/s; an
exchange takes 50 µs, and sends 2 (N − 1)/N times its volume. There are 10,000 validation rows and 50 draws; the 500 steps have
batches of 4,096 rows and are looked at ten times; all weights are random. GPUs change the costs, and not the model.

"""

CASE = """### {title}

{table}

Each node sends {sent}. A process holds about {held}; the guard's file has {guard}. {again}Scoring
takes {score} of one core per row with 50 draws, and needs no exchange: rows are scored where they are.

"""

AGAIN = "The data are gone through {passes} times: second moments of {millions} million numbers are held at a time. "

TAIL = """## What does not go down

- **Weights.** Noise is drawn, φ is stepped and V is held by every process: a model must fit into each. Models in shards (FSDP) are
  refused, with the remedy; `params="last-layer"` or patterns make few weights random.
- **Eigenvectors.** One fan-in is one process's work. Above `fan_in_limit` a basis is cut into pieces.
- **Validation data** are held in memory by every process.
- **Small work.** A step of a small model takes less time than an exchange: there, one process is quickest.

Measured on one of {processors} cores ({processor}), torch {torch}, Python {python}.
"""
