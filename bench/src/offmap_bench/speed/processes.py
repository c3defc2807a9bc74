"""Themes with processes of their own: `offmap score` of files, memory, models of 25 million weights, exports, `offmap serve`."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import offmap
from offmap.checks import require
from offmap.export.onnx import open_session
from offmap.integrations.nets import mlp
from offmap.posterior.predictive import Stochastic
from offmap.random import generator
from offmap_bench.speed import measure
from offmap_bench.speed import subjects as on
from offmap_bench.speed.measure import GEMM, Claim, Measurement, Record, Timing, Work, at_most, once, peak_memory, race, repeat

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(offmap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def start(words: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start `offmap WORDS` with one thread."""
    return subprocess.Popen([sys.executable, "-m", "offmap", *words], env=ENVIRONMENT, text=True, **options)


def imports(rounds: int = 7) -> Record:
    """`import offmap` and `import torch` in turns, each in a new process that counts its own time."""
    timings, env = {name: Timing() for name in ("torch", "offmap")}, ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": ""}
    for name, timing in list(timings.items()) * rounds:
        code, begin = f"import time, {name}; print(time.process_time())", time.perf_counter()
        timing.cpu.append(float(subprocess.check_output([sys.executable, "-c", code], env=env)))
        timing.wall.append(time.perf_counter() - begin)
    return measure.record("imports", rounds, {f"`import {name}`": timing for name, timing in timings.items()})


# ------------------------------------------------------------------------------------------------ offmap score


class Spent(NamedTuple):
    """One process: megabytes at its peak, seconds of the processor and on the wall, megabytes of the file."""

    peak: float
    seconds: float
    wall: float
    size: float


def prepare(folder: Path, net: nn.Module, hidden: tuple[int, ...], **guards: offmap.Guard) -> None:
    """Write a module that builds the net, its weights, and guards that know the names of the columns."""
    call = f"mlp({on.FEATURES}, {on.OUTPUTS}, hidden={hidden}, seed=0)"
    text = f"from offmap.integrations.nets import mlp\n\ndef make_model():\n    return {call}\n"
    (folder / "bench_module.py").write_text(text, encoding="utf-8")
    save_file(net.state_dict(), folder / "w.safetensors")
    for name, guard in guards.items():
        replace(guard, about={"inputs": on.NAMES, "targets": ["y"]}).save(folder / f"{name}.safetensors")


def score_file(folder: Path, guard: str, data: Path, rows: int) -> Spent:
    """Run `offmap score` in a process of its own, watch it, and check that every row was scored."""
    scores = folder / "scores.parquet"
    words = ["score", f"{guard}.safetensors", data.name, "-o", scores.name]
    words += ["--model", "bench_module:make_model", "--weights", "w.safetensors", "--quiet"]
    before, begin, peak = os.times(), time.perf_counter(), 0.0
    with start(words, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"`offmap score` ended with {process.returncode}")
    wall, after = time.perf_counter() - begin, os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert require("pyarrow.parquet", "parquet").read_metadata(scores).num_rows == rows
    return Spent(peak, seconds, wall, data.stat().st_size / 1e6)


def write_parquet(path: Path, x: NDArray[Any], group: int = 1 << 20) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    parquet.write_table(arrow.table(dict(zip((*on.NAMES, "y"), x.T, strict=False))), path, row_group_size=group)


WRITERS: dict[str, tuple[Callable[[Path, NDArray[Any]], None], float]] = {
    ".parquet": (write_parquet, 1.3),
    ".npz": (lambda path, x: np.savez(path, **dict(zip(on.NAMES, x.T, strict=True))), 1.3),
    ".csv": (lambda path, x: np.savetxt(path, x, delimiter=",", header=",".join(on.NAMES), comments=""), 1.6),
}
"""Forms of a table, how each is written, and the bound of its time against `guard(x)` in memory."""


