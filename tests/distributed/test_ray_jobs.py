"""A real Ray with two workers: the same results as on this machine, whoever is killed and whenever."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import offmap
from demo_jobs import die, die_once, fail, square
from offmap.cli.folder import Progress, ScoreResult, ScoreSpec, list_shards, score_folder
from offmap.cli.score import score_table
from offmap.data.tables.schema import Schema
from offmap.distributed.jobs import Pool
from offmap.errors import DataError, OffmapError
from offmap_bench.runner.plan import Cell, cells, parse
from offmap_bench.runner.run import Event, run
from offmap_bench.runner.store import Record, read_records
from shells import Shell
from trained import quick, regression, regressor

ray = pytest.importorskip("ray", reason="needs ray: pip install 'offmap[ray]'")
engine = pytest.importorskip("offmap.distributed.ray")
arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'offmap[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.xdist_group("ray")

TWO = Pool("ray", 2)
BLOCK = 1 << 16
"""Rows of a block of few columns."""


@pytest.fixture(scope="module", autouse=True)
def one_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Ray that offmap starts for itself, kept for all tests, with a token of its own: none is left in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("OFFMAP_CACHE", str(tmp_path_factory.mktemp("models")))  # its workers have the environment of its start
        with engine.connect(ray, 2, None):
            assert ray.cluster_resources()["CPU"] == 2
            yield
        assert not ray.is_initialized()


def workers() -> list[int]:
    """Processes below this one that are in the middle of a job, or wait for one."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    return [pid for pid in parents if ours(pid) and title(pid).startswith(("ray::run_job", "ray::IDLE"))]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_reports_come_in_order_and_an_error_as_it_was() -> None:
    x, said = torch.arange(3.0), list[Any]()
    with pytest.raises(DataError, match="Expected a fine day, but got rain."):
        Pool("ray", 1).run_jobs([(square, (x,)), (square, (x[:1],)), (fail, ())], report=lambda *told: said.append(told))
    assert said == [(0, "squaring 3"), (1, "squaring 1")]
    assert TWO.run_jobs([], report=lambda *told: None) == []


def test_a_job_that_kills_its_workers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_DEATHS", 1)
    with pytest.raises(OffmapError, match="A worker died in the middle of the same job, 1 of 1 times: WorkerCrashedError"):
        Pool("ray", 1).run_jobs([(die, ())], report=lambda *told: None)


def test_the_job_of_a_worker_that_dies_is_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard = list[Any]()
    jobs = [(die_once, (str(tmp_path / "mark"),)), (square, (torch.arange(3.0),))]
    alive, squares = TWO.run_jobs(jobs, report=lambda *item: heard.append(item))
    assert (alive, squares.tolist()) == ("alive", [0, 1, 4])
    assert [item for number, item in heard if number == 0] == ["about to die, or not"] * 2
    assert caplog.messages == ["A worker died; its job is run again."]


# ------------------------------------------------------------------------------------------------------- scores


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(100, 0), regression(60, 1), score="paper", draws=5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tables of two blocks each, with an id that no other row has."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.RandomState(0)
    for number in range(3):
        n = BLOCK + 1000 * (number + 1)
        columns = {"id": number * 10**7 + np.arange(n)} | {name: rng.randn(n) for name in "abc"}
        parquet.write_table(arrow.table(columns), folder / f"{number}.parquet")
    return folder


def score_on_ray(
    guard: offmap.Guard, data: Path, out: Path, pool: Pool, kill: int | None = None
) -> tuple[list[ScoreResult], list[int]]:
    """What became of the folder; a worker is killed at the `kill`-th news, and its id told."""
    heard, killed = list[Progress](), list[int]()

    def report(number: int, progress: Progress) -> None:
        heard.append(progress)
        if len(heard) == kill:
            os.kill(progress.process, signal.SIGKILL)
            killed.append(progress.process)

    spec = ScoreSpec(data, out, "a guard", Schema(("a", "b", "c")), keep=("id",))
    return score_folder(guard, spec, list_shards(data)[0], score_table, pool=pool, resume=False, report=report), killed


