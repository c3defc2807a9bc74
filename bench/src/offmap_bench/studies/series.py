"""False alarms on series: windows of a made valve bench, electricity prices and bike rentals; rows, groups, moving thresholds.

It needs OFFMAP_DATA for the two tables. Nothing here is OOD: every flagged row is a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import offmap
from offmap.conformal import effective_rows, group_weights
from offmap.detector import Calibration
from offmap.random import generator, permutation
from offmap.report import page
from offmap_bench.paths import DOCS
from offmap_bench.runner.table import format_table, percent
from offmap_bench.studies.study import Runs, Study, render_svg
from offmap_bench.tasks.shifts import read_columns

SEEDS, SPLITS, RATE = range(5), 100, 0.05
STUDENT = 2.776  # 97.5 % quantile of Student's t with four degrees of freedom
SAME, ROWS, GROUPS, MOVING = "`valid` of the same groups", "new groups, as rows", "new groups, `groups=`", "`AdaptiveThreshold`"
FEW_ROWS, FEW_GROUPS = "6 groups, as rows", "6 groups, `groups=`, at 1/7"
FIGURE = DOCS / "figures" / "series.svg"
NUMBERS = ("season", "mnth", "holiday", "weekday", "workingday", "weathersit", "temp", "atemp", "hum", "windspeed")
WINDOW, STRIDE, STEPS, SENSORS = 16, 4, 160, 8


@dataclass(frozen=True)
class Series:
    """Rows in time order: inputs (n, ...), targets (n, ...) and the group of each row, counted from 0."""

    x: Tensor
    y: Tensor
    group: Tensor

    @property
    def groups(self) -> int:
        return int(self.group.max()) + 1

    def take(self, chosen: Tensor) -> Series:
        """Return the rows of some groups, in their order."""
        rows = torch.isin(self.group, chosen)
        return Series(self.x[rows], self.y[rows], self.group[rows])


def valve(seed: int, runs: int = 160) -> Series:
    """Windows of eight sensors of a valve bench, and the next reading: each run has its own level, and drifts."""
    source = generator(seed, "valve")
    mixing = torch.randn(SENSORS, 3, generator=source) / sqrt(3)
    windows, following, group = list[Tensor](), list[Tensor](), list[Tensor]()
    for run in range(runs):
        level = 0.15 * torch.randn(SENSORS, generator=source)
        load = 1 + 0.1 * torch.randn((), generator=source)
        time = torch.arange(STEPS + WINDOW) / (20 + 4 * torch.randn((), generator=source))
        cycle = torch.stack([load * torch.sin(time), load * torch.cos(2 * time), load.expand(len(time))], 1)
        drift = 0.01 * torch.randn(len(time), SENSORS, generator=source).cumsum(0)
        readings = level + cycle @ mixing.T + drift + 0.1 * torch.randn(len(time), SENSORS, generator=source)
        cut = readings[:-1].unfold(0, WINDOW, STRIDE).mT  # (windows, WINDOW, SENSORS)
        windows.append(cut)
        following.append(readings[WINDOW::STRIDE][: len(cut)])
        group.append(torch.full((len(cut),), run))
    return Series(torch.cat(windows), torch.cat(following), torch.cat(group))


def electricity(rows_per_group: int) -> Series:
    """Half-hours of `elec2` since all its columns move, with those before as inputs; up or down is the target."""
    table = np.stack(list(read_columns("elec2").values()), 1)[17_760:]
    lags = torch.stack([torch.from_numpy(table[8 - lag : len(table) - lag, :6]) for lag in range(8)], 1)
    y = torch.from_numpy(table[8:, 6]).long()
    return Series(lags.float(), y, torch.arange(8, len(table)) // rows_per_group)


def bike(days_per_group: int) -> Series:
    """Hours of bike rentals with weather and calendar; the logarithm of the count is the target."""
    table = read_columns("bike_hour")
    hour, numbers = table["hr"] * 2 * np.pi / 24, [table[name] for name in NUMBERS]
    x = np.column_stack([np.sin(hour), np.cos(hour), np.sin(2 * hour), np.cos(2 * hour), *numbers])
    x = (x - x.mean(0)) / x.std(0)
    y, day = torch.from_numpy(np.log1p(table["cnt"])).float(), torch.from_numpy(table["dteday"]).long()
    return Series(torch.from_numpy(x).float(), y, day // days_per_group)


class LastState(nn.Module):
    """An LSTM that predicts the next reading."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(SENSORS, 24, batch_first=True), nn.Linear(24, SENSORS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Convolutions(nn.Module):
    """A small temporal convolutional net that predicts the next reading."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(SENSORS, 24, 3),
            nn.ReLU(),
            nn.Conv1d(24, 24, 3, dilation=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(240, SENSORS),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mT)


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(128, 48), nn.ReLU(), nn.Linear(48, 12), nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 128)
    )


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def reconstruct(series: Series) -> Series:
    return Series(series.x, series.x.flatten(1), series.group)


@dataclass(frozen=True)
class Case:
    """A series and a model; `later`: groups after this share of the time are held out, else random ones."""

    make: Callable[[int], Series]
    model: Callable[[], nn.Module]
    train: float = 0.3  # share of the groups that are trained on
    calibrate: float = 0.55  # share of the others that calibrate
    later: float | None = None


CASES = {
    "valve bench, LSTM": Case(valve, LastState),
    "valve bench, TCN": Case(valve, Convolutions),
    "valve bench, autoencoder": Case(lambda seed: reconstruct(valve(seed)), autoencoder),
    "elec2, random days": Case(lambda _: electricity(48), lambda: perceptron(48, 2)),
    "elec2, random weeks": Case(lambda _: electricity(7 * 48), lambda: perceptron(48, 2)),
    "elec2, later days": Case(lambda _: electricity(48), lambda: perceptron(48, 2), later=0.5),
    "bike, random days": Case(lambda _: bike(1), lambda: perceptron(14, 1)),
    "bike, random weeks": Case(lambda _: bike(7), lambda: perceptron(14, 1)),
    "bike, later days": Case(lambda _: bike(1), lambda: perceptron(14, 1), later=0.5),
}


def train_model(model: nn.Module, rows: Series, seed: int, epochs: int = 15) -> nn.Module:
    """Train by Adam on shuffled rows."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = nn.functional.mse_loss if rows.y.is_floating_point() else nn.functional.cross_entropy
    for epoch in range(epochs):
        for batch in permutation(len(rows.x), seed, "epoch", epoch).split(64):
            optimizer.zero_grad()
            output = model(rows.x[batch])
            loss(output.squeeze(-1) if rows.y.ndim == 1 and rows.y.is_floating_point() else output, rows.y[batch]).backward()
            optimizer.step()
    return model.eval()


