"""A real browser for tests of pages, and what every page must do in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window; a test that needs it is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install offmap[test]")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def open_page(running: Any, path: Path, *, width: int = 1180, colours: str = "light") -> Iterator[Any]:
    """The page in a tab; errors on its console, and anything it asks of the network, fail the test."""
    context = running.new_context(viewport={"width": width, "height": 900}, color_scheme=colours)
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    tab.on("request", lambda request: wrong.append(request.url) if not _own(request.url, path) else None)
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-ready]")
    yield tab
    context.close()
    assert not wrong, wrong


def _own(url: str, path: Path) -> bool:
    return url == path.as_uri() or url.startswith("data:")


def overlapping(tab: Any) -> list[str]:
    """Pairs of words in one figure that stand on each other."""
    return tab.evaluate("""() => [...document.querySelectorAll('svg')].flatMap(svg => {
        const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent && t.getBoundingClientRect().width);
        const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
        return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([, b]) =>
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2
        ).map(([other]) => `${one} | ${other}`));
    })""")


def skipped_levels(tab: Any) -> list[str]:
    """Headings that stand more than one level below the one before, among those that are shown."""
    found = tab.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].filter(h => h.offsetParent).map(h => [+h.tagName[1], h.innerText])"
    )
    return [words for (before, _), (level, words) in pairwise(found) if level > before + 1]
