"""Regression: means with variances of their own, or with a noise that all examples share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from offmap.errors import DataError
from offmap.likelihoods.likelihood import Likelihood, Prediction, align_targets, drop_axis, sample_position

LARGEST_STD = 1e33
"""Of targets, where the model is in float32: draws lie some orders of magnitude further apart."""


def epistemic_variance(means: Tensor) -> Tensor:
    """Return the variance of the means over the draws (divided by P, not P − 1), infinite if they overflow: (P, ...) -> (...)."""
    # relative to one draw the numbers are small, so their mean keeps the bits that the mean of raw values loses
    shifted = means - means[:1]
    variance = (shifted - shifted.mean(0)).square().mean(0)
    overflowed = variance.isnan() & ~means.isnan().any(0)  # inf − inf
    return variance.masked_fill(overflowed, torch.inf)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Regression of K targets.

    Args:
        targets: The number of targets K.
        flat: Whether targets have no axis for K: (B,) or (B, *positions).
        noise: The variance of the targets, (K,), if outputs are K means; None if they are K means and K log-variances, which
            are clamped to ±20.
        units: The variances of the targets over data, (K,): scores of several targets are added in these units.
        axis: The axis of a batch that holds the outputs, 1 or −1; the other axes are positions.

    >>> Gaussian(targets=1).nll(torch.tensor([[[0.0, 0.0]]]), torch.tensor([1.0]))
    tensor([[1.4189]])
    """

    targets: int = 1
    flat: bool = True
    noise: Tensor | None = None
    units: Tensor | None = None
    axis: int = 1

    expects: ClassVar[str] = (
        "targets (B,) or (B, K) with outputs (B, K) of means or (B, 2K) of means and log-variances, positions behind"
    )

    @property
    def width(self) -> int:
        """The number of outputs per position."""
        return self.targets * (2 if self.noise is None else 1)

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances: (P, B) or (P, B, W, *positions) -> (P, B, *positions, K) each."""
        outputs = outputs.unsqueeze(-1) if outputs.ndim == 2 else outputs.movedim(2 if self.axis == 1 else -1, -1)
        if self.noise is not None:
            outputs = outputs.to(torch.promote_types(outputs.dtype, self.noise.dtype))
            return outputs, self.noise.to(outputs).expand_as(outputs)
        mean, log_variance = outputs[..., : self.targets], outputs[..., self.targets :]
        return mean, log_variance.clamp(-20, 20).exp()

    def point(self, outputs: Tensor) -> Tensor:
        """Return the means, (P, B, *positions, K)."""
        return self.moments(outputs)[0]

    def columns(self, y: Tensor) -> Tensor:
        """Return the targets of all positions, a column per target: (B, ...) -> (B·positions, K)."""
        return y.reshape(-1, 1) if self.targets == 1 else y.movedim(self.axis, -1).flatten(0, -2)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return ½ Σ_k [log 2πσ² + (y − μ)²/σ²], averaged over positions: (P, B, ...), (B, ...) -> (P, B)."""
        return self._nll(*self.moments(outputs), y)

    def predictive_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the NLL of the Gaussian with the mixture's mean and variance: (P, B, ...), (B, ...) -> (B,)."""
        mean, variance = self.mixture_moments(outputs)
        return self._nll(mean.unsqueeze(0), variance.unsqueeze(0), y)[0]

    def averaged_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the NLL of the averaged means and log-variances, as in the authors' code: (P, B, ...), (B, ...) -> (B,)."""
        return self.nll(outputs.mean(0, keepdim=True), y)[0]

    def predict(self, outputs: Tensor) -> Prediction:
        """Return mean and standard deviation of the mixture, in the shape of the targets."""
        mean, variance = self.mixture_moments(outputs)
        return Prediction(mean=self._reshape(mean).to(outputs), std=self._reshape(variance.sqrt()).to(outputs))

    def mixture_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the mixture, noise plus how far draws lie apart: (P, B, ...) -> (B, *positions, K) each."""
        means, variances = self.moments(outputs)
        # relative to one draw, so that large means keep their last digits
        return means[0] + (means - means[:1]).mean(0), epistemic_variance(means) + variances.mean(0)

    def score(self, outputs: Tensor) -> Tensor:
        """Return the mixture variance, added up in units of the targets where there are several: (B, *positions)."""
        return self._total(self.mixture_moments(outputs)[1], outputs)

    def epistemic(self, outputs: Tensor) -> Tensor:
        """Return the variance of the means alone, (B, *positions)."""
        return self._total(epistemic_variance(self.moments(outputs)[0]), outputs)

    def baseline_nll(self, y: Tensor) -> Tensor:
        """Return the NLL of every target (and position) under the targets' own mean and variance."""
        values = self.columns(y).double()
        variance = values.var(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
        return 0.5 * ((2 * math.pi * variance).log() + (values - values.mean(0)).square() / variance).sum(1)

    def residual(self, prediction: Prediction, y: Tensor) -> Tensor:
        """Return |y − mean|/std, (n,) or (n, K); of dense outputs at a random position of every row, (n,)."""
        values = super().residual(prediction, y)
        dense = values.ndim == 2 and self.flat
        return sample_position(values, torch.ones_like(values, dtype=torch.bool)) if dense else values

    @classmethod
    def infer(cls, output: Tensor, y: Tensor) -> Gaussian | None:
        """Return the likelihood for the shapes of one batch; means alone get a noise of 1 until `fit_noise`."""
        columns = output.unsqueeze(-1) if output.ndim == 1 else output
        for axis in (1, -1):
            width, positions = columns.shape[axis], drop_axis(columns.shape, axis)
            for flat in (True, False):
                targets = 1 if flat else y.shape[axis] if y.ndim > 1 else 0
                shape = y.shape if flat else drop_axis(y.shape, axis)
                if shape == positions and targets and width in (targets, 2 * targets):
                    return cls(targets, flat, None if width == 2 * targets else output.new_ones(targets), axis=axis)
        return None

    def fit_noise(self, outputs: Tensor, y: Tensor) -> Self:
        """Return this likelihood with noise (the mean squared residual) and units (the variance) of validation targets.

        Both are in float64 where float32 has no room for the variance of draws, for targets from about 1e15 on.
        """
        columns = self.columns(y).to(outputs)
        residuals = columns - self.point(outputs).mean(0).flatten(0, -2)
        variance = columns.var(0, correction=0)
        if self.noise is not None and not bool((variance + residuals.square().mean(0) < 1e30).all()):  # room for draws far apart
            columns = columns.double()
            residuals, variance = columns - self.point(outputs.double()).mean(0).flatten(0, -2), columns.var(0, correction=0)
            if outputs.dtype != torch.float64 and bool((variance > LARGEST_STD**2).any()):
                raise DataError(
                    f"Expected targets with a deviation up to {LARGEST_STD:g}, but got {float(variance.max()) ** 0.5:.3g}, "
                    "which overflows in float32. Scale the targets, or fit `model.double()`."
                )
        units = torch.where(variance > 0, variance, torch.ones_like(variance))
        # a model that interpolates leaves no residual, and a variance of 0 makes every NLL infinite
        noise = None if self.noise is None else torch.maximum(residuals.square().mean(0), 1e-6 * units)
        return replace(self, noise=noise, units=units)

    def fits(self, output: Tensor, y: Tensor) -> bool:
        """Return whether there are K targets per `width` outputs."""
        if output.ndim <= 2:
            return y.ndim <= 2 and y[0].numel() == self.targets and output[0].numel() == self.width
        same_axes = y.ndim == output.ndim - 1 if self.flat else y.ndim == output.ndim and y.shape[self.axis] == self.targets
        return same_axes and output.shape[self.axis] == self.width

    def doubt_targets(self, y: Tensor) -> str:
        """Return a sentence where all targets are 0 or 1: classes, one-hot rows or several labels may be meant."""
        ones = y == 1
        if y.numel() < 20 or not bool(((y == 0) | ones).all()) or len(ones.unique()) < 2:
            return ""
        remedy = '`likelihood="bernoulli"`' if self.noise is not None else "`y.long()`"
        if self.targets > 1 and bool((ones.sum(self.axis) == 1).all()):
            remedy = f"their numbers, `y.argmax({self.axis})`"
        return (
            "All targets are 0 or 1 in floating-point numbers, and are fitted as a regression: if they are classes, pass "
            f'{remedy}; if not, `likelihood="gaussian"`.'
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the likelihood that has this state; a ValueError unless noise and units have one number per target."""
        likelihood = cls(**state)
        for name, value in state.items():
            if isinstance(value, Tensor) and (value.ndim > 1 or value.numel() not in (1, likelihood.targets)):
                raise ValueError(f"`{name}` has the shape {tuple(value.shape)}")
        return likelihood

    def _nll(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """(P, B, *positions, K), (P, B, *positions, K), (B, ...) -> (P, B)."""
        error = align_targets(self.columns(y), mean.shape[1:]).to(mean) - mean
        values = 0.5 * ((2 * math.pi * variance).log() + error.square() / variance).sum(-1)
        return values.flatten(2).mean(2) if values.ndim > 2 else values

    def _total(self, variance: Tensor, outputs: Tensor) -> Tensor:
        """Add the variances of several targets in their units; one alone stays as it is unless it overflows."""
        if self.targets == 1 and variance.dtype == outputs.dtype:
            return variance[..., 0]
        return (variance if self.units is None else variance / self.units.to(variance)).sum(-1)

    def _reshape(self, values: Tensor) -> Tensor:
        """(B, *positions, K) -> the shape of the targets."""
        return values[..., 0] if self.flat else values.movedim(-1, self.axis)


@dataclass(frozen=True)
class ScaledGaussian(Gaussian):
    """A Gaussian of standardised targets: moments are multiplied by `scale` (K,) and moved by `shift` (K,).

    Log-variances are clamped before that, so targets may have any units.
    """

    scale: Tensor = field(default_factory=lambda: torch.ones(1, device="cpu"))
    shift: Tensor = field(default_factory=lambda: torch.zeros(1, device="cpu"))

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances in the targets' units."""
        mean, variance = super().moments(outputs)
        return mean * self.scale + self.shift, variance * self.scale.square()
