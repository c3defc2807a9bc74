"""What a fit did, and whether it did what the theory says: `diagnose(guard, train)`.

The paper's section 4.2 says how wide each weight of a deep net becomes: φ² = σ_j² / (b·a_k²), inverse to the amplitude a_k of
the activation that the weight meets on the training data. Directions that the data never use cost no risk, so the noise goes
there, and an input that does use them makes the drawn networks disagree. In the SVD basis a_k is the root mean square along the
k-th eigenvector of the layer's inputs; without a basis it is that of the k-th input itself. A layer whose φ does not fall with
a_k (ρ near 0) was not shaped by the data: λ or the number of steps was too small, or the prior too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from offmap import checks
from offmap._types import Data
from offmap.data import Batches, as_batches, fork_rng
from offmap.errors import ConfigError
from offmap.guard import Guard
from offmap.maxwent.monitors import History
from offmap.metrics import rank_correlation
from offmap.model.select import StackedModel
from offmap.posterior.basis import LIMIT, Basis
from offmap.posterior.construct import Observed, observe
from offmap.posterior.predictive import Stochastic
from offmap.table import Table

FLOOR = 1e-4
"""Amplitudes below this share of the largest are rounding: they count as that share."""


@dataclass(frozen=True)
class Layer:
    """One random matrix: `amplitude` (M, G, D) of its inputs along each direction, and `scale` (M, G, D), the mean φ along it.

    M members; G blocks of rows that meet different inputs, such as the groups of a convolution; D the fan-in. `basis` is "svd"
    or "identity".
    """

    name: str
    basis: str
    amplitude: Tensor
    scale: Tensor
    eps: float = FLOOR

    @property
    def floored(self) -> Tensor:
        """The amplitude, at least `floor` times its block's largest, (M, G, D)."""
        return torch.maximum(self.amplitude, self.eps * self.amplitude.amax(-1, keepdim=True))

    @property
    def correlation(self) -> float:
        """Spearman's ρ of floored amplitude and mean φ, averaged over members and blocks; −1: strictly inverse."""
        pairs = zip(self.floored.flatten(0, 1), self.scale.flatten(0, 1), strict=True)
        found = [float(rank_correlation(a, s.double())) for a, s in pairs]
        known = [rho for rho in found if rho == rho]
        return fmean(known) if known else float("nan")

    @property
    def slope(self) -> float:
        """Of log φ over log amplitude, by least squares over the directions above the floor; −1: φ is proportional to 1/a."""
        above = self.amplitude > self.eps * self.amplitude.amax(-1, keepdim=True)
        a, s = self.amplitude.log(), self.scale.double().log()
        count = above.sum(-1, keepdim=True).clamp_min(1)
        middle = [t.where(above, 0).sum(-1, keepdim=True) / count for t in (a, s)]
        a, s = ((t - m).where(above, 0) for t, m in zip((a, s), middle, strict=True))
        return float((a * s).sum() / a.square().sum())


@dataclass(frozen=True)
class Diagnosis:
    """Layers with their amplitudes and φ, the history of the fit, and random parameters that meet no input, with the reason."""

    layers: Sequence[Layer]
    history: History
    left_out: dict[str, str]

    def table(self) -> Table:
        """One row per layer; entropy, risk and uncertainty below."""
        rows = [_row(layer) for layer in self.layers]
        return Table(rows, [*_notes(self.history), *self._omitted()])

    def __str__(self) -> str:
        return str(self.table())

    def _omitted(self) -> list[str]:
        return [f"left out, having no amplitude of inputs: {', '.join(self.left_out)}"] if self.left_out else []


