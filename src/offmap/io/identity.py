"""What makes a fit this one and no other: its models, data and settings, in a few words each.

A checkpoint belongs to one identity, and all ranks of a fit must have the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from offmap._torch_private import tree_leaves
from offmap.data import Batches, Rows
from offmap.distributed.group import Group
from offmap.errors import ConfigError, DataError, ModelError, OffmapError
from offmap.maxwent.train import generators_of
from offmap.model.params import digest
from offmap.model.select import StackedModel

HOSTS = "the model"
REMEDIES: dict[str, tuple[type[OffmapError], str]] = {
    HOSTS: (ModelError, "Load the same weights on every rank."),
    "`train`": (DataError, "Pass the same data on every rank, a DataLoader with a DistributedSampler, or `ranks='sharded'`."),
    "`valid`": (DataError, "Pass the same data on every rank, a DataLoader with a DistributedSampler, or `ranks='sharded'`."),
}


def identity(at: StackedModel, data: Mapping[str, Batches | None], settings: Any, **options: Any) -> dict[str, str]:
    """Models, data and settings by name, each as a few words; equal words for equal things, in every process."""
    weights = at.mean | at.fixed | dict(at.net.named_buffers())
    # settings first: another seed shuffles otherwise, and then data look different too
    words = {f"`{name}`": _said(value) for name, value in options.items()}
    words |= {f"`{f.name}`": _said(getattr(settings, f.name)) for f in fields(settings)}
    words |= {HOSTS: _short([[name, *digest(tensor)] for name, tensor in sorted(weights.items())])}
    return words | {f"`{name}`": _data(each) for name, each in data.items() if each is not None}


def same_on_all(words: Mapping[str, str], group: Group) -> None:
    """Raise, on every rank, if one of them was given something else."""
    told = group.all_gather_object(dict(words))
    for name in told[0]:
        for rank, other in enumerate(told):
            if other.get(name) != told[0][name]:
                error, remedy = REMEDIES.get(name, (ConfigError, "Pass the same options on every rank."))
                raise error(
                    f"Expected {name} to be the same on every rank, but it is {told[0][name]} on rank 0 and "
                    f"{other.get(name, 'nothing')} on rank {rank}. {remedy}"
                )


def _data(data: Batches) -> str:
    if isinstance(data, Rows):
        leaves = [leaf for leaf in tree_leaves((data.inputs, data.targets)) if isinstance(leaf, Tensor)]
        return f"{data.rows} rows ({_short([digest(leaf) for leaf in leaves])})"
    generators = generators_of(data)
    states = [generator.get_state() for generator in generators]
    first = next(iter(data), None)
    for generator, state in zip(generators, states, strict=True):  # as if nobody had looked
        generator.set_state(state)
    sized = getattr(data.source.dataset, "__len__", None)
    begins = [digest(leaf) for leaf in tree_leaves(first) if isinstance(leaf, Tensor)]
    return f"{sized() if sized else 'some'} rows ({_short(begins)} first)"


def _said(value: Any) -> str:
    """A setting in words that do not change from run to run."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_said(getattr(value, f.name)) for f in fields(value))})"
    if isinstance(value, Tensor):
        return _short(digest(value))
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def take_from_rank_0(at: StackedModel, group: Group) -> None:
    """Buffers, such as running means, drift apart between ranks in training: those of rank 0 count."""
    if group.size > 1:
        with torch.no_grad():
            group.broadcast(*at.net.buffers(), *at.fixed.values())
