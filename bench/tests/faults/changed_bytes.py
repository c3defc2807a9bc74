"""Bytes of a valid file that were changed at random are read or refused, whatever reads them."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

from checks.trust import Check
from faults.readers import READERS, attempt

OTHERS = (b"\x00", b"\xff" * 8, b"1e999", b"[" * 50, b'"', b"{}", b"-1", b"\n", b"&#0;")
"""What is put in."""


def trial(seed: int, folder: Path) -> str:
    """One reader, one of its valid files, one to four changes."""
    rng, name = random.Random(seed), [*READERS][seed % len(READERS)]
    data = bytearray(rng.choice(READERS[name].seeds(folder)))
    for _ in range(rng.randint(1, 4)):
        _change(data, rng)
    with warnings.catch_warnings(action="ignore"):  # of decoders, on bytes that they find OOD
        return attempt(name, bytes(data), folder)


def _change(data: bytearray, rng: random.Random) -> None:
    """Flip a bit, cut, leave out, repeat, or put other bytes in."""
    at, kind = rng.randrange(len(data) + 1), rng.randrange(5)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + rng.randint(1, 8)]
    elif kind == 3:
        data[at:at] = data[at : at + rng.randint(1, 64)]
    else:
        data[at:at] = rng.choice(OTHERS)


CHECK = Check(
    "Bytes of a guard, checkpoint, table, plan, record, annotation, image, weights or request that were changed at random are "
    "read, or refused with one of our errors.",
    trial, trials=3_000, limit=60.0, quick=70,
)  # fmt: skip
