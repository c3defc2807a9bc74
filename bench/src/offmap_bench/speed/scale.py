"""What a fit costs per row and per weight, and how that goes down with more processes: `python -m offmap_bench.studies scale`.

A cell of the study is one process, or this file under `torchrun` with 1, 2 or 4 processes; each phase is the work of one rank.
The page adds a model of the costs, and what the model says of larger fits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import offmap
from offmap.data import Rows, Shard
from offmap.distributed.group import Group, ProcessGroup, join_group
from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap.maxwent import train as objectives
from offmap.maxwent.risk import Validation
from offmap.maxwent.solve import feed_inputs
from offmap.maxwent.train import Cycle, adam, minimize
from offmap.model.forward import BatchedModel
from offmap.model.params import stack_models
from offmap.posterior.basis import observe
from offmap.posterior.distribution import WeightDistribution
from offmap_bench.runner.table import format_table
from offmap_bench.speed.measure import Timing, describe_machine, race
from offmap_bench.studies.study import Runs, Study, fill

INPUTS, WIDTH, DRAWS, STEPS = 16, 256, 10, 10
ROWS = {"pass": 16_384, "risk": 4_096, "step": 2_048}
"""Rows of the training data, of the validation data, and of one batch."""

ALONE = "one process"


def make_data(rows: int) -> Rows:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(rows, INPUTS, generator=source)
    return Rows(x, x[:, :1].sin() + 0.1 * torch.randn(rows, 1, generator=source), 128, "train")


def make_net() -> torch.nn.Module:
    return mlp(INPUTS, 2, hidden=(WIDTH, WIDTH, WIDTH))


def phases(rows: Mapping[str, int], group: Group) -> dict[str, Callable[[], object]]:
    """A pass over the data, the validation risk, and gradient steps, as a fit makes them."""
    stacked, train = stack_models(make_net()), make_data(rows["pass"])
    model, law = BatchedModel(stacked.module, chunk_size=DRAWS), Gaussian()
    step = replace(make_data(rows["step"]), batch_size=rows["step"])
    rotation = observe(stacked, feed_inputs(make_data(512)), rotated=True).rotation()
    q = WeightDistribution(stacked.mean, rotation=rotation, initial_scale=1e-3)
    validation = Validation(model, law, make_data(rows["risk"]), draws=DRAWS, group=group)
    optimizer = adam(q.raw_scale.parameters(), lr=1e-3)
    objective = objectives.maxwent(q, model, law, entropy_weight=1.0)
    mine = step if group.size == 1 else replace(step, shard=Shard(group, "rows"))
    return {
        "pass": lambda: observe(stacked, feed_inputs(train), rotated=False, group=group, shard=feed_inputs(train, group)),
        "risk": lambda: validation(q),
        "step": lambda: minimize(objective, optimizer, Cycle(mine, 0), steps=STEPS, group=group),
    }


def measure_alone() -> dict[str, Any]:
    """Processor seconds at a quarter of the rows and at all of them; of eigenvectors, and of scores."""
    with join_group(alone=True) as group:
        quarter, everything = (
            {name: _clock(run).best for name, run in phases({n: r // part for n, r in ROWS.items()}, group).items()}
            for part in (4, 1)
        )
    matrices = {str(n): torch.randn(n, n, dtype=torch.float64) for n in (256, 512, 1024)}
    x, y = make_data(4_096).inputs, make_data(4_096).targets
    parts = (x[:2048], y[:2048]), (x[2048:2304], y[2048:2304])
    guard = offmap.fit(make_net(), *parts, solver="closed-form", draws=50, progress=False)
    return {
        "rows": ROWS, "draws": DRAWS, "steps": STEPS, "width": WIDTH, "quarter": quarter, "all": everything,
        "parameters": sum(p.numel() for p in make_net().parameters()),
        "eigh": {n: _clock(lambda a=a: torch.linalg.eigh(a @ a.mT)).best for n, a in matrices.items()},
        "score": {"rows": 2_048, "draws": 50, "seconds": _clock(lambda: guard.score(x[:2048])).best},
        "machine": describe_machine(),
    }  # fmt: skip


def _clock(run: Callable[[], object], rounds: int = 3) -> Timing:
    return race({"": run}, rounds=rounds)[""]


def start_ranks(size: int) -> dict[str, Any]:
    """Run this file under torchrun: for every phase the slowest rank's seconds, and what it sent."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*words, "-m", "offmap_bench.speed.scale", folder], env=environment, check=True, timeout=240)
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in Path(folder).iterdir()]
    slowest = {name: {what: max(rank[name][what] for rank in ranks) for what in ranks[0][name]} for name in ROWS}
    return slowest | {"network": ranks[0]["network"]}


