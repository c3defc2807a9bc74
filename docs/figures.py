"""Figures of README and of the documentation: `python docs/figures.py drawings` or `... screenshots`.

Drawings show the paper's one-dimensional task, one net and its guard, for light and for dark screens. Screenshots, which need
chromium, show evaluation pages of three small tasks.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import torch
from matplotlib.axes import Axes
from torch import Tensor

import offmap
from offmap import Guard
from offmap.report.page import colour
from offmap_bench.demo.run import DIGITS, MOONS, REGRESSION, Bench
from offmap_bench.tasks.synthetic import truth
from offmap_bench.tasks.task import Task

TALL, CLIP = 1.6, 0.1  # half of the height; the clip of the middle panel, as the guard's own may be 0


def draw_all() -> None:
    task = REGRESSION.task()
    (net,) = Bench(REGRESSION, task, 0).train_members(range(1))
    guard, x = offmap.fit(net, task.train, task.valid, progress=False), torch.linspace(-1.5, 1.5, 151)[:, None]
    write("hero", [
        ("The network alone is sure everywhere", lambda axes: draw_prediction(axes, guard, task, x)),
        ("With a guard, it knows where it does not know", lambda axes: draw_verdicts(axes, guard, task, x)),
    ])  # fmt: skip
    write("how", [
        ("Draws without a clip detect", lambda axes: draw_samples(axes, guard, task, x, None)),
        (f"Draws with a clip of {CLIP:g} predict", lambda axes: draw_samples(axes, guard, task, x, CLIP)),
        ("The score, and its threshold", lambda axes: draw_score(axes, guard, task, x)),
    ])  # fmt: skip


def write(name: str, panels: list[tuple[str, Callable[[Axes], None]]]) -> None:
    """Write one row of panels, for light and for dark screens."""

    def paint(several: Sequence[Axes]) -> None:
        for axes, (title, draw) in zip(several, panels, strict=True):
            draw(axes)
            axes.set_title(title, fontsize=8.5 if len(panels) < 3 else 8)

    pictures.save(name, pictures.render((1, len(panels)), (7.6, 2.5), paint))


def draw_data(axes: Axes, task: Task, x: Tensor) -> None:
    axes.plot(x[:, 0], truth(x[:, 0].double().numpy()), color=colour("soft"), linewidth=0.9, linestyle=(0, (4, 2)), label="truth")
    rows = (t.flatten() for t in task.train)
    axes.plot(*rows, "o", markersize=2.4, color=colour("ink"), markeredgewidth=0, alpha=0.8, label="training data")
    axes.set(xlim=(-1.5, 1.5), ylim=(-TALL, TALL), xticks=(-1, 0, 1), yticks=(-1, 0, 1), xlabel="input", ylabel="output")


def draw_band(axes: Axes, guard: Guard, task: Task, x: Tensor, clip: float | None) -> None:
    """Mean ± 2 standard deviations, and the net's own mean."""
    wide, net = guard.predict(x, clip=clip), guard.predict(x, clip=0.0)
    low, high = ((wide.mean + side * 2 * wide.std).clamp(-3 * TALL, 3 * TALL) for side in (-1, 1))
    axes.fill_between(x[:, 0], low, high, color=colour("band"), linewidth=0, label="± 2 std")
    axes.plot(x[:, 0], net.mean, color=colour("series4"), linewidth=1.4, label="prediction")
    draw_data(axes, task, x)


def draw_prediction(axes: Axes, guard: Guard, task: Task, x: Tensor) -> None:
    """The net's own prediction and deviation, with a legend."""
    draw_band(axes, guard, task, x, clip=0.0)
    axes.legend(loc="lower left", fontsize=6.5, frameon=False, ncols=2, labelcolor=colour("ink"), borderaxespad=0.1)


def draw_verdicts(axes: Axes, guard: Guard, task: Task, x: Tensor) -> None:
    """The wide distribution, and the verdicts as a strip below."""
    draw_band(axes, guard, task, x, clip=None)
    ood = guard(x).ood.numpy()
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(ood)) + 1):
        name = "ood" if ood[part[0]] else "id"
        axes.axvspan(float(x[part[0]]), float(x[min(part[-1] + 1, len(x) - 1)]), 0, 0.05, color=colour(name), linewidth=0)
    for at, words, name in ((0.2, "off the map", "ood"), (-0.5, "on the map", "id")):
        axes.text(at, -1.38, words, fontsize=7, color=colour(name), horizontalalignment="center")


