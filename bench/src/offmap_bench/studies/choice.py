"""How the default score was chosen: its terms and ways to combine them, on tables that are in no benchmark of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import offmap
from offmap.guard import Guard
from offmap.metrics import auroc
from offmap.posterior.predictive import Stochastic
from offmap.scores.combine import log_uncertainty
from offmap.scores.features import layers_of
from offmap.scores.neighbours import KNNDistance, Scale
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner.base_models import Recipe, models
from offmap_bench.studies.study import Runs, Study, markdown, mean_over
from offmap_bench.studies.tables import TABLES
from offmap_bench.tasks.task import Task
from offmap_bench.tasks.uci import MODES, cut

RECIPE = Recipe(training=deep_ensemble.Config(steps=4_000))
FITS: dict[str, dict[str, Any]] = {
    "refine": {},
    "refine, authors' risk": {"risk": "averaged-nll"},
    "closed form": {"solver": "closed-form"},
}
EPSILONS: dict[str, dict[str, Any]] = {f"ε = 1e-{k}": {"eps": 10.0**-k} for k in (4, 3, 2)} | {"the rule": {}}
FITTED, SCORED = 1_000, 2_000
"""Training rows that give the scales, and OOD rows that are scored."""

COMBINED = {
    "inputs + layers": ("inputs", "layers"),
    "u + inputs": ("u", "inputs"),
    "u + layers": ("u", "layers"),
    "u + inputs + layers (the default)": ("u", "inputs", "layers"),
    "u + inputs + last layer": ("u", "inputs", "last layer"),
    "u + inputs + layers + whitened": ("u", "inputs", "layers", "whitened"),
    "u of all members together + inputs + layers": ("u together", "inputs", "layers"),
}


def measure(name: str, mode: str) -> dict[str, dict[str, float]]:
    """AUROC of every term and combination for each fit; for each ε, of what the weights alone say."""
    task = cut(f"{name}/{mode}", *TABLES[name](), mode, 0)
    nets = models(task, 0, RECIPE)
    found = {label: measure_terms(nets, task, mode, options) for label, options in FITS.items()}
    for label in ("refine", "closed form"):
        for eps, option in EPSILONS.items():
            found[f"{label}, {eps}"] = measure_epsilon(nets, task, mode, FITS[label] | option)
    return found


def measure_terms(nets: Sequence[nn.Module], task: Task, mode: str, options: dict[str, Any]) -> dict[str, float]:
    """AUROC of every term and combination."""
    guard = offmap.fit(nets, task.train, task.valid, progress=False, **options)
    sets = {"test": task.test[0], "OOD": task.ood[mode][:SCORED], "train": task.train[0][:FITTED]}
    terms = {part: terms_of(guard, task, x, training=part == "train") for part, x in sets.items()}
    # distances have scales of their own
    scales = {n: Scale.of(v) for n, v in terms["train"].items() if n.startswith(("u", "nearest", "the paper"))}
    test, ood = ({n: scales[n](v) if n in scales else v for n, v in terms[part].items()} for part in ("test", "OOD"))
    for values in (test, ood):
        values |= {name: torch.stack([values[n] for n in names]).sum(0) for name, names in COMBINED.items()}
    return {name: round(float(auroc(test[name], ood[name])), 5) for name in test}


def measure_epsilon(nets: Sequence[nn.Module], task: Task, mode: str, options: dict[str, Any]) -> dict[str, float]:
    """AUROC of the paper's score and of u, without any distance, and the entropy."""
    guard = offmap.fit(nets, task.train, task.valid, score="paper", progress=False, **options)
    outputs = guard.samples(task.test[0]), guard.samples(task.ood[mode][:SCORED])
    u = [log_uncertainty(guard.likelihood, o, guard.predictive.members) for o in outputs]
    paper = [guard.likelihood.score(o) for o in outputs]
    assert isinstance(guard.predictive, Stochastic)
    entropy = float(guard.predictive.q.mean_log_square().mean())
    return {"the paper's score": float(auroc(*paper)), "u": float(auroc(*u)), "entropy": round(entropy, 3)}


def terms_of(guard: Guard, task: Task, x: Tensor, *, training: bool) -> dict[str, Tensor]:
    """Every candidate, (B,). Training rows are their own nearest row: the next one counts."""
    reference = guard.familiar
    assert reference is not None
    assert reference.inputs is not None
    outputs, members, last = guard.samples(x), guard.predictive.members, reference.layers[-1]
    whitened, rotated = whiten(task.train[0][: len(reference.inputs.rows)], x)
    nearest = torch.cdist(x.double(), task.train[0].double())
    return {
        "nearest row": (nearest.topk(2, largest=False).values[:, 1] if training else nearest.amin(1)).clamp_min(1e-9).log(),
        "u": log_uncertainty(guard.likelihood, outputs, members),
        "u of the first member": log_uncertainty(guard.likelihood, outputs[: guard.draws], 1),
        "u together": log_uncertainty(guard.likelihood, outputs, 1),
        "the paper's score": guard.likelihood.score(outputs).double().log(),
        **reference.distances(guard.predictive, x),
        "last layer": reference.hidden[-1](layers_of(guard.predictive, x, [last])[last]),
        "whitened": whitened(rotated),
    }


def whiten(rows: Tensor, x: Tensor) -> tuple[KNNDistance, Tensor]:
    """The distance along the principal directions of the rows, in units of their spread there, and x in these coordinates."""
    mean = rows.double().mean(0)
    _, s, v = torch.linalg.svd(rows.double() - mean, full_matrices=False)
    rotation = v.mT / s.clamp_min(0.1 * s.max()) * len(rows) ** 0.5
    distance = KNNDistance.of((rows.double() - mean) @ rotation, standardized=False)
    assert distance is not None
    return distance, (x.double() - mean) @ rotation


def fields(runs: Runs) -> dict[str, Any]:
    """Means over the tables: terms per fit and mode, and what each ε gives."""

    def table(fits: Sequence[str], rows: dict[str, tuple[str, str, float]]) -> str:
        columns = [(fit, mode) for fit in fits for mode in MODES]
        body = [
            [label, *(f"{factor * mean_over(runs, mode, fit + suffix, key):.1f}" for fit, mode in columns)]
            for label, (suffix, key, factor) in rows.items()
        ]
        return markdown(["", *(f"{fit}, {mode}" for fit, mode in columns)], body)

    scales = {"the paper's score": 100, "u": 100, "entropy": 1}
    by_eps = {f"{key}, {eps}": (f", {eps}", key, scale) for key, scale in scales.items() for eps in EPSILONS}
    return {
        "joins": table(list(FITS), {name: ("", name, 100) for name in next(iter(runs.values()))["refine"]}),
        "epsilons": table(("refine", "closed form"), by_eps),
        "count": len(runs) // 2,
    }


STUDY = Study("choice", lambda: {f"{name}/{mode}": partial(measure, name, mode) for mode in MODES for name in TABLES}, fields)