def run_rank(folder: Path) -> None:
    """One rank: every phase in turn, then the cost of an exchange."""
    measured: dict[str, Any] = {}
    with join_group() as group:
        for name, run in phases(ROWS, group).items():
            with count_exchanges() as sizes:
                run()
            timing = _clock(run)
            spent = {"cpu": timing.best, "wall": min(timing.wall)}
            measured[name] = {**spent, "exchanges": len(sizes), "bytes": sum(sizes)}
        measured["network"] = measure_network(group)
        (folder / f"{group.rank}.json").write_text(json.dumps(measured), encoding="utf-8")


def measure_network(group: Group) -> dict[str, float]:
    """The shortest exchange, and what each byte of a long one adds: seconds of the processor, and on the wall."""
    if not isinstance(group, ProcessGroup):
        return {}
    short, long = torch.zeros(1), torch.zeros(1 << 22)
    call, large = _clock(lambda: group.all_reduce(short), 60), _clock(lambda: group.all_reduce(long), 9)
    size = long.numel() * 4
    return {"call": call.best, "byte": large.best / size, "call_wall": min(call.wall), "byte_wall": min(large.wall) / size}


@contextmanager
def count_exchanges() -> Generator[list[int]]:
    """Collect the bytes of every exchange of this rank within a block."""
    sizes: list[int] = []

    def count(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        sent = args[0] if isinstance(args[0], Tensor) else args[1]
        sizes.append(sent.numel() * sent.element_size())
        return function(*args, **options)

    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "broadcast"):
            stack.enter_context(mock.patch.object(dist, name, partial(count, getattr(dist, name))))
        yield sizes


CORES, BANDWIDTH, LATENCY = 32, 1.25e9, 5e-5
"""A node of a cluster: so many cores like the one measured, 10 Gbit/s, 50 µs for an exchange."""

MOMENTS = 1 << 24
"""Numbers of second moments that are held at a time."""

VALID, RISK_DRAWS, SEARCH, FIT_STEPS, BATCH, CHECKS = 10_000, 50, 20 * 10 + 7 * 50, 500, 4_096, 10
"""Validation rows; draws; draws of all evaluations of a bisection; gradient steps, rows of each, and evaluations in between."""


class Cost(NamedTuple):
    """Processor seconds of a phase: `fixed`, the same on every rank, and `row` for each row of the data."""

    fixed: float
    row: float


