"""How the default score was chosen: its parts and ways to join them, on tables that are in no benchmark of the paper.

`python -m offmap_bench.studies.choice` runs what is missing in `bench/records/choice.json` and writes `docs/choice.md`; with `table`
it only writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import offmap
from offmap.guard import Guard
from offmap.io.atomic import write_whole
from offmap.metrics import auroc
from offmap.posterior.predictive import Stochastic
from offmap.scores.combine import log_uncertainty
from offmap.scores.features import layers_of
from offmap.scores.neighbours import KNNDistance, Scale
from offmap_bench.methods import deep_ensemble
from offmap_bench.paths import DOCS, RECORDS
from offmap_bench.runner.base_models import Recipe, models
from offmap_bench.studies.tables import TABLES
from offmap_bench.tasks.task import Task
from offmap_bench.tasks.uci import MODES, cut

RECORD = RECORDS / "choice.json"
PAGE = DOCS / "choice.md"
RECIPE = Recipe(training=deep_ensemble.Config(steps=4_000))
FITS: dict[str, dict[str, Any]] = {
    "refine": {},
    "refine, authors' risk": {"risk": "averaged-nll"},
    "closed form": {"solver": "closed-form"},
}
FLOORS: dict[str, dict[str, Any]] = {
    "ε = 1e-4": {"eps": 1e-4},
    "ε = 1e-3": {"eps": 1e-3},
    "ε = 1e-2": {"eps": 1e-2},
    "the rule": {},
}
EVERY = FITS | {
    f"{label}, {eps}": FITS[label] | setting for label in ("refine", "closed form") for eps, setting in FLOORS.items()
}
FAMILIAR, STRANGE = 1_000, 2_000

Parts = dict[str, Tensor]

JOINS = {
    "inputs + layers": ("inputs", "layers"),
    "u + inputs": ("u", "inputs"),
    "u + layers": ("u", "layers"),
    "u + inputs + layers (the default)": ("u", "inputs", "layers"),
    "u + inputs + last layer": ("u", "inputs", "last layer"),
    "u + inputs + layers + whitened": ("u", "inputs", "layers", "whitened"),
    "u of all members together + inputs + layers": ("u together", "inputs", "layers"),
}

INTRODUCTION = """# How the default score was chosen

