"""Files as a bad disk leaves them: cut at a random byte, or with one to three bits flipped."""

from __future__ import annotations

import random


def damage(whole: bytes, seed: int, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and what is left: even seeds cut, odd ones flip."""
    return ("cut", whole[: rng.randrange(len(whole))]) if seed % 2 == 0 else ("flipped", flip(whole, rng))


def flip(whole: bytes, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for bit in rng.sample(range(8 * len(data)), rng.randint(1, 3)):
        data[bit // 8] ^= 1 << (bit % 8)
    return bytes(data)
