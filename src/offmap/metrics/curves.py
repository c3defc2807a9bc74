"""Calibration as a curve: what was stated, what was seen, and on how many examples, for reliability diagrams."""

from __future__ import annotations

import torch
from torch import Tensor

from offmap.metrics._checks import count
from offmap.metrics.calibration import check_classes, check_gaussian


def confidence_curve(probs: Tensor, labels: Tensor, bins: int = 10) -> Tensor:
    r"""Mean confidence, accuracy and number of examples in equally wide bins of confidence; empty bins are left out.

    .. math:: B_b = \left( \tfrac{b - 1}{\mathrm{bins}}, \tfrac{b}{\mathrm{bins}} \right]

    Shapes: `probs` (B, C), `labels` (B,) integers -> (bins with examples, 3), in float64.

    >>> confidence_curve(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor([[0.9000, 0.5000, 2.0000]], dtype=torch.float64)
    """
    p, y = check_classes(probs, labels)
    count("bins", bins)
    confidence, predicted = p.max(1)
    # an edge belongs to the bin below, also after float32 has made 0.60000002 of 0.6
    index = ((confidence * bins - 1e-6).ceil() - 1).clamp(0, bins - 1).long()
    size = torch.bincount(index, minlength=bins).double()
    stated, seen = (torch.bincount(index, weights=v, minlength=bins) for v in (confidence, (predicted == y).double()))
    return torch.stack([stated / size, seen / size, size], 1)[size > 0]


def coverage_curve(mean: Tensor, std: Tensor, y: Tensor, levels: int = 19) -> Tensor:
    r"""Level, empirical coverage of the central Gaussian interval at that level, and number of examples.

    .. math:: \ell_k = \frac{k}{L + 1}, \qquad \hat c_k = \frac1n \#\{i : |y_i - \mu_i| \le z_{(1 + \ell_k)/2}\, \sigma_i\}

    Shapes: `mean`, `std`, `y` (B,) -> (L, 3), in float64.

    >>> coverage_curve(torch.zeros(2), torch.ones(2), torch.tensor([0.1, 0.7]), levels=1)
    tensor([[0.5000, 0.5000, 2.0000]], dtype=torch.float64)
    """
    error, scale = check_gaussian(mean, std, y, scale_name="std")
    nominal = torch.arange(1, count("levels", levels) + 1, dtype=error.dtype, device=error.device) / (levels + 1)
    radii = torch.special.ndtri((1 + nominal) / 2)
    seen = torch.stack([(error <= radius * scale).double().mean() for radius in radii])
    return torch.stack([nominal, seen, torch.full_like(seen, error.numel())], 1)
