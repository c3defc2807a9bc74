"""One self-contained HTML page: no network, readable on a phone and on a dark screen."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offmap.errors import FileError
from offmap.evaluation import Evaluation
from offmap.io.atomic import write_whole
from offmap.report import style
from offmap.report.figures import Array, Panel, histogram_panel, roc, roc_panel, score_bins
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
    r"""Blank lines divide paragraphs, "- " begins the line of a list; `code`, *words* and **bold** ones are marked, the rest is
    escaped.

    >>> paragraphs("a < b, **so** *do* `x`")
    '<p>a &lt; b, <b>so</b> <em>do</em> <code>x</code></p>'
    >>> paragraphs("- a\n- b")
    '<ul><li>a</li><li>b</li></ul>'
    """
    safe = html.escape(text, quote=False).replace(" %", "\u00a0%")
    safe = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", safe)
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*(\w[^*]*)\*", r"<em>\1</em>", safe))
    named = f' class="{kind}"' if kind else ""
    return "\n".join(_paragraph(part.strip(), named) for part in safe.split("\n\n") if part.strip())


def _paragraph(text: str, named: str) -> str:
    if not text.startswith("- "):
        return f"<p{named}>{text}</p>"
    return f"<ul{named}>" + "".join(f"<li>{line}</li>" for line in text.removeprefix("- ").split("\n- ")) + "</ul>"


def gallery(panels: Sequence[Panel], *, legend: str = "", width: str = "16rem") -> str:
    """Panels side by side, as many as the screen is wide; the legend takes the last place."""
    figures = "\n".join(_figure(panel) for panel in panels)
    return f'<div class="gallery" style="--panel: {width}">\n{figures}\n{legend}\n</div>'


def _figure(panel: Panel) -> str:
    svg = style.themed(panel.svg, panel.title + panel.alt)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(panel.alt)}"', 1)
    subtitle = f" <span>{html.escape(panel.subtitle)}</span>" if panel.subtitle else ""
    return f"<figure><figcaption><b>{html.escape(panel.title)}</b>{subtitle}</figcaption>\n{svg}</figure>"


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """(shape, CSS colour, words); shapes are "area", "dot", "line", or "line" with dashes such as "line 4 2"."""
    items = "".join(f"<li>{_swatch(shape, look)}{html.escape(words)}</li>" for shape, look, words in entries)
    return f'<div class="legend"><ul>{items}</ul></div>'


def _swatch(shape: str, look: str) -> str:
    if not shape.startswith("line"):
        return f'<i class="{shape}" style="background: {look}"></i>'
    dashes = f' stroke-dasharray="{shape[5:]}"' if shape[5:] else ""
    line = f'<line x2="28" y1="4" y2="4" stroke="{look}" stroke-width="2"{dashes} />'
    return f'<svg width="28" height="8" aria-hidden="true">{line}</svg>'


def series_legend(names: Sequence[str]) -> str:
    """The colours and dashes of series by their order."""
    looks = [(" ".join(f"{1.3 * d:g}" for d in style.series(i)[1]), i % style.SERIES) for i in range(len(names))]
    return legend([(f"line {d}".strip(), f"var(--series{i})", n) for (d, i), n in zip(looks, names, strict=True)])


def table(rows: Table, *, best: Mapping[str, str] | None = None, dots: bool = False) -> str:
    """An HTML table; the best of each column named in `best` ("max" or "min") is bold; `dots` show the colour of each row."""
    columns, marks = rows.columns, _best(rows, best or {})
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in columns)
    lines: list[str] = []
    for position, row in enumerate(rows.rows):
        dot = f' style="--dot: var(--series{position % style.SERIES})"' if dots else ""
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


def score_panels(
    evaluation: Evaluation, *, thresholds: Mapping[str, float] | None = None, alone: Sequence[str] = (), least: float = 0.0
) -> list[Panel]:
    """A histogram per scorer on one common axis from `least` on; scorers in `alone` measure something else, on their own."""
    scores = {name: {k: np.asarray(v) for k, v in sets.items()} for name, sets in evaluation.scores.items()}
    common = score_bins([s for name, sets in scores.items() if name not in alone for s in sets.values()], least=least)
    panels: list[Panel] = []
    for name, sets in scores.items():
        bins = score_bins(list(sets.values()), least=-np.inf) if name in alone else common
        label = "own scale" if name in alone else "score"
        svg = histogram_panel(sets, bins=bins, threshold=(thresholds or {}).get(name), label=label)
        panels.append(Panel(svg, name, f"Histogram of the scores of {name}. {_medians(sets)}"))
    return panels


def _medians(sets: Mapping[str, Array]) -> str:
    return "Median score: " + ", ".join(f"{float(np.median(v)):.2g} on {k}" for k, v in sets.items()) + "."


def roc_gallery(evaluation: Evaluation) -> str:
    """ROC curves of all scorers, one panel per OOD data set, and which curve is whose."""
    names = list(dict.fromkeys(str(row["set"]) for row in evaluation.rows if "auroc" in row))
    panels: list[Panel] = []
    for ood in names:
        areas = {row["scorer"]: row["auroc"] for row in evaluation.rows if row["set"] == ood}
        curves = [roc(np.asarray(s["test"]), np.asarray(s[ood])) for s in evaluation.scores.values()]
        words = ", ".join(f"{name} {100 * area:.1f}" for name, area in areas.items())
        panels.append(Panel(roc_panel(curves), f"OOD data: {ood}", f"ROC curves, AUROC in percent: {words}."))
    return gallery(panels, legend=series_legend(list(evaluation.scores)), width="19rem")


@dataclass(frozen=True)
class Frame:
    """HTML around the sections: in the head, above the heading, below the lead, and at the end."""

    head: str = ""
    above: str = ""
    below: str = ""
    end: str = ""


def render(
    title: str, lead: str, sections: Sequence[Section], *, foot: str = "", heading: str | None = None, frame: Frame = Frame()
) -> str:
    """The whole page as text; the heading is the title, unless there is another."""
    contents = "".join(f'<li><a href="#{s.anchor}">{html.escape(s.title)}</a></li>' for s in sections)
    body = "\n".join(
        f'<section id="{s.anchor}" aria-labelledby="{s.anchor}-h">\n'
        f'<h2 id="{s.anchor}-h">{html.escape(s.title)}</h2>\n{s.body}\n</section>'
        for s in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{style.stylesheet()}</style>{frame.head}
</head>
<body>
<header>{frame.above}<h1>{html.escape(title if heading is None else heading)}</h1>
{paragraphs(lead, "lead")}{frame.below}
<nav aria-label="Contents"><ol>{contents}</ol></nav></header>
<main>
{body}
</main>
<footer>{paragraphs(foot)}</footer>{frame.end}
</body>
</html>
"""


def check_path(path: Path) -> Path:
    """The path, if a page can be written there; found out before any work is done."""
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
