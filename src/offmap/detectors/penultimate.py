"""What every detector of a classifier looks at: its logits, the features h that its last matrix meets, and that matrix.

For a net that ends in one matrix, logits = h Wᵀ + b (perhaps followed by a softmax, which is left out), h is found by watching a
forward pass. Otherwise the user names a layer. One pass gives all that the detectors of logits and features need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data import Place
from offmap.data.inputs import rows_of, take_rows
from offmap.errors import ConfigError, ModelError, nearest
from offmap.model.cache import LRUCache
from offmap.model.capture import CaptureMode, ParamUse, open_attention
from offmap.model.forward import MODEL_ERRORS, OutputFn, call, check_rows, first_tensor, model_failed
from offmap.model.params import copy_model, floating

LOOKED_AT = 8
"""Rows of the pass that finds the features."""

ENDINGS: tuple[Callable[[Tensor], Tensor], ...] = (lambda z: z, lambda z: z.log_softmax(1), lambda z: z.softmax(1))
"""What a net may do to its logits before it returns them."""


@dataclass(frozen=True)
class Head:
    """The last matrix: logits = h Wᵀ + b with W (C, D) and b (C,)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """(B, D) -> (B, C)."""
        return features @ self.weight.mT + self.bias


@dataclass(frozen=True)
class Seen:
    """What a classifier makes of B inputs: `features` (B, D), no column if none were found, and `logits` (B, C)."""

    inputs: Inputs
    features: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Source:
    """Where features are: what parameter `weight` meets, or what the module named `layer` gives or, if `before`, is given."""

    head: Head | None
    weight: str | None = None
    layer: str = ""
    before: bool = False
    probabilities: bool = False  # the net ends in a softmax


