"""The promises with a number, measured: false alarms, coverage and p-values of whole fits on fresh rows of real data."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.ensemble import RandomForestRegressor
from torch import Tensor, nn

import offmap
from offmap._types import Inputs
from offmap.data.batch import take_rows
from offmap.detector import Detector
from offmap.integrations.sklearn import OffmapClassifier, OffmapDetector, OffmapRegressor
from offmap.random import generator
from offmap_bench.runner.table import format_table
from offmap_bench.studies.study import Runs, Study, significant
from offmap_bench.tasks import tabular, uci
from offmap_bench.tasks.images import array
from offmap_bench.tasks.task import data_root

SIZES = (20, 100, 300, 1000, 5000)
"""Rows in `valid`, or in `calibrate`."""

TEST, LEVEL = 3000, 0.9
P_LEVELS = (0.1, 0.25, 0.5, 0.75)
BLOCK = 20  # seeds of one cell of the record
WORDS = 1000

Pair = tuple[Any, Tensor]
Verdict = tuple[Tensor, Tensor, Tensor | None]  # flagged rows, p-values, covered rows


@cache
def protein() -> Pair:
    """Regression: 45,730 rows of 9 numbers."""
    table = torch.as_tensor(uci.read("protein")).float()
    table = (table - table.mean(0)) / table.std(0)
    return table[:, :-1], table[:, -1]


@cache
def electricity() -> Pair:
    """Two classes: 45,312 rows of 6 numbers, which are shuffled here, so that they are exchangeable."""
    columns = tabular.read(data_root("tables") / "tables" / "elec2.csv.gz")
    table = torch.stack([torch.as_tensor(np.asarray(values, dtype=np.float32)) for values in columns.values()], 1)
    return table[:, :-1], table[:, -1].long()


@cache
def digits() -> Pair:
    """Ten classes: 20,000 images of MNIST."""
    path = data_root("images") / "images" / "mnist.npz"
    images = torch.from_numpy(array(path, "x_train", 20_000)).float().unsqueeze(1) / 255
    return images, torch.from_numpy(array(path, "y_train", 20_000)).long()


@cache
def intents() -> Pair:
    """150 classes: 22,500 questions as ids of words, padded."""
    with gzip.open(data_root("text") / "text" / "clinc150_full.json.gz") as file:
        data = json.load(file)
    pairs = [pair for part in ("train", "val", "test") for pair in data[part]]
    counts = Counter(word for text, _ in pairs for word in text.split())
    words = {word: i for i, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}  # 0 is padding, 1 any other word
    labels = {label: i for i, label in enumerate(sorted({label for _, label in pairs}))}
    ids = torch.zeros(len(pairs), 12, dtype=torch.long)
    for row, (text, _) in zip(ids, pairs, strict=True):
        known = torch.tensor([words.get(word, 1) for word in text.split()[:12]])
        row[: len(known)] = known
    return {"ids": ids, "attention_mask": (ids > 0).long()}, torch.tensor([labels[label] for _, label in pairs])


class Words(nn.Module):
    """The mean of the embeddings of words, and a hidden layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(2).to(self.embedding.weight.dtype)
        return self.head((self.embedding(ids) * mask).sum(1) / mask.sum(1).clamp_min(1))


def dense(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, outputs))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )


TABLE, CLASSES = partial(dense, 9, 1), partial(dense, 6, 2)