def throughput(rounds: int = 3) -> Record:
    """Rows a second in memory, in turns; then a process for every file, and one for its first rows."""
    guard, x, many, few = on.fit_guard(score="paper"), on.table()["score"][0], 30_000, 500
    one, both = "a bare GEMM of one pass of all draws", "both passes"
    score, call = "`guard.score` in memory", "`guard(x)` in memory, two passes of all draws"
    works = {score: lambda: guard.score(x), call: lambda: guard(x)}
    timings = race(works, rounds=rounds, gemm={one: works[score], both: works[call]})
    spent: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        prepare(folder := Path(name), on.trained_net(), on.HIDDEN, guard=guard)
        for suffix, (write, _) in WRITERS.items():
            for rows in (many, few):
                write(data := folder / f"data{suffix}", np.random.RandomState(rows).randn(rows, on.FEATURES))
                spent.setdefault(suffix, []).append(score_file(folder, "guard", data, rows).seconds)
    rates = {suffix: (many - few) / (every - start) for suffix, (every, start) in spent.items()}
    inverse = measure.measurements({name: timings[name] for name in (one, score, call)})
    measured = [Measurement(m.what, "rows/s", len(x) / m.best, len(x) / m.median, len(x) / (m.wall or m.best)) for m in inverse]
    measured += [once(f"`offmap score`, {suffix}", "rows/s", rate) for suffix, rate in rates.items()]
    measured += [once(f"`offmap score`, {suffix}, {many:,} rows with the start", "s", s[0]) for suffix, s in spent.items()]
    measured.append(once("the start alone", "s", spent[".parquet"][1]))
    best = {name: timing.best for name, timing in timings.items()}
    claims = [
        ("times the bare GEMM, `guard.score`", best[score] / best[one], 1.7),
        ("times the bare GEMM of both passes, `guard(x)`", best[call] / best[both], 1.7),
        *(
            (f"times `guard(x)` in memory, `offmap score` of {suffix}", len(x) / best[call] / rates[suffix], most)
            for suffix, (_, most) in WRITERS.items()
        ),
    ]
    return Record("throughput", rounds, measured, at_most(claims))


CASES = (("paper", 500_000), ("paper", 5_000_000), ("default", 500_000))
"""Scores, and rows of the file."""

LIMIT = 1000.0
"""Megabytes that `offmap score` may take in all."""


