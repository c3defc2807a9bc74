"""Regression: means with variances of their own, or with a noise that all share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from offmap.likelihoods.protocol import Prediction, aligned
from offmap.scores import uncertainty as scores

LOG_VARIANCE_BOUND = 20.0


@dataclass(frozen=True)
class Gaussian:
    """Regression. With `noise` None the output is K means then K log-variances, clamped to ±20; else K means, and `noise` (K,)
    is the variance. `units` (K,) are target variances: scores of several targets add in them.

    Dense outputs hold them on `axis` of a batch, 1 or −1; the other axes are positions. `flat` targets have no such axis.

    >>> import torch
    >>> likelihood = Gaussian(targets=1)
    >>> likelihood.nll(torch.tensor([[[0.0, 0.0]]]), torch.tensor([1.0]))
    tensor([[1.4189]])
    """

    targets: int = 1
    flat: bool = True
    noise: Tensor | None = None
    units: Tensor | None = None
    axis: int = 1

    @property
    def width(self) -> int:
        """How many numbers the model gives per position."""
        return self.targets * (2 if self.noise is None else 1)

    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances: (P, B) or (P, B, W, *positions) -> (P, B, *positions, K) each."""
        output = output.unsqueeze(-1) if output.ndim == 2 else output.movedim(2 if self.axis == 1 else -1, -1)
        if self.noise is not None:
            return output, self.noise.to(output).expand_as(output)
        mean, log_variance = output[..., : self.targets], output[..., self.targets :]
        return mean, log_variance.clamp(-LOG_VARIANCE_BOUND, LOG_VARIANCE_BOUND).exp()

    def columns(self, y: Tensor) -> Tensor:
        """Targets of all positions, a column each: (B, ...) -> (B·positions, K)."""
        return y.reshape(-1, 1) if self.targets == 1 else y.movedim(self.axis, -1).flatten(0, -2)

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """½ Σ_k [log 2πσ² + (y − μ)²/σ²], averaged over positions."""
        return self._nll(*self.moments(output), y)

    def predictive(self, outputs: Tensor) -> Prediction:
        """Mean and standard deviation of the mixture."""
        mean, variance = self.matched(outputs)
        return Prediction(mean=self._shape(mean), std=self._shape(variance.sqrt()))

    def prediction_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """NLL of the Gaussian with the mixture's mean and variance: (P, B, ...), (B, ...) -> (B,)."""
        mean, variance = self.matched(outputs)
        return self._nll(mean.unsqueeze(0), variance.unsqueeze(0), y)[0]

    def matched(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the mixture over P, (B, *positions, K) each."""
        means, variances = self.moments(outputs)
        # relative to one draw, so that large means keep their last digits
        return means[0] + (means - means[:1]).mean(0), scores.mixture_variance(means, variances)

    def score(self, outputs: Tensor) -> Tensor:
        """The mixture variance, Σ_k in units of the targets when there are several."""
        return self._total(scores.mixture_variance(*self.moments(outputs)))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """The variance of the means alone."""
        return self._total(scores.epistemic_variance(self.moments(outputs)[0]))

    def _nll(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """(P, B, *positions, K), (P, B, *positions, K), (B, ...) -> (P, B)."""
        error = aligned(self.columns(y), mean.shape[1:]).to(mean) - mean
        each = 0.5 * ((2 * math.pi * variance).log() + error.square() / variance).sum(-1)
        return each.flatten(2).mean(2) if each.ndim > 2 else each

    def _total(self, variance: Tensor) -> Tensor:
        if self.targets == 1:
            return variance[..., 0]
        return (variance if self.units is None else variance / self.units.to(variance)).sum(-1)

    def _shape(self, values: Tensor) -> Tensor:
        return values[..., 0] if self.flat else values.movedim(-1, self.axis)
