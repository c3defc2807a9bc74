"""What an output says about a target: Gaussian, Categorical, Bernoulli, and the rule that infers which.

Stacked outputs have the draw axis first: (P, B, ...). NLLs are in nats and include constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap import scores
from offmap.errors import ConfigError, DataError, ShapeError, nearest

LOG_VARIANCE_BOUND = 20.0


@dataclass(frozen=True)
class Prediction:
    """What the mixture over draws predicts; fields that do not apply are None.

    Regression: `mean` and total standard deviation `std` (B, K), or (B,) when targets were (B,), in target units.
    Classification: `probs` (B, C, ...) and `label` (B, ...).
    """

    mean: Tensor | None = None
    std: Tensor | None = None
    probs: Tensor | None = None
    label: Tensor | None = None


@runtime_checkable
class Likelihood(Protocol):
    """The contract of a likelihood; a user's own object with these methods is accepted."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """(P, B, ...), (B, ...) -> (P, B), nats."""
        ...

    def predictive(self, outputs: Tensor) -> Prediction:
        """The mixture over P."""
        ...

    def score(self, outputs: Tensor) -> Tensor:
        """(P, B, ...) -> (B,) or (B, *positions), higher = more OOD."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """Regression. With `noise` None the output is K means then K log-variances, clamped to ±20; else K means, and `noise` (K,)
    is the variance. `units` (K,) are target variances: scores of several targets add in them.

    >>> likelihood = Gaussian(targets=1)
    >>> likelihood.nll(torch.tensor([[[0.0, 0.0]]]), torch.tensor([1.0]))
    tensor([[1.4189]])
    """

    targets: int = 1
    flat: bool = True
    noise: Tensor | None = None
    units: Tensor | None = None

    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances: (P, B) or (P, B, W) -> (P, B, K) each."""
        if output.ndim == 2:
            output = output.unsqueeze(-1)
        if self.noise is not None:
            return output, self.noise.to(output).expand_as(output)
        mean, log_variance = output[..., : self.targets], output[..., self.targets :]
        return mean, log_variance.clamp(-LOG_VARIANCE_BOUND, LOG_VARIANCE_BOUND).exp()

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """½ Σ_k [log 2πσ² + (y − μ)²/σ²]."""
        return _gaussian_nll(*self.moments(output), y)

    def predictive(self, outputs: Tensor) -> Prediction:
        """Mean and standard deviation of the mixture."""
        mean, variance = self.matched(outputs)
        return Prediction(mean=self._shape(mean), std=self._shape(variance.sqrt()))

    def prediction_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """NLL of the Gaussian with the mixture's mean and variance: (P, B, ...), (B, ...) -> (B,)."""
        return _gaussian_nll(*self.matched(outputs), y)

    def matched(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the mixture over P, (B, K) each."""
        means, variances = self.moments(outputs)
        # relative to one draw, so that large means keep their last digits
        return means[0] + (means - means[:1]).mean(0), scores.mixture_variance(means, variances)

    def score(self, outputs: Tensor) -> Tensor:
        """The mixture variance, Σ_k in units of the targets when there are several."""
        return self._total(scores.mixture_variance(*self.moments(outputs)))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """The variance of the means alone."""
        return self._total(scores.epistemic_variance(self.moments(outputs)[0]))

    def _total(self, variance: Tensor) -> Tensor:
        return (
            variance[:, 0]
            if self.targets == 1
            else (variance if self.units is None else variance / self.units.to(variance)).sum(-1)
        )

    def _shape(self, values: Tensor) -> Tensor:
        return values[:, 0] if self.flat else values


def _gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """½ Σ_k [log 2πσ² + (y − μ)²/σ²]: (..., B, K), (..., B, K), (B,) or (B, K) -> (..., B)."""
    error = y.reshape(y.shape[0], -1).to(mean) - mean
    return 0.5 * ((2 * math.pi * variance).log() + error.square() / variance).sum(-1)


@dataclass(frozen=True)
class Categorical:
    """Classification: the output holds C logits on axis 1 of a batch (axis 2 of a stack); more axes are positions.

    >>> Categorical().nll(torch.zeros(1, 1, 4), torch.tensor([2]))
    tensor([[1.3863]])
    """

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p(y), averaged over positions."""
        return self._picked(output.log_softmax(2), y)

    def prediction_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log (1/P) Σ_p p(y | w_p), averaged over positions: (P, B, C, ...), (B, ...) -> (B,)."""
        mean = outputs.log_softmax(2).logsumexp(0, keepdim=True) - math.log(outputs.shape[0])
        return self._picked(mean, y)[0]

    def _picked(self, logs: Tensor, y: Tensor) -> Tensor:
        each = -logs.gather(2, y.long().expand(logs.shape[0], *y.shape).unsqueeze(2)).squeeze(2)
        return each.flatten(2).mean(2) if each.ndim > 2 else each

    def predictive(self, outputs: Tensor) -> Prediction:
        """The mean of the probabilities."""
        probs = outputs.softmax(2).mean(0)
        return Prediction(probs=probs, label=probs.argmax(1))

    def score(self, outputs: Tensor) -> Tensor:
        """The entropy of the mean prediction."""
        return scores.predictive_entropy(outputs.softmax(2))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """The mutual information between prediction and draw."""
        return scores.mutual_information(outputs.softmax(2))


@dataclass(frozen=True)
class Bernoulli:
    """Binary classification: one logit per example, (B,) or (B, 1). Probabilities are (B, 2), like a classifier's.

    >>> Bernoulli().nll(torch.zeros(1, 1), torch.tensor([1]))
    tensor([[0.6931]])
    """

    def logits(self, output: Tensor) -> Tensor:
        """(P, B) or (P, B, 1) -> two-class logits (P, B, 2)."""
        logit = output if output.ndim == 3 else output.unsqueeze(-1)
        return torch.cat([torch.zeros_like(logit), logit], -1)

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """log(1 + e^∓logit)."""
        logit = output.flatten(2).squeeze(2) if output.ndim == 3 else output
        sign = 1 - 2 * y.reshape(-1).to(logit)
        return F.softplus(sign * logit)

    def prediction_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log (1/P) Σ_p p(y | w_p): (P, B), (B,) -> (B,)."""
        return Categorical().prediction_nll(self.logits(outputs), y.reshape(-1))

    def predictive(self, outputs: Tensor) -> Prediction:
        """The mean of the probabilities."""
        return Categorical().predictive(self.logits(outputs))

    def score(self, outputs: Tensor) -> Tensor:
        """The entropy of the mean prediction."""
        return Categorical().score(self.logits(outputs))

    def epistemic(self, outputs: Tensor) -> Tensor:
        """The mutual information between prediction and draw."""
        return Categorical().epistemic(self.logits(outputs))


NAMES = ("gaussian", "categorical", "bernoulli")


def infer(output: Tensor, y: Tensor, name: str | None = None) -> Likelihood:
    """The likelihood for one batch of host outputs (B, ...) and targets: by name, or by the rule of the types and shapes.

    >>> infer(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))
    Categorical()
    """
    if name is not None and name not in NAMES:
        raise ConfigError(f"Expected `likelihood` to be {nearest(name, NAMES)} or an object with nll, predictive and score, "
                          f"but got {name!r}.")  # fmt: skip
    single = output.ndim == 1 or (output.ndim == 2 and output.shape[1] == 1)
    if name is None:
        name = "gaussian" if y.is_floating_point() else "bernoulli" if single else "categorical"
    if y.shape[0] != output.shape[0]:
        raise _misfit(name, output, y)
    return {"gaussian": _gaussian, "categorical": _categorical, "bernoulli": _bernoulli}[name](output, y)


def _gaussian(output: Tensor, y: Tensor) -> Likelihood:
    targets = 1 if y.ndim == 1 else y.shape[1]
    widths = output.reshape(output.shape[0], -1).shape[1]
    if y.ndim > 2 or output.ndim > 2 or widths not in (targets, 2 * targets):
        raise _misfit("gaussian", output, y)
    noise = None if widths == 2 * targets else torch.ones(targets)
    return Gaussian(targets, y.ndim == 1, noise)


def _categorical(output: Tensor, y: Tensor) -> Likelihood:
    if y.is_floating_point() or output.ndim < 2 or y.shape[1:] != output.shape[2:]:
        raise _misfit("categorical", output, y)
    return Categorical()


def _bernoulli(output: Tensor, y: Tensor) -> Likelihood:
    if max(output.ndim, y.ndim) > 2 or output.numel() != output.shape[0] or y.numel() != y.shape[0]:
        raise _misfit("bernoulli", output, y)
    return Bernoulli()


_FORMS = {
    "gaussian": "targets (B,) or (B, K) with outputs (B, K) of means or (B, 2K) of means and log-variances",
    "categorical": "integer targets (B, ...) with outputs (B, C, ...) of logits",
    "bernoulli": "targets (B,) or (B, 1) of 0 and 1 with outputs (B,) or (B, 1) of logits",
}


def _misfit(name: str, output: Tensor, y: Tensor) -> ShapeError:
    return ShapeError(
        f"Expected {_FORMS[name]} for the {name} likelihood, but got targets {tuple(y.shape)} ({y.dtype}) and outputs "
        f"{tuple(output.shape)}. Reshape the targets, pass `select=`, or name another `likelihood=` of {list(NAMES)}."
    )


def check_targets(likelihood: Likelihood, output: Tensor, y: Tensor, where: str) -> None:
    """Raise unless targets (n, ...) fit a host's outputs (b, ...): a ShapeError for their form, a DataError for their classes."""
    if isinstance(likelihood, Gaussian):
        width = likelihood.targets * (2 if likelihood.noise is None else 1)
        if max(y.ndim, output.ndim) > 2 or y[0].numel() != likelihood.targets or output[0].numel() != width:
            raise _misfit("gaussian", output, y)
    if not isinstance(likelihood, Categorical | Bernoulli):
        return
    (_categorical if isinstance(likelihood, Categorical) else _bernoulli)(output, y)
    classes = output.shape[1] if isinstance(likelihood, Categorical) else 2
    low, high = float(y.min()), float(y.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"Expected targets from 0 to {classes - 1} for {classes} classes, but `{where}` holds values from {low:g} to "
            f"{high:g}. Relabel the targets, or use a host with more outputs."
        )
    if bool((y != y.long()).any()):
        raise DataError(f"Expected whole numbers as classes, but `{where}` holds fractions. Round them, or fit a regression.")


def resolve(likelihood: str | Likelihood | None, outputs: Tensor, y: Tensor) -> Likelihood:
    """The likelihood for plain outputs (M, n, ...) and targets of validation data; a Gaussian learns its noise from them."""
    if likelihood is not None and not isinstance(likelihood, str):
        if not isinstance(likelihood, Likelihood) or isinstance(likelihood, type):
            raise ConfigError(f"Expected `likelihood` to be one of {list(NAMES)} or an object with nll, predictive and score, "
                              f"but got {type(likelihood).__name__}.")  # fmt: skip
        _check_own(likelihood, outputs, y)
        return likelihood
    law = infer(outputs[0], y, likelihood)
    check_targets(law, outputs[0], y, "valid")
    if not isinstance(law, Gaussian):
        return law
    columns = y.reshape(y.shape[0], -1).to(outputs)
    residuals = columns - law.moments(outputs)[0].mean(0)
    spread = columns.var(0, correction=0)
    # an interpolating host leaves no residual; a variance of zero would make every NLL infinite
    floor = 1e-6 * torch.where(spread > 0, spread, torch.ones_like(spread))
    noise = None if law.noise is None else torch.maximum(residuals.square().mean(0), floor)
    return replace(law, noise=noise, units=torch.where(spread > 0, spread, torch.ones_like(spread)))


def _check_own(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> None:
    """Ask a user's object once for everything that is needed of it later."""
    check_targets(likelihood, outputs[0], y, "valid")
    each = likelihood.nll(outputs, y)
    if each.shape != outputs.shape[:2]:
        raise ShapeError(
            f"Expected `likelihood.nll` to give one number per draw and example, {tuple(outputs.shape[:2])}, but got "
            f"{tuple(each.shape)}. Sum it over all other axes."
        )
    said = likelihood.predictive(outputs.repeat_interleave(2, 0))  # a spread over one draw alone may be undefined
    if (said.mean is None or said.std is None) and (said.probs is None or said.label is None):
        raise ConfigError(
            "Expected `likelihood.predictive` to give a mean and a std, or probs and a label, but it gives neither."
        )
