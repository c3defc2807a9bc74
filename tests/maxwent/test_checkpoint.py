"""The file of a fit's state: what is kept, what is refused, and that all ranks have what rank 0 reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offmap.atomic import HEADER, seal
from offmap.errors import FileError
from offmap.maxwent.checkpoint import FORMAT, Checkpoint, Part
from threads import Thread, in_ranks

IDENTITY = {"seed": "1"}


def part(step: int = 3) -> Part:
    return Part({"step": step}, {"u": torch.arange(4.0), "v": torch.tensor(step)})


def assert_kept(found: Part | None, step: int = 3) -> None:
    assert found is not None
    assert found.values == {"step": step}
    assert found.tensors.keys() == {"u", "v"}
    assert torch.equal(found.tensors["u"], torch.arange(4.0))
    assert int(found.tensors["v"]) == step


def test_parts_come_back_by_name(tmp_path: Path):
    kept = Checkpoint(tmp_path / "state", IDENTITY)
    kept.keep("one", *part())
    kept.keep("two", *part(5))
    again = Checkpoint(tmp_path / "state", IDENTITY)
    assert_kept(again["one"])
    assert_kept(again["two"], 5)
    assert again["three"] is None


def test_the_file_goes_when_the_fit_is_done(tmp_path: Path):
    kept = Checkpoint(tmp_path / "state", IDENTITY)
    kept.done()  # nothing was written yet
    kept.keep("part", *part())
    assert (tmp_path / "state").exists()
    kept.done()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"seed": "2"}, "seed was 1 and is 2 now"),
        ({}, "seed was 1 and is nothing now"),
        ({"seed": "1", "steps": "4"}, "steps was nothing and is 4 now"),
    ],
)
def test_the_state_of_another_fit_is_refused(identity: dict[str, str], message: str, tmp_path: Path):
    Checkpoint(tmp_path / "state", IDENTITY).keep("part", *part())
    with pytest.raises(FileError, match=f"state is the state of another fit: {message}. Delete the file to start anew, or pass"):
        Checkpoint(tmp_path / "state", identity)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(FileError, match=f"Cannot read {tmp_path}: Is a directory."):
        Checkpoint(tmp_path, IDENTITY)


def sealed_file(header: Any) -> bytes:
    tensors = {"part/u": torch.zeros(2)}
    return seal(header, tensors)


WHOLE: dict[str, Any] = {"format": FORMAT, "identity": IDENTITY, "parts": {"part": {}}}
WRONG: dict[str, tuple[bytes, str]] = {
    "a header without end": ((HEADER + 1).to_bytes(8, "little") + b" " * 99, rf"a header of {HEADER + 1} bytes"),
    "a header as long as can be": (HEADER.to_bytes(8, "little") + b" " * 99, "(?i)header"),
    "another format": (sealed_file(WHOLE | {"format": "other"}), f"expected '{FORMAT}', but got 'other'"),
    "a list": (sealed_file([]), f"expected '{FORMAT}', but got None"),
    "no identity": (sealed_file(WHOLE | {"identity": None}), "malformed parts"),
    "parts that are a list": (sealed_file(WHOLE | {"parts": ["part"]}), "malformed parts"),
    "a part that is a number": (sealed_file(WHOLE | {"parts": {"part": {}, "other": 1}}), "malformed parts"),
    "tensors of no part": (sealed_file(WHOLE | {"parts": {"other": {}}}), "malformed parts"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_state_is_refused(what: str, tmp_path: Path):
    content, message = WRONG[what]
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(FileError, match=message):
        Checkpoint(tmp_path / "state", IDENTITY)


def test_a_header_that_is_whole_is_taken(tmp_path: Path):
    (tmp_path / "state").write_bytes(sealed_file(WHOLE))
    found = Checkpoint(tmp_path / "state", IDENTITY)["part"]
    assert found is not None
    assert found.tensors["u"].tolist() == [0.0, 0.0]


def test_all_ranks_have_what_the_first_reads_and_it_alone_writes(tmp_path: Path):
    path = tmp_path / "state"

    def run(group: Thread) -> Checkpoint:
        mine = path if group.rank == 0 else tmp_path / "a disk that others do not see"
        kept = Checkpoint(mine, IDENTITY, group)
        assert kept.parts == {}
        kept.keep("part", *part(group.rank))
        return Checkpoint(mine, IDENTITY, group)

    for kept in in_ranks(3, run):
        assert_kept(kept["part"], 0)
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_the_file_of_the_ranks_is_removed_by_the_first(tmp_path: Path):
    path = tmp_path / "state"

    def run(group: Thread) -> bool:
        kept = Checkpoint(path, IDENTITY, group)
        kept.keep("part", *part())
        group.all_gather_object(None)
        if group.rank:
            kept.done()
        group.all_gather_object(None)
        there = path.exists()
        group.all_gather_object(None)
        kept.done()
        return there

    assert in_ranks(2, run) == [True, True]
    assert not path.exists()


def test_writing_takes_at_most_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each write takes two seconds by this clock: the next one is due eighteen after it."""
    clock, written = [0.0], list[float]()
    monkeypatch.setattr("offmap.maxwent.checkpoint.time.monotonic", lambda: clock[0])

    def write(path: Path, content: bytes) -> None:
        written.append(clock[0])
        clock[0] += 2

    monkeypatch.setattr("offmap.maxwent.checkpoint.write_whole", write)
    kept = Checkpoint(tmp_path / "state", IDENTITY)
    for now in (0.0, 2.0, 19.9, 20.0, 39.9, 40.1):
        clock[0] = now
        if kept.due():
            kept.keep("part", *part())
    assert written == [0.0, 20.0, 40.1]
