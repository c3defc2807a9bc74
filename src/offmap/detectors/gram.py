"""Gram matrices (Sastry & Oore, 2020): how channels of every layer act together, against the range seen in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data.inputs import rows_of, take_rows
from offmap.detectors.known import FitData, each_class, number
from offmap.detectors.penultimate import Classifier, Seen
from offmap.errors import ModelError
from offmap.model.forward import OutputFn, call

LEAST = 1e-3
"""Of the mean over layers, the least usual deviation that a layer is divided by."""


def correlations(h: Tensor, powers: int) -> Tensor:
    r"""Σ_j (F^p F^pᵀ)_ij^(1/p) for channels i and p = 1 … `powers`, signs kept: (B, C, ...) -> (B, powers · C).

    F is a layer's input with its positions in a row, (B, C, positions). Powers are taken of F / max |F|, so that none overflows.

    >>> correlations(torch.tensor([[[1.0, 2.0], [0.0, 1.0]]]), 1)
    tensor([[7., 3.]])
    """
    flat = h.flatten(2) if h.ndim > 2 else h.unsqueeze(2)
    unit = flat.abs().flatten(1).amax(1).clamp_min(torch.finfo(h.dtype).tiny).view(-1, 1, 1)
    parts: list[Tensor] = []
    for p in range(1, powers + 1):
        raised = (flat / unit) ** p
        product = raised @ raised.mT
        total = product.sum(2)
        parts.append(total.sign() * total.abs() ** (1 / p) * unit.squeeze(2) ** 2)
    return torch.cat(parts, 1)


def deviation(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    r"""Σ (low − v)₊ / |low| + (v − high)₊ / |high|: (B, K) each -> (B,).

    >>> deviation(torch.tensor([[0.5, 2.0, 6.0]]), torch.ones(1, 3), torch.full((1, 3), 3.0))
    tensor([1.5000])
    """
    tiny = 1e-6 * high.abs().amax().clamp_min(torch.finfo(values.dtype).tiny)
    below = (low - values).clamp_min(0) / low.abs().clamp_min(tiny)
    above = (values - high).clamp_min(0) / high.abs().clamp_min(tiny)
    return (below + above).sum(1)


class Layers:
    """What every layer with a matrix, but the first, is given in one pass: {name: (B, channels, ...)}."""

    def __init__(self, net: nn.Module, output_fn: OutputFn) -> None:
        self.net, self.output_fn = net, output_fn
        self.names = [n for n, m in net.named_modules() if any(p.ndim >= 2 for p in m.parameters(recurse=False))]

    def __call__(self, x: Inputs) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of the layers at their first use, and the net's output."""
        found: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def note(module: nn.Module, args: tuple[Any, ...]) -> None:
                if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].ndim >= 2:
                    linear = all(p.ndim <= 2 for p in module.parameters(recurse=False))
                    found.setdefault(name, args[0].movedim(-1, 1) if linear else args[0])  # channels of linear layers are last

            return note

        handles = [self.net.get_submodule(name).register_forward_pre_hook(keep(name)) for name in self.names]
        try:
            output = call(self.net, {}, x, self.output_fn)
        finally:
            for handle in handles:
                handle.remove()
        first = next(iter(found), None)
        return {name: h for name, h in found.items() if name != first and len(h) == rows_of(x)}, output


@dataclass(frozen=True)
class Gram:
    """The rule: lowest and highest values by predicted class, {layer: (C, K)}, and each layer's usual deviation."""

    classifier: Classifier
    powers: int
    low: dict[str, Tensor]
    high: dict[str, Tensor]
    usual: dict[str, float]

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        total = torch.zeros(len(seen.logits), device=seen.logits.device)
        for name, each in self.deviations(seen.inputs).items():
            total += each / self.usual[name]
        return total

    @torch.no_grad()
    def deviations(self, x: Inputs) -> dict[str, Tensor]:
        """How far each layer is outside the range of the predicted class, {layer: (B,)}."""
        layers = Layers(self.classifier.net, self.classifier.output_fn)
        parts: dict[str, list[Tensor]] = {name: [] for name in self.low}
        for rows in self.classifier.blocks(x):
            found, output = layers(take_rows(x, rows))
            best = output.argmax(1)
            for name, low in self.low.items():
                values = correlations(found[name], self.powers)
                parts[name].append(deviation(values, low[best], self.high[name][best]))
        return {name: torch.cat(each) for name, each in parts.items()}


@torch.no_grad()
def fit(known: FitData, *, powers: int = 5) -> Gram:
    """Ranges on the training data, by predicted class; the usual deviation on validation data."""
    number("powers", powers, 1, 20, whole=True)
    layers = Layers(known.classifier.net, known.classifier.output_fn)
    low: dict[str, Tensor] = {}
    high: dict[str, Tensor] = {}
    seen: list[Tensor] = []
    for x in known.batches():
        found, output = layers(x)
        if not found:
            raise ModelError(
                "Expected a net with two or more layers that hold a matrix for 'gram', but it has fewer. Take another method."
            )
        best = output.argmax(1)
        seen.append(best)
        for name, h in found.items():
            values = correlations(h, powers)
            index = best[:, None].expand(-1, values.shape[1])
            start = values.new_full((known.classes, values.shape[1]), torch.inf)
            low[name] = low.get(name, start).scatter_reduce(0, index, values, "amin")
            high[name] = high.get(name, -start).scatter_reduce(0, index, values, "amax")
    each_class(torch.cat(seen), known.classes, "predictions on training rows")
    rule = Gram(known.classifier, powers, low, high, {})
    usual = {name: float(each.mean()) for name, each in rule.deviations(known.valid.inputs).items()}
    # a layer that never deviates on validation data must not outweigh all others
    least = LEAST * sum(usual.values()) / len(usual) or 1.0
    return Gram(known.classifier, powers, low, high, {name: max(value, least) for name, value in usual.items()})
