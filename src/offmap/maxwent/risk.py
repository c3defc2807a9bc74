"""The validation risk, defined once: the mean NLL of the prediction that the draws make together, in nats.

For classification that is −log (1/P) Σ_p p(y | x, w_p); for regression the NLL of the Gaussian with the mixture's mean and
variance; for a user's own likelihood the mixture's. P draws with fixed noise; τ is the base model's risk plus 2·std/√n.
Stopping, closed form, tradeoff and clip all look at this number.

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
from offmap.cache import CACHE_NUMBERS
from offmap.data import Rows
from offmap.data.inputs import take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group, all_gather_concat, shard_slice
from offmap.errors import ConfigError, nearest
from offmap.likelihoods import Likelihood, align_targets, mean_over_positions
from offmap.model.forward import BatchedModel, Draw
from offmap.posterior.distribution import WeightDistribution

RiskFn: TypeAlias = Callable[[Likelihood, Tensor, Tensor], Tensor]
"""(likelihood, outputs (P, B, ...), targets) -> loss per example (B,)."""


def predictive_nll(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the NLL of the prediction as it is reported: (P, B, ...), (B, ...) -> (B,)."""
    return likelihood.predictive_nll(outputs, y)


def expected_nll(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Return (1/P) Σ_p −log p(y | w_p), the first term of the objective."""
    return likelihood.nll(outputs, y).mean(0)


def averaged_nll(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the NLL of the averaged outputs, as in the authors' code."""
    return likelihood.averaged_nll(outputs, y)


def zero_one(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """1 where the mixture's label is wrong, or the share of positions where it is."""
    label = likelihood.predict(outputs).label
    if label is None:
        raise ConfigError("Expected a classification likelihood for the risk 'zero-one'; use 'nll' for regression.")
    y = align_targets(y, label.shape)
    return mean_over_positions((label != y).to(outputs.dtype), y)


RISKS: dict[str, RiskFn] = {
    "nll": predictive_nll, "expected-nll": expected_nll, "averaged-nll": averaged_nll, "zero-one": zero_one,
}  # fmt: skip


ROUGH = 256
"""Validation rows at most, of which every second, third … one is taken, and a fifth of the draws tell roughly."""


@dataclass(frozen=True)
class Validation:
    """Everything needed to ask a weight distribution for its risk on validation data."""

    model: BatchedModel
    likelihood: Likelihood
    data: Rows
    risk: RiskFn = predictive_nll
    draws: int = 50
    seed: int = 0
    bound: Tensor | None = None  # (M, 1): no example costs more, unless its loss is not finite
    group: Group = SINGLE_PROCESS  # the processes among which the rows are divided: each ends with the losses of all

    def losses(self, q: WeightDistribution, *, clip: float | None = None) -> Tensor:
        """Loss per member and example, (M, n)."""
        return self._passed(range(q.members), self._draw(q, clip), 1 if clip == 0 else self.draws)[0]

    def plain(self, q: WeightDistribution) -> Tensor:
        """The risk of the members themselves, (M,)."""
        return self.losses(q, clip=0).mean(1)

    def look(self, q: WeightDistribution) -> tuple[Tensor, Tensor]:
        """The risk and the mean uncertainty on the validation inputs, the likelihood's score, of every member, (M,) each."""
        return self._told(range(q.members), self._draw(q))

    def along(self, q: WeightDistribution) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Looks with φ multiplied by a factor, (M,), NaN for members that need none, for a q that stays as it is: small draws
        are made once.
        """
        whole = all(mean.dtype.itemsize >= 4 for mean in q.mean.values())  # shorter numbers would lose too much when scaled
        if not whole or q.parameterization is not None or self.draws * q.members * q.dimension > CACHE_NUMBERS:
            return lambda factor: self._told(range(q.members), self._draw(q, factor=factor.nan_to_num(nan=1.0)))
        drawn: Weights = {}

        @torch.no_grad()
        def look(factor: Tensor) -> tuple[Tensor, Tensor]:
            factor = (
                factor if self.model.last_layer is None else factor.nan_to_num(nan=1.0)
            )  # which remembers what all members met
            which = (~factor.isnan()).nonzero().flatten()
            if not drawn:
                drawn.update(self._draw(q)(range(self.draws)))
            risk, uncertainty = self._told(
                which.tolist(), lambda span: q.rescale_draws(drawn, span, factor[which], which.tolist())
            )
            empty = torch.full_like(factor, math.nan, dtype=torch.float64)
            return empty.to(risk).scatter(0, which, risk), empty.to(uncertainty).scatter(0, which, uncertainty)

        return look

    def _draw(self, q: WeightDistribution, clip: float | None = None, factor: Tensor | None = None) -> Draw:
        return lambda span: q.draw(span, seed=self.seed, stream="valid", clip=clip, factor=factor)

    def _told(self, which: Sequence[int], draw: Draw) -> tuple[Tensor, Tensor]:
        """The risk and the mean uncertainty of k members, (k,) each."""
        losses, uncertainty = self._passed(which, draw, self.draws, scored=True)
        return losses.mean(1).nan_to_num(nan=math.inf), uncertainty

    def _passed(self, which: Sequence[int], draw: Draw, draws: int, *, scored: bool = False) -> tuple[Tensor, Tensor]:
        """Loss of k members and every example, (k, n), and if `scored` their mean uncertainty, (k,)."""
        members, parts = len(which), list[Tensor]()
        total = torch.zeros(members, dtype=torch.float64, device=self.data.targets.device)
        own = shard_slice(self.group, self.data.rows)
        inputs, targets = take_rows(self.data.inputs, own), self.data.targets[own]
        for rows in self.model.blocks(inputs, members * draws) if len(targets) else ():
            stacked = self.model.outputs(draw, draws, take_rows(inputs, rows), members=members)
            y = targets[rows]
            apart = stacked.unflatten(0, (members, draws))
            parts.append(torch.stack([self.risk(self.likelihood, o, y) for o in apart]))
            if scored:
                total += torch.stack([self.likelihood.score(o).double().mean() for o in apart]) * len(y)
        losses = all_gather_concat(self.group, torch.cat(parts, 1) if parts else None, 1)
        if scored:
            self.group.all_reduce(total)
        if self.bound is not None:
            losses = torch.where(losses.isfinite(), losses.clamp_max(self.bound[which].to(losses)), losses)
        return losses, total / self.data.rows

    def bounded(self, weights: Weights) -> Validation:
        """The same, but no example costs more than chance would pay for the worst one; `weights` are the plain members', {name:
        (M, ...)}. Likelihoods of the user's own, and members that chance beats, have no bound.
        """
        baseline = self.likelihood.baseline_nll(self.data.targets)
        if baseline is None:
            return self
        # without a bound, a row on which the model is sure and wrong decides alone how high τ is
        worst = float(baseline.max())
        members = next(iter(weights.values())).shape[0]
        losses = self._passed(range(members), lambda span: weights, 1)[0].clamp_max(worst)
        # a threshold at the bound itself would let anything pass
        beaten = losses.mean(1) + 2 * losses.std(1, correction=0) / math.sqrt(losses.shape[1]) >= worst
        return replace(self, bound=torch.full_like(losses[:, :1], worst).masked_fill(beaten[:, None], math.inf))

    def subsampled(self, q: WeightDistribution, max_risk: Tensor) -> tuple[Validation, Tensor]:
        """One that is soon asked, and its threshold, (M,): as far above the base model's risk there as τ is above it here."""
        some = slice(None, None, -(-self.data.rows // ROUGH))
        data = replace(self.data, inputs=take_rows(self.data.inputs, some), targets=self.data.targets[some])
        few = replace(self, data=data, draws=max(2, self.draws // 5))
        return few, max_risk + (few.plain(q) - self.plain(q))

    def __call__(self, q: WeightDistribution) -> Tensor:
        """The validation risk of every member, (M,); NaN counts as infinite."""
        return self.losses(q).mean(1).nan_to_num(nan=math.inf)

    def max_risk(self, q: WeightDistribution, *, tolerance: str = "paper") -> Tensor:
        """τ per member, (M,): the base model's risk plus twice its standard error.

        `tolerance="smoothed"` counts one more example, at chance: a model that makes no mistake on few rows may still make one.
        """
        losses = self.losses(q, clip=0)
        if tolerance == "smoothed":
            losses = F.pad(losses, (0, 1), value=chance_nll(self.likelihood, self.data.targets))
        n = losses.shape[1]
        spread = losses.std(1, correction=0)
        return losses.mean(1) + 2 * spread / (n if tolerance == "reference" else math.sqrt(n))


def chance_nll(likelihood: Likelihood, y: Tensor) -> float:
    """Return the mean NLL of a prediction that knows the targets' frequencies, or their mean and variance, and no input.

    >>> round(chance_nll(Categorical(), torch.tensor([0, 1, 0, 1])), 4)
    0.6931
    """
    losses = likelihood.baseline_nll(y)
    if losses is None:
        raise ConfigError("Expected a likelihood with `baseline_nll` for tolerance='smoothed'; use tolerance='paper'.")
    return float(losses.mean())


def as_risk(risk: str | RiskFn) -> RiskFn:
    """The risk of that name, or the function itself."""
    if callable(risk):
        return checks.function("risk", risk, ["likelihood", "outputs", "targets"])
    if not isinstance(risk, str) or risk not in RISKS:
        raise ConfigError(f"Expected `risk` to be {nearest(str(risk), RISKS)} or a function, but got {risk!r}.")
    return RISKS[risk]
