"""What a model of the zoo is: how to build and call it, and what the library should find in it."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offmap.likelihoods import Categorical, Gaussian, Likelihood
from offmap.model.forward import first_tensor

ROUGH = {torch.bfloat16: 300.0}
"""By how much tolerances for float32 are to be multiplied."""


@dataclass(frozen=True, eq=False)
class Case:
    """`build` makes the same model every time; `inputs(rows)` the same rows, of which fewer are the first of more.

    Every parameter of two axes or more is rotated in one block, but for those in `blocks` (more of them) and in `plain`
    (none: with a part of the reason, or "" for what is no matrix at all).
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3,)
    shows: str = ""
    vmap: bool = True
    wrap: Callable[[Tensor], Any] = lambda x: x
    dtype: torch.dtype = torch.float32
    whole: int | None = None  # inputs are whole numbers below this
    blocks: Mapping[str, int] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)
    layer_inputs: Callable[[Any, Any], Mapping[str, Tensor]] = (
        lambda net, x: {}
    )  # rows that multiply bare parameters: (n, D) or (G, n, D)
    output_fn: Callable[[Any], Tensor] = first_tensor
    positions: tuple[int, ...] | None = None  # a class for every position; None: one number to regress on

    def build(self, member: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()) + member)
            return self.make()

    def inputs(self, rows: int = 12) -> Any:
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        if self.whole is not None:
            return self.wrap(torch.stack([torch.randint(self.whole, self.shape, generator=generator) for _ in range(rows)]))
        # correlated columns of different size, so that no basis is the identity by chance
        x = torch.stack([torch.randn(self.shape, generator=generator) for _ in range(rows)]).to(self.dtype)
        return self.wrap(x + 0.5 * x.roll(1, dims=-1) * torch.linspace(0.2, 2.0, self.shape[-1], dtype=self.dtype))

    def data(self, rows: int = 12) -> tuple[Any, Tensor]:
        """Inputs, and targets to regress on or classes."""
        generator = torch.Generator().manual_seed(1)
        if self.positions is not None:
            return self.inputs(rows), torch.randint(2, (rows, *self.positions), generator=generator)
        return self.inputs(rows), torch.randn(rows, generator=generator, dtype=self.dtype)

    @property
    def likelihood(self) -> Likelihood:
        return Gaussian() if self.positions is None else Categorical()

    def rotated(self) -> dict[str, int]:
        """Names of the parameters to be rotated, and in how many blocks of outputs."""
        return {n: self.blocks.get(n, 1) for n, p in self.build().named_parameters() if p.ndim > 1 and n not in self.plain}

    def assert_close(self, actual: Tensor, expected: Tensor, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """With tolerances for float32, wider for a model of less precision."""
        subsampled = ROUGH.get(self.dtype, 1.0)
        torch.testing.assert_close(actual, expected, rtol=rtol * subsampled, atol=atol * subsampled)


class Through(nn.Module):
    """Layers as attributes and a forward of one's own."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def weight(*shape: int) -> nn.Parameter:
    """A bare parameter."""
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


def settle(net: nn.Module, *shape: int) -> nn.Module:
    """The model after its first call: lazy layers have their sizes, and what torch warns of once is said."""
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        net(torch.zeros(1, *shape))
    return net


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two inputs of one: as it is, and the first positions backwards."""
    return x, x.flip(1)[:, :2]
