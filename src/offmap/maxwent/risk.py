"""The validation risk, defined once: the mean NLL of the prediction that the draws make together, in nats.

For classification that is −log (1/P) Σ_p p(y | x, w_p); for regression the NLL of the Gaussian with the mixture's mean and
variance; for a user's likelihood the mixture's unless it says otherwise. P draws with fixed noise; τ is the base model's risk
plus 2·std/√n. Stopping, closed form, entropy weight and clip are all decided by this number.

The exact Gaussian mixture would forgive a few wild draws at every point, and in-distribution inputs would look OOD; the mean NLL
of the draws would forbid disagreement that the reported variance explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap import checks
from offmap._types import Weights
from offmap.data import Rows
from offmap.data.batch import take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group, all_gather_concat, shard_slice
from offmap.errors import ConfigError
from offmap.likelihoods.likelihood import Likelihood, align_targets, mean_over_positions
from offmap.model.forward import CACHE_NUMBERS, BatchedModel
from offmap.posterior.distribution import WeightDistribution

RiskFn: TypeAlias = Callable[[Likelihood, Tensor, Tensor], Tensor]
"""(likelihood, outputs (P, B, ...), targets) -> loss per example (B,)."""

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
    return RISKS[checks.one_of("risk", risk, RISKS, " or a function")]


class Evaluated(NamedTuple):
    """Of k members: the risk, NaN counted as infinite, the mean of the likelihood's score over the inputs, and the losses."""

    risk: Tensor  # (k,)
    uncertainty: Tensor  # (k,)
    losses: Tensor  # (k, n)


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

    @torch.no_grad()
    def evaluate(
        self, q: WeightDistribution, factor: Tensor | None = None, *, clip: float | None = None, cache: Weights | None = None
    ) -> Evaluated:
        """Evaluate every member with φ multiplied by a factor, (M,); `clip=0`: the base models, without their uncertainty.

        With a `cache`, empty at first, q is drawn once and rescaled, and members whose factor is NaN are left out: theirs is NaN.
        """
        members, draws = list(range(q.members)), 1 if clip == 0 else self.draws
        scale = None if factor is None else factor.nan_to_num(nan=1.0)
        draw = partial(q.draw, seed=self.seed, stream="valid", clip=clip, factor=scale)
        if cache is not None and factor is not None and scale is not None:
            if not cache:
                cache.update(q.draw(range(draws), seed=self.seed, stream="valid"))
            if self.model.last_layer is None:  # it caches the layer inputs of all members
                members = (~factor.isnan()).nonzero().flatten().tolist()
            draw = partial(q.rescale_draws, cache, factor=scale[members], which=members)
        count, parts = len(members), list[Tensor]()
        total = torch.zeros(count, dtype=torch.float64, device=self.data.targets.device)
        shard = shard_slice(self.group, self.data.rows)
        inputs, targets = take_rows(self.data.inputs, shard), self.data.targets[shard]
        for rows in self.model.blocks(inputs, count * draws) if len(targets) else ():
            stacked = self.model.outputs(draw, draws, take_rows(inputs, rows), members=count).unflatten(0, (count, draws))
            y = targets[rows]
            parts.append(torch.stack([self.risk(self.likelihood, outputs, y) for outputs in stacked]))
            if clip != 0:
                total += torch.stack([self.likelihood.score(outputs).double().mean() for outputs in stacked]) * len(y)
        losses = all_gather_concat(self.group, torch.cat(parts, 1) if parts else None, 1)
        if clip != 0:
            self.group.all_reduce(total)
        if self.bound is not None:
            losses = torch.where(losses.isfinite(), losses.clamp_max(self.bound[members].to(losses)), losses)
        risk, uncertainty = losses.mean(1).nan_to_num(nan=math.inf), total / self.data.rows
        if count < q.members:
            index = torch.tensor(members, device=risk.device)
            risk, uncertainty = (v.new_full((q.members,), math.nan).scatter(0, index, v) for v in (risk, uncertainty))
        return Evaluated(risk, uncertainty, losses)

    def evaluator(self, q: WeightDistribution) -> Callable[[Tensor], Evaluated]:
        """Return `evaluate` as a function of the factor. Small draws are made once and rescaled, so q must stay as it is."""
        full_precision = all(mean.dtype.itemsize >= 4 for mean in q.mean.values())
        linear = q.parameterization is None or q.parameterization.linear
        small = full_precision and linear and self.draws * q.members * q.size <= CACHE_NUMBERS
        return partial(self.evaluate, q, cache={} if small else None)

    def base_risk(self, q: WeightDistribution) -> Tensor:
        """Return the risk of the base models, (M,)."""
        return self.evaluate(q, clip=0).losses.mean(1)

    def clip_losses(self, q: WeightDistribution) -> Validation:
        """Return a validation in which no example costs more than a prediction without inputs pays for the worst one.

        Else a row on which the model is sure and wrong decides alone how high τ is. Members that such a prediction beats have no
        bound, nor likelihoods without `baseline_nll`.
        """
        baseline = self.likelihood.baseline_nll(self.data.targets)
        if baseline is None:
            return self
        worst = float(baseline.max())
        losses = self.evaluate(q, clip=0).losses.clamp_max(worst)
        # τ at the bound itself would let anything pass
        beaten = losses.mean(1) + 2 * losses.std(1, correction=0) / math.sqrt(losses.shape[1]) >= worst
        return replace(self, bound=torch.full_like(losses[:, :1], worst).masked_fill(beaten[:, None], math.inf))

    def subsample(self, q: WeightDistribution, max_risk: Tensor) -> tuple[Validation, Tensor, Tensor]:
        """Return a cheaper validation, its τ, (M,), as far above the base model's risk there as `max_risk` is here, and that."""
        some = slice(None, None, -(-self.data.rows // SUBSAMPLE))
        data = replace(self.data, inputs=take_rows(self.data.inputs, some), targets=self.data.targets[some])
        few = replace(self, data=data, draws=max(2, self.draws // 5))
        base_risk = few.base_risk(q)
        return few, max_risk + (base_risk - self.base_risk(q)), base_risk

    def max_risk(self, q: WeightDistribution, *, tolerance: str = "paper") -> Tensor:
        """Return τ per member, (M,): the base model's risk plus twice its standard error.

        `tolerance="smoothed"` counts one more example, at chance: a model that makes no mistake on few rows may still make one.
        """
        losses = self.evaluate(q, clip=0).losses
        if tolerance == "smoothed":
            baseline = self.likelihood.baseline_nll(self.data.targets)
            if baseline is None:
                raise ConfigError("Expected a likelihood with `baseline_nll` for tolerance='smoothed'; use tolerance='paper'.")
            losses = F.pad(losses, (0, 1), value=float(baseline.mean()))
        n = losses.shape[1]
        return losses.mean(1) + 2 * losses.std(1, correction=0) / (n if tolerance == "reference" else math.sqrt(n))
