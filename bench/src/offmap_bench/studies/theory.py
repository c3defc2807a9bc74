"""What the theory says, seen on two moons: φ against amplitude, and what turns a Bayesian net into MaxWEnt (appendix C).

`python -m offmap_bench.studies.theory` fits all, keeps a record and writes `docs/theory.md` with its figures; `python -m offmap_bench.studies.theory
table` only writes the page.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from offmap.diagnosis import Diagnosis, diagnose
from offmap.evaluation import detection
from offmap.fit import fit
from offmap.guard import Guard
from offmap.report.diagnosis import amplitude_panels, trace_panels
from offmap.report.figures import Panel
from offmap_bench.demo.plans import MOONS
from offmap_bench.demo.run import SILENT, Bench
from offmap_bench.methods import bnn
from offmap_bench.paths import DOCS, RECORDS
from offmap_bench.report.panels import map_panel, write_sheet
from offmap_bench.runner.views import grid, view
from offmap_bench.tasks.synthetic import SQUARE

RECORD = RECORDS / "theory.json"
PAGE = DOCS / "theory.md"
FIGURES = DOCS / "figures"

STEPS, RATE, TRADEOFF = 2000, 0.02, 1.0
"""A few minutes instead of an hour. With the paper's λ = 10 most settings cross τ on the way up, before φ has found its shape."""

SHARED: dict[str, Any] = {
    "steps": STEPS, "lr": RATE, "entropy_weight": TRADEOFF, "check_every": 50, "patience": None, "tolerance": "smoothed",
}  # fmt: skip
DRAWS = 20
"""Drawn nets over which amplitudes are taken."""

MAXWENT, MAXWENT_SVD, REFINED = "MaxWEnt", "MaxWEnt-SVD", "MaxWEnt-SVD, refined"
TITLES = {
    "nosvd_unfrozen_small": "BNN, trained mean, σ² = 0.1", "nosvd_unfrozen_large": "BNN, trained mean, σ² = 10¹⁰",
    "nosvd_frozen_small": "BNN, frozen mean, σ² = 0.1", "nosvd_frozen_large": "BNN, frozen mean, σ² = 10¹⁰",
    "svd_frozen_small": "BNN, SVD, frozen mean, σ² = 0.1", "svd_frozen_large": "BNN, SVD, frozen mean, σ² = 10¹⁰",
}  # fmt: skip


def main() -> None:
    """Fit all settings unless only the page is asked for."""
    torch.set_num_threads(1)
    if sys.argv[1:] != ["table"]:
        measure()
    write(json.loads(RECORD.read_text(encoding="utf-8")))
    print(f"The page is {PAGE}")


def measure() -> None:
    """Every setting around the same plain net; numbers to the record, figures to their folder."""
    bench = Bench(MOONS, MOONS.task(), 0, print)
    net = bench.plain(range(1))[0]
    runs: dict[str, Any] = {}
    diagnoses: dict[str, Diagnosis] = {}
    maps: list[Panel] = []
    for title, make in settings(bench, net).items():
        start = time.perf_counter()
        guard = make()
        seconds = time.perf_counter() - start
        diagnoses[title] = diagnose(guard, bench.task.train, draws=DRAWS)
        runs[title] = numbers(bench, guard, diagnoses[title]) | {"seconds": round(seconds, 1)}
        maps.append(uncertainty_map(bench, guard, title, runs[title]))
        print(title, runs[title], flush=True)
    versions = {name: version(name) for name in ("offmap", "torch")}
    kept = {
        "task": "two moons",
        "seed": 0,
        "steps": STEPS,
        "lr": RATE,
        "entropy_weight": TRADEOFF,
        "runs": runs,
        "versions": versions,
    }
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(diagnoses, maps)


def settings(bench: Bench, net: nn.Module) -> dict[str, Any]:
    """Functions that fit, by title."""
    made: dict[str, Any] = {}
    options = SHARED | {"solver": "sgd", "widen": False, "likelihood": bench.law, "score": "paper", "progress": False}
    for title, basis in ((MAXWENT, "identity"), (MAXWENT_SVD, "svd")):
        made[title] = lambda basis=basis: fit(net, bench.task.train, bench.task.valid, batch_size=32, basis=basis, **options)
    made[REFINED] = lambda: bench.maxwent([net], "svd")
    for name, title in TITLES.items():
        config = replace(bnn.ABLATION[name], **SHARED)
        made[title] = lambda config=config: bench.guard(
            bnn.fit(net, bench.train, bench.valid, likelihood=bench.law, config=config, runtime=SILENT)
        )
    return made


