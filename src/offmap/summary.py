"""What a guard made random, and how wide: one row per parameter."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offmap.errors import ConfigError
from offmap.guard import Guard
from offmap.posterior.distribution import WeightDistribution
from offmap.posterior.entropy import clipped_entropy
from offmap.posterior.predictive import Stochastic
from offmap.table import Table


def summarize(guard: Guard) -> Table:
    """Parameter, shape, random or not, rotated or plain and why, φ's median and range, its entropy, memory of the basis."""
    score = guard.score_module
    notes = [
        f"threshold {guard.threshold:.4g} · clip {guard.clip} · {guard.draws} draws · {guard.predictive.members} member(s)",
        f"{f'score {score.name!r}' if score.name else 'score'}: {score.describe()}",
        *_calibration_notes(guard),
        *guard.notes,
    ]
    if not isinstance(guard.predictive, Stochastic):
        return Table([{"predictive": type(guard.predictive).__name__, "members": guard.predictive.members}], notes)
    net = guard.predictive.model.module
    table = {name: _random(guard.predictive.q, name) for name in guard.predictive.q.mean}
    total = sum(row["entropy"] for row in table.values())
    rows: list[dict[str, Any]] = []
    for name, parameter in net.named_parameters():
        row: dict[str, Any] = {"parameter": name, "shape": tuple(parameter.shape), "random": name in table}
        if name in table:
            row |= table[name] | {"share": table[name]["entropy"] / total if total else 0.0}
        else:
            row |= {"basis": "fixed", "why": guard.predictive.q.why.get(name, "not picked by `params`")}
        rows.append({**{k: v for k, v in row.items() if k != "why"}, "why": row["why"]})
    return Table(rows, [*notes, *_entropy_notes(guard.predictive, guard.clip), _memory_note(guard.predictive.q)])


def _random(q: WeightDistribution, name: str) -> dict[str, Any]:
    """Basis, reason, φ and entropy (nats, over all members) of one parameter."""
    scale = functional.softplus(q.raw_scale[name].detach())
    each = q.noise.entropy() or 0.0  # the constant, where there is one
    return {
        "basis": _basis(q, name),
        "why": q.why.get(name, "" if name in q.rotation else "basis='identity'"),
        "φ median": float(scale.median()), "φ min": float(scale.min()), "φ max": float(scale.max()),
        "entropy": float(scale.double().log().sum()) + scale.numel() * each,
        "basis MB": _megabytes(q.rotation[name]) if name in q.rotation else 0.0,
    }  # fmt: skip


def _basis(q: WeightDistribution, name: str) -> str:
    if name not in q.rotation:
        return "identity"
    _, blocks, pieces, *_ = q.rotation[name].shape
    parts = [f"{n} {word}" for n, word in ((blocks, "blocks"), (pieces, "pieces of its fan-in")) if n > 1]
    return ", ".join(["svd", *parts])


def _megabytes(tensor: Tensor) -> float:
    return tensor.numel() * tensor.element_size() / 1e6


def _memory_note(q: WeightDistribution) -> str:
    weights, bases = (sum(map(_megabytes, t.values())) for t in (q.mean, q.rotation))
    return f"weights {weights:.3g} MB, scales as many, bases {bases:.3g} MB"


def _calibration_notes(guard: Guard) -> list[str]:
    n = guard.calibration.scores.shape[0]
    kind = "exact: separate calibration data" if guard.calibration.exact else "approximate: `valid` also chose τ and the clip"
    return [f"false alarms {guard.calibration.false_alarms:g} on {n} calibration rows ({kind})"]


def _entropy_notes(predictive: Stochastic, clip: float | None) -> list[str]:
    q, history = predictive.q, predictive.history
    lines = [f"(1/d) Σ log φ² = {float(q.mean_log_square().mean()):.3f} with d = {q.dimension}; fit {history.stop_reason}"]
    try:
        low, high = q.mixture_entropy_bounds()
    except ConfigError as error:  # discrete noise has no entropy
        return [*lines, str(error)]
    lines.append(f"entropy of the mixture between {float(low):.4g} and {float(high):.4g} nats")
    if clip is not None and q.parameterization is None and q.noise.truncated_entropy(torch.ones(1, device="cpu")) is not None:
        left = clipped_entropy(q, clip)
        inside, ends, share = (float(part.mean()) for part in (left.continuous, left.points, left.share))
        lines.append(
            f"clipped at {clip:g}, a member keeps {inside:.4g} nats inside and {ends:.4g} at the clip, which {share:.1%} of its "
            "weights reach"
        )
    if history.max_risk and history.final_risk:
        lines.append(f"validation risk {fmean(history.final_risk):.4g}, τ {fmean(history.max_risk):.4g}")
    return lines
