"""What the kernel of a convolution meets: for every place of its output one row, gathered from the input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 20
"""Numbers per block of gathered windows: what bounds the memory of a convolution's read."""


@dataclass(frozen=True)
class Windows:
    """Windows of an input (B, C, *space), one for each of `places`, with C·prod(kernel) numbers, channels first.

    >>> met = Windows(torch.tensor([[[1.0, 2.0, 3.0]]]), kernel=(2,), places=(4,), stride=(1,), padding=(1,), dilation=(1,))
    >>> next(met.rows(groups=1))
    tensor([[[0., 1.], [1., 2.], [2., 3.], [3., 0.]]])
    """

    x: Tensor
    kernel: tuple[int, ...]
    places: tuple[int, ...]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool = False

    @property
    def count(self) -> int:
        """How many windows there are."""
        return self.x.shape[0] * math.prod(self.places)

    def rows(self, groups: int, chosen: Tensor | None = None) -> Iterator[Tensor]:
        """All windows, or the `chosen` ones by number, group by group: blocks of (groups, n, C/groups·prod(kernel))."""
        flat = self.x.reshape(-1)
        step = max(1, BLOCK // (self.x.shape[1] * math.prod(self.kernel)))
        numbers = torch.arange(self.count, device=flat.device) if chosen is None else chosen.to(flat.device)
        for few in numbers.split(step):
            index, inside = self._index(few)
            met = torch.where(inside, flat[index], flat.new_zeros(()))  # (n, C, taps)
            yield met.reshape(len(few), groups, -1).transpose(0, 1)

    def _index(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Where in the flat input the windows lie, (n, C, taps), and which of it is not padding, (n, 1, taps)."""
        batch, channels, *space = self.x.shape
        image, *at = torch.unravel_index(numbers, (batch, *self.places))
        index, inside = (
            torch.zeros(len(numbers), 1, dtype=torch.long, device=numbers.device),
            torch.ones_like(numbers[:, None]).bool(),
        )
        axes = zip(at, space, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        for place, size, kernel, stride, padding, dilation in axes:
            taps = torch.arange(kernel, device=numbers.device)
            if self.transposed:
                reach = place[:, None] + padding - dilation * taps
                met, fits = reach.div(stride, rounding_mode="floor"), reach % stride == 0
            else:
                met, fits = place[:, None] * stride - padding + dilation * taps, torch.ones_like(inside[:, :1])
            fits = fits & (met >= 0) & (met < size)
            index = (index[:, :, None] * size + met.clamp(0, size - 1)[:, None]).flatten(1)
            inside = (inside[:, :, None] & fits[:, None]).flatten(1)
        first = (image[:, None] * channels + torch.arange(channels, device=numbers.device)) * math.prod(space)
        return first[:, :, None] + index[:, None], inside[:, None]
