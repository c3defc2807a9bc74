"""The validation risk, defined once: the mean NLL of the prediction that the draws make together, in nats.

For classification that is −log (1/P) Σ_p p(y | x, w_p); for regression the NLL of the Gaussian with the mixture's mean and
variance; for a user's likelihood the mixture's unless it says otherwise. P draws with fixed noise; τ is the base model's risk
plus 2·std/√n. Stopping, closed form, entropy weight and clip are all decided by this number.

Why not the exact Gaussian mixture: it forgives a few wild draws at every point, and in-distribution inputs would look OOD. Why
not the mean NLL of the draws: it forbids disagreement that the reported variance explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap import checks
from offmap._types import Weights
from offmap.data import Rows
from offmap.data.batch import take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group, all_gather_concat, shard_slice
from offmap.errors import ConfigError, nearest
from offmap.likelihoods.likelihood import Likelihood, align_targets, mean_over_positions
from offmap.model.forward import CACHE_NUMBERS, BatchedModel, Draw
from offmap.posterior.distribution import WeightDistribution

RiskFn: TypeAlias = Callable[[Likelihood, Tensor, Tensor], Tensor]
"""(likelihood, outputs (P, B, ...), targets) -> loss per example (B,)."""

Evaluated: TypeAlias = tuple[Tensor, Tensor, Tensor]

SUBSAMPLE = 256
"""Validation rows at most for a first, rough search."""


def zero_one(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Return 1 where the mixture's label is wrong, or the fraction of positions where it is: (P, B, ...), (B, ...) -> (B,)."""
    label = likelihood.predict(outputs).label
    if label is None:
        raise ConfigError("Expected a classification likelihood for the risk 'zero-one'; use 'nll' for regression.")
    y = align_targets(y, label.shape)
    return mean_over_positions((label != y).to(outputs.dtype), y)


RISKS: dict[str, RiskFn] = {
    "nll": lambda likelihood, outputs, y: likelihood.predictive_nll(outputs, y),
    "expected-nll": lambda likelihood, outputs, y: likelihood.nll(outputs, y).mean(0),  # the first term of the objective
    "averaged-nll": lambda likelihood, outputs, y: likelihood.averaged_nll(outputs, y),  # as in the authors' code
    "zero-one": zero_one,
}


def as_risk(risk: str | RiskFn) -> RiskFn:
    """Return the risk of that name, or the function itself."""
    if callable(risk):
        return checks.function("risk", risk, ["likelihood", "outputs", "targets"])
    if not isinstance(risk, str) or risk not in RISKS:
        raise ConfigError(f"Expected `risk` to be {nearest(str(risk), RISKS)} or a function, but got {risk!r}.")
    return RISKS[risk]


