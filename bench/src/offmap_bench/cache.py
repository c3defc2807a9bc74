"""Tensors that take long to make, kept in sealed files: trained nets, features, fits that are looked at."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from offmap.atomic import seal, unseal, write_whole

logger = logging.getLogger("offmap")

Entry: TypeAlias = tuple[Any, Mapping[str, Tensor]]
"""Plain values, and tensors by name."""


def cache_folder() -> Path:
    """Return OFFMAP_CACHE, or `~/.cache/offmap`."""
    return Path(os.environ.get("OFFMAP_CACHE") or Path.home() / ".cache" / "offmap")


def read(path: Path, like: Mapping[str, Tensor] | None = None) -> Entry | None:
    """Return what a file holds; None where it is absent, or damaged, or of other shapes than `like`, with a warning."""
    if not path.exists():
        return None
    try:
        header, tensors = unseal(path.read_bytes())
        if like is not None and {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in like.items()}:
            raise ValueError("it has other shapes than what is cached there")
        return header, tensors
    except Exception as error:  # whatever the bytes are
        logger.warning("The cache at %s cannot be read (%s): what it holds is made again.", path, error)
        return None


def read_or_make(path: Path, make: Callable[[], Entry], like: Mapping[str, Tensor] | None = None) -> Entry:
    """Return what a file holds, made and written first if need be."""
    entry = read(path, like)
    if entry is None:
        entry = make()
        write_whole(path, seal(*entry))
    return entry
