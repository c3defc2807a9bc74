"""The closed form beside Kronecker-factored Laplace: same nets, same data, the eight UCI tables in both modes.

It needs OFFMAP_DATA, and laplace-torch with curvlinops-for-pytorch and backpack-for-pytorch, installed with `--no-deps` so that
they bring no other torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.evaluation import measure_separation
from offmap.random import sample
from offmap_bench.runner.base_models import models
from offmap_bench.runner.images import time_work
from offmap_bench.runner.table import format_table, percent
from offmap_bench.speed.subjects import mean_head
from offmap_bench.studies.study import Runs, Study, format_signed, mean_over
from offmap_bench.tasks.catalog import task as named
from offmap_bench.tasks.task import Task
from offmap_bench.tasks.uci import MODES, SETS

ROWS, BATCH = 2000, 200  # test rows and OOD rows at most; the linearised Laplace holds a Jacobian per row of a batch
GRID = torch.logspace(-4, 4, 17).tolist()  # prior precisions tried on validation data
HEAD, REFERENCE = "closed form, mean head", "Kronecker-Laplace, marginal likelihood, linearised"

Scorer = Callable[[Tensor], Tensor]


def cells() -> dict[str, Callable[[], Any]]:
    """All tasks, after one unmeasured run: the first fit of a process imports half of torch."""
    measure("uci/yacht/extrapolation")
    return {name: partial(measure, name) for name in (f"uci/{name}/{mode}" for mode in MODES for name in SETS)}


def measure(name: str) -> dict[str, dict[str, float]]:
    """All contestants around the first model of a task."""
    task = named(name, 0)
    net, ood = models(task, 0)[0], next(iter(task.ood.values()))
    head = mean_head(net)
    sets = [x[sample(len(x), min(len(x), ROWS), "laplace", task.name)] for x in (task.test[0], ood)]
    contestants: dict[str, Callable[[], tuple[Scorer, float]]] = {
        "closed form, whole model": lambda: fit_guard(net, task, "closed-form"),
        HEAD: lambda: fit_guard(head, task, "closed-form"),
        "refined, mean head": lambda: fit_guard(head, task, "refine"),
        REFERENCE: lambda: fit_laplace(head, task, by_evidence),
        "Kronecker-Laplace, validation NLL, linearised": lambda: fit_laplace(head, task, by_validation),
        "Kronecker-Laplace, marginal likelihood, sampled": lambda: fit_laplace(head, task, by_evidence, sampled=True),
    }
    results: dict[str, dict[str, float]] = {}
    for title, fit in contestants.items():
        (score, entropy), seconds = time_work(fit)
        scores, spent = time_work(lambda score=score: [score(x) for x in sets])
        detection = {name: measure_separation(*scores)[name] for name in ("auroc", "fpr95")}
        results[title] = {**detection, "entropy": entropy, "fit": seconds, "score": 1000 * spent / sum(map(len, sets))}
    return results


def fit_guard(net: nn.Module, task: Task, solver: Any) -> tuple[Scorer, float]:
    """The variance of the means over 50 draws, and the entropy per weight in nats."""
    guard = offmap.fit(net, task.train, task.valid, solver=solver, score="epistemic", progress=False)
    q: Any = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    return guard.score, float(q.entropy()) / q.dimension


def fit_laplace(net: nn.Module, task: Task, choose: Callable[[Any, Task], None], sampled: bool = False) -> tuple[Scorer, float]:
    """The variance of the mean, linearised or over 50 sampled nets, with noise and prior as `choose` sets them."""
    from laplace import Laplace

    warnings.simplefilter("ignore")
    x, y = task.train
    model: Any = Laplace(net, "regression", subset_of_weights="all", hessian_structure="kron")
    model.fit(DataLoader(TensorDataset(x, y.reshape(-1, 1)), batch_size=BATCH))
    choose(model, task)
    entropy = 0.5 * math.log(2 * math.pi * math.e) - float(model.log_det_posterior_precision) / (2 * model.n_params)

    @torch.no_grad()
    def score(rows: Tensor) -> Tensor:
        if sampled:
            source = torch.Generator().manual_seed(0)  # the same nets for in-distribution and OOD rows
            return model.functional_samples(rows, "nn", n_samples=50, generator=source).var(0).flatten()
        return torch.cat([model(batch, pred_type="glm")[1].flatten() for batch in rows.split(BATCH)])

    return score, entropy


def by_evidence(model: Any, task: Task, steps: int = 100) -> None:
    """Prior precision and noise together, by Adam on the log marginal likelihood, as laplace-torch's own example does."""
    prior, noise = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([prior, noise], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-model.log_marginal_likelihood(prior.exp(), noise.exp())).backward()
        optimizer.step()
    model.prior_precision, model.sigma_noise = prior.detach().exp(), noise.detach().exp()


@torch.no_grad()
def by_validation(model: Any, task: Task) -> None:
    """Noise of the training residuals; the prior precision with the lowest validation NLL of the linearised prediction."""
    (x, y), (train, targets) = (part[:ROWS] for part in task.valid), task.train
    model.sigma_noise = (model.model(train)[:, 0] - targets).square().mean().sqrt()

    def nll(precision: float) -> float:
        model.prior_precision = precision
        means, variances = zip(*(model(batch, pred_type="glm") for batch in x.split(BATCH)), strict=True)
        mean, variance = torch.cat(means).flatten(), torch.cat(variances).flatten() + model.sigma_noise.square()
        return float(0.5 * ((2 * math.pi * variance).log() + (y - mean).square() / variance).mean())

    model.prior_precision = min(GRID, key=nll)


def fields(runs: Runs) -> dict[str, Any]:
    """Means over the tables, every task, and the closed form against the best Laplace on the same head."""
    titles = list(next(iter(runs.values())))
    header = ["contestant", *(f"{measure} {mode}" for mode in MODES for measure in ("AUROC", "FPR@95"))]
    rows = [
        [title, *(percent(mean_over(runs, mode, title, key)) for mode in MODES for key in ("auroc", "fpr95")),
         *(format_signed(mean_over(runs, "", title, key)) for key in ("entropy", "fit", "score"))]
        for title in titles
    ]  # fmt: skip
    tasks = [[name.removeprefix("uci/"), *(percent(run[title]["auroc"]) for title in titles)] for name, run in runs.items()]
    lines: list[str] = []
    for mode in MODES:
        gains = [run[HEAD]["auroc"] - run[REFERENCE]["auroc"] for name, run in runs.items() if name.endswith(mode)]
        points = f"{100 * sum(gains) / len(gains):+.1f}".replace("-", "−")
        ahead = f"{sum(g > 0 for g in gains)} of {len(gains)} tables"
        lines.append(f"In {mode} it is ahead on {ahead}, by {points} points on average.")
    times = mean_over(runs, "", REFERENCE, "score") / mean_over(runs, "", HEAD, "score")
    return {
        "rows": ROWS, "grid": len(GRID), "summary": format_table([*header, "entropy per weight", "fit, s", "score, s"], rows),
        "tasks": format_table(["task", *titles], tasks), "ahead": "\n".join(lines), "times": f"{times:.0f}",
    }  # fmt: skip


STUDY = Study("laplace", cells, fields, ("offmap", "torch", "laplace-torch"))
