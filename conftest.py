"""What all tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small tensors run many times slower on two threads
os.environ["OFFMAP_OFFLINE"] = "1"  # no test reaches out; those of downloads have a server of their own

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

collect_ignore = ["bench/src/offmap_bench/speed"]  # races against libraries that only `make bench` installs

settings.register_profile("offmap", deadline=None)  # the first call of a torch function is slow, and machines are shared
settings.load_profile("offmap")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Keep what a command does to the logger, such as `--quiet`, from the tests after it."""
    logger = logging.getLogger("offmap")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of downloaded data sets, for tests that need them."""
    folder = os.environ.get("OFFMAP_DATA")
    if not folder:
        pytest.skip("needs downloaded data: set OFFMAP_DATA to their folder")
    path = Path(folder)
    if not path.is_dir():
        pytest.skip(f"needs downloaded data: OFFMAP_DATA is {folder!r}, which is not a folder")
    return path