def draw_samples(axes: Axes, guard: Guard, task: Task, x: Tensor, clip: float | None) -> None:
    for line in guard.samples(x, 10, clip=clip)[..., 0].clamp(-3 * TALL, 3 * TALL):
        axes.plot(x[:, 0], line, color=colour("series4"), linewidth=0.8, alpha=0.7)
    draw_data(axes, task, x)


def draw_score(axes: Axes, guard: Guard, task: Task, x: Tensor) -> None:
    score, rows = guard.score(x), task.train[0][:, 0]
    over = score > guard.threshold
    axes.plot(x[:, 0], torch.where(over, score, torch.nan), color=colour("ood"), linewidth=1.6)
    axes.plot(x[:, 0], torch.where(over, torch.nan, score), color=colour("id"), linewidth=1.6)
    axes.axhline(guard.threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes.plot(rows, torch.full_like(rows, float(score.min()) - 0.6), "|", markersize=4, color=colour("ink"), alpha=0.6)
    axes.set(xlim=(-1.5, 1.5), xticks=(-1, 0, 1), xlabel="input", ylabel="score")


SHOTS = (
    ("page-light", DIGITS, "A guard of handwritten digits", (1180, 1120), "light", "header", (8, 8)),
    ("page-assessment", DIGITS, "A guard of handwritten digits", (1180, 1120), "light", "#what-this-guard-can-see", (8, 8)),
    ("page-dark", MOONS, "Guards on two moons", (1180, 960), "dark", "#clipping-the-weights", None),
    ("page-phone", DIGITS, "A guard of handwritten digits", (390, 1400), "light", "header", (8, 8)),
)
"""Name, plan, title, width and height of the screen, colours, what stands at the top, and the shape of images."""

JSON = {"Content-Type": "application/json"}
SCROLL = "top => { document.documentElement.style.scrollBehavior = 'auto'; document.querySelector(top).scrollIntoView(); }"


def take_screenshots() -> None:
    """Fit guards, write their pages, and take pictures of them."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, plan, title, (width, height), colours, top, shape in SHOTS:
            task = plan.task()
            bench = Bench(plan, task, 0)
            guard = bench.maxwent(bench.train_members(range(1)), "svd", score="default")
            evaluation = offmap.evaluate(guard, task.test, task.ood)
            path = offmap.write_page(evaluation, Path(folder, f"{name}.html"), title=title, image_shape=shape)
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.evaluate(SCROLL, top)
            save_screenshot(page, name)
            if name == "page-phone":
                take_live_screenshots(browser, guard, task, Path(folder))
        browser.close()


def save_screenshot(page: Any, name: str) -> None:
    from PIL import Image

    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(pictures.FOLDER / f"{name}.webp", quality=82, method=6)


def take_live_screenshots(browser: Any, guard: Guard, task: Task, folder: Path) -> None:
    """Serve a guard, send it in-distribution rows, then half OOD rows, and take screenshots of the server's page."""
    guard.export(folder / "guard.onnx", example=task.test[0][:20])
    command = [sys.executable, "-m", "offmap", "serve", str(folder / "guard.onnx"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        (url,) = re.findall(r"http://[\d.:]+", server.stdout.readline())
        for number in range(90):
            count = 0 if number < 60 else 5
            known, ood = (rows[torch.randperm(len(rows))] for rows in (task.test[0], *task.ood.values()))
            body = json.dumps({"inputs": torch.cat([known[: 10 - count], ood[:count]]).tolist()})
            urllib.request.urlopen(urllib.request.Request(f"{url}/score", body.encode(), JSON)).read()
            time.sleep(0.4)
        for colours in ("light", "dark"):
            page = browser.new_page(viewport={"width": 900, "height": 720}, color_scheme=colours)
            page.goto(url)
            page.wait_for_function("document.getElementById('state').textContent.includes('off the map')")
            save_screenshot(page, f"live-{colours}")
        server.terminate()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"drawings": draw_all, "screenshots": take_screenshots}[sys.argv[1]]()