def numbers(bench: Bench, guard: Guard, diagnosis: Diagnosis) -> dict[str, Any]:
    """What is kept of one fit."""
    history = guard.history
    strange = next(iter(bench.task.ood.values()))
    plain = {layer.name: layer.correlation for layer in diagnose(guard, bench.task.train).layers}
    found = detection(guard.score(bench.task.test[0]), guard.score(strange))
    return {
        "auroc": round(found["auroc"], 4),
        "fpr95": round(found["fpr95"], 4),
        "entropy": round(history.final_entropy[0], 3),
        "validation nll": round(history.final_risk[0], 4),
        "threshold": round(history.max_risk[0], 4),
        "kept step": history.kept[0],
        "layers": {
            layer.name: {"rank correlation": round(layer.correlation, 3), "slope": round(layer.slope, 3),
                         "of the plain net": round(plain[layer.name], 3), "mean φ": float(f"{float(layer.scale.mean()):.3g}")}
            for layer in diagnosis.layers
        },
    }  # fmt: skip


def uncertainty_map(bench: Bench, guard: Guard, title: str, found: dict[str, Any]) -> Panel:
    """The entropy of the mean prediction around the moons, unclipped."""
    x, y = (t.numpy() for t in bench.task.train)
    inputs = grid(bench.task.inputs, bench.plan.grid)
    assert inputs is not None
    values = view(guard, inputs, None).map()
    svg = map_panel(values, half=SQUARE, points=[x[y == c] for c in (0, 1)], top=0.6931)
    return Panel(svg, title, f"Uncertainty map of {title}", f"AUROC {100 * found['auroc']:.1f}")


def draw(diagnoses: dict[str, Diagnosis], maps: list[Panel]) -> None:
    """Figures 5 and 6 and table 8 of the paper, as SVG."""
    usual = TITLES["nosvd_unfrozen_small"]
    rows = [
        replace(panel, title=f"{title}, {panel.title}")
        for title in (MAXWENT, MAXWENT_SVD, usual)
        for panel in amplitude_panels(diagnoses[title])[1:]
    ]
    write_sheet(FIGURES / "amplitude.svg", rows, 3)
    write_sheet(FIGURES / "moons-ablation.svg", maps, 3)
    traces = [
        replace(p, title=f"{title}: {p.title.lower()}")
        for title in (MAXWENT, MAXWENT_SVD)
        for p in trace_panels(diagnoses[title].history)
    ]
    write_sheet(FIGURES / "traces.svg", traces, 3)


