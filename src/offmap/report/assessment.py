"""What a guard can and cannot see, as HTML: a table of shifts with bars, what is not seen in words, the terms of the score."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from offmap.assessment import KINDS, Assessment, Shift, can_assess, mean_terms
from offmap.guard import Guard
from offmap.report import page

LISTED = 6
"""Shifts that are not seen, and that stand on the page at once; the others unfold."""


def find_assessments(detectors: Mapping[str, Any]) -> dict[str, Assessment]:
    """Return the assessments of all guards that can be assessed, by name."""
    guards = {name: guard for name, guard in detectors.items() if isinstance(guard, Guard)}
    return {name: guard.assess() for name, guard in guards.items() if can_assess(guard)}


def describe_assessment(assessment: Assessment) -> str:
    """Return the HTML of one guard's assessment."""
    parts = [describe_shifts(assessment), describe_blind(assessment), "<h3>The terms of the score</h3>"]
    return "\n".join([*parts, describe_terms(assessment), describe_errors(assessment)])


def describe_shifts(assessment: Assessment) -> str:
    """Return a table with a row per kind of shift: AUROC and worst AUROC, the share flagged, and the best term."""
    if not assessment.shifts:
        return ""
    rows = [_describe_kind(kind, shifts) for kind, shifts in assessment.kinds().items()]
    return html_table(["shift", "AUROC", "flagged", "worst AUROC", "tried", "best term"], rows)


def _describe_kind(kind: str, shifts: Sequence[Shift]) -> list[str]:
    auroc, flagged, terms = fmean(s.auroc for s in shifts), fmean(s.flagged for s in shifts), mean_terms(shifts)
    best = max(terms, key=lambda name: terms[name], default=None)
    words = "" if best is None else f"{html.escape(best)} {terms[best]:.0f}\u00a0%"
    cells = [html.escape(KINDS.get(kind, kind)), bar(auroc, (auroc - 50) / 50), bar(flagged, flagged / 100, "flagged")]
    return [*cells, f"{min(s.auroc for s in shifts):.0f}\u00a0%", str(len(shifts)), words]


def bar(percent: float, share: float, kind: str = "") -> str:
    """Return a number in per cent beside a bar that is filled to this share; below it on a phone."""
    width = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    filled = f'<i class="bar {kind}" aria-hidden="true"><i style="width: {100 * width:.1f}%"></i></i>'
    return f'<span class="meter">{percent:.0f}\u00a0%{filled}</span>'


def describe_blind(assessment: Assessment) -> str:
    """List the shifts that are not seen reliably, the worst first."""
    blind, summary = assessment.blind(), assessment.sight_notes()
    if not blind:
        return page.paragraphs("\n\n".join(summary))
    lines = [
        f"**Not reliably seen: {len(blind)} of {len(assessment.shifts)} shifts that were tried.**",
        write_list(blind[:LISTED]),
    ]
    more = len(blind) - LISTED
    rest = f"<details><summary>{more} more</summary>{page.paragraphs(write_list(blind[LISTED:]))}</details>" if more > 0 else ""
    closing = [note for note in summary[1:] if not note.startswith(" ")]
    return page.paragraphs("\n\n".join(lines)) + rest + page.paragraphs("\n\n".join(closing))


def write_list(lines: Sequence[str]) -> str:
    """Return lines as a list in Markdown."""
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def describe_terms(assessment: Assessment) -> str:
    """Return a table with a row per term: its weight, its mean AUROC, and how well it ranks the model's errors."""
    kinds = [mean_terms(shifts) for shifts in assessment.kinds().values()]
    aurocs = {name: [kind[name] for kind in kinds if name in kind] for name in assessment.weights}
    most = max(assessment.weights.values(), default=1.0)
    rows: list[list[str]] = []
    for name, weight in assessment.weights.items():
        seen = f"{fmean(aurocs[name]):.0f}\u00a0%" if aurocs[name] else "–"
        rows.append([html.escape(name), bar(100 * weight, weight / most, "weight"), seen, correlation(assessment, name)])
    overall = "–" if math.isnan(assessment.auroc) else f"{assessment.auroc:.0f}\u00a0%"
    rows.append(["<b>the score</b>", "", overall, correlation(assessment, "score")])
    columns = ["term", "weight", "mean AUROC", "ranks errors"]
    known = bool(assessment.errors)
    return html_table(columns if known else columns[:3], [row if known else row[:3] for row in rows])


def correlation(assessment: Assessment, name: str) -> str:
    """Return the rank correlation of a term with the model's errors; a dash where it is unknown."""
    value = assessment.errors.get(name, math.nan)
    return "–" if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def describe_errors(assessment: Assessment) -> str:
    """Say how well the score ranks errors; a term that ranks them much better is set in bold."""
    notes = [note.replace(" -", " −") for note in assessment.error_notes()]
    bold = [f"**{note}**" if place else note for place, note in enumerate(notes)]
    return page.paragraphs(" ".join(bold)) if notes else ""


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table whose cells are HTML."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    lines = (f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows)
    return f'<div class="scroll"><table class="seen"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
