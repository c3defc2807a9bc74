"""Everything in offmap that parses bytes, each with bytes to begin with: for fuzzing, and for `changed_bytes`."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes
from torch import nn

import offmap
from offmap.atomic import checksum
from offmap.cli.options import read_weights
from offmap.data.tables.images import read_pixels
from offmap.data.tables.table import open_table
from offmap.errors import OffmapError
from offmap.maxwent.checkpoint import Checkpoint, Part
from offmap.serve.parsing import InputSpec, RequestError, parse_inputs
from offmap_bench.cache import read as read_cache
from offmap_bench.runner.plan import digest, parse, read_packaged
from offmap_bench.runner.store import Record, parse_record, to_line
from offmap_bench.tasks.citycam import Damaged, read_frame
from offmap_bench.tasks.features import open_image
from offmap_bench.tasks.tabular import read as read_columns
from trained import quick, regression, regressor

REFUSALS = (OffmapError, Damaged, RequestError)
"""How bytes that make no sense may end."""

WANTED = (InputSpec("x", (3,), np.float32), InputSpec("ids", (None,), np.int64))


@dataclass(frozen=True)
class Reader:
    """`seeds(folder)` are valid bytes; `read(bytes, folder)` gives what is read or raises one of the refusals."""

    seeds: Callable[[Path], list[bytes]]
    read: Callable[[bytes, Path], object]


def attempt(name: str, data: bytes, folder: Path) -> str:
    """Whether bytes were read or refused; any other error is a failure of the reader."""
    try:
        READERS[name].read(data, folder)
    except REFUSALS:
        return "refused"
    return "read"


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# -------------------------------------------------------------------------------------------------------- guards, states


@cache
def _fit() -> tuple[nn.Module, offmap.Guard]:
    net = regressor()
    return net, quick(net, regression(60), regression(30, seed=1))


@cache
def _save() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "guard.safetensors"
        _fit()[1].save(path)
        return path.read_bytes()


def header_of(content: bytes) -> str:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])["__metadata__"]["offmap"].partition(" ")[2]


def sign(text: str, content: bytes) -> bytes:
    """A file whose checksum is right, whatever its header says: whoever wants to deceive computes it too."""
    tensors = load_bytes(content)
    return to_bytes(tensors, metadata={"offmap": f"{checksum(text, tensors)} {text}"})


def _load(path: Path) -> None:
    """Load a guard; one that is accepted gives scores without NaN."""
    guard = offmap.load(path, _fit()[0])
    assert not guard.score(regression(3)[0]).isnan().any()


def _guard(data: bytes, folder: Path) -> None:
    _load(_file(folder, "guard.safetensors", data))


def _guard_header(data: bytes, folder: Path) -> None:
    _load(_file(folder, "guard.safetensors", sign(data.decode("utf-8", "replace"), _save())))


@cache
def _state() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        part = Part({"step": 3, "best": [1.5, None]}, {"scale": torch.ones(2, 3)})
        Checkpoint(path, {"seed": "0"}).keep("loop", *part)
        return path.read_bytes()


def _checkpoint(data: bytes, folder: Path) -> None:
    Checkpoint(_file(folder, "state.safetensors", data), {"seed": "0"})


def _checkpoint_header(data: bytes, folder: Path) -> None:
    _checkpoint(sign(data.decode("utf-8", "replace"), _state()), folder)


def _weights(folder: Path) -> list[bytes]:
    buffer = io.BytesIO()
    torch.save({"state_dict": regressor().state_dict()}, buffer)
    return [b"p" + buffer.getvalue(), b"s" + to_bytes(dict(regressor().state_dict()))]


def _read_weights(data: bytes, folder: Path) -> None:
    """The first byte tells which format."""
    read_weights(_file(folder, "net.safetensors" if data[:1] == b"s" else "net.pt", data[1:]))


def _cached_features(data: bytes, folder: Path) -> None:
    read_cache(_file(folder, "features.safetensors", data))


def _features(folder: Path) -> list[bytes]:
    return [to_bytes({"features": torch.ones(3, 2)}, metadata={"offmap": json.dumps({"1": "cut"})})]


# --------------------------------------------------------------------------------------------------------------- tables


def _columns() -> dict[str, Any]:
    return {"a": np.array([1.0, 2.5, -3e4]), "b": np.array([1, 2, 3]), "colour": np.array(["red", "blue", "red"])}


def _csv(folder: Path) -> list[bytes]:
    text = io.StringIO()
    csv.writer(text).writerows([list(_columns()), *zip(*(each.tolist() for each in _columns().values()), strict=True)])
    plain = text.getvalue().encode()
    return [plain, plain.replace(b",", b";"), b'"a","b"\n"1,5",NA\n', gzip.compress(plain, mtime=0)]


def _npz(folder: Path) -> list[bytes]:
    made: list[bytes] = []
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, x=np.eye(3, 4, dtype=np.float32), turned=np.asfortranarray(np.eye(3, 2)), **_columns())
        made.append(buffer.getvalue())
    return made


def _parquet(folder: Path) -> list[bytes]:
    import pyarrow
    from pyarrow import parquet

    made: list[bytes] = []
    for columns in (_columns(), {"gap": [1.0, None, 2.0], "yes": [True, False, None]}):
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), buffer)
        made.append(buffer.getvalue())
    return made


def _table(suffix: str) -> Callable[[bytes, Path], None]:
    """Both readers: the one that holds whole columns, and the one that streams blocks."""

    def read(data: bytes, folder: Path) -> None:
        packed = suffix == ".csv" and data[:2] == b"\x1f\x8b"
        path, refused = _file(folder, f"table{suffix}{'.gz' * packed}", data), None
        for each in (read_columns, _stream):
            try:
                each(path)
            except REFUSALS as error:
                refused = error
        if refused is not None:
            raise refused

    return read


def _stream(path: Path) -> None:
    with open_table(path) as table:
        for block in table.blocks(table.names[:-1], table.names[-1:]):
            assert np.isfinite(block.x).all()


# ------------------------------------------------------------------------------------------------------- texts, images


def _annotations(folder: Path) -> list[bytes]:
    vehicle = "<vehicle id='1'><bndbox><xmin>3</xmin></bndbox><type>2</type></vehicle>"
    text = f"<annotation><time>2016/02/23 09:00:01</time><weather>1</weather><flow>a & b</flow>{2 * vehicle}</annotation>"
    return [text.encode(), b"\xef\xbb\xbf<?xml version='1.0' encoding='utf-8'?><annotation>&#65;&lt;</annotation>"]


def _frame(data: bytes, folder: Path) -> None:
    _file(folder, "000001.xml", data)
    assert read_frame(folder / "000001.jpg", "928").vehicles >= 0


def _plan(data: bytes, folder: Path) -> None:
    for hurry in (False, True):
        parse(data.decode("utf-8", "replace"), "plan.toml", quick=hurry)


def _records(folder: Path) -> list[bytes]:
    cell = {"task": "uci/yacht/extrapolation", "method": "maxwent", "config": {"steps": 3}, "seed": 0, "members": 1}
    return [to_line(Record(cell, "ok", {"config": {}}, {"test": {"nll": 0.5}}))]


def _record(data: bytes, folder: Path) -> None:
    """With the hash and checksum that its content asks for, so that more of it is read."""
    try:
        content = json.loads(data)
        content["hash"] = digest(content["cell"])
        content["checksum"] = digest({key: value for key, value in content.items() if key not in ("hash", "checksum")})
        data = json.dumps(content).encode()
    except Exception:  # not JSON: as it is
        pass
    parse_record(data, "plan.jsonl, line 1")


def _bodies(folder: Path) -> list[bytes]:
    buffer = io.BytesIO()
    np.save(buffer, np.eye(2, 3, dtype=np.float32))
    one = [b"j" + b'{"inputs": [[1, 2.5, -3e2], [0, 0, 0]]}', b"n" + buffer.getvalue()]
    return [*one, b"m" + b'{"inputs": {"x": [[1, 2, 3]], "ids": [[7, 8]]}}']


def _body(data: bytes, folder: Path) -> None:
    """The first byte tells the content type, and whether the model wants one input or two."""
    kind = "application/x-npy" if data[:1] == b"n" else "application/json"
    wanted = WANTED if data[:1] == b"m" else WANTED[:1]
    arrays = parse_inputs(kind, data[1:], wanted, max_rows=100)
    assert {name: array.dtype for name, array in arrays.items()} == {each.name: each.dtype for each in wanted}
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert arrays["x"].shape[1:] == (3,)


def _images(folder: Path) -> list[bytes]:
    from PIL import Image

    made: list[bytes] = []
    for kind in ("PNG", "JPEG"):
        buffer = io.BytesIO()
        Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(buffer, kind)
        made.append(buffer.getvalue())
    return made


def _image(data: bytes, folder: Path) -> None:
    path = _file(folder, "image.png", data)
    open_image(path)
    read_pixels(path)


READERS: dict[str, Reader] = {
    "guard": Reader(lambda folder: [_save()], _guard),
    "guard_header": Reader(lambda folder: [header_of(_save()).encode()], _guard_header),
    "checkpoint": Reader(lambda folder: [_state()], _checkpoint),
    "checkpoint_header": Reader(lambda folder: [header_of(_state()).encode()], _checkpoint_header),
    "weights": Reader(_weights, _read_weights),
    "features": Reader(_features, _cached_features),
    "csv": Reader(_csv, _table(".csv")),
    "npz": Reader(_npz, _table(".npz")),
    "parquet": Reader(_parquet, _table(".parquet")),
    "annotation": Reader(_annotations, _frame),
    "plan": Reader(lambda folder: [text.encode() for text in read_packaged().values()], _plan),
    "record": Reader(_records, _record),
    "body": Reader(_bodies, _body),
    "image": Reader(_images, _image),
}