Made by `python -m offmap_bench.studies.choice` from `bench/records/choice.json`: mean AUROC over twelve tables that are in no
benchmark of the paper (`bench/src/offmap_bench/tables.py`: scikit-learn's and made-up ones), cut as the UCI tables are, one seed, five nets.
All parts are logarithms, in standard deviations over in-distribution rows; joined ones are added. *u* is the mean over members of the
logarithm of each one's variance of means, *together* that of all draws of all members; *nearest row* is the plain distance;
*inputs*, *layers* and *last layer* are relative distances (`offmap.scores.distance`), *whitened* is one in decorrelated inputs.
No part counts below −1. The choice was made on earlier runs over the same tables, with other nets and splits; this page repeats
them. Tried there and left out: one to forty neighbours, other local ratios, local outlier factors, kernel densities, kriging,
maxima and sums of tail probabilities, disagreement relative to that of neighbours. UCI's seed 0 was in sight: for the number of
in-distribution rows both were looked at together, a row of its wine table led to `bounded`, and ε = 1e-3 was seen to help there before
the rule below was made. So UCI is no untouched test of the score ([UCI](uci.md)). The authors' risk, the loss of the averaged
outputs, looked better on UCI between the data ([tried there](uci-tried.md)); here it is not, so the default stays with the loss
of the prediction that is reported.
"""

FLOORED = """
## ε, the smallest amplitude that counts

The same tables with one ε for all, and with the rule that is now the default: of 1e-4 and 1e-3 the one whose closed form has the
higher entropy below τ, net by net. A large ε helps beyond the data and hurts between them, and a curve in one dimension needs a
small one (`bench/tests/paper/test_synthetic.py`). That 1e-2 is not among the choices was decided by these numbers, as its entropy is
often the highest. Entropy is (1/d) Σ log φ².

"""


def main() -> None:
    """Run the tables that the record lacks, then write the page."""
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if sys.argv[1:] != ["table"]:
        for mode in MODES:
            for name in TABLES:
                key = f"{name}/{mode}"
                done = kept.setdefault(key, {})
                if missing := {label: options for label, options in EVERY.items() if label not in done}:
                    print(key, flush=True)
                    done |= measured(cut(key, *TABLES[name](), mode, 0), mode, missing)
                    write_whole(RECORD, (json.dumps(kept, indent=1) + "\n").encode())
    PAGE.write_text(INTRODUCTION + "\n" + table(kept) + FLOORED + floor_table(kept), encoding="utf-8")
    print(f"The page is {PAGE}")


def measured(task: Task, mode: str, fits: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What each fit gives: every part and join, or for one that asks about ε what the weights alone see."""
    nets = models(task, 0, RECIPE)
    return {label: (joined if label in FITS else floored)(nets, task, mode, options) for label, options in fits.items()}


def joined(nets: Sequence[nn.Module], task: Task, mode: str, options: Mapping[str, Any]) -> dict[str, float]:
    """AUROC of every part and join."""
    guard = offmap.fit(nets, task.train, task.valid, progress=False, **options)
    whole = {"test": task.test[0], "OOD": task.ood[mode][:STRANGE], "train": task.train[0][:FAMILIAR]}
    of = {part: parts(guard, task, x, own=part == "train") for part, x in whole.items()}
    # spaces know their own scale
    scales = {n: Scale.of(v) for n, v in of["train"].items() if n.startswith(("u", "nearest", "the paper"))}
    scored = {part: {n: scales[n](v) if n in scales else v for n, v in values.items()} for part, values in of.items()}
    for values in (scored["test"], scored["OOD"]):
        values |= {name: torch.stack([values[n] for n in names]).sum(0) for name, names in JOINS.items()}
    return {n: round(float(auroc(scored["test"][n], scored["OOD"][n])), 5) for n in scored["test"]}


def floored(nets: Sequence[nn.Module], task: Task, mode: str, options: Mapping[str, Any]) -> dict[str, float]:
    """What an ε gives without any distance: the AUROC of the paper's score and of u, and the entropy."""
    guard = offmap.fit(nets, task.train, task.valid, score="paper", progress=False, **options)
    test, strange = guard.samples(task.test[0]), guard.samples(task.ood[mode][:STRANGE])
    u = [log_uncertainty(guard.likelihood, outputs, guard.predictive.members) for outputs in (test, strange)]
    paper = [guard.likelihood.score(outputs) for outputs in (test, strange)]
    assert isinstance(guard.predictive, Stochastic)
    entropy = float(guard.predictive.q.mean_log_square().mean())
    return {"the paper's score": float(auroc(*paper)), "u": float(auroc(*u)), "entropy": round(entropy, 3)}


def parts(guard: Guard, task: Task, x: Tensor, *, own: bool) -> Parts:
    """Every candidate, (B,). Rows of the training data (`own`) are their own nearest row: the next one counts."""
    assert guard.familiar is not None
    assert guard.familiar.inputs is not None
    outputs = guard.samples(x)
    members = guard.predictive.members
    distances = guard.familiar.distances(guard.predictive, x)
    last = guard.familiar.hidden[-1]
    met = layers_of(guard.predictive, x, guard.familiar.layers[-1:])[guard.familiar.layers[-1]]
    whitened, turned = decorrelated(task.train[0][: len(guard.familiar.inputs.rows)], x)
    nearest = torch.cdist(x.double(), task.train[0].double())
    return {
        "nearest row": (nearest.topk(2, largest=False).values[:, 1] if own else nearest.amin(1)).clamp_min(1e-9).log(),
        "u": log_uncertainty(guard.likelihood, outputs, members),
        "u of the first member": log_uncertainty(guard.likelihood, outputs[: guard.draws], 1),
        "u together": log_uncertainty(guard.likelihood, outputs, 1),
        "the paper's score": guard.likelihood.score(outputs).double().log(),
        **distances,
        "last layer": last(met),
        "whitened": whitened(turned),
    }


def decorrelated(rows: Tensor, x: Tensor) -> tuple[KNNDistance, Tensor]:
    """A space of the training rows along their principal directions, in units of their spread there, and x in it."""
    middle = rows.double().mean(0)
    _, s, v = torch.linalg.svd(rows.double() - middle, full_matrices=False)
    turn = v.mT / s.clamp_min(0.1 * s.max()) * len(rows) ** 0.5
    space = KNNDistance.of((rows.double() - middle) @ turn, standardized=False)
    assert space is not None
    return space, (x.double() - middle) @ turn


def table(kept: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Means over the tables, per fit and mode."""
    columns = [(fit, mode) for fit in FITS for mode in MODES]
    names = list(next(iter(kept.values()))["refine"])
    lines = [["", *(f"{fit}, {mode}" for fit, mode in columns)], ["---", *["---:"] * len(columns)]]
    for name in names:
        means = [fmean(100 * of[fit][name] for key, of in kept.items() if key.endswith(mode)) for fit, mode in columns]
        lines.append([name, *(f"{mean:.1f}" for mean in means)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\nTables: {len(kept) // 2} in both modes.\n"


def floor_table(kept: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Means over the tables, per ε; AUROC of the paper's score, then of u, then the entropy."""
    columns = [(fit, mode) for fit in ("refine", "closed form") for mode in MODES]
    lines = [["", *(f"{fit}, {mode}" for fit, mode in columns)], ["---", *["---:"] * len(columns)]]
    for name, scale in (("the paper's score", 100), ("u", 100), ("entropy", 1)):
        for eps in FLOORS:
            of = [[scale * t[f"{fit}, {eps}"][name] for key, t in kept.items() if key.endswith(mode)] for fit, mode in columns]
            lines.append([f"{name}, {eps}", *(f"{fmean(values):.1f}" for values in of)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
