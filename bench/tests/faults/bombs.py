"""Files that mean harm: each is made by a seeded generator, and is a few megabytes at most."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes

from faults.readers import READERS, header_of, sign
from offmap.atomic import checksum

Make = Callable[[random.Random], bytes]
MEGABYTE = 1 << 20


class Malice:
    """Runs a command if it is ever unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harm",)


def _seed(name: str) -> bytes:
    return READERS[name].seeds(Path())[0]


# ------------------------------------------------------------------------------------------------ guards and checkpoints


def _safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def long_header(rng: random.Random) -> bytes:
    """A header that claims to be longer than the file, or than anything."""
    return struct.pack("<Q", rng.choice([2**63, 2**40, 2**32, 10**8, 2**24])) + b"{}"


def deep_header(rng: random.Random) -> bytes:
    """Lists in lists, as deep as they go."""
    return _safetensors(b"[" * rng.choice([1_000, 100_000, 4 * MEGABYTE, 9 * MEGABYTE]))


def wide_header(rng: random.Random) -> bytes:
    """Very many values, in a file whose checksum is right."""
    each = rng.choice(["[]", "{}", '"a"', "1.5", '"\\u00e9"'])
    count = rng.choice([1_000, 100_000, 1_000_000])
    text = json.dumps({**json.loads(header_of(_seed("guard"))), "about": {}})[:-3] + '{"x": [' + ",".join([each] * count) + "]}}"
    return sign(text, _seed("guard"))


def crossed_tensors(rng: random.Random) -> bytes:
    """Tensors that overlap, leave holes, lie outside, or claim shapes that their bytes do not have."""
    spans = rng.choice([[(0, 8), (4, 12)], [(0, 4), (8, 12)], [(0, 2**60)], [(8, 0)], [(2**64 - 8, 2**64)]])
    shape = rng.choice([[2], [2**62], [2**40, 2**40], [0, 2**62], [-1], []])
    header = {
        f"t{i}": {"dtype": rng.choice(["F32", "F64", "U8", "X9"]), "shape": shape, "data_offsets": s} for i, s in enumerate(spans)
    }
    return _safetensors(json.dumps(header).encode(), bytes(12))


def odd_names(rng: random.Random) -> bytes:
    """Tensors and attributes that are named like paths, and like what Python has inside."""
    name = rng.choice(["../../harm", "/tmp/harm", "__class__", "raw_scale.../x", "rotation.__dict__", "~/x", "\x00", "a" * 10**5])
    tensors = {**load_bytes(_seed("guard")), name: torch.ones(2)} if rng.random() < 0.5 else load_bytes(_seed("guard"))
    header = json.loads(header_of(_seed("guard")))
    header["restore_state"] = [name] if rng.random() < 0.5 else []
    header["about"] = {"inputs": [name], "path": name}
    text = json.dumps(header)
    return to_bytes(tensors, metadata={"offmap": f"{checksum(text, tensors)} {text}"})


ODD = (
    None,
    True,
    -1,
    0,
    10**18,
    2**70,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 1000,
    [],
    {},
    [[]],
    {"": None},
    "__class__",
)


def changed_header(rng: random.Random) -> bytes:
    """One value of the header is another; the checksum is right."""
    header = json.loads(header_of(_seed("guard")))
    at, key = header, rng.choice(list(header))
    while isinstance(at[key], dict | list) and len(at[key]) and rng.random() < 0.8:
        at = at[key]
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    if rng.random() < 0.2:
        del at[key]
    else:
        at[key] = rng.choice(ODD)
    return sign(json.dumps(header), _seed("guard"))


def changed_tensor(rng: random.Random) -> bytes:
    """One tensor has another shape, type or values, or is missing; the checksum is right."""
    tensors, text = load_bytes(_seed("guard")), header_of(_seed("guard"))
    name = rng.choice(sorted(tensors))
    t = tensors.pop(name)
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: t[:0], lambda: t.flatten(), lambda: t[None], lambda: t.long(), lambda: t * torch.nan, lambda: t + torch.inf,
        lambda: torch.cat([t, t]), lambda: t * -1e30, lambda: t * 0, lambda: t.bool(), lambda: torch.ones(2_000_000),
    ]  # fmt: skip
    if rng.random() < 0.9:
        tensors[name] = rng.choice(changes)().contiguous()
    return to_bytes(tensors, metadata={"offmap": f"{checksum(text, tensors)} {text}"})


# --------------------------------------------------------------------------------------------------------------- tables