TEXT = """# Theory, seen

Made by `python -m offmap_bench.studies.theory` from `bench/records/theory.json`: two moons (200 + 50 points), one 3 × 100 ReLU net,
and around it MaxWEnt and the six Bayesian settings of the paper's appendix C. All take {steps} Adam steps at rate {rate} with
λ = {tradeoff:g}, batch 32, from a constant φ: softplus(−5), for SVD softplus(−10). The paper takes 50,000 steps at 0.001 with
λ = 10; in so few steps that λ crosses τ on the way up, before φ has found its shape. "Refined" is this library's default solver.
Everyone keeps its last state with a validation NLL at or below τ (with one more row at chance: the net fits all 50 points). The
OOD points lie on [−3, 3]², more than 0.5 from every training point. One seed: directions, not digits; and λ = 1 was chosen
among 0.1, 1 and 10 with these AUROCs in sight, so they show a mechanism and are no benchmark.

## What turns a Bayesian net into MaxWEnt

{ablation}

![Uncertainty maps](figures/moons-ablation.svg)

`offmap_bench.methods.bnn` is the same weight distribution as MaxWEnt with another objective, E[NLL] + λ·KL(q ‖ prior)/d: divided by
the n training rows, the paper's weight 10·n/d on the KL is λ = 10. A mean frozen at the trained weights has its prior there, a
trained one (it starts there too) at 0. With σ² → ∞ and a frozen mean, the KL is MaxWEnt's entropy term with g = log.

{verdict}

## φ is inverse to the amplitude of the activation

`offmap.diagnose(guard, train, draws={draws})` holds the mean φ of each layer against the root mean square of its inputs on the
training data and over drawn nets, along the basis (SVD) or input by input. But for "refined", nothing of that goes into the fits,
which start from one φ for all. Rank correlation ρ; in brackets the slope of log φ over log amplitude, which is −1 at the
theory's optimum, and ρ with the amplitudes of the plain net (`draws=0`):

{layers}

![Mean φ over amplitude](figures/amplitude.svg)

As in the paper's figure 6 the relation is clear in the hidden layers of MaxWEnt and hardly there in the usual Bayesian net
(trained mean, narrow prior), whose φ are the prior's. Which amplitudes are meant matters: noise in one layer makes the next one
meet directions that the plain net never uses, and the SVD fits, which look unshaped beside the plain net's amplitudes, have a
slope near −1 beside those of drawn nets, of which the theory speaks. The last layer, one output wide, follows it least. Two
cautions: the closed form is inverse to the plain net's amplitudes by construction, and "refined" starts from it, so that there ρ
says that gradient steps keep the order, no more; and the first layer has two inputs, so that its ρ is the order of two numbers.

## Entropy, risk and uncertainty while fitting

![Traces](figures/traces.svg)

Risk with τ (dashed) and the step that was kept (dotted), entropy (1/d) Σ log φ², and the mean entropy of predictions on
validation inputs. `offmap.report.diagnosis.write_diagnosis(diagnosis, path)` draws the same for any guard on one HTML page.
"""


def write(kept: dict[str, Any]) -> None:
    """The page from the record."""
    runs: dict[str, Any] = kept["runs"]
    head = ["setting", "AUROC", "FPR@95", "entropy (1/d) Σ log φ²", "validation NLL", "τ", "kept step"]
    ablation = [
        [title, f"{100 * r['auroc']:.1f}", f"{100 * r['fpr95']:.1f}", signed(r["entropy"]), f"{r['validation nll']:.3f}",
         f"{r['threshold']:.3f}", str(r["kept step"])]
        for title, r in runs.items()
    ]  # fmt: skip
    names = list(next(iter(runs.values()))["layers"])
    layers = [[title, *map(shape, r["layers"].values())] for title, r in runs.items()]
    filled = TEXT.format(
        steps=f"{kept['steps']:,}", lr=kept["lr"], entropy_weight=kept["entropy_weight"], ablation=markdown(head, ablation),
        layers=markdown(["setting", *(f"`{n}`" for n in names)], layers), verdict=verdict(runs), draws=DRAWS,
    )  # fmt: skip
    PAGE.write_text(filled, encoding="utf-8")


def verdict(runs: dict[str, Any]) -> str:
    """The paper's three findings, and whether they show here."""
    area = {name: 100 * runs[title]["auroc"] for name, title in TITLES.items()}

    def change(before: str, after: str) -> str:
        return f"{area[before]:.1f} → {area[after]:.1f}"

    return f"""The paper's findings on UCI tables, and here (AUROC):

- a wide prior instead of a narrow one: {change("nosvd_unfrozen_small", "nosvd_unfrozen_large")} (trained mean),
  {change("nosvd_frozen_small", "nosvd_frozen_large")} (frozen), {change("svd_frozen_small", "svd_frozen_large")} (SVD);
- a frozen mean instead of a trained one: {change("nosvd_unfrozen_small", "nosvd_frozen_small")} (narrow prior),
  {change("nosvd_unfrozen_large", "nosvd_frozen_large")} (wide);
- the SVD basis: {change("nosvd_frozen_small", "svd_frozen_small")} (narrow prior),
  {change("nosvd_frozen_large", "svd_frozen_large")} (wide)."""


def shape(layer: dict[str, float]) -> str:
    """How φ of one layer goes with amplitude."""
    return "{} ({}; {})".format(*(signed(layer[key]) for key in ("rank correlation", "slope", "of the plain net")))


def signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
