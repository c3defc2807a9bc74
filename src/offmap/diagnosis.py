"""What a fit did, and whether it did what the theory says: `diagnose(guard, train)`; and `summarize(guard)`, without data.

Section 4.2 of the paper predicts the width of each weight of a deep net: φ² = σ_j² / (b·a_k²), inverse to the amplitude a_k of
the layer input on the training data. Directions that the data never use cost no risk, so the noise goes there, and an input
that uses them makes the draws disagree. In the SVD basis a_k is the root mean square along the k-th eigenvector of the layer's
inputs; without a basis it is that of the k-th input itself. Where φ does not fall with a_k (ρ near 0), the data did not shape
the layer: λ or the number of steps was too small, or the prior too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offmap import checks
from offmap._types import Data
from offmap.data import Batches, as_batches, fork_rng
from offmap.errors import ConfigError
from offmap.guard import Guard
from offmap.metrics import rank_correlation
from offmap.model.params import StackedModel
from offmap.posterior.basis import LIMIT, Observed, observe
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.predictive import History, Stochastic
from offmap.scores.distance import TableEncoder
from offmap.table import Table

KINDS = {
    "indicators": "indicators, of two values, compared by being equal",
    "missing": "missing in some rows, compared by being missing",
    "categories": "categories, compared by being equal",
}


@dataclass(frozen=True)
class LayerDiagnosis:
    """Amplitudes and scales of one random matrix: M members, G blocks of rows with different inputs, fan-in D."""

    name: str
    basis: str  # "svd" or "identity"
    amplitude: Tensor = field(repr=False)  # (M, G, D), root mean square of the layer inputs along each direction
    scale: Tensor = field(repr=False)  # (M, G, D), mean φ along each direction
    eps: float = 1e-4  # smallest amplitude that counts, as a share of its block's largest

    @property
    def clamped_amplitude(self) -> Tensor:
        """The amplitude, at least `eps` times its block's largest, (M, G, D)."""
        return torch.maximum(self.amplitude, self.eps * self.amplitude.amax(-1, keepdim=True))

    @property
    def correlation(self) -> float:
        """Spearman's ρ of clamped amplitude and mean φ, averaged over members and blocks; −1: strictly inverse."""
        pairs = zip(self.clamped_amplitude.flatten(0, 1), self.scale.flatten(0, 1), strict=True)
        return float(torch.stack([rank_correlation(a, s.double()) for a, s in pairs]).nanmean())

    @property
    def slope(self) -> float:
        """Of log φ over log amplitude, by least squares over the directions above `eps`; −1: φ is proportional to 1/a."""
        above = self.amplitude > self.eps * self.amplitude.amax(-1, keepdim=True)
        count = above.sum(-1, keepdim=True).clamp_min(1)
        logs = [t.log().where(above, 0) for t in (self.amplitude, self.scale.double())]
        a, s = ((t - t.sum(-1, keepdim=True) / count).where(above, 0) for t in logs)
        return float((a * s).sum() / a.square().sum())

    def row(self) -> dict[str, Any]:
        """Return the layer as one row of a table."""
        members, blocks, directions = self.amplitude.shape
        order = self.clamped_amplitude.flatten(0, 1).argsort(-1, descending=True)
        sorted_scale, tenth = self.scale.flatten(0, 1).gather(-1, order), max(1, directions // 10)
        return {
            "layer": self.name,
            "basis": self.basis,
            "blocks": blocks,
            "directions": directions,
            "amplitude max": float(self.amplitude.max()),
            "amplitude median": float(self.amplitude.median()),
            "φ at the strongest": float(sorted_scale[:, :tenth].mean()),
            "φ at the weakest": float(sorted_scale[:, -tenth:].mean()),
            "rank correlation": self.correlation,
            "slope": self.slope,
        } | ({"members": members} if members > 1 else {})


@dataclass(frozen=True)
class Diagnosis:
    """`layers`, the `history` of the fit, and `left_out`, {parameter: why} of random parameters that have no layer input."""

    layers: Sequence[LayerDiagnosis]
    history: History
    left_out: dict[str, str]

    def table(self) -> Table:
        """Return one row per layer, with entropy, risk and uncertainty below."""
        omitted = [f"left out, having no amplitude of inputs: {', '.join(self.left_out)}"] if self.left_out else []
        return Table([layer.row() for layer in self.layers], [*_history_notes(self.history), *omitted])

    def __str__(self) -> str:
        return str(self.table())


def diagnose(guard: Guard, train: Data, *, draws: int = 0, eps: float = 1e-4) -> Diagnosis:
    """Compare each layer's φ with the amplitude of its inputs on `train`, and report how the fit went.

    Args:
        guard: A guard over a weight distribution, as `offmap.fit` returns.
        train: The training data.
        draws: 0: one pass of the base models (of a Bayesian net: of its trained mean), to which the closed form is inverse.
            Else one pass of so many draws; amplitudes are root mean squares over them, as in the theory, which differ in hidden
            layers, where inputs are noisy.
        eps: Amplitudes below this share of a layer's largest are rounding: they count as that share.

    >>> import offmap
    >>> x = torch.linspace(-1, 1, 60)[:, None] * torch.tensor([1.0, 0.1])
    >>> train, valid = (x[::2], x[::2, 0]), (x[1::2], x[1::2, 0])
    >>> guard = offmap.fit(torch.nn.Linear(2, 1), train, valid, solver="closed-form", basis="identity")
    >>> round(diagnose(guard, train).layers[0].slope, 3)  # φ is proportional to 1/a
    -1.0
    """
    if not isinstance(guard, Guard):
        raise ConfigError(f"Expected a Guard, as `offmap.fit` gives, but got {type(guard).__name__}.")
    predictive = guard.predictive
    if not isinstance(predictive, Stochastic):
        raise ConfigError(f"Expected a guard over a weight distribution, but got one over {type(predictive).__name__}.")
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(f"Expected `eps` to be at least 0 and below 1, but got {eps!r}.")
    if len(predictive.q.directions):
        raise ConfigError("Expected a guard with a φ for every weight, but in this one directions stand for all of them.")
    draws = checks.integer("draws", draws, 0)
    data = as_batches(train, guard.place, name="train", target=guard.target)
    observed = [_observe(predictive, data, draw, guard.seed) for draw in (range(draws) if draws else [None])]
    bases, scale = observed[0].bases, predictive.q.scale()
    layers: list[LayerDiagnosis] = []
    for name in (name for name in predictive.q.mean if name in bases):
        view, kind = bases[name].view, "identity" if bases[name].matrix is None else "svd"
        square = torch.stack([o.bases[name].input_rms.square() / len(observed) for o in observed]).sum(0)
        rows = view.rows(scale[name].detach())  # (M, out, D)
        blocks = rows.split(list(view.blocks), 1) if view.blocks else [rows]
        mean = torch.stack([block.mean(1) for block in blocks], 1)  # (M, G, D)
        layers.append(LayerDiagnosis(name, kind, square.sqrt(), mean, eps))
    left_out = {name: observed[0].why.get(name, "no basis") for name in predictive.q.mean if name not in bases}
    return Diagnosis(layers, predictive.history, left_out)


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


def _history_notes(history: History) -> list[str]:
    if not history.step:
        return ["no history: the fit kept none"]
    lines = [
        f"entropy (1/d) Σ log φ²: {fmean(history.entropy[0]):.3f} at the start, {fmean(history.final_entropy):.3f} in the end",
        f"validation risk: {fmean(history.final_risk):.4g}, τ {fmean(history.max_risk):.4g}; kept at step "
        + ", ".join(map(str, history.kept)),
    ]
    if history.uncertainty:
        lines.append(
            f"mean uncertainty of validation inputs: {fmean(history.uncertainty[0]):.3g} at the start, "
            f"{fmean(history.of_kept()[1]):.3g} at the kept check, {fmean(history.uncertainty[-1]):.3g} at the last"
        )
    return lines


def summarize(guard: Guard) -> Table:
    """Parameter, shape, random or not, rotated or plain and why, φ's median and range, its entropy, memory of the basis."""
    score, predictive = guard.score_module, guard.predictive
    members = f"{predictive.members} member{'s' * (predictive.members > 1)}"
    notes = [
        f"threshold {guard.threshold:.4g} · clip {guard.clip} · {guard.draws} draws · {members}",
        f"{f'score {score.name!r}' if score.name else 'score'}: {score.describe()}",
        *_column_notes(guard),
        guard.calibration.describe(why=True),
        *guard.notes,
    ]
    if not isinstance(predictive, Stochastic):
        return Table([{"predictive": type(predictive).__name__, "members": predictive.members}], notes)
    q = predictive.q
    random = {name: _describe_param(q, name) for name in q.mean}
    total = sum(row.get("entropy", 0.0) for row in random.values())
    rows: list[dict[str, Any]] = []
    for name, parameter in predictive.model.module.named_parameters():
        row: dict[str, Any] = {"parameter": name, "shape": tuple(parameter.shape), "random": name in random}
        if name in random:
            row |= random[name]
            if "entropy" in row:  # directions that stand for all parameters have one entropy together
                row["share"] = row["entropy"] / total if total else 0.0
            row["why"] = q.why.get(name, "" if name in q.rotation or name not in q.raw_scale else "basis='identity'")
        else:
            row |= {"basis": "fixed", "why": q.why.get(name, "not picked by `params`")}
        rows.append(row)
    bases = [*q.rotation.values(), *q.directions.values(), *q.state.values()]
    memory = f"weights {_megabytes(q.mean.values()):.3g} MB, scales {_megabytes(q.raw_scale.values()):.3g} MB, "
    memory += f"bases {_megabytes(bases):.3g} MB"
    return Table(rows, [*notes, *_entropy_notes(predictive, guard.clip), memory])


def _column_notes(guard: Guard) -> list[str]:
    """Say which input columns are no plain numbers in the distance, by name where the guard knows names."""
    encoder = next((module for module in guard.score_module.modules() if isinstance(module, TableEncoder)), None)
    if encoder is None:
        return []
    names, width = list(guard.about.get("inputs") or ()), len(encoder.indicators)
    notes: list[str] = []
    for kind, columns in encoder.kinds().items():
        if columns:
            known = kind != "categories" and len(names) == width  # whole numbers are counted among themselves
            words = [str(names[i]) if known else str(i) for i in columns[:12]]
            several = (
                f"{len(columns)} of {width} columns are" if kind != "categories" else f"{len(columns)} whole-number columns are"
            )
            notes.append(f"{several} {KINDS[kind]}: {', '.join(words)}{', …' if len(columns) > 12 else ''}")
    return notes


def _describe_param(q: WeightDistribution, name: str) -> dict[str, Any]:
    """Basis, φ and entropy (nats, over all members) of one random parameter; of one that directions stand for, what they are."""
    if name not in q.raw_scale:
        return {"basis": type(q.parameterization).__name__.lower()}
    scale, basis = functional.softplus(q.raw_scale[name].detach()), "identity"
    if name in q.rotation:
        _, blocks, pieces, *_ = q.rotation[name].shape
        parts = [f"{n} {word}" for n, word in ((blocks, "blocks"), (pieces, "pieces of its fan-in")) if n > 1]
        basis = ", ".join(["svd", *parts])
    return {
        "basis": basis,
        "φ median": float(scale.median()), "φ min": float(scale.min()), "φ max": float(scale.max()),
        "entropy": float(scale.double().log().sum()) + scale.numel() * (q.noise.entropy() or 0.0),  # if it has one
        "basis MB": _megabytes([q.rotation[name]]) if name in q.rotation else 0.0,
    }  # fmt: skip


def _megabytes(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def _entropy_notes(predictive: Stochastic, clip: float | None) -> list[str]:
    q, history = predictive.q, predictive.history
    lines = [f"(1/d) Σ log φ² = {float(q.mean_log_square().mean()):.3f} with d = {q.dimension}; the fit {history.stop_reason}"]
    try:
        low, high = q.mixture_entropy_bounds()
    except ConfigError as error:  # discrete noise has no entropy
        return [*lines, str(error)]
    span = f"between {float(low):.4g} and {float(high):.4g}" if q.members > 1 else f"{float(low):.4g}"
    lines.append(f"entropy of the weights {span} nats")
    if q.parameterization is not None:
        lines.append(f"parameterization {q.parameterization}, entropy of its d numbers {float(q.entropy().mean()):.4g} nats")
    if clip and q.parameterization is None and q.noise.truncated_entropy(torch.ones(1, device="cpu")) is not None:
        left = q.clipped_entropy(clip)
        inside, ends, share = (float(part.mean()) for part in (left.continuous, left.points, left.share))
        at_clip = f"{ends:.4g} of the {share:.1%} of weights that sit at the clip"
        lines.append(f"with the clip {clip:g}: {inside:.4g} nats of the weights inside it, {at_clip}")
    if history.max_risk and history.final_risk:
        lines.append(f"validation risk {fmean(history.final_risk):.4g}, τ {fmean(history.max_risk):.4g}")
    return lines
