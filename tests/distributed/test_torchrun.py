"""Two processes that fit together give what one gives; when one dies, the other says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import offmap
import rank_jobs as jobs
from offmap.errors import ConfigError

CHILD = Path(jobs.__file__)
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(CHILD)]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two ranks of one `torchrun` make of all jobs."""
    folder = tmp_path_factory.mktemp("ranks")
    ran = subprocess.run([*LAUNCH, str(folder), *jobs.JOBS], env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def read_states(folder: Path, job: str) -> dict[str, Tensor]:
    """The state of both ranks, which is the same to the bit."""
    first, second = (load_file(folder / f"{job}-{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    return first


def assert_near(found: dict[str, Tensor], alone: dict[str, Tensor], tolerance: float, kinds: tuple[str, ...]) -> None:
    """Equal up to a share of the largest number of each tensor."""
    assert found.keys() == alone.keys()
    for name, tensor in alone.items():
        if name.startswith(kinds):
            size = float(tensor.abs().max())
            torch.testing.assert_close(
                found[name], tensor, rtol=0, atol=tolerance * size, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_second_moments_and_bases_are_those_of_one_process(folder: Path) -> None:
    assert_near(read_states(folder, "moments"), jobs.JOBS["moments"](), 1e-5, ("s.", "reach.", "moment."))


@pytest.mark.parametrize("job", ["closed-form", "convolutions", "members", "wrapped"])
def test_the_closed_form_is_that_of_one_process(folder: Path, job: str) -> None:
    assert_near(read_states(folder, job), jobs.JOBS[job](), 1e-5, ("scale.", "covariance.", "scores", "residuals"))


STEPS = {"refine": 1e-4, "refine64": 1e-10, "sgd-shuffled": 1e-4, "low-rank": 1e-10, "subspace": 1e-7, "flow": 1e-10}


@pytest.mark.parametrize(("job", "tolerance"), STEPS.items())
def test_gradient_steps_are_those_of_one_process(folder: Path, job: str, tolerance: float) -> None:
    assert_near(read_states(folder, job), jobs.JOBS[job](), tolerance, ("scale.",))


@pytest.mark.parametrize("job", ["sharded", "sampler"])
def test_rows_that_each_rank_has_of_its_own_count_as_if_one_had_them_all(folder: Path, job: str) -> None:
    assert_near(read_states(folder, job), jobs.JOBS[job](), 1e-5, ("scale.", "covariance."))


@pytest.mark.parametrize("job", ["fsdp", "fully-shard"])
def test_sharded_models_are_refused_and_the_remedy_works(folder: Path, job: str) -> None:
    assert_near(read_states(folder, job), read_states(folder, "wrapped"), 0, ("scale.", "covariance.", "scores"))


def test_other_data_on_one_rank_are_an_error_on_all(folder: Path) -> None:
    texts = [(folder / f"other-rows-{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("DataError: Expected `train` to be the same on every rank, but it is 300 rows (")
    assert texts[0].endswith("a DataLoader with a DistributedSampler, or `ranks='sharded'`.")


def test_an_error_of_one_rank_is_raised_on_the_others(folder: Path) -> None:
    texts = [(folder / f"one-fails-{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    assert texts[1].startswith("ModelError: ")
    assert texts[0].startswith(f"RankError: Rank 1 failed: {texts[1]}")
    assert "Start all ranks again" in texts[0]


def ranks_of(folder: Path, job: str) -> list[subprocess.Popen[str]]:
    """Two ranks without an agent that would end one for the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started: list[subprocess.Popen[str]] = []
    for rank in "01":
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = ENVIRONMENT | own | {"TORCHELASTIC_RUN_ID": "test"}
        started.append(subprocess.Popen([sys.executable, str(CHILD), str(folder), job], env=env, text=True))
    return started


def test_a_killed_rank_ends_the_other_with_a_message_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    first, second = ranks_of(tmp_path, "killed")
    assert second.wait(timeout=120) == -signal.SIGKILL
    assert first.wait(timeout=60) == 0  # it has written what was raised
    said = (tmp_path / "killed-0.txt").read_text(encoding="utf-8")
    assert said.startswith("RankError: Rank 1 died, or has been silent for 30 seconds. Look at that rank's own output.")
    assert said.endswith("with `checkpoint=` the fit goes on from its last state.")

    assert b"steps.30.0" in (tmp_path / "fit.state").read_bytes()
    assert [rank.wait(timeout=120) for rank in ranks_of(tmp_path, "resumed")] == [0, 0]
    assert not (tmp_path / "fit.state").exists()
    assert_near(read_states(tmp_path, "resumed"), jobs.fit_in_steps(), 1e-4, ("scale.",))


@pytest.mark.slow  # the patience of the others takes half a minute
def test_a_rank_that_hangs_is_given_up_within_a_minute(tmp_path: Path) -> None:
    first, second = ranks_of(tmp_path, "stopped")
    try:
        while "T" not in Path(f"/proc/{second.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]:
            assert first.poll() is None
            time.sleep(0.1)
        assert first.wait(timeout=60) == 0
    finally:
        second.kill()
        second.wait()
    said = (tmp_path / "stopped-0.txt").read_text(encoding="utf-8")
    assert said.startswith("RankError: Rank 1 died, or has been silent for 30 seconds. Look at that rank's own output.")


def test_a_data_parallel_model_is_unwrapped() -> None:
    wrapped = nn.DataParallel(nn.DataParallel(jobs.mlp()))
    guard = offmap.fit(wrapped, *jobs.TWO, solver="closed-form", **jobs.OPTIONS)
    assert type(guard.predictive.model.module) is nn.Sequential  # pyright: ignore[reportAttributeAccessIssue]


def test_unknown_words_for_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Expected `ranks` to be one of .*'sharded'.* but got 'shard'."):
        offmap.fit(jobs.mlp(), *jobs.TWO, ranks="shard")  # pyright: ignore[reportArgumentType]
