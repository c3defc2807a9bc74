"""What a guard made random, and how wide: one row per parameter."""

from __future__ import annotations

from typing import Any

import torch

from offmap.errors import ConfigError
from offmap.guarding.guard import Guard
from offmap.methods.predictives import Stochastic
from offmap.table import Table


def summarize(guard: Guard) -> Table:
    """Parameter, shape, random or not, rotated or plain, φ's median and range, share of the entropy, memory of the basis."""
    notes = [
        f"threshold {guard.threshold:.4g} · clip {guard.clip} · {guard.draws} draws · {guard.predictive.members} member(s)",
        *_calibration_notes(guard),
        *guard.notes,
    ]
    if not isinstance(guard.predictive, Stochastic):
        return Table([{"predictive": type(guard.predictive).__name__, "members": guard.predictive.members}], notes)
    q, net = guard.predictive.q, guard.predictive.host.net
    scale = {n: s.detach() for n, s in q.scale().items()}
    logs = {n: float(s.double().log().sum()) for n, s in scale.items()}
    total = sum(logs.values())
    rows: list[dict[str, Any]] = []
    for name, parameter in net.named_parameters():
        row: dict[str, Any] = {"parameter": name, "shape": tuple(parameter.shape), "random": name in scale}
        if name in scale:
            s = scale[name]
            row |= {
                "basis": "svd" if name in q.rotation else "identity",
                "φ median": float(s.median()), "φ min": float(s.min()), "φ max": float(s.max()),
                "share of Σ log φ": logs[name] / total if total else 0.0,
                "basis MB": q.rotation[name].numel() * q.rotation[name].element_size() / 1e6 if name in q.rotation else 0.0,
            }  # fmt: skip
        rows.append(row)
    return Table(rows, [*notes, *_entropy_notes(guard.predictive)])


def _calibration_notes(guard: Guard) -> list[str]:
    n = guard.calibration.scores.shape[0]
    kind = "exact: separate calibration data" if guard.calibration.exact else "approximate: `valid` also chose τ and the clip"
    return [f"false alarms {guard.calibration.false_alarms:g} on {n} calibration rows ({kind})"]


def _entropy_notes(predictive: Stochastic) -> list[str]:
    q, history = predictive.q, predictive.history
    lines = [f"(1/d) Σ log φ² = {float(q.mean_log_square().mean()):.3f} with d = {q.dimension}; fit {history.ending}"]
    try:
        low, high = q.mixture_entropy_bounds()
    except ConfigError as error:  # discrete noise has no entropy
        return [*lines, str(error)]
    lines.append(f"entropy of the mixture between {float(low):.4g} and {float(high):.4g} nats")
    if history.threshold and history.final_risk:
        risk, tau = torch.tensor(history.final_risk), torch.tensor(history.threshold)
        lines.append(f"validation risk {float(risk.mean()):.4g}, τ {float(tau.mean()):.4g}")
    return lines
