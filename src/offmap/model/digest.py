"""What tensors are, in a few letters: equal tensors have equal digests, on any device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(tensor: Tensor) -> list[Any]:
    """Shape, dtype and SHA-256 of the numbers.

    >>> digest(torch.zeros(2))[:2]
    [[2], 'torch.float32']
    """
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return [list(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()]


def sealed(header: str, tensors: Mapping[str, Tensor]) -> str:
    """A text behind the checksum of it and of tensors by name.

    >>> unsealed(sealed("{}", {"w": torch.zeros(2)}), {"w": torch.zeros(2)})
    '{}'
    """
    return f"{checksum(header, tensors)} {header}"


def unsealed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """What was sealed together with these tensors. Of JSON that never was, as in older files, nothing can be said.

    Raises:
        ValueError: The text or the tensors are others.
    """
    expected, _, header = text.partition(" ")
    if text.startswith("{"):
        return text
    if expected != checksum(header, tensors):
        raise ValueError("its checksum does not fit")
    return header


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of tensors by name."""
    whole = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        whole.update(json.dumps([name, *digest(tensors[name])]).encode())
    return whole.hexdigest()
