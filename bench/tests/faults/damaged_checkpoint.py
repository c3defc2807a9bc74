"""The state of a fit that was cut or changed is refused by its name, and left alone."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import rank_jobs as jobs
from checks.trust import Check
from faults.damage import damage
from offmap.errors import FileError


class Ended(Exception):
    pass


def _end() -> None:
    raise Ended


@cache
def _state() -> bytes:
    """In the middle of the steps."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "fit.state"
        with pytest.raises(Ended):
            jobs.fit_in_steps(file, jobs.EndsAfter(file, "steps.", _end))
        return file.read_bytes()


def trial(seed: int, folder: Path) -> str:
    what, content = damage(_state(), seed, random.Random(seed))
    file = folder / "fit.state"
    file.write_bytes(content)
    with pytest.raises(FileError, match=re.escape(str(file))):
        jobs.fit_in_steps(file)
    assert file.read_bytes() == content
    return f"{what}, refused"


CHECK = Check("The state of a fit that was cut or changed is refused, and the error names it.", trial, limit=60.0, quick=8)
