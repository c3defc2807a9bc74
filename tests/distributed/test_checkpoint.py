"""A fit that was ended goes on from its last state, and gives what it would have given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offmap
import rank_jobs as jobs
from offmap.errors import FileError
from offmap.maxwent.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return jobs.fit_in_steps()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_after_a_kill_the_fit_goes_on_and_gives_the_same_guard_to_the_bit(tmp_path: Path, undisturbed: dict[str, Tensor]) -> None:
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    child = [sys.executable, str(Path(jobs.__file__)), str(tmp_path), "killed"]
    assert subprocess.run(child, env=environment, timeout=120).returncode == -signal.SIGKILL
    file = tmp_path / "fit.state"
    assert b"steps.30.0" in file.read_bytes()
    assert_same(jobs.fit_in_steps(file), undisturbed)
    assert list(tmp_path.iterdir()) == []


class Ended(Exception):
    pass


def end_early() -> None:
    raise Ended


AT = (r"\"step\": 30", r"\"stop_reason\": \"finished\"")  # as they stand in JSON within JSON


@pytest.mark.parametrize("part", ["bases", "shape", "steps.", *AT])
def test_wherever_it_was_ended_the_fit_gives_the_same_guard(
    part: str, tmp_path: Path, undisturbed: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offmap.maxwent.checkpoint.TIME_SHARE", 1.0)  # write at every check
    file = tmp_path / "fit.state"
    with pytest.raises(Ended):
        jobs.fit_in_steps(file, jobs.EndsAfter(file, part, end_early))
    assert_same(jobs.fit_in_steps(file), undisturbed)


def test_ended_after_the_last_step_the_fit_gives_the_same_guard(
    tmp_path: Path, undisturbed: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is left to bring the generators of a DataLoader to where they were; a pass over it follows all the same."""
    monkeypatch.setattr("offmap.maxwent.checkpoint.TIME_SHARE", 1.0)
    file = tmp_path / "fit.state"
    with monkeypatch.context() as patch, pytest.raises(Ended):  # noqa: PT012
        patch.setattr("offmap.maxwent.checkpoint.Descent.end", lambda self: end_early())
        jobs.fit_in_steps(file)
    assert rb"\"step\": 40" in file.read_bytes()
    assert_same(jobs.fit_in_steps(file), undisturbed)


def test_what_was_done_is_not_done_again(tmp_path: Path) -> None:
    file = tmp_path / "fit.state"
    with pytest.raises(Ended):
        jobs.fit_in_steps(file, jobs.EndsAfter(file, AT[1], end_early))
    rest, whole = (jobs.EndsAfter(tmp_path / "nowhere", "", end_early) for _ in range(2))
    jobs.fit_in_steps(file, rest)
    jobs.fit_in_steps(None, whole)
    assert rest.seen < whole.seen / 2  # score and threshold are fitted anew


def test_several_tradeoffs_and_members_go_on_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"entropy_weight": (3.0, 30.0), "steps": 20, "basis": "identity"}
    file = tmp_path / "fit.state"
    with pytest.raises(Ended):
        jobs.fit_in_steps(file, jobs.EndsAfter(file, "steps.30.0", end_early), **options)
    assert b"steps.3.0" in file.read_bytes()
    assert_same(jobs.fit_in_steps(file, **options), jobs.fit_in_steps(**options))


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"steps": 50}, "`steps` was 40 and is 50 now"),
    "seed": ({"seed": 6}, "`seed` was 5 and is 6 now"),
    "likelihood": ({"likelihood": None}, "`likelihood` was 'gaussian' and is None now"),
    "noise": ({"noise": offmap.posterior.noise.Uniform(1.0)}, r"`noise` was 'uniform' and is Uniform\(1.0\) now"),
}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("state") / "fit.state"
    with pytest.raises(Ended):
        jobs.fit_in_steps(file, jobs.EndsAfter(file, "bases", end_early))
    return file


@pytest.mark.parametrize("name", OTHER)
def test_the_state_of_another_fit_is_refused_and_left_alone(name: str, state: Path) -> None:
    options, message = OTHER[name]
    before = state.read_bytes()
    with pytest.raises(FileError, match=f"fit.state is the state of another fit: {message}. Delete the file to start anew"):
        jobs.fit_in_steps(state, **options)
    assert state.read_bytes() == before


@pytest.mark.parametrize("what", ["the model", "`train`", "`valid`"])
def test_other_models_and_data_are_refused(what: str, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "the model":
        net, known = jobs.mlp(), {count: jobs.rows(count, seed) for count, seed in ((301, 7), (60, 11))}
        net[0].bias.data[3] += 1e-6  # pyright: ignore[reportIndexIssue]
        monkeypatch.setattr(jobs, "mlp", lambda: net)
        monkeypatch.setattr(jobs, "rows", lambda count, seed=7: known[count])
    else:
        size = 301 if what == "`train`" else 60
        monkeypatch.setattr(jobs, "rows", lambda count, seed=7, given=jobs.rows: given(count + (count == size), seed))
    with pytest.raises(FileError, match=f"is the state of another fit: {what} was .* and is .* now"):
        jobs.fit_in_steps(state)


@pytest.mark.parametrize(("content", "message"), [
    (b"", "is damaged or not the state of a fit"),
    (b"hello, this is no state of ours" * 9, "is damaged or not the state of a fit"),
])  # fmt: skip
def test_a_file_that_is_no_state_is_refused_and_left_alone(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "fit.state"
    file.write_bytes(content)
    with pytest.raises(FileError, match=message):
        jobs.fit_in_steps(file)
    assert file.read_bytes() == content


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "fit.state"
    kept = Checkpoint(file, {"seed": "1"})
    kept.keep("part", {"step": 3}, {"u": torch.arange(4.0)})
    again = Checkpoint(file, {"seed": "1"})["part"]
    assert again is not None
    assert again.values == {"step": 3}
    assert torch.equal(again.tensors["u"], torch.arange(4.0))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(FileError, match="its checksum does not fit"):
        Checkpoint(file, {"seed": "1"})


def test_a_guard_is_no_state(tmp_path: Path) -> None:
    offmap.fit(jobs.mlp(), *jobs.TWO, solver="closed-form", **jobs.OPTIONS).save(tmp_path / "guard")
    with pytest.raises(FileError, match="is not the state of a fit of this version: expected 'offmap-checkpoint-2', but"):
        jobs.fit_in_steps(tmp_path / "guard")
    assert (tmp_path / "guard").exists()
