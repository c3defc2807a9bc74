"""The pictures of README and of the page "How it works", light and dark: `python -m offmap_bench.studies.drawings`, under a minute.

They show the paper's one-dimensional task, one net and its guard as `offmap.fit` makes it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import offmap
from offmap.data import Place, batches, gather
from offmap.guard import Guard
from offmap.integrations.mlp import mlp
from offmap.likelihoods import Gaussian
from offmap.report.figures import COLOURS, RC, colour
from offmap_bench.methods import deep_ensemble
from offmap_bench.paths import DOCS
from offmap_bench.tasks.synthetic import regression, truth
from offmap_bench.tasks.task import Task

FOLDER = DOCS / "figures"
LINES = 10
TALL = 1.6
CLIP = 0.1
"""Of the middle panel, where it can be seen; the guard's own may be 0, which would show the net alone."""

Draw = Callable[[Axes], None]


def main() -> None:
    """Draw all of them."""
    torch.set_num_threads(1)
    task = regression()
    place = Place(torch.device("cpu"), torch.float32)
    train, valid = batches(task.train, place, name="train", batch_size=100), gather(batches(task.valid, place, name="valid"))
    config = deep_ensemble.Config(steps=2000, lr=2e-3)
    (net,) = deep_ensemble.fit(mlp(1, 2), train, valid, likelihood=Gaussian(), config=config).nets()
    guard = offmap.fit(net, task.train, task.valid, progress=False)
    x = torch.linspace(-1.5, 1.5, 151)[:, None]
    write("hero", [
        ("A plain net is sure everywhere", plain(guard, task, x)),
        ("With a guard, it knows where it does not know", guarded(guard, task, x)),
    ])  # fmt: skip
    write("how", [
        ("Draws without a clip detect", lines(guard, task, x, None)),
        (f"Draws with a clip of {CLIP:g} predict", lines(guard, task, x, CLIP)),
        ("The score, and its threshold", scored(guard, task, x)),
    ])  # fmt: skip


def write(name: str, panels: list[tuple[str, Draw]]) -> None:
    """One picture in a row, for light and for dark screens."""
    with matplotlib.rc_context(RC | {"font.family": "sans-serif", "axes.titlesize": 9, "axes.titlecolor": colour("ink")}):
        figure = Figure(figsize=(7.6, 2.35), layout="constrained")
        for axes, (title, draw) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            draw(axes)
            axes.set_title(title, loc="left", fontsize=8.5 if len(panels) < 3 else 8)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    light = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    light = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), light)
    light = re.sub(r"font: ([\d.]+px) [^\";]+", r"font: \1 system-ui, 'DejaVu Sans', Arial, sans-serif", light)
    dark = re.sub("|".join(pair[0] for pair in COLOURS.values()), lambda found: DARK[found[0]], light)
    for kind, svg in (("light", light), ("dark", dark)):
        (FOLDER / f"{name}-{kind}.svg").write_text("\n".join(map(str.rstrip, svg.splitlines())) + "\n", encoding="utf-8")


DARK = {pair[0]: pair[1] for pair in COLOURS.values()}


def frame(axes: Axes, task: Task, x: Tensor, **more: Any) -> None:
    """Points, the true curve, and the same axes everywhere."""
    axes.plot(x[:, 0], truth(x[:, 0].double().numpy()), color=colour("soft"), linewidth=0.9, linestyle=(0, (4, 2)))
    axes.plot(*(t.flatten() for t in task.train), "o", markersize=2.4, color=colour("ood"), markeredgewidth=0, alpha=0.8)
    axes.set(xlim=(-1.5, 1.5), ylim=(-TALL, TALL), xticks=(-1, 0, 1), yticks=(-1, 0, 1), **more)


def band(axes: Axes, x: Tensor, mean: Tensor, std: Tensor, line: Tensor) -> None:
    """Mean ± 2 standard deviations, and a line."""
    low, high = ((mean + side * 2 * std).clamp(-3 * TALL, 3 * TALL) for side in (-1, 1))
    axes.fill_between(x[:, 0], low, high, color=colour("band"), linewidth=0)
    axes.plot(x[:, 0], line, color=colour("series4"), linewidth=1.4)


def plain(guard: Guard, task: Task, x: Tensor) -> Draw:
    """The net itself: a clip of 0."""
    found = guard.predict(x, clip=0.0)

    def draw(axes: Axes) -> None:
        assert found.mean is not None
        assert found.std is not None
        band(axes, x, found.mean, found.std, found.mean)
        frame(axes, task, x)

    return draw


def guarded(guard: Guard, task: Task, x: Tensor) -> Draw:
    """The wide distribution, and the verdicts as a strip below."""
    found, own, strange = guard.predict(x, clip=None), guard.predict(x, clip=0.0), guard(x).ood.numpy()

    def draw(axes: Axes) -> None:
        assert found.mean is not None
        assert found.std is not None
        assert own.mean is not None
        band(axes, x, found.mean, found.std, own.mean)
        frame(axes, task, x)
        edges = np.flatnonzero(np.diff(strange)) + 1
        for part in np.split(np.arange(len(x)), edges):
            name = "ood" if strange[part[0]] else "id"
            axes.axvspan(float(x[part[0]]), float(x[min(part[-1] + 1, len(x) - 1)]), 0, 0.05, color=colour(name), linewidth=0)
        for at, words, name in ((0.2, "off the map", "ood"), (-0.5, "on the map", "id")):
            axes.text(at, -1.38, words, fontsize=7, color=colour(name), horizontalalignment="center")

    return draw


def lines(guard: Guard, task: Task, x: Tensor, clip: float | None) -> Draw:
    """The means of single draws."""
    draws = guard.samples(x, LINES, clip=clip)[..., 0].clamp(-3 * TALL, 3 * TALL)

    def draw(axes: Axes) -> None:
        for each in draws:
            axes.plot(x[:, 0], each, color=colour("series4"), linewidth=0.8, alpha=0.7)
        frame(axes, task, x)

    return draw


def scored(guard: Guard, task: Task, x: Tensor) -> Draw:
    """The default score along x."""
    score = guard.score(x)

    def draw(axes: Axes) -> None:
        over = score > guard.threshold
        axes.plot(x[:, 0], torch.where(over, score, torch.nan), color=colour("ood"), linewidth=1.6)
        axes.plot(x[:, 0], torch.where(over, torch.nan, score), color=colour("id"), linewidth=1.6)
        axes.axhline(guard.threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
        axes.plot(task.train[0][:, 0], torch.full((len(task.train[0]),), float(score.min()) - 0.6), "|", markersize=4,
                  color=colour("ood"), alpha=0.6)  # fmt: skip
        axes.set(xlim=(-1.5, 1.5), xticks=(-1, 0, 1))

    return draw


if __name__ == "__main__":
    main()