def test_a_worker_killed_in_the_middle_loses_no_row_and_repeats_none(guard: offmap.Guard, data: Path, tmp_path: Path) -> None:
    """At its first news a worker has written one block of a table, and has another one before it."""
    here, _ = score_on_ray(guard, data, tmp_path / "here", Pool())
    there, killed = score_on_ray(guard, data, tmp_path / "there", TWO, kill=1)
    assert here == there
    assert len(killed) == 1
    for number in range(3):
        local, remote = (parquet.read_table(tmp_path / name / f"{number}.parquet") for name in ("here", "there"))
        assert remote["id"].to_pylist() == list(range(number * 10**7, number * 10**7 + BLOCK + 1000 * (number + 1)))
        assert remote.equals(local)  # to the bit
    left = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert left == [".offmap", "0.parquet", "1.parquet", "2.parquet"]


def test_the_command_joins_a_cluster_and_finds_the_model_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n\nclass Own(nn.Sequential):\n    pass\n\n"
        "def make():\n    return Own(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("own_nets").make()
    net.load_state_dict(regressor().state_dict())
    (tmp_path / "in").mkdir()
    for name, n in (("a", 50), ("b", 60)):
        np.savez(tmp_path / "in" / f"{name}.npz", **dict(zip("xyz", regression(n, n)[0].numpy().T, strict=True)))
    (tmp_path / "in" / "c.npz").write_text("no table")
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    guard = quick(net, regression(100, 0), regression(60, 1), score="paper")
    guard.save(tmp_path / "guard")
    shell, token = Shell(tmp_path), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}
    words = ["score", "guard", "in", "--model", "own_nets:make", "--weights", "w.safetensors", "-o", "out", "--json"]
    done = shell(*words, "--engine", "ray", "--address", ray.get_runtime_context().gcs_address, **token)
    lost = shell(*words, "--engine", "ray", "--address", "127.0.0.1:1", "--resume")
    shell.close()
    assert lost.code == 1
    assert lost.sentence.startswith("Cannot join Ray at '127.0.0.1:1': ConnectionRefusedError: ")
    assert lost.sentence.endswith("without an address, offmap starts its own Ray.")
    assert done.code == 1
    assert done.err.startswith("Failed: c.npz: Expected arrays of numbers or words at ")
    told = json.loads(done.out)
    assert (told["files"], told["rows"], list(told["failed"])) == (2, 110, ["c.npz"])
    for name, n in (("a", 50), ("b", 60)):
        with np.load(tmp_path / "out" / f"{name}.npz") as file:
            np.testing.assert_array_equal(file["score"], guard.score(regression(n, n)[0].double()).numpy())


# ------------------------------------------------------------------------------------------------------- sweeps

PLAN = """
name = "tiny"
seeds = [0, 1]
tasks = ["regression"]
[[method]]
name = "nearest"
[[method]]
name = "nearest"
label = "nearest of five"
config = {k = 5}
[[method]]
name = "mahalanobis"
"""


def drop_times(path: Path, wanted: list[Cell]) -> dict[str, Any]:
    """Records without their times."""
    found = read_records(path)
    assert {found.state(cell) for cell in wanted} == {"ok"}
    return {name: (record.metrics, record.chosen, record.settings, record.steps) for name, record in found.records.items()}


def test_a_sweep_whose_worker_is_killed_gives_every_record_once(tmp_path: Path) -> None:
    """All workers die when the first cell is done: its record stays, the others are made, and all are those of this machine."""
    wanted, heard = cells(parse(PLAN, "tiny.toml")), list[Event]()
    first: dict[str, Record] = {}

    def report(event: Event) -> None:
        heard.append(event)
        if event.kind == "done" and not first:
            running = workers()  # Ray may keep an idle one beside the one that runs the job
            assert running
            for worker in running:
                os.kill(worker, signal.SIGKILL)
            first.update(read_records(tmp_path / "there.jsonl").records)  # what was written until then

    there = run(wanted, tmp_path / "there.jsonl", pool=Pool("ray"), report=report)
    here = run(wanted, tmp_path / "here.jsonl")
    assert there == here
    assert (there.done, there.failed) == (6, 0)
    after = read_records(tmp_path / "there.jsonl").records
    assert {name: after[name] for name in first} == first
    assert drop_times(tmp_path / "there.jsonl", wanted) == drop_times(tmp_path / "here.jsonl", wanted)
    ends = [event.cell.hash for event in heard if event.kind == "done"]
    assert sorted(ends) == sorted(cell.hash for cell in wanted)
