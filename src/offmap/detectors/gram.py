"""Gram matrices (Sastry & Oore, 2020): correlations between channels of every layer, against their range in training."""

from typing import TypeAlias

import torch
from torch import Tensor

from offmap._types import Inputs
from offmap.data.batch import rows_of
from offmap.detectors.classifier import Classifier
from offmap.detectors.posthoc import FitData, count_classes, register
from offmap.errors import ModelError

Ranges: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Lowest and highest correlations by class, {layer: (C, K) each}."""


def correlations(h: Tensor, powers: int) -> Tensor:
    r"""(Σ_j (F^p F^pᵀ)_ij)^(1/p) for channels i and p = 1 … `powers`, signs kept: (B, C, ...) -> (B, powers · C).

    F is a layer's input with its positions in a row, (B, C, positions). Powers are taken of F / max |F|, so that none overflows.

    >>> correlations(torch.tensor([[[1.0, 2.0], [0.0, 1.0]]]), 2)  # 5 + 2, 2 + 1, √(17 + 4), √(4 + 1)
    tensor([[7.0000, 3.0000, 4.5826, 2.2361]])
    """
    flat = h.flatten(2) if h.ndim > 2 else h.unsqueeze(2)
    unit = flat.abs().flatten(1).amax(1).clamp_min(torch.finfo(h.dtype).tiny).view(-1, 1, 1)
    parts: list[Tensor] = []
    for p in range(1, powers + 1):
        raised = (flat / unit) ** p
        total = (raised @ raised.mT).sum(2)
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


def run_matrix_layers(classifier: Classifier, x: Inputs) -> tuple[dict[str, Tensor], Tensor]:
    """Return the input of every layer with a matrix except the first, at its first use, (B, channels, ...), and the output."""
    params = {name: list(module.parameters(recurse=False)) for name, module in classifier.model.named_modules()}
    linear = {name: all(p.ndim <= 2 for p in tensors) for name, tensors in params.items() if any(p.ndim >= 2 for p in tensors)}
    output, records = classifier.record(x, linear)
    inputs: dict[str, Tensor] = {}
    for name, side, h in records:
        if side == "input" and isinstance(h, Tensor) and h.is_floating_point() and h.ndim >= 2:
            inputs.setdefault(name, h.movedim(-1, 1) if linear[name] else h)  # channels of linear layers are last
    first = next(iter(inputs), None)
    return {name: h for name, h in inputs.items() if name != first and len(h) == rows_of(x)}, output


def layer_deviations(inputs: Inputs, classifier: Classifier, powers: int, ranges: Ranges) -> dict[str, Tensor]:
    """Measure how far each layer is outside its range (C, K) for the predicted class, {layer: (B,)}."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ranges}
    for batch in classifier.batches(inputs):
        layer_inputs, output = run_matrix_layers(classifier, batch)
        best = output.argmax(1)
        for name, (low, high) in ranges.items():
            parts[name].append(deviation(correlations(layer_inputs[name], powers), low[best], high[best]))
    return {name: torch.cat(blocks) for name, blocks in parts.items()}


@torch.no_grad()
def gram(inputs: Inputs, classifier: Classifier, powers: int, ranges: Ranges, usual: dict[str, float]) -> Tensor:
    """Sum the deviations of all layers, each divided by its usual one: inputs of B rows -> (B,)."""
    deviations = layer_deviations(inputs, classifier, powers, ranges)
    return torch.stack([values / usual[name] for name, values in deviations.items()]).float().sum(0)


@register("gram", score=gram, powers=(1, 20))
@torch.no_grad()
def fit(data: FitData, powers: int = 5) -> dict[str, object]:
    """Take ranges on training rows by predicted class, and the usual deviation on validation rows."""
    ranges: Ranges = {}
    predictions: list[Tensor] = []
    for x in data.batches():
        layer_inputs, output = run_matrix_layers(data.classifier, x)
        if not layer_inputs:
            raise ModelError("'gram' needs a model with two or more weight matrices, but it has fewer. Use another method.")
        best = output.argmax(1)
        predictions.append(best)
        for name, h in layer_inputs.items():
            values = correlations(h, powers)
            index = best[:, None].expand(-1, values.shape[1])
            empty = values.new_full((data.classes, values.shape[1]), torch.inf)
            low, high = ranges.get(name, (empty, -empty))
            ranges[name] = low.scatter_reduce(0, index, values, "amin"), high.scatter_reduce(0, index, values, "amax")
    count_classes(torch.cat(predictions), data.classes, "predictions on training rows")
    deviations = layer_deviations(data.valid.inputs, data.classifier, powers, ranges)
    usual = {name: float(values.mean()) for name, values in deviations.items()}
    # a layer that never deviates on validation data must not outweigh all others
    least = 1e-3 * sum(usual.values()) / len(usual) or 1.0
    return {"powers": powers, "ranges": ranges, "usual": {name: max(value, least) for name, value in usual.items()}}
