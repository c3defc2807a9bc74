"""Files that are either whole or absent, however many processes write them and whenever one is killed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from offmap._types import Weights
from offmap.errors import FileError, first_line

HEADER = 1 << 23  # bytes that a header of JSON in a file of ours may have; those of large ensembles have some hundred thousand


def write_whole(path: Path, content: bytes, *, folders: bool = True) -> None:
    """Write beside the file, then rename; make missing folders, unless `folders` is False: then they are a mistake."""
    with whole_file(path, folders=folders) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, folders: bool = False) -> Generator[BinaryIO]:
    """Open a file to write part by part. It takes its name when the block ends well; otherwise nothing of it is left."""
    if not path.name:
        raise FileError(f"Cannot write {str(path)!r}: it names no file.")
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise FileError(
            f"Cannot write {path}: {error.strerror or error}. Check that the folder exists and is writable; nothing was changed."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            beside.unlink()


def digest(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    """Return shape, dtype and SHA-256 of the numbers.

    >>> digest(torch.zeros(2))[:2]
    ((2,), 'torch.float32')
    """
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()


def seal(header: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file with a header as JSON, behind the SHA-256 of it and of the tensors.

    >>> unseal(seal({"steps": 3}, {"w": torch.zeros(2)}))
    ({'steps': 3}, {'w': tensor([0., 0.])})
    """
    tensors, text = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, json.dumps(header)
    if 2 * len(text) > HEADER:
        raise ValueError(f"got a header of {len(text)} letters, more than {HEADER // 2}")
    # one entry: safetensors writes several in a random order, and equal contents should give equal files
    return to_bytes(tensors, metadata={"offmap": f"{checksum(text, tensors)} {text}"})


def unseal(content: bytes) -> tuple[Any, Weights]:
    """Return header and tensors of a sealed file; raise an error of many kinds if it is none, or a bit of it has changed."""
    size = int.from_bytes(content[:8], "little")
    if size > HEADER:
        raise ValueError(f"a header of {size} bytes")
    tensors = load_bytes(content)
    entry = json.loads(content[8 : 8 + size]).get("__metadata__", {}).get("offmap")
    if entry is None:
        raise ValueError("it was not written by offmap")
    expected, _, text = entry.partition(" ")
    if expected != checksum(text, tensors):
        raise ValueError("its checksum does not fit")
    return json.loads(text), tensors


def unseal_as(kind: str, version: str, content: bytes, path: Path, remedy: str) -> tuple[dict[str, Any], Weights]:
    """Return header and tensors of a sealed file of one kind and version; raise a FileError if it is another."""
    try:
        header, tensors = unseal(content)
    except Exception as error:  # whatever the bytes are
        raise FileError(f"{path} is damaged or not {kind} ({first_line(error)}). {remedy}") from error
    format_name = header.get("format") if isinstance(header, dict) else None
    if format_name != version:
        raise FileError(f"{path} is not {kind} of this version: expected {version!r}, but got {format_name!r}. {remedy}")
    return header, tensors


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a text and of tensors by name."""
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        total.update(json.dumps([name, *digest(tensors[name])]).encode())
    return total.hexdigest()
