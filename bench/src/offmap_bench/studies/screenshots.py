"""`python -m offmap_bench.studies.screenshots` fits guards on three small tasks, writes their pages and pictures of them in docs/figures.

The pictures need chromium; `--pages FOLDER` keeps the pages.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import offmap
from offmap_bench.demo.plans import DIGITS, MOONS, REGRESSION, Plan
from offmap_bench.demo.run import Bench
from offmap_bench.paths import DOCS
from offmap_bench.tasks.digits import digits
from offmap_bench.tasks.synthetic import moons, regression

FIGURES = DOCS / "figures"
PLANS: dict[str, Plan] = {"regression": REGRESSION, "moons": MOONS, "digits": DIGITS}
TASKS = {"regression": regression, "moons": moons, "digits": digits}


@dataclass(frozen=True)
class Shot:
    """Which page is pictured, how wide and high the screen is, its colours, and what stands at its top."""

    name: str
    task: str
    width: int
    height: int
    colours: str = "light"
    top: str = "header"


SHOTS = (
    Shot("page-light", "regression", 1180, 1120),
    Shot("page-dark", "moons", 1180, 960, "dark", "#clipping-the-weights"),
    Shot("page-phone", "digits", 390, 1400),
)


def evaluated(name: str) -> offmap.Evaluation:
    """A plain net, two guards around it and their numbers on one task."""
    plan, task = PLANS[name], TASKS[name]()
    bench = Bench(plan, task, 0, lambda doing: None)
    net = bench.plain(range(1))
    guard = bench.maxwent(net, "svd")
    if name != "moons":
        return offmap.evaluate(guard, task.test, task.ood)
    return offmap.evaluate({"MaxWEnt-SVD": guard, "with distances": bench.joined(guard.predictive)}, task.test, task.ood)


def pages(folder: Path) -> dict[str, Path]:
    """A page for every task."""
    titles = {"regression": "A guard on a line", "moons": "Guards on two moons", "digits": "A guard of handwritten digits"}
    shape = {"digits": (8, 8)}
    return {
        name: offmap.write_page(evaluated(name), folder / f"{name}.html", title=title, image_shape=shape.get(name))
        for name, title in titles.items()
    }


def shoot(shots: tuple[Shot, ...], written: dict[str, Path], folder: Path) -> list[Path]:
    """Small pictures of pages."""
    made: list[Path] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for shot in shots:
            screen = {"width": shot.width, "height": shot.height}
            page = browser.new_page(viewport=screen, color_scheme=shot.colours)
            page.goto(written[shot.task].as_uri())
            page.wait_for_selector("html[data-ready]")
            page.evaluate("top => { document.documentElement.style.scrollBehavior = 'auto';"
                          " document.querySelector(top).scrollIntoView(); }", shot.top)  # fmt: skip
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            made.append(folder / f"{shot.name}.webp")
            image.save(made[-1], quality=82, method=6)
            page.close()
        browser.close()
    return made


def main() -> None:
    """Pages, then pictures."""
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.studies.screenshots", description=__doc__)
    parser.add_argument("--pages", type=Path, help="keep the pages in this folder")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="where pictures go")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.pages or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for path in shoot(SHOTS, pages(folder), asked.figures):
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
