"""Type names, and one number, that all packages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

Weights: TypeAlias = dict[str, Tensor]
"""Tensors under a model's own parameter names."""

Inputs: TypeAlias = Any
"""Inputs of a model: a tensor, an array, a tuple (`*args`) or a dict (`**kwargs`)."""

Data: TypeAlias = Any
"""A DataLoader, a Dataset, or a pair `(inputs, targets)` of tensors or arrays."""

ScoreFn: TypeAlias = Callable[[Tensor], Tensor]
"""Stacked outputs `(P, B, ...)` to one score per example `(B,)` or per position."""

Tensors: TypeAlias = Mapping[str, Tensor]

IGNORED = -100
"""A class target that counts for nothing: torch's `ignore_index`, Hugging Face's label of special tokens and padding."""
