"""What methods share: the contracts of their results, and how they are to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data.inputs import take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import ConfigError, nearest
from offmap.maxwent.checkpoint import NONE, Checkpoint
from offmap.model.chunk import choose_chunk
from offmap.model.forward import MODEL_ERRORS, BatchedModel, OutputFn, call, check_rows, first_tensor, model_failed


@runtime_checkable
class Scorer(Protocol):
    """Whatever tells OOD inputs from in-distribution ones."""

    def score(self, x: Inputs) -> Tensor:
        """(B,), higher = more OOD."""
        ...


@runtime_checkable
class Predictive(Protocol):
    """Whatever gives a stack of outputs."""

    @property
    def members(self) -> int:
        """M, the number of models."""
        ...

    def outputs(self, x: Inputs, draws: int, *, clip: float | None, seed: int) -> Tensor:
        """(M·P, B, ...), member-major."""
        ...


@dataclass(frozen=True)
class Runtime:
    """How a method runs its models; nothing here changes what it computes.

    `chunk_size` is how many draws run at once, under `vmap`, and 1 a loop over them; "auto" tries both on one batch.
    """

    output_fn: OutputFn = first_tensor
    chunk_size: int | Literal["auto"] = "auto"
    batch_size: int = 128
    progress: bool | None = None
    group: Group = SINGLE_PROCESS  # the processes that fit together
    sharded: bool = False  # each of them has training rows of its own
    checkpoint: Checkpoint = NONE

    def __post_init__(self) -> None:
        if self.chunk_size != "auto" and (not isinstance(self.chunk_size, int) or self.chunk_size < 1):
            raise ConfigError(f"Expected `chunk_size` to be 'auto' or a whole number ≥ 1, but got {self.chunk_size!r}.")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigError(f"Expected `batch_size` to be a whole number ≥ 1, but got {self.batch_size!r}.")

    def model(self, net: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs) -> BatchedModel:
        """The net with its output measured on a few rows and its chunk on a batch; `weights` are stacked, {name: (M, ...)}."""
        few = take_rows(inputs, slice(0, 2))
        try:
            row = call(net, {n: w[0] for n, w in weights.items()}, few, self.output_fn)
        except MODEL_ERRORS as error:
            raise model_failed(net, few, error) from error
        check_rows(net, row, few)
        chunk = self.chunk_size
        if chunk == "auto":
            few = take_rows(inputs, slice(0, self.batch_size))
            name = f"chunk.{sum(w.numel() for w in weights.values())}"  # a model may be asked for twice, with more or less random
            chunk = self.checkpoint.once(
                name, lambda: self.group.all_gather_object(choose_chunk(net, weights, few, self.output_fn))[0]
            )
        return BatchedModel(net, self.output_fn, chunk, self.batch_size, max(1, row[0].numel()), row.ndim - 1)


AnyConfig = TypeVar("AnyConfig")


def override(config: AnyConfig, options: Mapping[str, Any], *, also: Iterable[str] = ()) -> AnyConfig:
    """A configuration with some fields changed; an unknown field is refused and the nearest one, or one of `also`, named."""
    valid = [f.name for f in fields(config)]  # pyright: ignore[reportArgumentType]
    for option in options:
        if option not in valid:
            raise ConfigError(f"Expected options to be {nearest(option, {*valid, *also})}, but got {option!r}.")
    return replace(config, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
