"""What every detector reads of a classifier: its logits, the features h that its last matrix multiplies, and that matrix.

For a model that ends in one matrix, logits = h Wᵀ + b (perhaps followed by a softmax, which is undone), `find_features` finds h
in a forward pass. Otherwise the user names a layer. One pass gives all that detectors of logits and features need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data.batch import rows_of, take_rows
from offmap.errors import ConfigError, ModelError, nearest
from offmap.model.capture import LayerInput, capture
from offmap.model.forward import (
    MODEL_ERRORS,
    LRUCache,
    OutputFn,
    call,
    check_rows,
    content_key,
    copy_model,
    first_tensor,
    model_failed,
    replica,
    widen,
)
from offmap.model.params import detach_params

OUTPUT_MAPS: tuple[Callable[[Tensor], Tensor], ...] = (lambda z: z, lambda z: z.log_softmax(1), lambda z: z.softmax(1))
"""What a model may apply to its logits before it returns them."""

Side: TypeAlias = Literal["input", "output"]
Record: TypeAlias = tuple[str, Side, Any]
"""The name of a module, and its input or output in one pass."""


@dataclass(frozen=True)
class Head:
    """The last matrix: logits = h Wᵀ + b with W (C, D) and b (C,)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """(B, D) -> (B, C)."""
        return features @ self.weight.mT + self.bias


@dataclass(frozen=True)
class Activations:
    """What a classifier computes for B inputs: `features` (B, D), no column if none were found, and `logits` (B, C)."""

    inputs: Inputs
    features: Tensor
    logits: Tensor


@dataclass(frozen=True)
class FeatureLayer:
    """Where features are: the rows that parameter `weight` multiplies, or the input or output (`side`) of a named `module`."""

    head: Head | None
    weight: str | None = None
    module: str = ""
    side: Side = "output"
    probabilities: bool = False  # the model ends in a softmax

    def find(self, records: list[Record]) -> Tensor | None:
        """Return the last of what was recorded of the module that is one vector per example, (B, D)."""
        values = [value for name, side, value in records if (name, side) == (self.module, self.side)]
        values = [value[0] if isinstance(value, tuple | list) and value else value for value in values]
        vectors = [v.flatten(1) for v in values if isinstance(v, Tensor) and v.ndim >= 2 and v.is_floating_point()]
        return vectors[-1] if vectors else None