@dataclass(frozen=True)
class Validation:
    """Evaluates the risk of a weight distribution on validation data."""

    model: BatchedModel
    likelihood: Likelihood
    data: Rows
    risk: RiskFn = RISKS["nll"]
    draws: int = 50
    seed: int = 0
    bound: Tensor | None = None  # (M, 1): no example costs more, unless its loss is not finite
    group: Group = SINGLE_PROCESS  # the processes that share the rows; each ends with the losses of all

    def __call__(self, q: WeightDistribution) -> Tensor:
        """Return the validation risk of every member, (M,); NaN counts as infinite."""
        return self.losses(q).mean(1).nan_to_num(nan=math.inf)

    def losses(self, q: WeightDistribution, *, clip: float | None = None) -> Tensor:
        """Return the loss per member and example, (M, n)."""
        return self._evaluate(range(q.members), self._draw(q, clip), 1 if clip == 0 else self.draws)[0]

    def base_risk(self, q: WeightDistribution) -> Tensor:
        """Return the risk of the base models, (M,)."""
        return self._evaluate(range(q.members), self._draw(q, 0), 1)[0].mean(1)

    def evaluate(self, q: WeightDistribution) -> tuple[Tensor, Tensor]:
        """Return the risk of every member, and the mean of the likelihood's score over the validation inputs, (M,) each."""
        return self._evaluate(range(q.members), self._draw(q), self.draws, scored=True)[1:]

    def evaluator(self, q: WeightDistribution) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a function that evaluates q with φ multiplied by a factor, (M,), NaN for members that need not be evaluated.

        Small draws are made once and rescaled, so q must stay as it is.
        """
        full_precision = all(mean.dtype.itemsize >= 4 for mean in q.mean.values())
        if not full_precision or q.parameterization is not None or self.draws * q.members * q.dimension > CACHE_NUMBERS:
            return lambda factor: self._evaluate(
                range(q.members), self._draw(q, factor=factor.nan_to_num(nan=1.0)), self.draws, scored=True
            )[1:]
        cached: Weights = {}

        @torch.no_grad()
        def evaluate(factor: Tensor) -> tuple[Tensor, Tensor]:
            if self.model.last_layer is not None:  # it caches the layer inputs of all members
                factor = factor.nan_to_num(nan=1.0)
            index = (~factor.isnan()).nonzero().flatten()
            members = index.tolist()
            if not cached:
                cached.update(self._draw(q)(range(self.draws)))
            values = self._evaluate(
                members, lambda span: q.rescale_draws(cached, span, factor[index], members), self.draws, scored=True
            )[1:]
            risk, uncertainty = (torch.full_like(factor, math.nan, dtype=v.dtype).scatter(0, index, v) for v in values)
            return risk, uncertainty

        return evaluate

    def clip_losses(self, weights: Weights) -> Validation:
        """Return a validation in which no example costs more than a prediction without inputs pays for the worst one.

        Without a bound, a row on which the model is sure and wrong decides alone how high τ is. Members that such a prediction
        beats have no bound, nor likelihoods without `baseline_nll`. `weights` are the base models', {name: (M, ...)}.
        """
        baseline = self.likelihood.baseline_nll(self.data.targets)
        if baseline is None:
            return self
        worst = float(baseline.max())
        members = next(iter(weights.values())).shape[0]
        losses = self._evaluate(range(members), lambda span: weights, 1)[0].clamp_max(worst)
        # τ at the bound itself would let anything pass
        beaten = losses.mean(1) + 2 * losses.std(1, correction=0) / math.sqrt(losses.shape[1]) >= worst
        return replace(self, bound=torch.full_like(losses[:, :1], worst).masked_fill(beaten[:, None], math.inf))

    def subsample(self, q: WeightDistribution, max_risk: Tensor) -> tuple[Validation, Tensor]:
        """Return a cheaper validation and its τ, (M,): as far above the base model's risk there as `max_risk` is here."""
        some = slice(None, None, -(-self.data.rows // SUBSAMPLE))
        data = replace(self.data, inputs=take_rows(self.data.inputs, some), targets=self.data.targets[some])
        few = replace(self, data=data, draws=max(2, self.draws // 5))
        return few, max_risk + (few.base_risk(q) - self.base_risk(q))

    def max_risk(self, q: WeightDistribution, *, tolerance: str = "paper") -> Tensor:
        """Return τ per member, (M,): the base model's risk plus twice its standard error.

        `tolerance="smoothed"` counts one more example, at chance: a model that makes no mistake on few rows may still make one.
        """
        losses = self._evaluate(range(q.members), self._draw(q, 0), 1)[0]
        if tolerance == "smoothed":
            baseline = self.likelihood.baseline_nll(self.data.targets)
            if baseline is None:
                raise ConfigError("Expected a likelihood with `baseline_nll` for tolerance='smoothed'; use tolerance='paper'.")
            losses = F.pad(losses, (0, 1), value=float(baseline.mean()))
        n = losses.shape[1]
        return losses.mean(1) + 2 * losses.std(1, correction=0) / (n if tolerance == "reference" else math.sqrt(n))

    def _draw(self, q: WeightDistribution, clip: float | None = None, factor: Tensor | None = None) -> Draw:
        return lambda span: q.draw(span, seed=self.seed, stream="valid", clip=clip, factor=factor)

    def _evaluate(self, members: Sequence[int], draw: Draw, draws: int, *, scored: bool = False) -> Evaluated:
        """Return losses of k members, (k, n), their risk, (k,), with NaN as infinite, and if `scored` their mean uncertainty."""
        count, parts = len(members), list[Tensor]()
        total = torch.zeros(count, dtype=torch.float64, device=self.data.targets.device)
        shard = shard_slice(self.group, self.data.rows)
        inputs, targets = take_rows(self.data.inputs, shard), self.data.targets[shard]
        for rows in self.model.blocks(inputs, count * draws) if len(targets) else ():
            stacked = self.model.outputs(draw, draws, take_rows(inputs, rows), members=count).unflatten(0, (count, draws))
            y = targets[rows]
            parts.append(torch.stack([self.risk(self.likelihood, outputs, y) for outputs in stacked]))
            if scored:
                total += torch.stack([self.likelihood.score(outputs).double().mean() for outputs in stacked]) * len(y)
        losses = all_gather_concat(self.group, torch.cat(parts, 1) if parts else None, 1)
        if scored:
            self.group.all_reduce(total)
        if self.bound is not None:
            losses = torch.where(losses.isfinite(), losses.clamp_max(self.bound[members].to(losses)), losses)
        return losses, losses.mean(1).nan_to_num(nan=math.inf), total / self.data.rows
