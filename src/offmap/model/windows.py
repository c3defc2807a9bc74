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
        if self.transposed:
            yield from self._plain().rows(groups, chosen)
            return
        flat = self.x.reshape(-1)
        numbers = torch.arange(self.count, device=flat.device) if chosen is None else chosen.to(flat.device)
        for few in numbers.split(max(1, BLOCK // (self.x.shape[1] * math.prod(self.kernel)))):
            index, inside = self._index(few)
            met = flat.take(index.clamp_(0, len(flat) - 1)).masked_fill_(~inside, 0)
            yield met.reshape(len(few), groups, -1).transpose(0, 1)

    def _index(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Where in the flat input the windows lie, (n, C, taps), and which of it is not padding, (n, 1, taps)."""
        channels, *space = self.x.shape[1:]
        device = numbers.device
        start, offset, apart = torch.zeros_like(numbers), torch.zeros(1, dtype=torch.long, device=device), 1
        inside = torch.ones(1, 1, dtype=torch.bool, device=device)
        axes = zip(space, self.kernel, self.places, self.stride, self.padding, self.dilation, strict=True)
        for size, kernel, places, stride, padding, dilation in reversed(list(axes)):  # neighbours are `apart` in the flat input
            first, taps = numbers.remainder(places) * stride - padding, torch.arange(kernel, device=device) * dilation
            met = first[:, None] + taps
            inside = (((met >= 0) & (met < size))[:, :, None] & inside[:, None]).flatten(1)
            start, offset = start + first * apart, (taps[:, None] * apart + offset).flatten()
            numbers, apart = numbers.div(places, rounding_mode="floor"), apart * size
        within = torch.arange(channels, device=device)[:, None] * apart + offset  # (C, taps)
        return (start + numbers * (channels * apart))[:, None, None] + within, inside[:, None]

    def _plain(self) -> Windows:
        """A transposed convolution is a plain one, its taps counted backwards, over the input with zeros between its numbers."""
        size = [(length - 1) * step + 1 for length, step in zip(self.x.shape[2:], self.stride, strict=True)]
        spread = self.x.new_zeros(*self.x.shape[:2], *size)
        spread[(..., *(slice(None, None, step) for step in self.stride))] = self.x
        back = [-p for p in self.padding], [-d for d in self.dilation]
        return Windows(spread, self.kernel, self.places, (1,) * len(size), *back)
