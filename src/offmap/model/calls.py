"""One call of a model, with some of its weights replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data.inputs import arguments
from offmap.errors import ModelError
from offmap.model.capture import ONE_AT_A_TIME

OutputFn: TypeAlias = Callable[[Any], Tensor]
"""From what a model returns to the tensor that matters."""

MODEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError)
"""What a model may raise on inputs of a form that it does not know."""


def first_tensor(output: Any) -> Tensor:
    """The default `output_fn`: a tensor itself, `.logits`, or the first entry."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ModelError(
        f"Expected a model that returns a tensor, an object with `.logits` or a tuple that starts with a tensor, "
        f"but got {type(output).__name__}. Pass `output_fn=` to pick the tensor."
    )


def call(net: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output_fn: OutputFn = first_tensor) -> Tensor:
    """One plain call of the model with some of its weights replaced. A tuple is `*args`, a dict `**kwargs`."""
    args, kwargs = arguments(inputs)
    with replaced(net, weights):
        return output_fn(net(*args, **kwargs))


@contextmanager
def replaced(net: nn.Module, weights: Mapping[str, Tensor]) -> Generator[None]:
    """Other weights in the model for a while, a tied one in all of its places, whichever of its names it is given under.

    `functional_call` does the same, but takes several times as long to set up and trips over modules that are reachable by two
    paths (pytorch issue 164759).
    """
    with ONE_AT_A_TIME:
        found: list[tuple[dict[str, Any], str, str]] = []
        given: dict[int, Tensor] = {}
        for path, module in net.named_modules():
            for table in (vars(module)["_parameters"], vars(module)["_buffers"]):
                for leaf, own in table.items():
                    name = f"{path}.{leaf}" if path else leaf
                    found.append((table, leaf, name))
                    if name in weights:
                        given.setdefault(id(own), weights[name])
        swaps = [(t, leaf, t[leaf], weights.get(name, given[id(t[leaf])])) for t, leaf, name in found if id(t[leaf]) in given]
        try:
            for table, leaf, _, other in swaps:
                table[leaf] = other
            yield
        finally:
            for table, leaf, own, _ in swaps:
                table[leaf] = own