def train(build: Callable[[], nn.Module], rows: Pair, steps: int, seed: int) -> nn.Module:
    """Train a model by Adam on all of its rows: none is kept back to stop at."""
    torch.manual_seed(seed)
    model, (x, y) = build(), rows
    optimizer, source = torch.optim.Adam(model.parameters(), 5e-3), generator(seed, "batches")
    for _ in range(steps):
        batch = torch.randint(len(y), (64,), generator=source)
        inputs = take_rows(x, batch)
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = F.cross_entropy(outputs, y[batch]) if outputs.shape[1] > 1 else F.mse_loss(outputs.squeeze(1), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@dataclass(frozen=True)
class Case:
    """Data, how many rows train a model, and which; `judge` makes verdicts of new rows, given rows to fit with.

    Rows are (training, validation, calibration, new); verdicts come by the name of how the calibration was done.
    """

    data: Callable[[], Pair]
    build: Callable[[], nn.Module]
    judge: Callable[[list[nn.Module], Pair, Pair, Pair, Pair], Iterator[tuple[str, Verdict]]]
    rows: int = 500
    steps: int = 300
    members: int = 1
    seeds: int = 40
    sizes: tuple[int, ...] = SIZES


def verdict(detector: Detector, new: Pair) -> Verdict:
    """Ask a detector, and whether its 90 % interval or set holds the targets, if it has one."""
    x, y = new
    result = detector(x)
    if result.mean is not None and result.std is not None:
        interval = detector.interval(x, LEVEL)
        return result.ood, result.p_value, (interval.lower <= y) & (y <= interval.upper)
    sets = None if isinstance(detector, offmap.DistilledGuard | offmap.PostHocDetector) else detector.prediction_set(x, LEVEL)
    return result.ood, result.p_value, None if sets is None else sets.gather(1, y.unsqueeze(1)).squeeze(1)


def judge_guard(
    models: list[nn.Module], rows: Pair, valid: Pair, fresh: Pair, new: Pair, **options: Any
) -> Iterator[tuple[str, Verdict]]:
    guard = offmap.fit(models, rows, valid, progress=False, **options)
    yield "valid", verdict(guard, new)
    yield "calibrate", verdict(guard.calibrate(fresh), new)


def judge_seen(models: list[nn.Module], rows: Pair, valid: Pair, fresh: Pair, new: Pair) -> Iterator[tuple[str, Verdict]]:
    """A model that has seen all rows there are: a tenth of them calibrates, which promises nothing."""
    model = train(TABLE, valid, 300, len(valid[1]))
    result = offmap.fit(model, valid, progress=False)(new[0])
    yield "a tenth of `train`", (result.ood, result.p_value, None)


def judge_distilled(models: list[nn.Module], rows: Pair, valid: Pair, fresh: Pair, new: Pair) -> Iterator[tuple[str, Verdict]]:
    guard = offmap.fit(models, rows, valid, solver="closed-form", draws=20, progress=False)
    head = offmap.distill(guard, rows, valid, rows=2000)
    for name, detector in (("valid", head), ("calibrate", head.calibrate(fresh))):
        result = detector(new[0])
        yield name, (result.ood, result.p_value, None)


def judge_exported(models: list[nn.Module], rows: Pair, valid: Pair, fresh: Pair, new: Pair) -> Iterator[tuple[str, Verdict]]:
    """Verdicts by ONNX Runtime: as exported by default, and with a fifth of the draws."""
    import onnxruntime

    guard = offmap.fit(models, rows, valid, solver="closed-form", progress=False)
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("50 draws", {}), ("10 draws", {"draws": 10})):
            path = Path(folder, "guard.onnx")
            guard.export(path, rows[0][:2], **options)
            session = onnxruntime.InferenceSession(path)
            wanted = ["ood", "p_value"]
            ood, p_value = session.run(wanted, {session.get_inputs()[0].name: new[0].numpy()})
            yield name, (torch.as_tensor(ood), torch.as_tensor(p_value), None)


def judge_detectors(models: list[nn.Module], rows: Pair, valid: Pair, fresh: Pair, new: Pair) -> Iterator[tuple[str, Verdict]]:
    for name in ("energy", "knn", "mds"):
        result = offmap.detect(models[0], rows, valid, method=name)(new[0])
        yield name, (result.ood, result.p_value, None)


@dataclass(frozen=True)
class Forest:
    """The trees of a forest as draws."""

    trees: Any
    members: int = 1

    def outputs(self, x: Inputs, draws: int, *, clip: float | None = None, seed: int = 0) -> Tensor:
        values = np.stack([tree.predict(np.asarray(x)) for tree in self.trees[:draws]])
        return torch.as_tensor(values).float().unsqueeze(2)