def fields(runs: Runs) -> dict[str, Any]:
    alone, ranks = runs[ALONE], {size: run for size, run in runs.items() if size != ALONE}
    d, score = alone["parameters"], alone["score"]
    # from a quarter of the rows and all of them, both in one process
    slopes = {name: (alone["all"][name] - alone["quarter"][name]) / (0.75 * rows) for name, rows in alone["rows"].items()}
    costs = {name: Cost(max(0.0, alone["all"][name] - slope * alone["rows"][name]), slope) for name, slope in slopes.items()}
    parts = {"pass": d, "risk": d * alone["draws"], "step": d * alone["steps"]}
    unit = {name: Cost(cost.fixed / parts[name], cost.row / parts[name]) for name, cost in costs.items()}
    unit["score"] = Cost(0.0, score["seconds"] / score["rows"] / score["draws"] / d)
    unit["eigh"] = Cost(alone["eigh"]["1024"] / 1024**3, 0.0)
    words = {"pass": "basis pass", "risk": "validation risk, a draw", "step": "gradient step", "score": "scoring, a draw"}
    rows = [[word, f"{unit[n].row * 1e12:.3g} ps", f"{unit[n].fixed * 1e9:.3g} ns"] for n, word in words.items()]
    rows.append(["eigenvectors, per fan-in³", "", f"{unit['eigh'].fixed * 1e9:.3g} ns"])
    names = {"pass": "basis pass", "risk": f"validation risk, {alone['draws']} draws", "step": f"{alone['steps']} gradient steps"}
    checked: list[list[str]] = []
    ratios: list[float] = []
    for name, cost in costs.items():
        for size, run in ranks.items():
            phase, network = run[name], run["network"] or {"call": 0.0, "byte": 0.0}
            exchanges = network["call"] * phase["exchanges"] + network["byte"] * phase["bytes"]
            model = cost.fixed + cost.row * alone["rows"][name] / int(size) + exchanges
            ratios += [phase["cpu"] / model] if size != "1" else []
            cells = [f"{phase['cpu']:.3g} s", f"{model:.3g} s", f"{phase['cpu'] / model:.2f}", str(phase["exchanges"])]
            checked.append([names[name], size, *cells, _size(phase["bytes"])])
    networks = [
        f"{n['call_wall'] * 1e3:.2g} ms of the wall ({n['call'] * 1e3:.2g} ms of the processor) and moved "
        f"{1e-6 / n['byte_wall']:.3g} MB/s with {size} processes"
        for size, run in ranks.items() if (n := run["network"])
    ]  # fmt: skip
    again = [ranks["1"][name]["cpu"] / seconds for name, seconds in alone["all"].items()]
    header = ["phase", "processes", "measured", "model", "measured / model", "exchanges", "sent by each"]
    return {
        **alone["machine"], **alone, "d": f"{d:,}", "checked": format_table(header, checked),
        "costs": format_table(["phase", "per row and weight", "beside rows, per weight"], rows), "worst": f"{max(ratios):.2f}",
        "least": f"{min(ratios):.2f}", "network": ", ".join(networks), "again": f"{min(again):.2f} to {max(again):.2f}",
        "cases": describe_case("1e9 rows, a model of 1e6 weights (fan-in 512)", 1e9, 1e6, 512, unit)
        + describe_case("1e6 rows, a model of 1e9 weights (fan-in 4,096)", 1e6, 1e9, 4096, unit),
    }  # fmt: skip


def describe_case(title: str, rows: float, d: float, fan_in: int, unit: Mapping[str, Cost]) -> str:
    """A larger fit, of square matrices of this fan-in, on 1, 8 and 64 nodes, by the model."""
    passes = -(-round(d / fan_in**2) // max(1, MOMENTS // fan_in**2))
    lines: list[list[str]] = []
    for nodes in (1, 8, 64):
        cores, wire = nodes * CORES, 2 * (nodes - 1) / nodes / BANDWIDTH
        basis = unit["pass"].row * rows * d / cores * passes + wire * 8 * d
        eigen = unit["eigh"].fixed * fan_in**3 * -(-(d / fan_in**2) // cores) + wire * 2 * d
        risk = d * unit["risk"].fixed / CORES + unit["risk"].row * VALID * d / cores
        step = d * unit["step"].fixed / CORES + unit["step"].row * BATCH * d / cores + (wire * 4 * d + LATENCY) * (nodes > 1)
        steps = FIT_STEPS * step + CHECKS * RISK_DRAWS * risk
        lines.append([str(nodes), *map(_time, (basis, eigen, SEARCH * risk, steps, basis + eigen + SEARCH * risk + steps))])
    again = f"The data are read {passes} times: second moments of {round(MOMENTS / 2**20)} million numbers are held at a time. "
    return fill(
        "scale_case", title=title, sent=f"{_size(10 * d)} once (second moments and bases), {_size(4 * d)} in every step",
        held=_size(32 * d + 8 * max(MOMENTS, fan_in**2)), again=again if passes > 1 else "", guard=_size(8 * d),
        score=_time(unit["score"].row * RISK_DRAWS * d),
        table=format_table(["nodes", "basis pass", "eigenvectors", "closed form", f"{FIT_STEPS} steps", "all"], lines),
    )  # fmt: skip


def _scale(value: float, units: Mapping[str, float]) -> str:
    unit = next((name for name, size in units.items() if value >= size), [*units][-1])
    return f"{value / units[unit]:.3g} {unit}"


_time = partial(_scale, units={"days": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3})
_size = partial(_scale, units={"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


STUDY = Study("scale", lambda: {ALONE: measure_alone, **{str(n): partial(start_ranks, n) for n in (1, 2, 4)}}, fields)

if __name__ == "__main__":
    torch.set_num_threads(1)
    run_rank(Path(sys.argv[1]))
