"""One self-contained HTML page, without network, readable on a phone and on a dark screen; its colours, figures and tables.

Figures are drawn by matplotlib in the light colours; `apply_theme` swaps each for the page's variable of that name, so that one
drawing follows the reader's screen.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offmap.atomic import write_whole
from offmap.checks import require
from offmap.errors import FileError
from offmap.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.floating[Any]]


def resource(name: str) -> str:
    """Read a file beside this one."""
    return files("offmap.report").joinpath(name).read_text(encoding="utf-8")


def texts() -> dict[str, Any]:
    """Return the words of the pages."""
    return tomllib.loads(resource("texts.toml"))


_LOOK: dict[str, dict[str, Any]] = tomllib.loads(resource("colours.toml"))
COLOURS: dict[str, tuple[str, str]] = {name: (light, dark) for name, (light, dark) in _LOOK["colours"].items()}
"""{name: (on light, on dark)}."""

RC = {key: COLOURS[value][0] if value in COLOURS else value for key, value in _LOOK["matplotlib"].items()}
DASHES = ((5, 2), (3, 1.5), (1, 1.2), (6, 1.5, 1, 1.5), (), (), (1, 2), (4, 1, 1, 1, 1, 1))
"""Of each series, in points; colour is never the only difference."""

SERIES = len(DASHES)
MAP = ("#f7fafd", "#d3e3f3", "#94bfe0", "#4a90c6", "#1c5f9f", "#0a2f63")
"""Colours of an uncertainty map, from certain to uncertain; the same on every screen."""


def colour(name: str) -> str:
    """Return the light colour of that name."""
    return COLOURS[name][0]


def series(position: int) -> tuple[str, tuple[float, ...]]:
    """Return colour and dashes of a series by its position."""
    return colour(f"series{position % SERIES}"), DASHES[position % SERIES]


@dataclass(frozen=True)
class Panel:
    """One drawing: its SVG, a title above it, and a description for those who cannot see it."""

    svg: str
    title: str
    alt: str
    subtitle: str = ""


def draw_svg(draw: Callable[[Axes], None], *, width: float, height: float, margins: tuple[float, float, float, float]) -> str:
    """Return the SVG that `draw(axes)` makes; sizes and margins (left, bottom, right, top) in inches, so that panels align."""
    matplotlib, figures = require("matplotlib", "figures"), require("matplotlib.figure", "figures")
    left, bottom, right, top = margins
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    with matplotlib.rc_context(RC):
        figure = figures.Figure(figsize=(width, height))
        draw(figure.add_axes(box))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def apply_theme(svg: str, name: str) -> str:
    """Make a matplotlib SVG fit for a page: no prolog, the page's colours and font, ids that depend on `name`."""
    prefix = "f" + hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| version="[^"]*"', "", svg, count=3)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib's names of parts: nothing refers to them
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", svg)
    # round coordinates, which stand inside tags, but no text between them
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    for variable, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{variable})")
    return svg


def gallery(panels: Sequence[Panel], *, legend: str = "", width: str = "16rem") -> str:
    """Set panels side by side, as many as the screen is wide; the legend takes the last place."""
    figures: list[str] = []
    for panel in panels:
        svg = apply_theme(panel.svg, panel.title + panel.alt)
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(panel.alt)}"', 1)
        subtitle = f" <span>{html.escape(panel.subtitle)}</span>" if panel.subtitle else ""
        figures.append(f"<figure><figcaption><b>{html.escape(panel.title)}</b>{subtitle}</figcaption>\n{svg}</figure>")
    return "\n".join([f'<div class="gallery" style="--panel: {width}">', *figures, legend, "</div>"])


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Explain (shape, CSS colour, words); shapes are "area", "dot", "line", or "line" with dashes such as "line 4 2"."""
    items: list[str] = []
    for shape, look, words in entries:
        swatch = f'<i class="{shape}" style="background: {look}"></i>'
        if shape.startswith("line"):
            dashes = f' stroke-dasharray="{shape[5:]}"' if shape[5:] else ""
            line = f'<line x2="28" y1="4" y2="4" stroke="{look}" stroke-width="2"{dashes} />'
            swatch = f'<svg width="28" height="8" aria-hidden="true">{line}</svg>'
        items.append(f"<li>{swatch}{html.escape(words)}</li>")
    return f'<div class="legend"><ul>{"".join(items)}</ul></div>'


def paragraphs(text: str, kind: str = "") -> str:
    """Turn a little Markdown into HTML: paragraphs, lists of "- ", `code`, *emphasis* and **bold**; the rest is escaped."""
    safe = html.escape(text, quote=False).replace(" %", "\u00a0%")
    for pattern, tag in ((r"\*\*([^*]+)\*\*", "b"), (r"\*(\w[^*]*)\*", "em"), (r"`([^`]+)`", "code")):
        safe = re.sub(pattern, rf"<{tag}>\1</{tag}>", safe)
    attribute, blocks = f' class="{kind}"' if kind else "", list[str]()
    for block in filter(None, map(str.strip, safe.split("\n\n"))):
        items = "</li><li>".join(block.removeprefix("- ").split("\n- "))
        blocks.append(f"<ul{attribute}><li>{items}</li></ul>" if block.startswith("- ") else f"<p{attribute}>{block}</p>")
    return "\n".join(blocks)


def format_number(value: float) -> str:
    """Format a number in few characters."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}").replace("inf", "∞").replace("-", "−")


