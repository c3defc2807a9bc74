"""What makes a fit this one and no other: models, data and options, each as a short text.

A checkpoint belongs to one identity, and all ranks of a fit must have the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from offmap._torch_private import tree_leaves
from offmap.data import Batches, Rows
from offmap.distributed.group import Group
from offmap.errors import ConfigError, DataError, ModelError, OffmapError
from offmap.model.params import StackedModel, digest

MODEL = "the model"
SAME_DATA = "Pass the same data on every rank, a DataLoader with a DistributedSampler, or `ranks='sharded'`."
REMEDIES: dict[str, tuple[type[OffmapError], str]] = {
    MODEL: (ModelError, "Load the same weights on every rank."),
    "`train`": (DataError, SAME_DATA),
    "`valid`": (DataError, SAME_DATA),
}


def identify(models: StackedModel, data: Mapping[str, Batches | None], config: Any, **options: Any) -> dict[str, str]:
    """Return models, data and options by name, each as a text that is equal for equal things in every process."""
    weights = models.mean | models.fixed | dict(models.module.named_buffers())
    # options first: another seed shuffles the data otherwise, and then they look different too
    texts = {f"`{name}`": _describe(value) for name, value in options.items()}
    texts |= {f"`{f.name}`": _describe(getattr(config, f.name)) for f in fields(config)}
    texts |= {MODEL: _hash([[name, *digest(tensor)] for name, tensor in sorted(weights.items())])}
    return texts | {f"`{name}`": _describe_data(rows) for name, rows in data.items() if rows is not None}


def check_same_on_all(texts: Mapping[str, str], group: Group) -> None:
    """Raise, on every rank, if the identity of one of them differs."""
    first, *others = group.all_gather_object(dict(texts))
    for name in first:
        for rank, other in enumerate(others, 1):
            if other.get(name) != first[name]:
                error, remedy = REMEDIES.get(name, (ConfigError, "Pass the same options on every rank."))
                raise error(
                    f"Expected {name} to be the same on every rank, but it is {first[name]} on rank 0 and "
                    f"{other.get(name, 'nothing')} on rank {rank}. {remedy}"
                )


def _describe_data(data: Batches) -> str:
    """Return the number of rows and a hash of all of them, or of the first batch of a stream."""
    if isinstance(data, Rows):
        return f"{data.rows} rows ({_hash_leaves((data.inputs, data.targets))})"
    states = [(generator, generator.get_state()) for generator in data.generators()]
    first = next(iter(data), None)
    for generator, state in states:  # as if nothing had been read
        generator.set_state(state)
    length = getattr(data.source.dataset, "__len__", None)
    return f"{length() if length else 'some'} rows ({_hash_leaves(first)} first)"


def _describe(value: Any) -> str:
    """Return an option as a text that does not change from run to run."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_describe(getattr(value, f.name)) for f in fields(value))})"
    if isinstance(value, Tensor):
        return _hash(digest(value))
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def _hash_leaves(tree: Any) -> str:
    return _hash([digest(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
