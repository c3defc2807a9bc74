"""Examples as rows of numbers: their inputs, and what hidden matrices of their model meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap._torch_private import tree_leaves
from offmap._types import Inputs
from offmap.data.inputs import Shared, is_table, rows_of, take_rows
from offmap.model.capture import features
from offmap.model.params import floating
from offmap.posterior.noise import Normal
from offmap.posterior.predictive import Predictive
from offmap.random import generator

WIDEST = 4096
"""Inputs of more numbers than this are not compared: their layers are."""

NARROW = 256
"""Numbers per row that distances in layers are found with, at most."""

STEP = 1024
"""Rows to look at together, unless the model asks for fewer."""


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


def layers_of(predictive: Predictive, x: Inputs, names: Sequence[str], *, pictures: bool = False) -> dict[str, Tensor]:
    """What these matrices of all plain members meet, side by side and no wider than NARROW, (B, D) each.

    Of `pictures`, convolutions are asked too, and every member's vectors have length one: away from the training data features
    shrink, and what is left of them is told by their direction.
    """
    each = [_met(predictive, member, x, names, maps=pictures) for member in range(predictive.members)]
    if pictures:
        each = [{name: F.normalize(rows.double(), dim=1).float() for name, rows in met.items()} for met in each]
    return {name: narrowed(torch.cat([met[name] for met in each], 1)) for name in names if all(name in met for met in each)}


def _met(
    predictive: Predictive, member: int, x: Inputs, names: Sequence[str] | None = None, *, maps: bool = False
) -> dict[str, Tensor]:
    """What one member's matrices meet, (B, D) each; nothing for a Predictive that is no model of ours."""
    weights, model = predictive.mean_weights(member), predictive.model
    if weights is None or model is None:
        return {}
    # one member alone has its fixed weights in the model itself
    return features(model.net, floating(model.net) | weights, x, model.output_fn, names=names, maps=maps)


def narrowed(rows: Tensor) -> Tensor:
    """Rows (B, D) of more than NARROW numbers in as many random directions, the same ones always.

    Distances stay what they are to a few per cent (Johnson and Lindenstrauss), and are found in a fraction of the time.

    >>> narrowed(torch.zeros(2, 3000)).shape, narrowed(torch.zeros(2, 30)).shape
    (torch.Size([2, 256]), torch.Size([2, 30]))
    """
    if rows.shape[1] <= NARROW:
        return rows
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows @ directions(rows.shape[1]).to(rows)


@lru_cache(maxsize=8)
def directions(width: int) -> Tensor:
    """(width, NARROW) normal numbers of variance 1/NARROW."""
    return Normal().sample((width, NARROW), generator("directions", width)) / NARROW**0.5


def blocks(predictive: Predictive, x: Inputs) -> Iterator[Inputs]:
    """Some rows at a time: as many as the model is to run, or more if it is small."""
    model = predictive.model
    step = STEP if model is None or (model.layers and is_table(x)) else model.batch_size
    return (take_rows(x, slice(start, start + step)) for start in range(0, rows_of(x), step))


def hidden(
    predictive: Predictive, rows: Sequence[Inputs], vectors: Tensor | None, pick: Callable[[list[str]], list[str]] | None = None
) -> dict[str, Tensor]:
    """What `layers_of` gives of these rows, (N, D) by name, for the matrices that meet the same in whatever company a row is, and
    other than the inputs themselves, `vectors`. With `pick` the rows are pictures, and it says which of the matrices are asked.
    """
    pictures = pick is not None
    parts = [block for part in rows for block in blocks(predictive, part)]
    few, first = (_met(predictive, 0, x, maps=pictures) for x in (take_rows(rows[0], slice(0, 2)), parts[0]))
    names = [n for n in few if n in first and _alike(few[n], first[n][: len(few[n])]) and not _same(first[n], vectors)]
    names = pick(names) if pick else names
    found = [layers_of(predictive, block, names, pictures=pictures) for block in parts] if names else []
    met = {name: whole([block.get(name) for block in found]) for name in names}
    return {name: m for name, m in met.items() if m is not None}


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


def _same(met: Tensor, vectors: Tensor | None) -> bool:
    """Whether these are the first of the vectors themselves."""
    return vectors is not None and met.shape[1] == vectors.shape[1] and torch.equal(met, vectors[: len(met)].to(met))


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether numbers are the same up to rounding, in half precision as well."""
    if a.shape != b.shape:
        return False
    return bool(((a.double() - b.double()).abs() <= 0.05 * b.double().abs().amax()).all())
