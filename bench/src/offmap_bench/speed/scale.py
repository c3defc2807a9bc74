"""What a fit costs per row and per weight, and how that goes down with more processes: measured here, written to `docs/scale.md`.

`python -m offmap_bench.speed.scale` measures, about four minutes, and keeps `bench/records/scale.json`; with `table` it only writes
the page. It starts itself under `torchrun` with 1, 2 and 4 processes; each phase is then the work of one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import offmap
from offmap.data import Rows, Share
from offmap.distributed.group import Group
from offmap.distributed.torchrun import Ranks, together
from offmap.integrations.mlp import mlp
from offmap.likelihoods import Gaussian
from offmap.maxwent import objective as objectives
from offmap.maxwent.feeding import feed_of, sharded_among
from offmap.maxwent.risk import Validation
from offmap.maxwent.train import Cycle, adam, minimize
from offmap.model.forward import BatchedModel
from offmap.posterior.construct import centre, observe
from offmap.posterior.distribution import WeightDistribution
from offmap_bench.paths import RECORDS
from offmap_bench.speed import scale_page
from offmap_bench.speed.record import machine

RECORD = RECORDS / "scale.json"
INPUTS, WIDTH, DRAWS, STEPS, TURNS = 16, 256, 10, 10, 3
ROWS = {"pass": 16_384, "risk": 4_096, "step": 2_048}
"""Rows of the training data, of the validation data, and of one batch."""

SIZES = (1, 2, 4)


def main() -> None:
    """Measure, and write the page."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["rank"]:
        _rank(Path(sys.argv[2]))
        return
    if sys.argv[1:] != ["table"]:
        record = _alone() | {"ranks": {str(size): _started(size) for size in SIZES}, "machine": machine()}
        RECORD.write_text(json.dumps(_short(record), indent=1) + "\n", encoding="utf-8")
    print(f"The page is {scale_page.write(json.loads(RECORD.read_text(encoding='utf-8')))}")


def _data(rows: int) -> Rows:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(rows, INPUTS, generator=source)
    return Rows(x, x[:, :1].sin() + 0.1 * torch.randn(rows, 1, generator=source), 128, "train")


def _net() -> torch.nn.Module:
    return mlp(INPUTS, 2, hidden=(WIDTH, WIDTH, WIDTH))


def phases(rows: dict[str, int], group: Group) -> dict[str, Callable[[], object]]:
    """A pass over the data, a look at the validation risk, and gradient steps, as a fit makes them."""
    at, train = centre(_net()), _data(rows["pass"])
    model, law = BatchedModel(at.net, chunk_size=DRAWS), Gaussian()
    step = replace(_data(rows["step"]), batch_size=rows["step"])
    q = WeightDistribution(at.mean, rotation=observe(at, feed_of(_data(512)), rotated=True).rotation(), initial_scale=1e-3)
    validation = Validation(model, law, _data(rows["risk"]), draws=DRAWS, group=group)
    optimizer = adam(q.raw_scale.parameters(), lr=1e-3)
    objective = objectives.maxwent(q, model, law, entropy_weight=1.0)
    mine = step if group.size == 1 else replace(step, share=Share(group, "rows"))
    return {
        "pass": lambda: observe(at, feed_of(train), rotated=False, dealt=sharded_among(train, group, sharded=False)),
        "risk": lambda: validation(q),
        "step": lambda: minimize(objective, optimizer, Cycle(mine, 0), steps=STEPS, group=group),
    }


def _alone() -> dict[str, Any]:
    """Processor seconds in one process, at a quarter of the rows and at all of them; of eigenvectors, and of scores."""
    with together(alone=True) as group:
        few = {name: _timed(run)[0] for name, run in phases({n: r // 4 for n, r in ROWS.items()}, group).items()}
        all_ = {name: _timed(run)[0] for name, run in phases(ROWS, group).items()}
    eigh = {str(n): _timed(lambda n=n: torch.linalg.eigh(_symmetric(n)))[0] for n in (256, 512, 1024)}
    x, y = _data(4_096).inputs, _data(4_096).targets
    guard = offmap.fit(_net(), (x[:2048], y[:2048]), (x[2048:2304], y[2048:2304]), solver="closed-form", draws=50, progress=False)
    return {
        "rows": ROWS, "draws": DRAWS, "steps": STEPS, "width": WIDTH, "fan_ins": [INPUTS, WIDTH, WIDTH, WIDTH],
        "parameters": sum(p.numel() for p in _net().parameters()), "quarter": few, "whole": all_, "eigh": eigh,
        "score": {"rows": 2_048, "draws": 50, "seconds": _timed(lambda: guard.score(x[:2048]))[0]},
    }  # fmt: skip


def _symmetric(n: int) -> Tensor:
    a = torch.randn(n, n, dtype=torch.float64)
    return a @ a.mT


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """The best of a few turns: seconds of the processor, and on the wall."""
    run()
    best = [float("inf"), float("inf")]
    for _ in range(TURNS):
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        best = [min(best[0], time.process_time() - cpu), min(best[1], time.perf_counter() - wall)]
    return best[0], best[1]


def _started(size: int) -> dict[str, Any]:
    """This file under torchrun: for every phase the slowest rank's seconds, and what it sent."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*words, "-m", "offmap_bench.speed.scale", "rank", folder], env=environment, check=True, timeout=240)
        told = [json.loads(file.read_text(encoding="utf-8")) for file in Path(folder).iterdir()]
    phases = {name: {what: max(each[name][what] for each in told) for what in told[0][name]} for name in ROWS}
    return phases | {"network": told[0]["network"]}


def _rank(folder: Path) -> None:
    """One rank: every phase in turn, then what the network can do."""
    with together() as group:
        found: dict[str, Any] = {}
        for name, run in phases(ROWS, group).items():
            with _Counted() as counted:
                run()
            cpu, wall = _timed(run)
            found[name] = {"cpu": cpu, "wall": wall, "exchanges": counted.calls, "bytes": counted.bytes}
        found["network"] = _network(group)
        (folder / f"{group.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _network(group: Group) -> dict[str, float]:
    """The shortest exchange, and what each byte of a long one adds: seconds of the processor, and on the wall."""
    if not isinstance(group, Ranks):
        return {}
    short, long = torch.zeros(1), torch.zeros(1 << 22)
    call = [min(times) for times in zip(*(_timed(lambda: group.sum(short)) for _ in range(20)), strict=True)]
    whole = [min(times) for times in zip(*(_timed(lambda: group.sum(long)) for _ in range(3)), strict=True)]
    size = long.numel() * 4
    return {"call": call[0], "byte": whole[0] / size, "call_wall": call[1], "byte_wall": whole[1] / size}


class _Counted:
    """Exchanges made in a block, and the bytes of each on this rank."""

    def __enter__(self) -> _Counted:
        self.calls, self.bytes = 0, 0
        self._own = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast")}
        for name, made in self._own.items():
            setattr(dist, name, self._counting(made))
        return self

    def _counting(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            sent = args[0] if isinstance(args[0], Tensor) else args[1]
            self.calls, self.bytes = self.calls + 1, self.bytes + sent.numel() * sent.element_size()
            return made(*args, **options)

        return call

    def __exit__(self, *_: object) -> None:
        for name, made in self._own.items():
            setattr(dist, name, made)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