@dataclass(frozen=True)
class Classifier:
    """A private copy of the user's model, and where its features are; `remedy` says what to do if there are none."""

    model: nn.Module
    output_fn: OutputFn
    layer: FeatureLayer | None
    remedy: str = ""
    batch_size: int = 128
    cache: LRUCache | None = None

    @property
    def head(self) -> Head | None:
        """The last matrix, if it maps the features to the logits."""
        return self.layer and self.layer.head

    @torch.no_grad()
    def activations(self, inputs: Inputs) -> Activations:
        """Compute features and logits of all rows, in batches."""
        if self.cache is None:
            parts = [self._run_batch(x) for x in self.batches(inputs)]
        else:
            keyed = [(content_key(x), x) for x in self.batches(inputs)]
            parts = [self.cache.get(key) or self.cache.put(key, self._run_batch(x)) for key, x in keyed]
        return Activations(inputs, torch.cat([h for h, _ in parts]), torch.cat([z for _, z in parts]))

    def batches(self, inputs: Inputs) -> Iterator[Inputs]:
        """Cut the rows into batches."""
        size = self.batch_size
        return (take_rows(inputs, slice(start, start + size)) for start in range(0, rows_of(inputs), size))

    def logits(self, inputs: Inputs) -> Tensor:
        """Compute logits of a few rows, (B, C), with gradients to the inputs."""
        output, _ = self.record(inputs, ())
        if self.layer is not None and self.layer.probabilities:
            output = output.clamp_min(torch.finfo(output.dtype).tiny).log()
        return widen(output)

    def record(self, inputs: Inputs, names: Collection[str]) -> tuple[Tensor, list[Record]]:
        """Run a replica of the model, which no other thread uses; return its output, and what modules take and return."""
        records: list[Record] = []
        with replica(self.model) as twin:
            handles: list[Any] = []
            for name in names:
                module = twin.get_submodule(name)
                before = lambda _, args, name=name: records.extend((name, "input", x) for x in args[:1])  # noqa: E731
                after = lambda _, __, output, name=name: records.append((name, "output", output))  # noqa: E731
                handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
            try:
                return call(twin, {}, inputs, self.output_fn), records
            except MODEL_ERRORS as error:
                raise model_failed(self.model, inputs, error) from error
            finally:
                for handle in handles:
                    handle.remove()

    def _run_batch(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Features and logits of one batch."""
        rows, layer = rows_of(inputs), self.layer
        if rows == 1:  # as two rows: of one, some operators make a vector
            features, logits = self._run_batch(take_rows(inputs, [0, 0]))
            return features[:1], logits[:1]
        if layer is None:
            logits = self.logits(inputs)
            return logits.new_empty(rows, 0), logits
        if layer.head is None or layer.weight is None:
            logits, records = self.record(inputs, [layer.module])
            vectors = layer.find(records)
            assert vectors is not None
            return widen(vectors), widen(logits)
        _, uses = capture(self.model, {}, inputs, [layer.weight], output_fn=self.output_fn, last=True)
        vectors = uses[layer.weight].per_example(rows)
        assert vectors is not None
        features = widen(vectors)
        return features, layer.head(features)


def find_features(model: nn.Module, x: Inputs, *, features: str | None = None, output_fn: OutputFn | None = None) -> Classifier:
    """Run a few rows of `x` through a private copy of the model and find its features, or those at the layer of that name.

    A layer that returns the logits stands for its input; any other for its output, flattened to one vector per example.

    >>> classifier = find_features(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.ones(4, 2))
    >>> classifier.layer.weight, classifier.activations(torch.ones(4, 2)).features.shape
    ('2.weight', torch.Size([4, 3]))
    """
    probe = take_rows(x, slice(0, 8))
    probe = take_rows(probe, [0, 0]) if rows_of(probe) == 1 else probe
    classifier = Classifier(copy_model(model), output_fn or first_tensor, None)
    logits, uses = capture(classifier.model, {}, probe, output_fn=classifier.output_fn, last=True)
    check_rows(classifier.model, logits, probe)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ModelError(
            f"Expected a classifier that gives (B, C) logits of two or more classes, but {type(model).__name__} gives "
            f"{tuple(logits.shape)}. Pass `output_fn=` to pick the right tensor."
        )
    layer, rows = find_last_matrix(classifier.model, logits, uses)
    if features is None and layer is not None:
        return replace(classifier, layer=layer)
    modules = [name for name, _ in classifier.model.named_modules() if name]
    with torch.no_grad():
        _, records = classifier.record(probe, modules)
    remedy = _suggest_layers(records, rows_of(probe))
    if features is None:
        return replace(classifier, remedy=remedy)
    if not isinstance(features, str) or features not in modules:
        raise ConfigError(f"Expected `features` to name a layer, {nearest(str(features), modules)}, but got {features!r}.")
    named, vectors = _find_named_layer(records, features, logits, remedy)
    same = rows is not None and vectors.shape == rows.shape and _close(vectors, rows)
    return replace(classifier, layer=layer if same else named)  # else other features than the last matrix multiplies


def find_last_matrix(model: nn.Module, logits: Tensor, uses: dict[str, LayerInput]) -> tuple[FeatureLayer | None, Tensor | None]:
    """Find the last matrix whose product is the model's output, up to a softmax; return it with the rows that it multiplies."""
    weights = detach_params(model)
    for name, use in reversed(uses.items()):
        rows, view, weight = use.per_example(len(logits)), use.view, weights[name]
        shape = None if rows is None else (logits.shape[1], rows.shape[1])
        if rows is None or weight.numel() != view.outputs * view.fan_in or (view.outputs, view.fan_in) != shape:
            continue
        matrix = widen(view.rows(weight[None])[0].clone())
        vectors = [w for w in weights.values() if w.numel() == len(matrix) and w.ndim == 1]
        # the layer's own bias, none, or a vector that is added later
        beside = [w for n, w in weights.items() if n == f"{name.removesuffix('weight')}bias"]
        for bias in (*beside, weight.new_zeros(len(matrix)), *vectors):
            head = Head(matrix, widen(bias.reshape(-1).clone()))
            equal = [_close(output_map(head(widen(rows))), logits) for output_map in OUTPUT_MAPS]
            if any(equal):
                return FeatureLayer(head, name, probabilities=equal[2]), rows
    return None, None


def _find_named_layer(records: list[Record], name: str, logits: Tensor, remedy: str) -> tuple[FeatureLayer, Tensor]:
    """The features that a user means by the name of a module."""
    layer = FeatureLayer(None, module=name)
    vectors = layer.find(records)
    if vectors is not None and vectors.shape == logits.shape and any(_close(f(vectors), logits) for f in OUTPUT_MAPS):
        before = FeatureLayer(None, module=name, side="input")
        inputs = before.find(records)
        layer, vectors = (layer, vectors) if inputs is None else (before, inputs)
    if vectors is None or len(vectors) != len(logits):
        raise ModelError(f"Expected a layer that gives one vector per example for `features`, but `{name}` does not. {remedy}")
    return layer, vectors


def _suggest_layers(records: list[Record], batch: int) -> str:
    """Name the layers that return one vector per example."""
    tensors = [(name, t) for name, side, t in records if side == "output" and isinstance(t, Tensor) and t.ndim >= 2]
    names = list(dict.fromkeys(name for name, t in tensors if len(t) == batch and t[0].numel() == t.shape[1]))
    candidates = f"candidates are {names}" if names else "no layer gives one vector per example"
    return f"Name the layer that gives the penultimate features with `features=`: {candidates}."


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two results of one model are equal up to the rounding of its numbers."""
    loose = max(1.0, 16 * torch.finfo(b.dtype).eps / 1e-3)
    return torch.allclose(a.double(), b.double(), rtol=1e-3 * loose, atol=1e-4 * loose * float(b.abs().max()) + 1e-6)
