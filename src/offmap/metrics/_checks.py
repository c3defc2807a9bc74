"""Checks of the arguments of metrics, and the precision of results."""

from functools import reduce

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError


def vector(name: str, values: Tensor, *, finite: bool = False) -> Tensor:
    """Return `values` in float64; refuse all but 1-D, non-empty tensors without NaN (and, if asked, without infinities).

    >>> vector("scores", torch.tensor([1, 2]))
    tensor([1., 2.], dtype=torch.float64)
    """
    values = checks.tensor(name, values)
    if values.ndim != 1:
        raise ShapeError(f"Expected `{name}` to be 1-D, but got shape {tuple(values.shape)}; pass `{name}.flatten()`.")
    if values.numel() == 0:
        raise DataError(f"Expected `{name}` to hold at least one value, but it is empty.")
    bad = ~values.isfinite() if finite else values.isnan()
    if bad.any():
        expected, got = ("finite", "are not") if finite else ("free of NaN", "are NaN")
        raise DataError(
            f"Expected `{name}` to be {expected}, but {int(bad.sum())} of {values.numel()} values {got}; "
            "drop or repair them first."
        )
    return values.double().contiguous()  # searchsorted copies strided tensors, and warns


def same_length(**vectors: Tensor) -> None:
    """Refuse vectors of different lengths, by name."""
    lengths = [v.shape[0] for v in vectors.values()]
    if len(set(lengths)) > 1:
        names = ", ".join(f"`{name}`" for name in vectors)
        raise ShapeError(f"Expected {names} of one length, but got {lengths}; they must describe the same examples.")


def like(result: Tensor, *inputs: Tensor) -> Tensor:
    """Convert a float64 result to the common dtype of the inputs, at least float32.

    >>> like(torch.tensor(0.5, dtype=torch.float64), torch.tensor([1, 2]))
    tensor(0.5000)
    """
    return result.to(reduce(torch.promote_types, (values.dtype for values in inputs), torch.float32))
