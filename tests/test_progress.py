"""Progress off a terminal: a line every so often says what is being done."""

from __future__ import annotations

import re
import time

import pytest

from offmap import progress
from offmap.progress import Status, bar, print_status
from trained import inputs, quick, regression, regressor


def test_lines_tell_the_status_until_the_work_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    status = Status()
    with print_status(status), bar("MaxWEnt, step", 500, show=None, status=status) as advance:
        advance(20, "risk 0.1")
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert set(lines) == {"offmap: MaxWEnt, step 20/500, risk 0.1, 0 s"}
    time.sleep(0.05)
    assert not capsys.readouterr().err


def test_a_fit_prints_lines_unless_asked_not_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.002)
    train, valid = regression(60, 0), regression(60, 1)
    quick(regressor(), train, valid, solver="refine", steps=100, progress=False)
    assert not capsys.readouterr().err
    quick(regressor(), train, valid, solver="refine", steps=100)
    text = capsys.readouterr().err
    assert "offmap: MaxWEnt, step " in text
    assert re.search(r"offmap: score and threshold, \d+ s", text)


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.001)
    monkeypatch.setenv("RANK", "1")
    with print_status(Status("reading data")):
        inputs(10)
        time.sleep(0.02)
    assert not capsys.readouterr().err
