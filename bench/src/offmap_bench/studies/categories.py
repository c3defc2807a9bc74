"""Tables of words and numbers, one-hot encoded as users do: does a shift of one number drown among a hundred indicators?

Two real tables, bike rentals and electricity prices; columns of few values, or cut into bins of equal width, are words, of which
some have a share below 0.1 %. It needs OFFMAP_DATA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.compose import make_column_transformer
from sklearn.covariance import EmpiricalCovariance
from sklearn.ensemble import IsolationForest
from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from offmap.evaluation import measure_separation
from offmap.integrations.sklearn import OffmapDetector
from offmap.scores.distance import TableEncoder
from offmap_bench.runner.table import format_table
from offmap_bench.studies.study import Runs, Study
from offmap_bench.tasks.shifts import read_columns

SEEDS = range(3)
ROWS, TEST = 3000, 1000  # to fit, and of every set to score
BEYOND = 0.93  # the quantile of a number above which no row is trained on
UNIT = 1.8  # degrees Fahrenheit for Celsius
UNSEEN = 3  # columns whose words become unseen ones

Array = NDArray[Any]
Scorer = Callable[[Array], Array]  # rows -> scores, higher = more OOD


@dataclass(frozen=True)
class Table:
    """A table: numbers, words {column: bins of equal width, or None for the values themselves}, and what is hidden."""

    file: str
    numbers: Sequence[str]
    words: Mapping[str, int | None]
    hidden: tuple[str, ...]  # columns that a guard does not see where rows of one word are held out
    held: tuple[str, Sequence[float]]


TABLES = {
    "bike": Table(
        "bike_hour", ("temp", "atemp", "hum"),
        {"season": None, "yr": None, "mnth": None, "hr": None, "weekday": None, "holiday": None, "workingday": None,
         "weathersit": None, "windspeed": 30},
        ("season", "mnth"), ("season", [1.0]),
    ),
    "elec2": Table(
        "elec2", ("nswdemand", "vicdemand", "nswprice"),
        {"weekday": None, "period": 24, "vicprice": 40, "transfer": 30}, ("weekday",), ("weekday", [4.0, 5.0]),
    ),
}  # fmt: skip


def cells() -> dict[str, Callable[[], Any]]:
    """Both tables, seed by seed."""
    return {f"{name}, seed {seed}": partial(measure, table, seed) for seed in SEEDS for name, table in TABLES.items()}


def read(table: Table) -> dict[str, Array]:
    """Read the columns of a table, numbers as they are and words as the number of their bin."""
    every = read_columns(table.file)
    if "weekday" not in every:  # half hours in a row, from a Tuesday on: 4 and 5 are the weekend
        every["weekday"] = np.arange(len(every["period"])) // 48 % 7.0
    columns = {name: every[name] for name in (*table.numbers, *table.words)}
    for name, bins in table.words.items():
        if bins is not None:
            low, high = columns[name].min(), columns[name].max()
            columns[name] = np.floor((columns[name] - low) / (high - low) * (bins - 1e-9))
    return columns


def measure(table: Table, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """AUROC and FPR@95 of all detectors by shift: {shift: {detector: {...}}}."""
    columns, rng = read(table), np.random.default_rng(seed)
    first = table.numbers[0]
    far = columns[first] > np.quantile(columns[first], BEYOND)
    results = compare(table, columns, ~far, {f"{first} beyond": far}, rng, seed, made=True)
    column, values = table.held
    held = np.isin(columns[column], values)
    shown = {name: values for name, values in columns.items() if name not in table.hidden}
    return results | compare(table, shown, ~held, {f"{column} held out": held}, rng, seed)


def compare(
    table: Table, columns: Mapping[str, Array], kept: Array, natural: Mapping[str, Array], rng: np.random.Generator, seed: int, *,
    made: bool = False,
) -> dict[str, dict[str, dict[str, float]]]:  # fmt: skip
    """Fit all detectors on some rows; score others, rows that were held out, and if `made` shifts of our own."""
    order = rng.permutation(np.flatnonzero(kept))
    train, test = ({name: values[part] for name, values in columns.items()} for part in (order[:ROWS], order[ROWS:][:TEST]))
    held = {name: rng.permutation(np.flatnonzero(rows))[:TEST] for name, rows in natural.items()}
    shifts = {name: {column: values[rows] for column, values in columns.items()} for name, rows in held.items()}
    numbers, words = list(table.numbers), [name for name in table.words if name in columns]
    if made:
        shifts[f"{numbers[0]} × {UNIT}"] = test | {numbers[0]: test[numbers[0]] * UNIT}
        shifts[f"{UNSEEN} unseen words"] = test | {name: np.full(len(test[name]), -1.0) for name in words[-UNSEEN:]}
        shifts["columns shuffled"] = {name: rng.permutation(values) for name, values in test.items()}
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(stack(train, words))
    rows = {name: np.hstack([stack(part, numbers), encoder.transform(stack(part, words))])
            for name, part in {"train": train, "test": test, **shifts}.items()}  # fmt: skip
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in shifts}
    for detector, score in fit_all(rows["train"], len(numbers), seed).items():
        id_scores = torch.from_numpy(score(rows["test"]))
        for name in shifts:
            parts = measure_separation(id_scores, torch.from_numpy(score(rows[name])))
            results[name][detector] = {key: float(parts[key]) for key in ("auroc", "fpr95")}
    return results


def stack(columns: Mapping[str, Array], names: Sequence[str]) -> Array:
    return np.stack([columns[name] for name in names], 1)


def fit_all(x: Array, numbers: int, seed: int) -> dict[str, Scorer]:
    """Fit every detector; rows are `numbers` first, then indicators."""
    scorers = {"OffmapDetector": negative(OffmapDetector(random_state=seed).fit(x))}
    with patch.object(TableEncoder, "fit", return_value=None):  # every column in units of its standard deviation
        scorers["OffmapDetector, all standardised"] = negative(OffmapDetector(random_state=seed).fit(x))
    alone = negative(OffmapDetector(random_state=seed).fit(x[:, :numbers]))
    scorers["OffmapDetector, numbers alone"] = lambda rows: alone(rows[:, :numbers])
    mixed = make_column_transformer((StandardScaler(), slice(numbers)), remainder="passthrough").fit(x)
    whole = StandardScaler().fit(x)
    scorers["kNN(5)"] = nearest(mixed.transform, x)
    scorers["kNN(5), all standardised"] = nearest(whole.transform, x)
    outliers = LocalOutlierFactor(novelty=True).fit(mixed.transform(x))
    scorers["LOF"] = lambda rows: -outliers.score_samples(mixed.transform(rows))
    forest = IsolationForest(random_state=seed).fit(x)
    scorers["isolation forest"] = lambda rows: -forest.score_samples(rows)
    covariance = EmpiricalCovariance().fit(mixed.transform(x))
    scorers["Mahalanobis"] = lambda rows: covariance.mahalanobis(mixed.transform(rows))
    return scorers


def negative(estimator: Any) -> Scorer:
    """Turn scikit-learn's sign."""
    return lambda rows: -estimator.score_samples(rows)