@dataclass(frozen=True)
class Classifier:
    """A private copy of the user's net, with where its features are; `missing` says why there are none."""

    net: nn.Module
    output_fn: OutputFn
    source: Source | None
    missing: str = ""
    batch_size: int = 128
    memory: LRUCache | None = None

    @property
    def place(self) -> Place:
        """Where inputs belong."""
        return Place.of(self.net)

    @torch.no_grad()
    def look(self, inputs: Inputs) -> Seen:
        """Features and logits of all rows, in batches."""
        parts = [self._block(take_rows(inputs, rows)) for rows in self.blocks(inputs)]
        return Seen(inputs, torch.cat([h for h, _ in parts]), torch.cat([z for _, z in parts]))

    def blocks(self, inputs: Inputs) -> Iterator[slice]:
        """Rows, a batch at a time."""
        return (slice(start, start + self.batch_size) for start in range(0, rows_of(inputs), self.batch_size))

    def logits(self, inputs: Inputs) -> Tensor:
        """Logits of a few rows, (B, C), through which gradients flow to the inputs."""
        try:
            output = call(self.net, {}, inputs, self.output_fn)
        except MODEL_ERRORS as error:
            raise model_failed(self.net, inputs, error) from error
        if self.source is not None and self.source.probabilities:
            output = output.clamp_min(torch.finfo(output.dtype).tiny).log()
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def _block(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if self.memory is not None:
            return self.memory.find(inputs, lambda: self._pass(inputs))
        return self._pass(inputs)

    def _pass(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if rows_of(inputs) == 1:  # in company: of one row, some operators make a vector
            features, logits = self._pass(take_rows(inputs, [0, 0]))
            return features[:1], logits[:1]
        found: list[Tensor] = []
        if self.source is None:
            logits = self.logits(inputs)
            features = logits.new_empty(len(logits), 0)
        elif self.source.weight is not None:
            logits, reads = watched(self.net, inputs, self.output_fn, self.source.weight)
            features = reads[-1][1]
        else:
            with hooked(self.net, self.source, found):
                logits = self.logits(inputs)
            features = found[-1]
        head = self.source and self.source.head
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        return features, logits if head is None else head(features)


def classifier(
    net: nn.Module,
    x: Inputs,
    *,
    features: str | None = None,
    output_fn: OutputFn | None = None,
    batch_size: int = 128,
    memory: LRUCache | None = None,
) -> Classifier:
    """Look at the net on a few rows of `x` and find its features: by themselves, or at the layer that the user names.

    A layer that gives the logits stands for what it is given; any other for what it gives, flattened to one vector an example.

    >>> found = classifier(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.ones(4, 2))
    >>> found.source.weight, found.look(torch.ones(4, 2)).features.shape
    ('2.weight', torch.Size([4, 3]))
    """
    twin, take = copy_model(net), output_fn or first_tensor
    few = take_rows(x, slice(0, LOOKED_AT))
    few = take_rows(few, [0, 0]) if rows_of(few) == 1 else few
    logits, reads = watched(twin, few, take)
    check_rows(twin, logits, few)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ModelError(
            f"Expected a classifier that gives (B, C) logits of two or more classes, but {type(net).__name__} gives "
            f"{tuple(logits.shape)}. Pass `output_fn=` to pick the right tensor."
        )
    source, met = last_matrix(twin, logits, reads)
    if features is not None:
        source = named_layer(twin, few, take, features, logits, (source, met))
    missing = "" if source else _missing(twin, few, take)
    return Classifier(twin, take, source, missing, batch_size, memory)


@torch.no_grad()
def watched(
    net: nn.Module, x: Inputs, output_fn: OutputFn, name: str | None = None
) -> tuple[Tensor, list[tuple[ParamUse, Tensor]]]:
    """The net's output, and the rows that met each matrix (or that of a name alone) which meets one row per example."""
    batch, found = rows_of(x), list[tuple[ParamUse, Tensor]]()

    def visit(read: ParamUse) -> None:
        met = read.meeting
        if met is not None and met.count == batch and met.groups == 1 and name in (None, read.name):
            found.append((read, torch.cat([block[0] for block in met.rows(None)])))

    # in inference mode products are not taken apart, and nobody sees what they read
    with torch.inference_mode(False), open_attention(), CaptureMode(floating(net), visit):
        try:
            return call(net, {}, x, output_fn), found
        except MODEL_ERRORS as error:
            raise model_failed(net, x, error) from error


def last_matrix(net: nn.Module, logits: Tensor, reads: list[tuple[ParamUse, Tensor]]) -> tuple[Source | None, Tensor | None]:
    """The last matrix whose result is the net's output, up to a softmax, with the features that met it."""
    weights = floating(net)
    for read, met in reversed(reads):
        assert read.meeting is not None
        frame, w = read.meeting.frame, weights[read.name]
        if w.numel() != frame.outputs * frame.fan_in or frame.outputs != logits.shape[1] or frame.fan_in != met.shape[1]:
            continue
        matrix = frame.rows(w[None])[0].clone()
        biases = [weights[read.bias]] if read.bias else [w.new_zeros(len(matrix)), *_additions(weights, len(matrix))]
        for bias in biases:
            wide = torch.promote_types(matrix.dtype, torch.float32)
            head = Head(matrix.to(wide), bias.reshape(-1).clone().to(wide))
            fits = [_close(ending(head(met.to(wide))), logits) for ending in ENDINGS]
            if any(fits):
                return Source(head, read.name, probabilities=fits[2]), met
    return None, None


def _additions(weights: dict[str, Tensor], width: int) -> list[Tensor]:
    """Parameters that may have been added to a product afterwards."""
    return [w for w in weights.values() if w.numel() == width and w.ndim == 1]


def named_layer(
    net: nn.Module, x: Inputs, output_fn: OutputFn, name: str, logits: Tensor, last: tuple[Source | None, Tensor | None]
) -> Source:
    """The source of features that a user means by the name of a module."""
    modules = {path: module for path, module in net.named_modules() if path}
    if not isinstance(name, str) or name not in modules:
        raise ConfigError(f"Expected `features` to be the name of a layer, {nearest(str(name), modules)}, but got {name!r}.")
    given, (source, met) = Source(None, layer=name), last
    found = _given(net, x, output_fn, given)
    gives_logits = found.shape == logits.shape and any(_close(ending(found), logits) for ending in ENDINGS)
    if gives_logits:
        given = Source(None, layer=name, before=True)
        found = _given(net, x, output_fn, given)
    if met is not None and source is not None and found.shape == met.shape and _close(found, met):
        return source  # what was found anyway, with its matrix
    return given


@torch.no_grad()
def _given(net: nn.Module, x: Inputs, output_fn: OutputFn, source: Source) -> Tensor:
    """What a named layer gives or is given for `x`, (B, D)."""
    found: list[Tensor] = []
    with hooked(net, source, found):
        call(net, {}, x, output_fn)
    if not found or len(found[-1]) != rows_of(x):
        raise ModelError(
            f"Expected a layer that gives one vector per example for `features`, but `{source.layer}` does not. "
            f"{_missing(net, x, output_fn)}"
        )
    return found[-1]


class hooked:
    """While active, what a source's layer gives (or is given) is put into `found`, flattened to (B, D)."""

    def __init__(self, net: nn.Module, source: Source, found: list[Tensor]) -> None:
        self.module, self.source, self.found = net.get_submodule(source.layer), source, found

    def __enter__(self) -> None:
        self.handle = self.module.register_forward_hook(self._keep)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        value = args[0] if self.source.before and args else output
        value = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(value, Tensor) and value.ndim >= 2 and value.is_floating_point():
            self.found.append(value.flatten(1))


def vectors(net: nn.Module, x: Inputs, output_fn: OutputFn) -> list[str]:
    """Names of the layers that give one vector per example, in order of execution: candidates for `features`."""
    found: list[str] = []
    batch = rows_of(x)

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if (
                isinstance(output, Tensor)
                and output.ndim >= 2
                and output.shape[0] == batch
                and output[0].numel() == output.shape[1]
            ):
                found.append(name)

        return keep

    handles = [module.register_forward_hook(note(name)) for name, module in net.named_modules() if name]
    try:
        with torch.no_grad():
            call(net, {}, x, output_fn)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(found))


def _missing(net: nn.Module, x: Inputs, output_fn: OutputFn) -> str:
    names = vectors(net, x, output_fn)
    said = f"candidates are {names}" if names else "no layer gives one vector per example"
    return f"Name the layer that gives the penultimate features with `features=`: {said}."


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two results of one net are equal up to the rounding of its numbers."""
    loose = max(1.0, 16 * torch.finfo(b.dtype).eps / 1e-3)
    return torch.allclose(a.double(), b.double(), rtol=1e-3 * loose, atol=1e-4 * loose * float(b.abs().max()) + 1e-6)
