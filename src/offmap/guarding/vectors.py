"""Examples as rows of numbers: their inputs, and what hidden matrices of their host meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offmap._types import Inputs
from offmap.core.features import features
from offmap.core.inputs import Shared, is_table, rows_of, take_rows
from offmap.methods.protocol import Predictive

WIDEST = 4096
"""Inputs of more numbers than this are not compared: their layers are."""

STEP = 1024
"""Rows to look at together, unless the host asks for fewer."""


def flat(x: Inputs) -> Tensor | None:
    """Floating-point inputs as rows, (B, D). None if there are none or too many, and for series beside lengths, masks or ids:
    how far they are padded is not theirs.

    >>> x = torch.zeros(4, 2, 3)
    >>> flat((x, torch.ones(4))).shape, flat((x, torch.tensor([2, 1, 2, 2])))
    (torch.Size([4, 7]), None)
    """
    size = rows_of(x)
    leaves = tree_leaves(dict(sorted(x.items())) if isinstance(x, dict) else x)
    own = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Shared) and t.shape[:1] == (size,)]
    floats = [t for t in own if t.is_floating_point()]
    told = len(floats) < len(own) or (isinstance(x, dict) and "attention_mask" in x)
    padded = told and any(t.ndim > 2 for t in floats)
    width = sum(t[0].numel() for t in floats)
    return torch.cat([t.reshape(size, -1) for t in floats], 1) if 0 < width <= WIDEST and not padded else None


def layers_of(predictive: Predictive, x: Inputs, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """What the plain first member's matrices meet, (B, D) each; nothing for a Predictive that is no host of ours."""
    plain, host = getattr(predictive, "plain", None), getattr(predictive, "host", None)
    return {} if plain is None or host is None else features(host.net, plain(), x, host.select, names=names)


def blocks(predictive: Predictive, x: Inputs) -> Iterator[Inputs]:
    """Some rows at a time: as many as the host is to run, or more if it is small."""
    host = getattr(predictive, "host", None)
    step = STEP if host is None or (host.layers and is_table(x)) else host.batch_size
    return (take_rows(x, slice(start, start + step)) for start in range(0, rows_of(x), step))


def hidden(predictive: Predictive, rows: Sequence[Inputs], vectors: Tensor | None) -> dict[str, Tensor]:
    """What matrices meet, (N, D) by name, in whatever company a row is; other than the inputs themselves, `vectors`."""
    found = [layers_of(predictive, block) for part in rows for block in blocks(predictive, part)]
    few = layers_of(predictive, take_rows(rows[0], slice(0, 2)))
    kept: dict[str, Tensor] = {}
    for name in few:
        met = whole([block.get(name) for block in found])
        if met is None or not _alike(few[name], met[: len(few[name])]):
            continue
        if vectors is None or met.shape != vectors.shape or not torch.equal(met, vectors.to(met)):
            kept[name] = met
    return kept


def whole(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All parts as one matrix, if none is missing and they are equally wide."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) and len({part.shape[1] for part in known}) == 1 else None


def spread_out(names: list[str], most: int) -> list[str]:
    """At most so many of them, evenly spaced, the last among them.

    >>> spread_out(["a", "b", "c", "d", "e"], 2)
    ['b', 'e']
    """
    if len(names) <= most:
        return names
    return [names[(i + 1) * len(names) // most - 1] for i in range(most)]


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are the same up to rounding, in half precision as well."""
    if a.shape != b.shape:
        return False
    return bool(((a.double() - b.double()).abs() <= 0.05 * b.double().abs().amax()).all())