def nearest(scale: Callable[[Array], Array], x: Array) -> Scorer:
    neighbours = NearestNeighbors(n_neighbors=5).fit(scale(x))
    return lambda rows: neighbours.kneighbors(scale(rows))[0].mean(1)


def fields(runs: Runs) -> dict[str, Any]:
    """One table for each data set: mean over seeds of AUROC / FPR@95 for every detector and shift."""
    tables: list[str] = []
    for name in TABLES:
        seeds = [run for cell, run in runs.items() if cell.startswith(f"{name},")]
        shifts = list(seeds[0])
        rows = [[detector, *(mean_pair(seeds, shift, detector) for shift in shifts)] for detector in seeds[0][shifts[0]]]
        tables.append(f"## {name}\n\n{format_table(['AUROC / FPR@95, %', *shifts], rows)}")
    shifts = {shift for run in runs.values() for shift in run}
    pairs = [(run[s]["OffmapDetector"]["auroc"], run[s]["OffmapDetector, all standardised"]["auroc"]) for run in runs.values()
             for s in run]  # fmt: skip
    return {
        "tables": "\n\n".join(tables), "seeds": len(runs) // len(TABLES), "rows": ROWS, "test": TEST,
        "beyond": f"{100 * (1 - BEYOND):.0f}",
        "unit": UNIT, "unseen": UNSEEN, "spread": f"{100 * largest_spread(runs):.1f}", "count": len(shifts),
        "after": f"{100 * fmean(a for a, _ in pairs):.1f}", "before": f"{100 * fmean(b for _, b in pairs):.1f}",
    }  # fmt: skip


def mean_pair(seeds: Sequence[Runs], shift: str, detector: str) -> str:
    auroc, fpr = (100 * fmean(run[shift][detector][key] for run in seeds) for key in ("auroc", "fpr95"))
    return f"{auroc:.1f} / {fpr:.0f}"


def largest_spread(runs: Runs) -> float:
    """The largest standard deviation of an AUROC of OffmapDetector over seeds."""
    values: dict[tuple[str, str], list[float]] = {}
    for cell, run in runs.items():
        for shift, detectors in run.items():
            values.setdefault((cell.partition(",")[0], shift), []).append(detectors["OffmapDetector"]["auroc"])
    return max(stdev(each) for each in values.values())


STUDY = Study("categories", cells, fields, ("offmap", "torch", "scikit-learn"))
