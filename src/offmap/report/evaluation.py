"""`write_page`: an evaluation as one self-contained, interactive page.

The scripts beside this file draw the curves from numbers inside the page: about 8 kB for a scorer and a set, 50 kB for the clips
of a guard, 1 MB for all images together, whatever the number of rows.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offmap._version import __version__
from offmap.detector import Detector
from offmap.evaluation import EXAMPLES, Evaluation
from offmap.guard import Guard
from offmap.report.curves import curves
from offmap.report.examples import Names, examples
from offmap.report.figures import MAP
from offmap.report.page import Section, check_path, paragraphs, render, resource, table, write
from offmap.table import Table

SCRIPTS = ("plot.js", "evaluation.js", "clips.js", "choices.js")
MOST_ROWS = 120
"""Parameters of a model that the summary lists."""

NO_SCRIPT = (
    "<noscript><p>The figures are drawn by a script inside this page, which is switched off. All tables are here.</p></noscript>"
)
GRADES = (
    (0.97, "tells {what} from in-distribution data reliably"),
    (0.9, "tells {what} from in-distribution data in most cases"),
    (0.75, "tells {what} from in-distribution data in part"),
    (0.6, "hardly tells {what} from in-distribution data"),
    (0.4, "cannot tell {what} from in-distribution data"),
    (0.0, "scores {what} lower than in-distribution data"),
)
"""By the lowest AUROC of all OOD sets."""


def write_page(
    evaluation: Evaluation,
    path: str | Path,
    *,
    title: str = "What is out of distribution?",
    columns: Sequence[str] = (),
    classes: Sequence[str] = (),
    image_shape: tuple[int, ...] | None = None,
) -> Path:
    """Write an evaluation as one HTML file that needs no network, atomically; it stays below 2 MB for a guard.

    Args:
        evaluation: What `offmap.evaluate` returned.
        path: The file to write; its folder must exist.
        title: The title of the page.
        columns: Names of the input columns, for the tables of examples.
        classes: Names of the classes.
        image_shape: (height, width) or (channels, height, width) of images that come as flat rows.

    Returns:
        The full path of the file.
    """
    target = check_path(Path(path))
    names = Names(columns, classes, image_shape)
    parts: dict[str, dict[str, str]] = tomllib.loads(resource("sections.toml"))
    numbers = [curves(evaluation, name) for name in evaluation.scores]
    parts["clips"]["missing"] = next((n["clips"] for n in numbers if isinstance(n["clips"], str)), "")
    shown = [part for part in parts if not parts[part].get("missing") or any(_has(n[part]) for n in numbers)]
    start = list(evaluation.scores).index(best(evaluation))
    missing = {part: words["missing"] for part, words in parts.items() if "missing" in words}
    data = {"start": start, "missing": missing, "map": MAP, "classes": list(map(str, classes)), "scorers": numbers}
    script = "\n".join(map(resource, SCRIPTS))
    omitted = [f"{parts[p]['title']} is left out: {why[:1].lower()}{why[1:]}" for p, why in missing.items() if p not in shown]
    page = render(
        title,
        "",
        [Section(parts[part]["title"], _body(part, parts[part], evaluation, names)) for part in shown],
        heading=headline(evaluation),
        foot="\n\n".join([*omitted, f"Written by offmap {__version__}. This page loads nothing and sends nothing."]),
        head=_policy(script) + f"\n<style>{resource('evaluation.css')}</style>",
        above=f'<div class="top"><p class="eyebrow">{html.escape(title)}</p>{_tools(list(evaluation.scores), start)}</div>',
        below=_per_scorer(evaluation, lambda name: paragraphs(verdict(evaluation, name), "lead")) + NO_SCRIPT,
        end=f'\n<script type="application/json" id="data">{embed_json(data)}</script>\n<script>{script}</script>',
    )
    return write(page, target)


def _has(part: Any) -> bool:
    return bool(part) and not isinstance(part, str)


def embed_json(data: Any) -> str:
    r"""Return JSON that can stand inside a script element, whatever strings it holds; refuse NaN and infinities.

    >>> embed_json({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII alone: U+2028 is escaped with the rest
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(script: str) -> str:
    """Allow this script alone, and load nothing from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f'\n<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _per_scorer(evaluation: Evaluation, make: Callable[[str], str]) -> str:
    """Return HTML for every scorer, of which the script shows one."""
    return "\n".join(f'<div data-scorer="{i}">{make(name)}</div>' for i, name in enumerate(evaluation.scores))


def _tools(names: Sequence[str], start: int) -> str:
    """Return a choice of scorers, where there are several, and of colours."""
    options = "".join(
        f'<option value="{i}"{" selected" if i == start else ""}>{html.escape(n)}</option>' for i, n in enumerate(names)
    )
    choice = f'<label>Scorer <select id="scorer">{options}</select></label>' if len(names) > 1 else ""
    return f'<div class="tools">{choice}<button type="button" id="theme" aria-pressed="false">Dark colours</button></div>'


def _body(part: str, words: Mapping[str, str], evaluation: Evaluation, names: Names) -> str:
    """Return the HTML of one section."""
    text = paragraphs(words.get("text", ""))
    if part == "examples":
        note = paragraphs(f"At most {EXAMPLES} rows from either end of every set. Rows count from 0.", "note")
        return note + _per_scorer(evaluation, lambda name: examples(evaluation, name, names))
    if part == "summary":
        return text + _per_scorer(evaluation, lambda name: _summary(evaluation.detectors.get(name)))
    if part == "rows":
        kinds = ([_texts(row) for row in evaluation.rows if ("auroc" in row) == detection] for detection in (True, False))
        return text + "".join(table(Table(rows)) for rows in kinds if rows)
    plot = f'<div class="plot" id="plot-{part}"></div><p class="missing" id="missing-{part}" hidden></p>'
    same = f'<details><summary>The same as a table</summary><div class="scroll"><table id="table-{part}"></table></div></details>'
    return text + plot + words.get("controls", "") + same


def _summary(scorer: Any) -> str:
    if not isinstance(scorer, Guard):
        return paragraphs("This scorer is no guard: nothing in a model was made random.")
    summary = scorer.summary()
    more = [f"… and {len(summary.rows) - MOST_ROWS} more parameters."] if len(summary.rows) > MOST_ROWS else []
    return table(Table(list(map(_texts, summary.rows[:MOST_ROWS])))) + paragraphs("\n\n".join([*more, *summary.notes]), "note")


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    return {key: _text(value) for key, value in row.items()}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "∞" if value > 0 else str(value)
    return "" if value is None else str(value)


# ------------------------------------------------------------------------------------------------------- in words


def grade(area: float, what: str) -> str:
    """Put an AUROC into words.

    >>> grade(0.99, "sketches"), grade(0.5, "sketches")
    ('tells sketches from in-distribution data reliably', 'cannot tell sketches from in-distribution data')
    """
    return next(words for least, words in GRADES if area >= least or least == 0).format(what=what)


def areas(evaluation: Evaluation, name: str) -> dict[str, float]:
    """Return the AUROC by OOD set."""
    return {row["set"]: row["auroc"] for row in evaluation.rows if row["scorer"] == name and "auroc" in row}


def best(evaluation: Evaluation) -> str:
    """Return the scorer whose mean AUROC is the highest."""
    means = {name: sum(by_set.values()) / len(by_set) for name in evaluation.scores if (by_set := areas(evaluation, name))}
    return max(means, key=lambda name: means[name])


def headline(evaluation: Evaluation) -> str:
    """Put the evaluation into one sentence: the best scorer and its lowest AUROC."""
    name = best(evaluation)
    by_set = areas(evaluation, name)
    lowest = min(by_set, key=lambda label: by_set[label])
    what = f"“{lowest}”"
    if len(by_set) > 1 and by_set[lowest] >= 0.6:
        what = f"{'both' if len(by_set) == 2 else f'all {len(by_set)}'} OOD sets"
    words = grade(by_set[lowest], what)
    if len(evaluation.scores) == 1:
        return f"{'This guard' if name == 'guard' else f'“{name}”'} {words}."
    return f"Of {len(evaluation.scores)} scorers, “{name}” does best: it {words}."


def verdict(evaluation: Evaluation, name: str) -> str:
    """Put what one scorer does at its threshold into a paragraph; `**` marks numbers."""
    scores, details, by_set = evaluation.scores[name], evaluation.details.get(name), areas(evaluation, name)
    lowest = min(by_set, key=lambda label: by_set[label])
    ordered = ", ".join(f"{percent(area)} for “{label}”" for label, area in by_set.items())
    parts = [f"An OOD row gets a higher score than an in-distribution one with a probability (AUROC) of {ordered}."]
    if len(by_set) > 1 and by_set[lowest] < 0.9:
        parts.append(f"The hardest to tell apart is “{lowest}”.")
    threshold = details.threshold if details is not None else None
    if threshold is None:
        parts.append("This scorer has no threshold of its own: the line below starts where 95 % of in-distribution rows pass.")
    elif not math.isfinite(threshold):
        parts.append("**Its threshold is infinite, so that it flags nothing**: it was calibrated on too few rows.")
    else:
        flagged = {label: float((values > threshold).double().mean()) for label, values in scores.items()}
        caught = [f"**{percent(share)} of “{label}”**" for label, share in flagged.items() if label != "test"]
        listed = caught[0] if len(caught) == 1 else f"{', '.join(caught[:-1])} and {caught[-1]}"
        false = f"**{percent(flagged['test'])} of in-distribution rows**"
        parts.append(f"At its own threshold it flags {listed}, and {false} by mistake.")
        parts += _compare_false_alarms(evaluation.detectors.get(name), flagged["test"], len(scores["test"]))
    return " ".join([*parts, *_quality(evaluation, name)])


def _compare_false_alarms(scorer: Any, share: float, rows: int) -> list[str]:
    """Say whether false alarms are as many as the threshold was set for."""
    if not isinstance(scorer, Detector):
        return []
    rate = scorer.calibration.false_alarms
    # two standard deviations of chance, in the test data and in the calibration data
    tolerance = 2 * math.sqrt(rate * (1 - rate) * (1 / rows + 1 / len(scorer.calibration.scores)))
    words = "more than that" if share > rate + tolerance else "fewer" if share < rate - tolerance else "as many as chance allows"
    return [f"It was set for {percent(rate)} of false alarms; these are {words}."]


def _quality(evaluation: Evaluation, name: str) -> list[str]:
    row: dict[str, Any] = next((r for r in evaluation.rows if r["scorer"] == name and r["set"] == "test"), {})
    if not row:
        return []
    right = f"an accuracy of {percent(row['accuracy'])}" if "accuracy" in row else f"an RMSE of {row['rmse']:.3g}"
    kind = "prediction sets" if "accuracy" in row else "intervals"
    return [f"On in-distribution data its predictions have {right}, and its 95 % conformal {kind} hold the truth for "
            f"{percent(row['conformal_coverage'])} of rows."]  # fmt: skip


def percent(share: float) -> str:
    r"""Format a share in percent, with a digit more near the ends; never 0 or 100 unless it is.

    >>> percent(0.5), percent(0.0423), percent(0.99996), percent(1.0)
    ('50\xa0%', '4.2\xa0%', '> 99.9\xa0%', '100\xa0%')
    """
    if share in (0, 1):
        text = f"{100 * share:.0f}"
    elif share < 0.0005 or share > 0.9995:
        text = "< 0.1" if share < 0.5 else "> 99.9"
    else:
        text = f"{100 * share:.1f}".removesuffix(".0") if share < 0.1 or share > 0.9 else f"{100 * share:.0f}"
    return f"{text}\u00a0%"
