"""Build one self-contained HTML page: no network, readable on a phone and on a dark screen."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from offmap.atomic import write_whole
from offmap.errors import FileError
from offmap.report.figures import COLOURS, SERIES, Panel, themed
from offmap.table import Table


@dataclass(frozen=True)
class Section:
    """A heading and the HTML below it."""

    title: str
    body: str

    @property
    def anchor(self) -> str:
        """The heading as an address.

        >>> Section("1-D regression", "").anchor
        '1-d-regression'
        """
        return re.sub(r"[^\w]+", "-", self.title.lower()).strip("-")


def paragraphs(text: str, kind: str = "") -> str:
    r"""Turn a little Markdown into HTML: paragraphs, lists of "- ", `code`, *emphasis* and **bold**; the rest is escaped.

    >>> paragraphs("a < b, **so** *do* `x`")
    '<p>a &lt; b, <b>so</b> <em>do</em> <code>x</code></p>'
    >>> paragraphs("- a\n- b")
    '<ul><li>a</li><li>b</li></ul>'
    """
    safe = html.escape(text, quote=False).replace(" %", "\u00a0%")
    safe = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", safe)
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", safe))
    attribute = f' class="{kind}"' if kind else ""
    return "\n".join(_paragraph(part.strip(), attribute) for part in safe.split("\n\n") if part.strip())


def _paragraph(text: str, attribute: str) -> str:
    if not text.startswith("- "):
        return f"<p{attribute}>{text}</p>"
    return f"<ul{attribute}>" + "".join(f"<li>{line}</li>" for line in text.removeprefix("- ").split("\n- ")) + "</ul>"


def gallery(panels: Sequence[Panel], *, legend: str = "", width: str = "16rem") -> str:
    """Set panels side by side, as many as the screen is wide; the legend takes the last place."""
    figures = "\n".join(_figure(panel) for panel in panels)
    return f'<div class="gallery" style="--panel: {width}">\n{figures}\n{legend}\n</div>'


def _figure(panel: Panel) -> str:
    svg = themed(panel.svg, panel.title + panel.alt)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(panel.alt)}"', 1)
    subtitle = f" <span>{html.escape(panel.subtitle)}</span>" if panel.subtitle else ""
    return f"<figure><figcaption><b>{html.escape(panel.title)}</b>{subtitle}</figcaption>\n{svg}</figure>"


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """Explain (shape, CSS colour, words); shapes are "area", "dot", "line", or "line" with dashes such as "line 4 2"."""
    items = "".join(f"<li>{_swatch(shape, look)}{html.escape(words)}</li>" for shape, look, words in entries)
    return f'<div class="legend"><ul>{items}</ul></div>'


def _swatch(shape: str, look: str) -> str:
    if not shape.startswith("line"):
        return f'<i class="{shape}" style="background: {look}"></i>'
    dashes = f' stroke-dasharray="{shape[5:]}"' if shape[5:] else ""
    line = f'<line x2="28" y1="4" y2="4" stroke="{look}" stroke-width="2"{dashes} />'
    return f'<svg width="28" height="8" aria-hidden="true">{line}</svg>'


def table(rows: Table, *, best: Mapping[str, str] | None = None, dots: bool = False) -> str:
    """Write an HTML table; the best of each column named in `best` ("max" or "min") is bold; `dots` show each row's colour."""
    columns, marks = rows.columns, _best(rows, best or {})
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in columns)
    lines: list[str] = []
    for position, row in enumerate(rows.rows):
        dot = f' style="--dot: var(--series{position % SERIES})"' if dots else ""
        first = f'<th scope="row"{dot}>{html.escape(str(row.get(columns[0], "")))}</th>'
        cells = "".join(
            f"<td{' class=best' if (position, c) in marks else ''}>{html.escape(str(row.get(c) or ''))}</td>" for c in columns[1:]
        )
        lines.append(f"<tr>{first}{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _best(rows: Table, best: Mapping[str, str]) -> set[tuple[int, str]]:
    marks: set[tuple[int, str]] = set()
    for column, which in best.items():
        values = {i: float(row[column]) for i, row in enumerate(rows.rows) if row.get(column) not in (None, "", "–")}
        if values:
            winner = (max if which == "max" else min)(values.values())
            marks |= {(i, column) for i, value in values.items() if value == winner}
    return marks


def render(
    title: str, lead: str, sections: Sequence[Section], *, foot: str = "", heading: str | None = None, **parts: str
) -> str:
    """Return the page as text; the heading is the title, unless there is another.

    Args:
        title: The title of the document.
        lead: A little Markdown below the heading.
        sections: The sections, which the contents list.
        foot: A little Markdown at the end.
        heading: The first heading, if it is not the title.
        parts: HTML in the `head`, `above` the heading, `below` the lead, and at the `end`.
    """
    return Template(resource("page.html")).substitute(
        {"head": "", "above": "", "below": "", "end": ""} | parts,
        title=html.escape(title),
        css=stylesheet(),
        heading=html.escape(title if heading is None else heading),
        lead=paragraphs(lead, "lead"),
        contents="".join(f'<li><a href="#{s.anchor}">{html.escape(s.title)}</a></li>' for s in sections),
        sections="\n".join(
            f'<section id="{s.anchor}" aria-labelledby="{s.anchor}-h">\n'
            f'<h2 id="{s.anchor}-h">{html.escape(s.title)}</h2>\n{s.body}\n</section>'
            for s in sections
        ),
        foot=paragraphs(foot),
    )


def stylesheet() -> str:
    """Return the page's CSS. The screen decides between light and dark, unless the page says `data-theme`."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    return "\n".join([
        f":root {{ color-scheme: light; {light} }}",
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ color-scheme: dark; {dark} }} }}",
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}",
        resource("page.css"),
    ])  # fmt: skip


def resource(name: str) -> str:
    """Read a file beside this one."""
    return files("offmap.report").joinpath(name).read_text(encoding="utf-8")


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