def _npy(shape: tuple[int, ...], descr: str, data: bytes) -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def packed_arrays(rng: random.Random) -> bytes:
    """Zeros that take a thousandth of their room: narrow, wide, or words."""
    size = rng.choice([20, 60, 70]) * MEGABYTE
    descr, width = rng.choice([("|u1", 1), ("<f8", 8), ("|b1", 1), ("<U1", 4), ("<U1000", 4000)])
    count = size // width
    shape = rng.choice([(count,), (1, count), (count // 4, 4)])
    return _zip({"x.npy": _npy(shape, descr, bytes(int(np.prod(shape)) * width))})


def claimed_arrays(rng: random.Random) -> bytes:
    """Headers that claim what is not there."""
    shape = rng.choice([(10**12,), (1, 10**12), (10**6, 10**6), (-1,), (2**63,), (0, 10**12), (3, 0)])
    return _zip({f"{rng.choice(['x', '../x', '/tmp/harm'])}.npy": _npy(shape, rng.choice(["<f8", "<U9", "|O", "V8"]), bytes(64))})


def pickled_arrays(rng: random.Random) -> bytes:
    """Python objects where numbers should be."""
    buffer = io.BytesIO()
    np.savez(buffer, x=np.array([Malice(), 1], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def packed_text(rng: random.Random) -> bytes:
    """A CSV file that grows a thousandfold when unpacked: one line, many short fields, or many lines."""
    unit = rng.choice([b"a", b",", b"\n", b"ab,", b"1,2\n", b'"', b"a,b\n"])
    whole = b"a,b\n" + unit * (rng.choice([1, 2] if unit.endswith(b"\n") else [3, 17, 34]) * MEGABYTE // len(unit))
    return gzip.compress(whole, 6)


# ------------------------------------------------------------------------------------------------- annotations and others


def entities(rng: random.Random) -> bytes:
    """Entities that grow, or that read another file."""
    laughs = "".join(f"<!ENTITY l{i} '{f'&l{i - 1};' * 10}'>" for i in range(1, rng.randint(2, 10)))
    bodies = [
        f"<!DOCTYPE a [<!ENTITY l0 'ha'>{laughs}]><annotation>&l1;</annotation>",
        "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><annotation><time>&x;</time></annotation>",
        "<!DOCTYPE a SYSTEM 'http://127.0.0.1:9/x.dtd'><annotation/>",
        f"<!DOCTYPE a [<!ENTITY x '{'a' * 10**6}'>]><annotation>{'&x;' * 1000}</annotation>",
        f"<?xml version='1.0' encoding='{rng.choice(['utf-16', 'utf-7', 'cp037'])}'?><!DOCTYPE a [<!ENTITY x 'y'>]><annotation/>",
    ]
    text = rng.choice(bodies)
    return text.encode(rng.choice(["utf-8", "utf-16", "utf-8-sig", "utf-32"]))


def tall_annotation(rng: random.Random) -> bytes:
    """Elements in elements, very many of them, or one with very much text; below and above what is read."""
    size = rng.choice([1, 3, 5]) * MEGABYTE
    unit = rng.choice(["<a>", "<a/>", "<vehicle/>", "x", "&amp;", "&"])
    return ("<annotation>" + unit * (size // len(unit)) + "</annotation>").encode()


def harmful_weights(rng: random.Random) -> bytes:
    """A pickle that runs a command, as torch or as Python write it."""
    buffer = io.BytesIO()
    if rng.random() < 0.5:
        torch.save({"w": Malice()}, buffer)
    else:
        pickle.dump({"w": Malice()}, buffer, protocol=rng.randint(0, 5))
    return b"p" + buffer.getvalue()


def large_body(rng: random.Random) -> bytes:
    """Eight megabytes of JSON or an array whose header lies."""
    if rng.random() < 0.3:
        shape = rng.choice([(10**12, 3), (2**62, 2**62), (0, 3), (10**6, 0)])
        return b"n" + _npy(shape, rng.choice(["<f4", "<f8", "|O"]), bytes(24))
    unit = rng.choice(["[", "[],", "[1,2,3],", '{"a":', "1e999,", "9" * 4000 + ",", '"\\ud800",'])
    return b"j" + ('{"inputs": [' + unit * (8 * MEGABYTE // len(unit) - 8)).rstrip(",").encode() + b"]}"


def large_image(rng: random.Random) -> bytes:
    """A PNG that claims very many pixels, or a few that unpack to much."""
    side = rng.choice([5_000, 9_000, 60_000, 2**31 - 1])

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, rng.choice([0, 2]), 0, 0, 0)
    rows = zlib.compress(bytes(min(side * side, 20 * MEGABYTE)), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def claimed_rows(rng: random.Random) -> bytes:
    """A Parquet table of three rows that somewhere says that it has, or that a column has, up to a million millions."""
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": [1.0, 2.0, 3.0], "colour": ["red", "blue", "red"]}), buffer)
    data = buffer.getvalue()
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    head, footer = data[:end], data[end:-8]
    three = b"\x16\x06"  # a field of 64 bits, and 3, doubled for the sign as Thrift writes it
    places = [i for i in range(len(footer)) if footer.startswith(three, i)]
    number, digits = 2 << rng.randint(20, 40), bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    place = rng.choice(places)
    footer = footer[: place + 1] + bytes(digits) + footer[place + 2 :]
    return head + footer + len(footer).to_bytes(4, "little") + b"PAR1"


BOMBS: list[tuple[str, Make]] = [
    ("guard", long_header), ("guard", deep_header), ("guard", wide_header), ("guard", crossed_tensors),
    ("guard", odd_names), ("guard", changed_header), ("guard", changed_header), ("guard", changed_tensor),
    ("guard", changed_tensor), ("checkpoint", long_header), ("checkpoint", deep_header), ("checkpoint", crossed_tensors),
    ("npz", packed_arrays), ("npz", packed_arrays), ("npz", claimed_arrays), ("npz", pickled_arrays), ("csv", packed_text),
    ("csv", packed_text), ("annotation", entities), ("annotation", tall_annotation), ("weights", harmful_weights),
    ("body", large_body), ("image", large_image), ("parquet", claimed_rows),
]  # fmt: skip
"""What is attacked, and how."""
