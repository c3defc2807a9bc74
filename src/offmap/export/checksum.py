"""The checksum of an exported file, as its last fact: ONNX itself has none, and a changed weight would go unnoticed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from offmap.errors import FileError

NAME = b"offmap.checksum"
DIGITS = 64

ENTRY = b"\x0a" + bytes([len(NAME)]) + NAME + b"\x12" + bytes([DIGITS])
"""How protobuf begins a pair of strings whose first is the name."""

FRONT = b"\x72" + bytes([len(ENTRY) + DIGITS]) + ENTRY
"""Field 14 of an ONNX model, `metadata_props`: what is appended to a message is one more of its facts."""


def add_checksum(model: bytes) -> bytes:
    """Append the SHA-256 of all bytes of a serialised ONNX model, as one more of its facts."""
    return model + FRONT + hashlib.sha256(model).hexdigest().encode()


def verify_checksum(content: bytes, path: Path) -> None:
    """Raise a FileError unless the bytes are those that were written."""
    model, front, digest = (content[: -len(FRONT) - DIGITS], content[-len(FRONT) - DIGITS : -DIGITS], content[-DIGITS:])
    if front != FRONT or digest != hashlib.sha256(model).hexdigest().encode():
        raise FileError(
            f"Expected a file as `Guard.export` wrote it, but {path} is damaged, changed or another: its checksum does not fit. "
            "Export the guard anew."
        )
