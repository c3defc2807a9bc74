"""What a fit did, and whether it did what the theory says: `diagnose(guard, train)`.

Section 4.2 of the paper predicts the width of each weight of a deep net: φ² = σ_j² / (b·a_k²), inverse to the amplitude a_k of
the layer input on the training data. Directions that the data never use cost no risk, so the noise goes there, and an input
that uses them makes the draws disagree. In the SVD basis a_k is the root mean square along the k-th eigenvector of the layer's
inputs; without a basis it is that of the k-th input itself. Where φ does not fall with a_k (ρ near 0), the data did not shape
the layer: λ or the number of steps was too small, or the prior too narrow.
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
from offmap.metrics import rank_correlation
from offmap.model.params import StackedModel
from offmap.posterior.basis import LIMIT, Basis, Observed, observe
from offmap.posterior.predictive import History, Stochastic
from offmap.table import Table

EPS = 1e-4
"""Amplitudes below this share of the largest are rounding: they count as that share."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """Amplitudes and scales of one random matrix.

    Attributes:
        name: The parameter.
        basis: "svd" or "identity".
        amplitude: (M, G, D), root mean square of the layer inputs along each direction; M members, G blocks of rows with
            different inputs, such as the groups of a convolution, D the fan-in.
        scale: (M, G, D), mean φ along each direction.
        eps: Smallest amplitude that counts, as a share of its block's largest.
    """

    name: str
    basis: str
    amplitude: Tensor
    scale: Tensor
    eps: float = EPS

    @property
    def clamped_amplitude(self) -> Tensor:
        """The amplitude, at least `eps` times its block's largest, (M, G, D)."""
        return torch.maximum(self.amplitude, self.eps * self.amplitude.amax(-1, keepdim=True))

    @property
    def correlation(self) -> float:
        """Spearman's ρ of clamped amplitude and mean φ, averaged over members and blocks; −1: strictly inverse."""
        pairs = zip(self.clamped_amplitude.flatten(0, 1), self.scale.flatten(0, 1), strict=True)
        correlations = [float(rank_correlation(a, s.double())) for a, s in pairs]
        defined = [rho for rho in correlations if rho == rho]
        return fmean(defined) if defined else float("nan")

    @property
    def slope(self) -> float:
        """Of log φ over log amplitude, by least squares over the directions above `eps`; −1: φ is proportional to 1/a."""
        above = self.amplitude > self.eps * self.amplitude.amax(-1, keepdim=True)
        a, s = self.amplitude.log(), self.scale.double().log()
        count = above.sum(-1, keepdim=True).clamp_min(1)
        middle = [t.where(above, 0).sum(-1, keepdim=True) / count for t in (a, s)]
        a, s = ((t - m).where(above, 0) for t, m in zip((a, s), middle, strict=True))
        return float((a * s).sum() / a.square().sum())


@dataclass(frozen=True)
class Diagnosis:
    """Layers, the history of the fit, and {parameter: why} for random parameters that have no layer input."""

    layers: Sequence[LayerDiagnosis]
    history: History
    left_out: dict[str, str]

    def table(self) -> Table:
        """Return one row per layer, with entropy, risk and uncertainty below."""
        omitted = [f"left out, having no amplitude of inputs: {', '.join(self.left_out)}"] if self.left_out else []
        return Table([_row(layer) for layer in self.layers], [*_notes(self.history), *omitted])

    def __str__(self) -> str:
        return str(self.table())


def diagnose(guard: Guard, train: Data, *, draws: int = 0, eps: float = EPS) -> Diagnosis:
    """Compare each layer's φ with the amplitude of its inputs on `train`, and report how the fit went.

    Args:
        guard: A guard over a weight distribution, as `offmap.fit` returns.
        train: The training data.
        draws: 0: one pass of the base models (of a Bayesian net: of its trained mean), to which the closed form is inverse.
            Else one pass of so many draws; amplitudes are root mean squares over them, as in the theory, which differ in hidden
            layers, where inputs are noisy.
        eps: Amplitudes below this share of a layer's largest count as that share.

    >>> import offmap
    >>> x = torch.linspace(-1, 1, 60)[:, None] * torch.tensor([1.0, 0.1])
    >>> guard = offmap.fit(torch.nn.Linear(2, 1), (x, x[:, 0]), (x, x[:, 0]), solver="closed-form", basis="identity")
    >>> round(diagnose(guard, (x, x[:, 0])).layers[0].slope, 3)  # φ is proportional to 1/a
    -1.0
    """
    if not isinstance(guard, Guard):
        raise ConfigError(f"Expected a Guard, as `offmap.fit` gives, but got {type(guard).__name__}.")
    predictive = guard.predictive
    if not isinstance(predictive, Stochastic):
        raise ConfigError(f"Expected a guard over a weight distribution, but got one over {type(predictive).__name__}.")
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(f"Expected `eps` to be at least 0 and below 1, but got {eps!r}.")
    draws = checks.integer("draws", draws, 0)
    data = as_batches(train, guard.place, name="train", target=guard.target)
    observed = [_observe(predictive, data, draw, guard.seed) for draw in (range(draws) if draws else [None])]
    bases, why = observed[0].bases, observed[0].why
    q, scale = predictive.q, predictive.q.scale()
    layers = [
        _layer(name, bases[name], [o.bases[name].input_rms for o in observed], scale[name].detach(), eps)
        for name in q.mean
        if name in bases
    ]
    return Diagnosis(layers, predictive.history, {name: why.get(name, "no basis") for name in q.mean if name not in bases})


def _observe(predictive: Stochastic, data: Batches, draw: int | None, seed: int) -> Observed:
    """Layer inputs of one draw of every member, or of the base models, along the distribution's own directions."""
    q, model = predictive.q, predictive.model
    drawn = q.draw([draw or 0], seed=seed, clip=0 if draw is None else None)
    stack = StackedModel(model.module, {n: drawn[n].detach() for n in q.mean}, dict(q.fixed.items()))
    directions = dict(q.rotation.items())
    limit = max((v.shape[-1] for v in directions.values()), default=LIMIT)  # pieces as wide as those at fit time
    with fork_rng(seed):
        return observe(
            stack, lambda rows: (x for x, _ in data), rotated=False, along=directions, output_fn=model.output_fn, limit=limit
        )


def _layer(name: str, basis: Basis, amplitudes: Sequence[Tensor], scale: Tensor, eps: float) -> LayerDiagnosis:
    square = sum((amplitude.square() / len(amplitudes) for amplitude in amplitudes[1:]), amplitudes[0].square() / len(amplitudes))
    rows = basis.view.rows(scale)  # (M, out, D)
    blocks = rows.split(list(basis.view.blocks), 1) if basis.view.blocks else [rows]
    mean = torch.stack([block.mean(1) for block in blocks], 1)  # (M, G, D)
    return LayerDiagnosis(name, "identity" if basis.matrix is None else "svd", square.sqrt(), mean, eps)


def _row(layer: LayerDiagnosis) -> dict[str, Any]:
    members, blocks, directions = layer.amplitude.shape
    order = layer.clamped_amplitude.flatten(0, 1).argsort(-1, descending=True)
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
        at_kept = [history.uncertainty[history.step.index(step)][m] for m, step in enumerate(history.kept)]
        lines.append(
            f"mean uncertainty of validation inputs: {fmean(history.uncertainty[0]):.3g} at the start, "
            f"{fmean(at_kept):.3g} at the kept check, {fmean(history.uncertainty[-1]):.3g} at the last"
        )
    return lines