def judge_forest(models: list[nn.Module], rows: Pair, valid: Pair, fresh: Pair, new: Pair) -> Iterator[tuple[str, Verdict]]:
    trees = RandomForestRegressor(50, min_samples_leaf=5, random_state=0).fit(*rows).estimators_
    guard = offmap.guard(Forest(trees), valid, train=rows, clip=None)
    yield "valid", verdict(guard, new)
    yield "calibrate", verdict(guard.calibrate(fresh), new)


def judge_estimators(models: list[nn.Module], rows: Pair, valid: Pair, fresh: Pair, new: Pair) -> Iterator[tuple[str, Verdict]]:
    """Estimators that get as many rows as there are in `valid`, train their own nets and calibrate on rows of these."""
    x, y = valid[0].numpy(), valid[1].numpy()
    kinds = {"OffmapDetector": OffmapDetector} | (
        {"OffmapRegressor": OffmapRegressor} if valid[1].is_floating_point() else {"OffmapClassifier": OffmapClassifier}
    )
    for name, kind in kinds.items():
        estimator = kind(steps=300, random_state=0).fit(x, *(() if name == "OffmapDetector" else (y,)))
        if name == "OffmapDetector":
            flagged = torch.as_tensor(estimator.predict(new[0].numpy()) == -1)
            yield name, (flagged, torch.empty(0), None)
        elif math.isfinite(estimator.guard_.threshold):
            yield name, verdict(estimator.guard_, new)


CASES = {
    "regression": Case(protein, TABLE, judge_guard, seeds=120),
    "classification": Case(electricity, CLASSES, judge_guard, seeds=120),
    "images": Case(digits, convolutional, judge_guard, rows=1000),
    "tokens": Case(
        intents,
        partial(Words, 150),
        partial(judge_guard, solver="closed-form"),
        rows=3000,
        steps=600,
        seeds=40,
        sizes=(20, 100, 1000),
    ),
    "ensemble of 3": Case(protein, TABLE, judge_guard, members=3),
    "forest, trees as draws": Case(protein, TABLE, judge_forest, steps=0, seeds=100),
    "post-hoc detectors": Case(electricity, CLASSES, judge_detectors, seeds=100),
    "no unseen rows": Case(protein, TABLE, judge_seen, steps=0, sizes=(300, 1000, 5000)),
    "distilled": Case(protein, TABLE, judge_distilled),
    "exported": Case(protein, TABLE, judge_exported, seeds=40, sizes=(20, 300)),
    "exported classifier": Case(electricity, CLASSES, judge_exported, seeds=20, sizes=(20, 300)),
    "estimators, regression": Case(protein, TABLE, judge_estimators, steps=0, sizes=(100, 300, 1000)),
    "estimators, classification": Case(electricity, CLASSES, judge_estimators, steps=0, sizes=(100, 300, 1000)),
}


def measure(name: str, seed: int) -> dict[tuple[str, int], dict[str, float]]:
    """One seed: other training, validation, calibration and new rows, and other models; shares by (way, rows)."""
    torch.set_num_threads(1)
    case = CASES[name]
    x, y = case.data()
    order = torch.randperm(len(y), generator=generator(seed, name))

    def pick(start: int, stop: int) -> Pair:
        return take_rows(x, order[start:stop]), y[order[start:stop]]

    rows = pick(0, case.rows)
    models = [train(case.build, rows, case.steps, 1000 * seed + member) for member in range(case.members)]
    new, shares = pick(len(y) - TEST, len(y)), dict[tuple[str, int], dict[str, float]]()
    for size in case.sizes:
        first = case.rows + size
        for way, (ood, p_value, covered) in case.judge(models, rows, pick(case.rows, first), pick(first, first + size), new):
            values = {"alarms": ood} | {f"p{level}": p_value <= level for level in P_LEVELS if len(p_value)}
            values |= {} if covered is None else {"covered": covered}
            shares[way, size] = {key: float(flags.double().mean()) for key, flags in values.items()}
    return shares