def measure(case: Case, seed: int) -> dict[str, Any]:
    """Rates of false alarms on held-out groups: means over random splits, or over the later groups."""
    series = case.make(seed)
    known = torch.arange(series.groups if case.later is None else int(case.later * series.groups))
    order = known[permutation(len(known), seed, "groups")]
    cut = int(case.train * len(known))
    if len(series.x) > 12_000:  # half the training rows are enough, and keep the scores cheap
        cut //= 2
    trained, others = series.take(order[:cut]), order[cut:] if case.later is None else order[cut : cut + len(known) // 3]
    mixed = permutation(len(trained.x), seed, "split")
    held, fitted = mixed[: len(mixed) // 5].sort().values, mixed[len(mixed) // 5 :]
    rows = Series(trained.x[fitted], trained.y[fitted], trained.group[fitted])
    torch.manual_seed(seed)
    model = train_model(case.model(), rows, seed)
    valid = (trained.x[held], trained.y[held])
    guard = offmap.fit(model, (rows.x, rows.y), valid, solver="closed-form", draws=10, seed=seed, progress=False)
    unseen = series.take(others)
    scores = guard.score(unseen.x)
    if case.later is not None:
        future = series.take(torch.arange(len(known), series.groups))
        calibration = Calibration(scores, None, RATE), Calibration(scores, None, RATE, weights=group_weights(unseen.group))
        flagged = judge(guard, *calibration, guard.score(future.x))
        rates = {way: grouped_rate(verdicts, future.group) for way, verdicts in flagged.items()}
        fortnights = {way: [float(part.double().mean()) for part in v.split(len(v) // 20)] for way, v in flagged.items()}
        if case is CASES["elec2, later days"] and seed == 0:
            draw(fortnights)
        counts = {"groups": len(others), "held out": series.groups - len(known), "parts": fortnights}
        return {"rates": rates} | counts | notice(guard, scores)
    rates, count = list[dict[str, float]](), int(case.calibrate * len(others))
    for split in range(SPLITS):
        parts = permutation(len(others), seed, "calibrate", split)
        chosen = torch.isin(unseen.group, others[parts[:count]])
        few = torch.isin(unseen.group, others[parts[:6]])
        rows, weights = Calibration(scores[chosen], None, RATE), group_weights(unseen.group[chosen])
        new, group = scores[~chosen], unseen.group[~chosen]
        flagged = judge(guard, rows, replace(rows, weights=weights), new)
        flagged[FEW_ROWS] = new > Calibration(scores[few], None, RATE).threshold
        flagged[FEW_GROUPS] = new > Calibration(scores[few], None, 1 / 7, weights=group_weights(unseen.group[few])).threshold
        rates.append({way: grouped_rate(verdicts, group) for way, verdicts in flagged.items()})
    means = {way: fmean(rate[way] for rate in rates) for way in rates[0]}
    return {"rates": means, "groups": count, "held out": len(others) - count} | notice(guard, scores)


def notice(guard: offmap.Guard, scores: Tensor) -> dict[str, Any]:
    """How many rows there are, and what they are worth where neighbours are alike; and whether `fit` noticed that in `valid`."""
    fitted = guard.calibration.effective_rows is not None
    return {"rows": len(scores), "effective rows": effective_rows(scores), "noticed by fit": fitted}


def judge(guard: offmap.Guard, rows: Calibration, groups: Calibration, new: Tensor) -> dict[str, Tensor]:
    """Verdicts on new rows by each way to set the threshold."""
    adaptive = offmap.AdaptiveThreshold(replace(guard, calibration=groups))
    flagged = {SAME: new > guard.threshold, ROWS: new > rows.threshold, GROUPS: new > groups.threshold}
    return flagged | {MOVING: adaptive.update(new)}


def grouped_rate(flagged: Tensor, group: Tensor) -> float:
    """The mean over groups of the share that is flagged."""
    codes = group.unique(return_inverse=True)[1]
    return float((codes.bincount(flagged.double()) / codes.bincount()).mean())


def cells() -> dict[str, Callable[[], Any]]:
    named = {f"{name}, seed {seed}": partial(measure, case, seed) for name, case in CASES.items() for seed in SEEDS}
    return named | {"random order": measure_notices}


def measure_notices(trials: int = 2000) -> dict[str, float]:
    """The share of false notices in sets of n exchangeable scores: normal, with ties, and sorted by class."""
    source, rates = generator("notices"), dict[str, float]()
    for n in (40, 100, 300, 1000, 5000):
        for kind in ("normal", "tied", "sorted"):
            count = 0
            for _ in range(trials):
                scores, classes = torch.randn(n, generator=source), torch.randint(5, (n,), generator=source).sort().values
                scores = {"normal": scores, "tied": scores.clamp_min(0), "sorted": scores + classes}[kind]
                count += effective_rows(scores, classes if kind == "sorted" else None) is not None
            rates[f"{kind}, n = {n}"] = count / trials
    return rates


def fields(runs: Runs) -> dict[str, Any]:
    """Tables of rates with their intervals, and what the notice says."""

    def format_ways(names: list[str], ways: list[str]) -> str:
        found = {name: [runs[f"{name}, seed {seed}"] for seed in SEEDS] for name in names}
        counts = {name: [str(each[0]["groups"])] if GROUPS in ways else [] for name, each in found.items()}
        rows = [[name, *counts[name], *(interval(each, way) for way in ways)] for name, each in found.items()]
        return format_table(["", *(["groups"] if GROUPS in ways else []), *ways], rows)

    false, runs = runs["random order"], {name: run for name, run in runs.items() if name != "random order"}
    random = [name for name, case in CASES.items() if case.later is None]
    later = [name for name, case in CASES.items() if case.later is not None]
    noticed, fitted = (sum(bool(run[key]) for run in runs.values()) for key in ("effective rows", "noticed by fit"))
    worth = [run["rows"] / run["effective rows"] for run in runs.values() if run["effective rows"]]
    return {
        "random": format_ways(random, [SAME, ROWS, GROUPS, MOVING]),
        "later": format_ways(later, [SAME, ROWS, GROUPS, MOVING]),
        "few": format_ways(random, [FEW_ROWS, FEW_GROUPS]),
        "same": SAME, "rows_way": ROWS, "groups_way": GROUPS, "moving": MOVING, "rate": round(100 * RATE),
        "seeds": len(SEEDS), "splits": SPLITS, "noticed": noticed, "fitted": fitted, "runs": len(runs),
        "false": f"{100 * fmean(false.values()):.2f}", "false_most": f"{100 * max(false.values()):.2f}", "sets": len(false),
        "least": round(min(worth)), "most": round(max(worth)),
    }  # fmt: skip


def interval(found: list[Any], way: str) -> str:
    """The mean over seeds and its 95 % interval, in per cent."""
    rates = [run["rates"][way] for run in found]
    return f"{percent(fmean(rates))} ± {percent(STUDENT * stdev(rates) / sqrt(len(rates)))}"


def draw(parts: dict[str, list[float]]) -> None:
    """Draw the rates of one case in twentieths of the later time."""
    with matplotlib.rc_context(page.RC):
        figure = Figure(figsize=(6.4, 2.8), layout="constrained")
        axes = figure.subplots()
        for place, (way, rates) in enumerate(parts.items()):
            colour, dashes = page.series(place)
            axes.plot(range(1, 21), [100 * rate for rate in rates[:20]], color=colour, dashes=dashes or (None, None),
                      label=way.replace("`", ""))  # fmt: skip
        axes.axhline(100 * RATE, linewidth=0.8, color="0.5")
        axes.set(xlabel="fortnights after calibration", ylabel="flagged, %", ylim=(0, None), xticks=[1, 5, 10, 15, 20])
        axes.legend(frameon=False, handlelength=3)
        FIGURE.write_text(render_svg(figure), encoding="utf-8")


STUDY = Study("series", cells, fields)
