"""Whether stated confidence matches what happens: for class probabilities, and for Gaussian predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError
from offmap.metrics._checks import count, like, same_length, vector


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    r"""Gap between confidence and accuracy of the predicted class, averaged over equally wide bins (Guo et al., 2017).

    .. math:: \mathrm{ECE} = \sum_b \frac{|B_b|}{n} \left| \mathrm{acc}(B_b) - \mathrm{conf}(B_b) \right|,
              \qquad B_b = \left( \tfrac{b - 1}{\mathrm{bins}}, \tfrac{b}{\mathrm{bins}} \right]

    Shapes: `probs` (B, C), `labels` (B,) integers -> ().

    >>> expected_calibration_error(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]))
    tensor(0.4000)
    """
    p, y = check_classes(probs, labels)
    count("bins", bins)
    confidence, predicted = p.max(1)
    # an edge belongs to the bin below, also after float32 has made 0.60000002 of 0.6
    index = ((confidence * bins - 1e-6).ceil() - 1).clamp(0, bins - 1).long()
    surplus = torch.bincount(index, weights=(predicted == y).double() - confidence, minlength=bins)
    return like(surplus.abs().sum() / y.numel(), probs)


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    r"""Squared distance between the probabilities and the one-hot truth, summed over classes: from 0 to 2.

    .. math:: \frac1n \sum_i \sum_c (p_{ic} - 1[y_i = c])^2

    Brier's own sum; the binary score in [0, 1] is half of it. Shapes: `probs` (B, C), `labels` (B,) integers -> ().

    >>> brier(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.3700)
    """
    p, y = check_classes(probs, labels)
    truth = torch.nn.functional.one_hot(y, p.shape[1]).double()
    return like((p - truth).square().sum(1).mean(), probs)


def ence(mean: Tensor, std: Tensor, y: Tensor, bins: int = 10) -> Tensor:
    r"""Expected normalised calibration error: relative gap between stated and seen error size (Levi et al., 2022).

    .. math:: \mathrm{ENCE} = \frac1N \sum_b \frac{|\mathrm{RMV}_b - \mathrm{RMSE}_b|}{\mathrm{RMV}_b}, \qquad
              \mathrm{RMV}_b^2 = \frac{1}{|B_b|} \sum_{i \in B_b} \sigma_i^2

    over N = `bins` groups of (nearly) equal size of the examples sorted by σ; equal σ stay in the order given.
    Shapes: `mean`, `std`, `y` (B,) -> ().

    >>> ence(torch.zeros(4), torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([1.0, -1.0, 3.0, 3.0]), bins=2)
    tensor(0.2500)
    """
    error, scale = check_gaussian(mean, std, y, scale_name="std")
    if (scale == 0).any() or scale.isinf().any():
        raise DataError("Expected `std` to be positive and finite, since errors are divided by it; clamp it first.")
    order = scale.argsort(stable=True)
    groups = count("bins", bins, most=scale.numel())
    gaps = [
        (seen.square().mean().sqrt() / stated.square().mean().sqrt() - 1).abs()
        for seen, stated in zip(error[order].tensor_split(groups), scale[order].tensor_split(groups), strict=True)
    ]
    return like(torch.stack(gaps).mean(), mean, std, y)


def quantile_ece(mean: Tensor, std: Tensor, y: Tensor, levels: int = 10) -> Tensor:
    r"""Mean gap between nominal and empirical coverage of the central Gaussian intervals at evenly spaced levels.

    .. math:: \frac1L \sum_{k=1}^{L} \left| \ell_k - \hat c_k \right|, \qquad \ell_k = \frac{k}{L + 1}, \qquad
              \hat c_k = \frac1n \#\{i : |y_i - \mu_i| \le z_{(1 + \ell_k)/2}\, \sigma_i\}

    Shapes: `mean`, `std`, `y` (B,) -> ().

    >>> quantile_ece(torch.zeros(2), torch.ones(2), torch.tensor([0.1, 0.7]), levels=1)
    tensor(0.)
    """
    error, scale = check_gaussian(mean, std, y, scale_name="std")
    return like(_coverage_gap(error, scale, count("levels", levels)), mean, std, y)


def reference_ece(mean: Tensor, variance: Tensor, y: Tensor, levels: int = 10) -> Tensor:
    r"""The ECE of the paper's tables, as its authors' code has it: `quantile_ece` with the *variance* as the scale.

    .. math:: \frac1L \sum_{k=1}^{L} \left| \ell_k - \hat c_k \right|, \qquad \ell_k = \frac{k}{L + 1}, \qquad
              \hat c_k = \frac1n \#\{i : |y_i - \mu_i| \le z_{(1 + \ell_k)/2}\, \sigma_i^2\}

    It depends on the unit of y; use it to reproduce the paper, and `quantile_ece` to judge calibration.
    Shapes: `mean`, `variance`, `y` (B,) -> ().

    >>> reference_ece(torch.zeros(2), torch.full((2,), 0.25), torch.tensor([0.1, 0.3]), levels=1)
    tensor(0.)
    """
    error, scale = check_gaussian(mean, variance, y, scale_name="variance")
    return like(_coverage_gap(error, scale, count("levels", levels)), mean, variance, y)


def _coverage_gap(error: Tensor, scale: Tensor, levels: int) -> Tensor:
    nominal = torch.arange(1, levels + 1, dtype=error.dtype, device=error.device) / (levels + 1)
    radius = torch.special.ndtri((1 + nominal) / 2)[:, None] * scale  # (L, B)
    empirical = (error <= radius).double().mean(1)
    return (nominal - empirical).abs().mean()


def check_gaussian(mean: Tensor, scale: Tensor, y: Tensor, *, scale_name: str) -> tuple[Tensor, Tensor]:
    """|y − mean| and the scale, in float64; an infinite scale is allowed."""
    m, s, t = vector("mean", mean, finite=True), vector(scale_name, scale), vector("y", y, finite=True)
    same_length(**{"mean": m, scale_name: s, "y": t})
    if (s < 0).any():
        raise DataError(f"Expected `{scale_name}` to be at least 0, but its minimum is {s.min():g}; is it a logarithm?")
    return (t - m).abs(), s


def check_classes(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in float64 and labels in int64, refused unless they are what they are called."""
    probs, labels = checks.tensor("probs", probs), checks.tensor("labels", labels)
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        raise ShapeError(
            f"Expected `probs` of shape (B, C) and `labels` of shape (B,), but got {tuple(probs.shape)} and "
            f"{tuple(labels.shape)}; move positions into the batch first."
        )
    if probs.numel() == 0:
        raise DataError("Expected at least one example and one class, but `probs` is empty.")
    p = probs.double()
    # written so that NaN fails too
    if not bool(((p >= 0) & (p <= 1 + 1e-3)).all() and ((p.sum(1) - 1).abs() < 1e-2).all()):
        raise DataError("Expected the rows of `probs` to be non-negative and to sum to 1; apply softmax to logits.")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError(f"Expected `labels` to be integers, but got {labels.dtype}; pass `labels.long()`.")
    if labels.min() < 0 or labels.max() >= probs.shape[1]:
        raise DataError(
            f"Expected `labels` from 0 to {probs.shape[1] - 1}, the classes of `probs`, but got values from "
            f"{int(labels.min())} to {int(labels.max())}; drop ignored positions first."
        )
    return p, labels.long()