def command(rounds: int = 1) -> Record:
    """Peak memory and time of Parquet files larger than the memory that scoring may take."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_small(Path(folder))
        data, runs = Path(folder, "data.parquet"), dict[tuple[str, int], Spent]()
        for kind, rows in CASES:
            write_parquet(data, np.random.RandomState(1).randn(rows, on.FEATURES + 1), group=100_000)
            runs[kind, rows] = score_file(Path(folder), kind, data, rows)
    measured: list[Measurement] = []
    for (kind, rows), spent in runs.items():
        measured.append(once(f'{rows:,} rows ({spent.size:.0f} MB), score="{kind}", peak', "MB", spent.peak))
        measured.append(once(f'{rows:,} rows, score="{kind}", time', "s", spent.seconds, spent.wall))
    few, many, rows = runs[CASES[0]], runs[CASES[1]], CASES[1][1]
    claims = at_most([
        (f"MB at the peak of `offmap score`, {rows:,} rows", many.peak, LIMIT),
        (f"MB more for {rows:,} rows than for {CASES[0][1]:,}", many.peak - few.peak, 64.0),
    ])  # fmt: skip
    claims.append(Claim('rows a second of the processor, score="paper"', rows / many.seconds, "at least", 50_000))
    return Record("command", rounds, measured, claims)


def prepare_small(folder: Path) -> None:
    """Train a small net, and fit a guard for every score."""
    net = mlp(on.FEATURES, on.OUTPUTS, hidden=(32, 32), seed=0)
    on.descend(net, 200, torch.Generator().manual_seed(0))
    (x, y), valid = on.table()["train"], on.table()["valid"]
    options: dict[str, Any] = {"solver": "closed-form", "draws": 20, "progress": False}
    guards = {kind: offmap.fit(net, (x[:2_000], y[:2_000]), valid, score=kind, **options) for kind in ("paper", "default")}
    prepare(folder, net, (32, 32), **guards)


# ------------------------------------------------------------------------------------------------ memory


def memory(rounds: int = 2) -> Record:
    """What scoring needs beyond inputs and result; peaks may differ by what a guard holds of stacked outputs at once."""
    stream, tensor, draws = (
        [("stream", rows, 50) for rows in (10_000, 100_000, 1_000_000)],
        [("tensor", rows, 50) for rows in (100_000, 1_000_000)],
        [("tensor", 10_000, draws) for draws in (500, 2_000)],
    )
    growth = {
        "MB more for 1,000,000 rows than for 10,000, streamed": (stream[0], stream[2]),
        "MB more for 1,000,000 rows than for 100,000, in a tensor": (tensor[0], tensor[1]),
        "MB more for 2,000 draws than for 500": (draws[0], draws[1]),
    }
    with tempfile.TemporaryDirectory() as folder:
        on.fit_guard().save(Path(folder, "guard"))
        torch.save(on.trained_net().state_dict(), Path(folder, "net"))
        cases = stream + tensor + draws
        peaks = {case: [spawn("score_rows", folder, *map(str, case)) for _ in range(rounds)] for case in cases}
    measured = [
        Measurement(f"{rows:,} rows ({form}), {draws} draws", "MB", min(mb), statistics.median(mb))
        for (form, rows, draws), mb in peaks.items()
    ]
    # the allocator's worst
    claims = at_most((what, max(peaks[more]) - min(peaks[less]), 32.0) for what, (less, more) in growth.items())
    return Record("memory", rounds, measured, claims)


class Stream(IterableDataset[Tensor]):
    def __init__(self, rows: int, batch: int = 10_000) -> None:
        self.rows, self.batch = rows, batch

    def __iter__(self) -> Iterator[Tensor]:
        source = generator("benchmarks", "stream")
        for _ in range(self.rows // self.batch):
            yield torch.randn(self.batch, on.FEATURES, generator=source)


def score_rows(folder: str, form: str, rows: str, draws: str) -> float:
    """Megabytes that scoring adds to this process at its highest."""
    net = mlp(on.FEATURES, on.OUTPUTS, hidden=on.HIDDEN)
    net.load_state_dict(torch.load(Path(folder, "net")))
    guard = replace(offmap.load(Path(folder, "guard"), net), draws=int(draws))
    inputs = DataLoader(Stream(int(rows)), batch_size=None) if form == "stream" else torch.randn(int(rows), on.FEATURES)
    before = peak_memory(reset=True)
    scores = guard.score(inputs)
    return peak_memory() - before - scores.numel() * scores.element_size() / 1e6


class Skip(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(input + super().forward(input))


def wide() -> nn.Sequential:
    """24 million weights; two layers of 5,000 inputs, which is above the limit of a full basis."""
    return nn.Sequential(nn.Linear(5_000, 2_400), nn.ReLU(), nn.Linear(2_400, 5_000), nn.ReLU(), nn.Linear(5_000, 10))


def convolutions() -> nn.Sequential:
    """24 million weights in ten 3 × 3 convolutions of 512 channels: a fan-in of 4,608."""

    def layer() -> list[nn.Module]:
        return [nn.Conv2d(512, 512, 3, padding=1, bias=False), nn.BatchNorm2d(512), nn.ReLU()]

    first, blocks = nn.Conv2d(3, 512, 3, padding=1), [Skip(*layer(), *layer()) for _ in range(5)]
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


SUBJECTS = {
    "wide": on.Subject("MLP 5000-2400-5000-10", wide, (5_000,), 64),
    "conv": on.Subject("ten 3 × 3 convolutions of 512 channels", convolutions, (3, 8, 8), 64),
    "encoder": on.Subject("Transformer, 8 layers of 512", lambda: on.Encoder(512, heads=8, layers=8), (16, 16), 64),
}


def large(rounds: int = 1) -> Record:
    """One process for every fit and every scoring; memory counts in copies of the weights, beyond the stored bases."""
    result = Record("large", rounds, [])
    with tempfile.TemporaryDirectory() as folder:
        for key, subject in SUBJECTS.items():
            for action in ("fit", "score"):
                peak, weights, bases, chunk = spawn("fit_or_score", action, key, str(Path(folder, key)))
                sizes = {"the weights": weights, "the bases": bases} if action == "fit" else {}
                sizes[f"peak of `{action}`"] = peak
                result.measurements.extend(once(f"{subject.name}: {part}", "MB", size) for part, size in sizes.items())
                what, copies = f"{subject.name}, `{action}`: copies of the weights", (peak - bases) / weights
                result.claims.extend(at_most([(what, copies, chunk + 3)]))
                print(what, copies, flush=True)
    return result


def fit_or_score(action: str, name: str, path: str) -> tuple[float, float, float, int]:
    """Megabytes that a fit, or scores of a guard of an earlier process, add; of weights and of bases; and the chunk size."""
    net, x = SUBJECTS[name].net(), SUBJECTS[name].inputs(64)
    net(x[:2])
    data = (torch.randn(40, 300), torch.arange(40) % 2)
    offmap.fit(nn.Linear(300, 2), data, data, solver="closed-form", draws=2, risk_draws=2)  # what torch sets up once
    before = peak_memory(reset=True)
    if action == "fit":
        data = (x, torch.arange(len(x)) % 10)  # targets do not matter
        guard = offmap.fit(net, data, data, solver="closed-form", params="all", draws=4, risk_draws=4, progress=False)
    else:
        guard = offmap.load(path, net)
        peak_memory(reset=True)  # after the peak of loading
        guard.score(x)
    after = peak_memory()
    if action == "fit":
        guard.save(path)
    assert isinstance(guard.predictive, Stochastic)
    state = guard.predictive.q.state_dict()
    bases = sum(t.nbytes for n, t in state.items() if not n.startswith(("mean.", "raw_scale.", "fixed.")))
    weights = sum(p.nbytes for p in net.parameters())
    return after - before, weights / 1e6, bases / 1e6, guard.predictive.model.chunk_size


def spawn(function: str, *arguments: str) -> Any:
    """Run one of this module's functions in a process of its own; what it prints at last, as JSON.

    In `fit_or_score` malloc gives freed memory back at once: left to itself, glibc keeps freed blocks of up to 32 MB.
    """
    trim = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if function == "fit_or_score" else {}
    words = [sys.executable, "-m", "offmap_bench.speed.processes", function, *arguments]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | trim)
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------ exports


@contextmanager
def open_export(guard: offmap.Guard) -> Generator[tuple[Path, Any]]:
    """The path of an exported guard, and a session that runs it."""
    with tempfile.TemporaryDirectory() as folder:
        path = guard.export(Path(folder, "g.onnx"), on.table()["valid"][0][:64]).path
        yield path, open_session(str(path))


def export(rounds: int = 5) -> Record:
    """Few rows and many, the graph and the guard in turns."""
    guard, every = on.fit_guard(), dict[str, Timing]()
    with open_export(guard) as (_, session):
        for rows, calls in {32: 100, 4_096: 1}.items():
            x = on.table()["score"][0][:rows]
            works: dict[str, Work] = {
                f"{rows:,} rows: the graph, ONNX Runtime": repeat(calls, lambda x=x: session.run(None, {"input": x.numpy()})),
                (ours := f"{rows:,} rows: `guard(x)`, torch"): repeat(calls, lambda x=x: guard(x)),
            }
            timings = race(works, rounds=rounds, gemm={f"{rows:,} rows: {GEMM}": works[ours]})
            every |= {name: timing.times(1 / calls) for name, timing in timings.items()}
    return measure.record("export", rounds, every, "ms")


CALLS = 200
Turn = tuple[float, list[float]]
"""Milliseconds of the processor per call, and of each call on the wall."""


def serving(rounds: int = 5) -> Record:
    """One server, bodies of both kinds, and the bare calls in between: 32 rows a call."""
    guard, rows = on.fit_guard(), on.table()["score"][0][:32]
    x, buffer = rows.numpy(), io.BytesIO()
    np.save(buffer, x)
    npy = {"content": buffer.getvalue(), "headers": {"Content-Type": "application/x-npy"}}
    bare, product, turns = "bare `session.run`", measure.multiply(), dict[str, list[Turn]]()
    with open_export(guard) as (path, session), start_server(path) as (process, address):
        contestants: dict[str, Callable[[], Turn]] = {
            bare: lambda: time_calls(lambda: session.run(None, {"input": x})),
            "NPY body": lambda: time_requests(process, address, **npy),
            "JSON body": lambda: time_requests(process, address, json={"inputs": x.tolist()}),
            "NPY body, 8 clients": lambda: time_requests(process, address, clients=8, **npy),
            "gemm": lambda: time_calls(product, 1),
        }
        for _ in range(rounds):
            for name, take_turn in contestants.items():
                turns.setdefault(name, []).append(take_turn())
    gemm = turns.pop("gemm")
    turn = Timing([ms / 1e3 for ms, _ in gemm], [wall[0] / 1e3 for _, wall in gemm])
    bound = measure.least_time(turn, measure.count_flops(lambda: guard(rows)))
    cpu = {name: sorted(ms for ms, _ in each) for name, each in turns.items()}
    walls = {name: min((sorted(wall) for _, wall in each), key=lambda wall: wall[CALLS // 2]) for name, each in turns.items()}
    measured = [Measurement(f"{n}, a call", "ms", t[0], t[rounds // 2], walls[n][CALLS // 2]) for n, t in cpu.items()]
    measured += [once(f"{name}, p99 on the wall", "ms", wall[int(0.99 * CALLS)]) for name, wall in walls.items()]
    measured += measure.measurements({GEMM: bound}, "ms")
    claims = at_most((f"times the bare call, {n}", t[0] / cpu[bare][0], 2.0) for n, t in cpu.items() if n != bare)
    return Record("serving", rounds, measured, claims)


def time_calls(call: Work, calls: int = CALLS) -> Turn:
    walls, begin = list[float](), time.process_time()
    for _ in range(calls):
        before = time.perf_counter()
        call()
        walls.append(1e3 * (time.perf_counter() - before))
    return 1e3 * (time.process_time() - begin) / calls, walls


def time_requests(process: int, address: str, clients: int = 1, **body: Any) -> Turn:
    """Post a body from so many clients at once, `CALLS` times in all; the processor time is the server's."""

    def read_cpu_time() -> float:
        words = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 1e3 * (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def post(_: int) -> list[float]:
        with httpx.Client(timeout=30) as client:
            return time_calls(lambda: client.post(f"{address}/score", **body).raise_for_status(), CALLS // clients)[1]

    begin = read_cpu_time()
    with ThreadPoolExecutor(clients) as pool:
        walls = [wall for each in pool.map(post, range(clients)) for wall in each]
    return (read_cpu_time() - begin) / CALLS, walls


@contextmanager
def start_server(path: Path) -> Generator[tuple[int, str]]:
    """Serve an exported guard in a process of its own: its id and its address."""
    with start(["serve", str(path), "--port", "0"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        assert address is not None
        yield process.pid, address[0]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"score_rows": score_rows, "fit_or_score": fit_or_score}[sys.argv[1]](*sys.argv[2:])))