def measure_block(name: str, block: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Measure some seeds: {way: {rows: {share: [mean, standard deviation]}}}."""
    seeds = [measure(name, seed) for seed in range(BLOCK * block, BLOCK * (block + 1))]
    result: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (way, size), shares in seeds[0].items():
        columns = {key: [seed[way, size][key] for seed in seeds] for key in shares}
        result.setdefault(way, {})[str(size)] = {key: significant([fmean(v), stdev(v)]) for key, v in columns.items()}
    return result


def collect(runs: Runs) -> dict[tuple[str, str, int], dict[str, tuple[float, float]]]:
    """Return the number of seeds, and mean and half of the 95 % interval of every share, in per cent, by case, way and rows."""
    blocks: dict[tuple[str, str, int], dict[str, list[list[float]]]] = {}
    for cell, run in runs.items():
        for way, sizes in run.items():
            for size, shares in sizes.items():
                for key, pair in shares.items():
                    blocks.setdefault((cell.rpartition(",")[0], way, int(size)), {}).setdefault(key, []).append(pair)
    result: dict[tuple[str, str, int], dict[str, tuple[float, float]]] = {}
    for place in sorted(blocks, key=lambda place: list(CASES).index(place[0])):
        result[place] = {"seeds": (BLOCK * len(blocks[place]["alarms"]), 0.0)}
        for key, pairs in blocks[place].items():
            mean, n = fmean(mean for mean, _ in pairs), BLOCK * len(pairs)
            variance = fmean(deviation**2 + (value - mean) ** 2 for value, deviation in pairs)
            result[place][key] = (100 * mean, 196 * math.sqrt(variance / n))
    return result


def exceptions(figures: dict[tuple[str, str, int], dict[str, tuple[float, float]]]) -> dict[str, tuple[int, list[str]]]:
    """Count the figures of each promise, and name those whose 95 % interval lies on the wrong side of what is promised."""
    result: dict[str, tuple[int, list[str]]] = {}
    for (name, way, size), shares in figures.items():
        for key, (mean, error) in shares.items():
            if key != "seeds":
                promise, bound = {"alarms": ("false alarms", 5.0), "covered": ("coverage", -100 * LEVEL)}.get(
                    key, ("p-values", 100 * float(key[1:]) if key[0] == "p" else 0.0)
                )
                count, names = result.setdefault(promise, (0, []))
                wrong = (mean if bound > 0 else -mean) - error > bound
                shown = f"{name}, {way}, {size:,} rows ({mean:.1f} ± {error:.1f})"
                result[promise] = (count + 1, [*names, shown] if wrong else names)
    return result


def fields(runs: Runs) -> dict[str, Any]:
    """One line per case, way and number of rows."""
    lines: list[list[str]] = []
    figures = collect(runs)
    for (name, way, size), shares in figures.items():
        values = {key: f"{mean:.1f} ± {error:.1f}" for key, (mean, error) in shares.items()}
        p_values = ", ".join(f"{shares[key][0]:.0f}" for key in shares if key.startswith("p"))
        lines.append([name, way, f"{size:,}", f"{shares['seeds'][0]}", values["alarms"], values.get("covered", ""), p_values])
    head = ["what", "calibrated by", "rows", "seeds", "false alarms", "covered", "p-values ≤ 10, 25, 50, 75 %"]
    verdict = "\n".join(
        f"- **{promise.capitalize()}**: {count - len(names)} of {count} figures hold within their 95 % interval"
        + (f"; not: {'; '.join(names)}." if names else ".")
        for promise, (count, names) in exceptions(figures).items()
    )
    return {"table": format_table(head, lines), "verdict": verdict, "new": f"{TEST:,}", "ceiling": f"{100 * 19 / 21:.1f}"}


STUDY = Study(
    "promises",
    lambda: {
        f"{name}, {block}": partial(measure_block, name, block)
        for name, case in CASES.items()
        for block in range(case.seeds // BLOCK)
    },
    fields,
)
