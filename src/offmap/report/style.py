"""Colours and type, defined once for figures and page, for light and dark screens.

Figures are drawn in the light colours; `themed` swaps each for the page's variable of that name, so that one drawing
follows the reader's screen. The series colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

COLOURS = {
    # name: (on light, on dark); every light colour occurs once, it is the key by which `themed` finds it
    "ink": ("#1f2430", "#e7e9ee"),
    "soft": ("#5d6675", "#a3abb9"),
    "line": ("#d5dae1", "#3a4250"),
    "paper": ("#fdfdfc", "#14171c"),
    "card": ("#f5f6f8", "#1c2027"),
    "link": ("#0b62a8", "#7cc0ff"),
    "in-distribution": ("#2f6fb5", "#6aa9e9"),
    "OOD": ("#d1541b", "#f08a4b"),
    "band": ("#b9d7ef", "#2b4d6d"),
    "series0": ("#7b8491", "#97a1af"),
    "series1": ("#e69f00", "#f0b429"),
    "series2": ("#cc79a7", "#dd93bb"),
    "series3": ("#56b4e9", "#8fd0f7"),
    "series4": ("#0072b2", "#3f9fe0"),
    "series5": ("#009e73", "#2cc295"),
    "series6": ("#d55e00", "#ff8a3d"),
    "series7": ("#8a7a00", "#d6c64a"),
}
DASHES = ((5, 2), (3, 1.5), (1, 1.2), (6, 1.5, 1, 1.5), (), (), (1, 2), (4, 1, 1, 1, 1, 1))
"""Of each series, in points; colour is never the only difference."""

SERIES = len(DASHES)
SETS = ("in-distribution", "OOD", "series1", "series2", "series5")
"""Colours of data sets in histograms: the in-distribution one first."""

CLASSES = ("#ffffff", "#ffc24d")
MAP = ("#f7fafd", "#d3e3f3", "#94bfe0", "#4a90c6", "#1c5f9f", "#0a2f63")
"""Calm to uncertain; the same on every screen."""

RC = {
    "svg.fonttype": "none", "svg.hashsalt": "offmap", "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "axes.edgecolor": COLOURS["line"][0], "text.color": COLOURS["ink"][0], "axes.labelcolor": COLOURS["soft"][0],
    "xtick.color": COLOURS["line"][0], "ytick.color": COLOURS["line"][0],
    "xtick.labelcolor": COLOURS["soft"][0], "ytick.labelcolor": COLOURS["soft"][0],
    "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "axes.labelpad": 2,
}  # fmt: skip


def colour(name: str) -> str:
    """The light colour of that name, to draw with."""
    return COLOURS[name][0]


def series(position: int) -> tuple[str, tuple[float, ...]]:
    """Colour and dashes of a method by its place in the order of methods."""
    return colour(f"series{position % SERIES}"), DASHES[position % SERIES]


def themed(svg: str, name: str) -> str:
    """A matplotlib SVG made fit to stand inside a page: no prolog, the page's colours and font, ids that depend on `name`."""
    prefix = "f" + hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| version="[^"]*"', "", svg, count=3)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib's names of parts: nothing refers to them
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", svg)
    # coordinates are rounded, the words between the tags are not
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    return svg


def variables(dark: bool) -> str:
    """The colours as CSS."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())


def stylesheet() -> str:
    """The page's CSS: its colours, then the rules in page.css beside this file.

    The screen decides between light and dark, unless the page says `data-theme`.
    """
    dark = f"color-scheme: dark; {variables(True)}"
    return "\n".join([
        f":root {{ color-scheme: light; {variables(False)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}",
        f":root[data-theme=dark] {{ {dark} }}",
        resource("page.css"),
    ])  # fmt: skip


def resource(name: str) -> str:
    """The text of a file beside this one."""
    return files("offmap.report").joinpath(name).read_text(encoding="utf-8")