def diagnose(guard: Guard, train: Data, *, draws: int = 0, eps: float = FLOOR) -> Diagnosis:
    """Hold each layer's φ against the amplitude of what it meets on `train`, and tell how the fit went.

    One pass over the training inputs, along the guard's own directions, of the base models (for a Bayesian net with a trained
    mean: of that mean), to which the closed form is inverse. With `draws` it is one pass of every drawn net, and amplitudes
    are root mean squares over these: the theory's, which hidden layers with noisy inputs differ in. Amplitudes below `floor`
    times the largest of a layer are taken for rounding.
    """
    if not isinstance(guard, Guard):
        raise ConfigError(f"Expected a Guard, as `offmap.fit` gives, but got {type(guard).__name__}.")
    predictive = guard.predictive
    if not isinstance(predictive, Stochastic):
        raise ConfigError(f"Expected a guard over a weight distribution, but got one over {type(predictive).__name__}.")
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(f"Expected `floor` to be at least 0 and below 1, but got {eps!r}.")
    draws = checks.integer("draws", draws, 0)
    data = as_batches(train, guard.place, name="train", target=guard.target)
    seen = _seen(predictive, data, None if draws == 0 else 0, guard.seed)
    squares = {name: basis.amplitude.square() / max(1, draws) for name, basis in seen.bases.items()}
    for draw in range(1, draws):
        for name, basis in _seen(predictive, data, draw, guard.seed).bases.items():
            squares[name] += basis.amplitude.square() / draws
    q, scale = predictive.q, predictive.q.scale()
    layers = [
        _layer(name, seen.bases[name], squares[name].sqrt(), scale[name].detach(), eps) for name in q.mean if name in seen.bases
    ]
    left_out = {name: seen.why.get(name, "no basis") for name in q.mean if name not in seen.bases}
    return Diagnosis(layers, predictive.history, left_out)


def _seen(predictive: Stochastic, data: Batches, draw: int | None, seed: int) -> Observed:
    """What one draw of every member, or the base models, meet along the distribution's own directions."""
    q, model = predictive.q, predictive.model
    drawn = q.draw([draw or 0], seed=seed, clip=0 if draw is None else None)
    at = StackedModel(model.net, {n: drawn[n].detach() for n in q.mean}, dict(q.fixed.items()))
    along = dict(q.rotation.items())
    limit = max((v.shape[-1] for v in along.values()), default=LIMIT)  # pieces as wide as those at fit time
    with fork_rng(seed):
        return observe(at, lambda rows: (x for x, _ in data), rotated=False, along=along, pick=model.output_fn, limit=limit)


def _layer(name: str, basis: Basis, amplitude: Tensor, scale: Tensor, eps: float) -> Layer:
    rows = basis.frame.rows(scale)  # (M, out, D)
    blocks = rows.split(list(basis.frame.blocks), 1) if basis.frame.blocks else [rows]
    mean = torch.stack([block.mean(1) for block in blocks], 1)  # (M, G, D)
    return Layer(name, "identity" if basis.matrix is None else "svd", amplitude, mean, eps)


def _row(layer: Layer) -> dict[str, Any]:
    members, blocks, directions = layer.amplitude.shape
    order = layer.floored.flatten(0, 1).argsort(-1, descending=True)
    sorted_scale = layer.scale.flatten(0, 1).gather(-1, order)
    tenth = max(1, directions // 10)
    return {
        "layer": layer.name,
        "basis": layer.basis,
        "blocks": blocks,
        "directions": directions,
        "amplitude max": float(layer.amplitude.max()),
        "amplitude median": float(layer.amplitude.median()),
        "φ at the strongest": float(sorted_scale[:, :tenth].mean()),
        "φ at the weakest": float(sorted_scale[:, -tenth:].mean()),
        "rank correlation": layer.correlation,
        "slope": layer.slope,
    } | ({"members": members} if members > 1 else {})


def _notes(history: History) -> list[str]:
    if not history.step:
        return ["no history: the fit kept none"]
    lines = [
        f"entropy (1/d) Σ log φ²: {fmean(history.entropy[0]):.3f} at the start, {fmean(history.final_entropy):.3f} in the end",
        f"validation risk: {fmean(history.final_risk):.4g}, τ {fmean(history.max_risk):.4g}; kept at step "
        + ", ".join(map(str, history.kept)),
    ]
    if history.uncertainty:
        kept = [history.uncertainty[history.step.index(step)][m] for m, step in enumerate(history.kept)]
        lines.append(
            f"mean uncertainty of validation inputs: {fmean(history.uncertainty[0]):.3g} at the start, {fmean(kept):.3g} at the "
            f"kept check, {fmean(history.uncertainty[-1]):.3g} at the last"
        )
    return lines