def table(rows: Table, *, best: Mapping[str, str] | None = None, dots: bool = False) -> str:
    """Write an HTML table; the best of each column named in `best` ("max" or "min") is bold; `dots` show each row's colour."""
    columns, winners = rows.columns, dict[str, float]()
    for column, which in (best or {}).items():
        values = [float(row[column]) for row in rows.rows if row.get(column) not in (None, "", "–")]
        winners[column] = (max if which == "max" else min)(values, default=math.nan)
    lines: list[str] = []
    for position, row in enumerate(rows.rows):
        dot = f' style="--dot: var(--series{position % SERIES})"' if dots else ""
        cells = [f'<th scope="row"{dot}>{_cell(row.get(columns[0]))}</th>']
        for column in columns[1:]:
            value = row.get(column)
            won = column in winners and value not in (None, "", "–") and float(value) == winners[column]
            cells.append(f"<td{' class=best' if won else ''}>{_cell(value)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in columns)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _cell(value: Any) -> str:
    return "" if value is None else html.escape(format_number(value) if isinstance(value, float) else str(value))


class Section(NamedTuple):
    """A heading and the HTML below it."""

    title: str
    body: str


def style() -> str:
    """Return the style of all pages; the screen decides between light and dark, unless the page says `data-theme`."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    return Template(resource("page.css")).substitute(light=light, dark=dark)


def render(title: str, lead: str, sections: Sequence[Section], *, foot: str = "", heading: str = "", **parts: str) -> str:
    """Return the page as text; lead and foot are Markdown, parts are HTML: `head`, `above` the heading, `below`, `end`."""
    contents, bodies = list[str](), list[str]()
    for name, body in sections:
        anchor, text = re.sub(r"[^\w]+", "-", name.lower()).strip("-"), html.escape(name)
        contents.append(f'<li><a href="#{anchor}">{text}</a></li>')
        bodies.append(
            f'<section id="{anchor}" aria-labelledby="{anchor}-h">\n<h2 id="{anchor}-h">{text}</h2>\n{body}\n</section>'
        )
    return Template(resource("page.html")).substitute(
        {"head": "", "above": "", "below": "", "end": ""} | parts,
        title=html.escape(title),
        css=style(),
        heading=html.escape(heading or title),
        lead=paragraphs(lead, "lead"),
        contents="".join(contents),
        sections="\n".join(bodies),
        foot=paragraphs(foot),
    )


def check_path(path: Path) -> Path:
    """Return the path, or raise before any work is done if no page can be written there."""
    folder = path.absolute().parent
    if path.is_dir():
        raise FileError(f"Expected the path of a file to write, but {path} is a folder. Add a file name.")
    if not folder.is_dir():
        raise FileError(f"Cannot write {path}: the folder {folder} does not exist. Create it, or choose another path.")
    if not os.access(folder, os.W_OK):
        raise FileError(f"Cannot write {path}: no permission to write in {folder}. Choose another path.")
    return path


def write(text: str, path: Path) -> Path:
    """Write a page atomically, and return its full path."""
    write_whole(check_path(path), text.encode(errors="replace"), folders=False)  # half a surrogate pair has no bytes
    return path.absolute()
