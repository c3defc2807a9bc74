"""The theory on two moons: φ against amplitude, and what turns a Bayesian net into MaxWEnt (appendix C), with figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

import offmap
from offmap import Diagnosis, Guard, diagnose
from offmap.evaluation import measure_separation
from offmap.report.diagnosis import amplitude_panels, trace_panels
from offmap.report.page import Panel
from offmap_bench.demo.run import MOONS, SILENT, Bench
from offmap_bench.methods.variational import ABLATION, bnn
from offmap_bench.paths import DOCS
from offmap_bench.report.panels import map_panel, write_sheet
from offmap_bench.runner.table import format_table, percent
from offmap_bench.runner.watch import grid, view_of
from offmap_bench.studies.study import Runs, Study, format_signed

FIGURES = DOCS / "figures"
SHARED: dict[str, Any] = {
    "steps": 2000, "lr": 0.02, "entropy_weight": 1.0, "check_every": 50, "patience": None, "tolerance": "smoothed",
}  # fmt: skip
"""A few minutes instead of an hour. With the paper's λ = 10 most settings cross τ on the way up, before φ has found its shape."""

DRAWS = 20  # nets over which amplitudes are taken
MAXWENT, MAXWENT_SVD, REFINED = "MaxWEnt", "MaxWEnt-SVD", "MaxWEnt-SVD, refined"
TITLES = {
    f"{basis}_{mean}_{prior}": f"BNN, {'SVD, ' if basis == 'svd' else ''}{word} mean, σ² = {variance}"
    for basis, mean, word in (("nosvd", "unfrozen", "trained"), ("nosvd", "frozen", "frozen"), ("svd", "frozen", "frozen"))
    for prior, variance in (("small", "0.1"), ("large", "10¹⁰"))
}


def measure() -> dict[str, Any]:
    """Fit every setting around the same net; return the numbers, and write the figures."""
    bench = Bench(MOONS, MOONS.task(), 0, print)
    inputs = grid(bench.task.inputs, bench.plan.grid)
    numbers: dict[str, Any] = {}
    diagnoses: dict[str, Diagnosis] = {}
    maps: list[Panel] = []
    for title, fit in settings(bench, bench.train_members(range(1))[0]).items():
        start = time.perf_counter()
        guard = fit()
        seconds = round(time.perf_counter() - start, 1)
        diagnoses[title] = diagnose(guard, bench.task.train, draws=DRAWS)
        numbers[title] = describe(bench, guard, diagnoses[title]) | {"seconds": seconds}
        view = view_of(guard.predict(inputs, clip=None))
        svg, area = map_panel(view["entropy"], bench.task.train), percent(numbers[title]["auroc"])
        maps.append(Panel(svg, title, f"Uncertainty map of {title}", f"AUROC {area}"))
        print(title, numbers[title], flush=True)
    draw(diagnoses, maps)
    return numbers


def settings(bench: Bench, net: nn.Module) -> dict[str, Callable[[], Guard]]:
    options = SHARED | {"solver": "sgd", "rescale": False, "likelihood": bench.likelihood, "score": "paper", "progress": False}

    def fit_maxwent(basis: str) -> Guard:
        return offmap.fit(net, bench.task.train, bench.task.valid, batch_size=32, basis=basis, **options)

    def fit_bnn(name: str) -> Guard:
        shared = {("tradeoff" if key == "entropy_weight" else key): value for key, value in SHARED.items()}  # λ of the KL
        data = {"likelihood": bench.likelihood, "config": replace(ABLATION[name], **shared), "runtime": SILENT}
        return bench.guard(bnn.fit(net, bench.train, bench.valid, **data), score="paper")

    fits: dict[str, Callable[[], Guard]] = {
        MAXWENT: lambda: fit_maxwent("identity"), MAXWENT_SVD: lambda: fit_maxwent("svd"),
        REFINED: lambda: bench.maxwent([net], "svd"),
    }  # fmt: skip
    return fits | {title: lambda name=name: fit_bnn(name) for name, title in TITLES.items()}


def describe(bench: Bench, guard: Guard, diagnosis: Diagnosis) -> dict[str, Any]:
    test, (ood,), history = bench.task.test[0], bench.task.ood.values(), guard.history
    separation = measure_separation(guard.score(test), guard.score(ood))
    mean_net = {layer.name: layer.correlation for layer in diagnose(guard, bench.task.train).layers}
    layers = {
        layer.name: {
            "rank correlation": round(layer.correlation, 3), "slope": round(layer.slope, 3),
            "of the plain net": round(mean_net[layer.name], 3), "mean φ": float(f"{float(layer.scale.mean()):.3g}"),
        }
        for layer in diagnosis.layers
    }  # fmt: skip
    return {
        **{name: round(separation[name], 4) for name in ("auroc", "fpr95")}, "entropy": round(history.final_entropy[0], 3),
        "validation nll": round(history.final_risk[0], 4), "max_risk": round(history.max_risk[0], 4),
        "kept step": history.kept[0], "layers": layers,
    }  # fmt: skip


def draw(diagnoses: dict[str, Diagnosis], maps: list[Panel]) -> None:
    """Figures 5 and 6 and table 8 of the paper, as SVG."""
    amplitudes = [
        replace(panel, title=f"{title}, {panel.title}")
        for title in (MAXWENT, MAXWENT_SVD, TITLES["nosvd_unfrozen_small"])
        for panel in amplitude_panels(diagnoses[title])[1:]
    ]
    traces = [
        replace(panel, title=f"{title}: {panel.title.lower()}")
        for title in (MAXWENT, MAXWENT_SVD)
        for panel in trace_panels(diagnoses[title].history)
    ]
    for name, panels in (("amplitude", amplitudes), ("moons-ablation", maps), ("traces", traces)):
        write_sheet(FIGURES / f"{name}.svg", panels, 3)


def fields(runs: Runs) -> dict[str, Any]:
    """Both tables, and the AUROC of the Bayesian settings by their names."""
    (numbers,) = runs.values()
    ablation = [
        [title, percent(n["auroc"]), percent(n["fpr95"]), format_signed(n["entropy"]), f"{n['validation nll']:.3f}",
         f"{n['max_risk']:.3f}", str(n["kept step"])]
        for title, n in numbers.items()
    ]  # fmt: skip
    keys = ("rank correlation", "slope", "of the plain net")
    layers = [
        [title, *("{} ({}; {})".format(*(format_signed(layer[key]) for key in keys)) for layer in n["layers"].values())]
        for title, n in numbers.items()
    ]
    names = list(next(iter(numbers.values()))["layers"])
    head = ["setting", "AUROC", "FPR@95", "entropy (1/d) Σ log φ²", "validation NLL", "τ", "kept step"]
    return {
        **SHARED, "draws": DRAWS, "ablation": format_table(head, ablation),
        "layers": format_table(["setting", *(f"`{name}`" for name in names)], layers),
        **{name: percent(numbers[title]["auroc"]) for name, title in TITLES.items()},
    }  # fmt: skip


STUDY = Study("theory", lambda: {"two moons": measure}, fields)
