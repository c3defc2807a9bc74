"""`write_page`: an evaluation as one self-contained page that answers to the reader's hand.

Curves are drawn by the scripts beside this file from numbers inside the page. Their amount does not grow with the rows: about
8 kB for a scorer and a set, 50 kB for the clips of a guard, 1 MB for all pictures together.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offmap._version import __version__
from offmap.evaluation import Evaluation
from offmap.guard import Guard
from offmap.report import style
from offmap.report.clips import frames
from offmap.report.examples import Names, examples, note
from offmap.report.measured import measured
from offmap.report.page import Frame, Section, check_path, paragraphs, render, table, write
from offmap.report.verdict import best, headline, verdict
from offmap.table import Table

SCRIPTS = ("plot.js", "evaluated.js", "clips.js", "choices.js")
MOST_ROWS = 120
"""Parameters of a model that the summary lists."""

WORDS = {
    "scores": """How OOD each set is found: further right is more OOD, and every histogram is as high as its own tallest bar.
All that lies right of the line is flagged. Move the line with the slider, with the arrow keys, or in the picture.""",
    "roc": """Every threshold at once: OOD rows caught over in-distribution rows flagged by mistake. The mark is the threshold
chosen above.""",
    "risk": """If it may decline the rows that it finds most OOD, how wrong is it on the rest? The lower the curve runs to the
left, the better the score knows where predictions fail. Test data only.""",
    "reliability": """Whether stated confidence is met, on test data. On the diagonal it is; below it, predictions are surer than
they are right.""",
    "clips": """One and the same fit, its random weights held ever closer to the model's: w = w̄ + V·clip(φ ⊙ z, c). Without a
clip (∞) draws differ wherever the training data allow it, which detects; at 0 they are the model itself. The paper's figure 4.""",
    "history": """The weights' entropy (1/d) Σ log φ² rises until the validation risk would pass its threshold τ (dashed). Dotted:
the step whose state was kept. Risks far above τ are cut off.""",
    "summary": "What is random in the model, and how far: φ is the scale of a weight's noise.",
    "rows": "All that was measured, for all scorers. `wide_`: predictions of unclipped draws.",
}
TITLES = {
    "scores": "Scores and threshold", "roc": "ROC curves", "risk": "Risk and coverage", "reliability": "Reliability",
    "examples": "Most and least in-distribution", "clips": "Clipping the weights", "history": "How the fit went",
    "summary": "The model, summarised", "rows": "All numbers",
}  # fmt: skip
MISSING = {
    "risk": "This scorer predicts nothing that could be wrong.",
    "reliability": "This scorer predicts nothing whose confidence could be checked.",
    "history": "Nothing was fitted step by step.",
}
NO_SCRIPT = (
    "<noscript><p>The figures are drawn by a script inside this page, which is switched off. All tables are here.</p></noscript>"
)


def write_page(
    evaluation: Evaluation,
    path: str | Path,
    *,
    title: str = "How OOD is OOD?",
    columns: Sequence[str] = (),
    classes: Sequence[str] = (),
    image_shape: tuple[int, ...] | None = None,
) -> Path:
    """Write an evaluation as one HTML file that needs no network, and return its full path.

    Examples are shown with the names of `columns` and `classes`, where given; flat rows are folded into images of
    `image_shape`, (height, width) or (channels, height, width). The file is written whole or not at all, and stays below
    2 MB for a guard, whatever the number of rows.
    """
    target = check_path(Path(path))
    names = Names(columns, classes, image_shape)
    studies = [study(evaluation, name) for name in evaluation.scores]
    shown = [part for part in TITLES if part not in MISSING | {"clips": ""} or any(_has(s[part]) for s in studies)]
    sections = [Section(TITLES[part], _body(part, evaluation, names)) for part in shown]
    start = list(evaluation.scores).index(best(evaluation))
    data = {"start": start, "missing": MISSING, "map": style.MAP, "classes": list(map(str, classes)), "scorers": studies}
    script = "\n".join(map(style.resource, SCRIPTS))
    frame = Frame(
        head=_policy(script) + f"\n<style>{style.resource('evaluated.css')}</style>",
        above=f'<div class="top"><p class="eyebrow">{html.escape(title)}</p>{_tools(list(evaluation.scores), start)}</div>',
        below=per_scorer(evaluation, lambda name: paragraphs(verdict(evaluation, name), "lead")) + NO_SCRIPT,
        end=f'\n<script type="application/json" id="data">{embedded(data)}</script>\n<script>{script}</script>',
    )
    foot = _left_out(studies, shown)
    return write(render(title, "", sections, foot=foot, heading=headline(evaluation), frame=frame), target)


def study(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """All that is drawn of one scorer."""
    return measured(evaluation, name) | {"clips": frames(evaluation, name)}


def _has(part: Any) -> bool:
    return bool(part) and not isinstance(part, str)


def embedded(data: Any) -> str:
    r"""JSON that can stand inside a script element, whatever strings it holds; NaN and infinities are refused.

    >>> embedded({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII alone: U+2028 is escaped with the rest
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(script: str) -> str:
    """Nothing is loaded from anywhere, and no script runs but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f'\n<meta http-equiv="Content-Security-Policy" content="{rules}">'


def per_scorer(evaluation: Evaluation, make: Any) -> str:
    """HTML for every scorer, of which the script shows one."""
    return "\n".join(f'<div data-scorer="{i}">{make(name)}</div>' for i, name in enumerate(evaluation.scores))


def _tools(names: Sequence[str], start: int) -> str:
    """A choice of scorers, where there are several, and of colours."""
    options = "".join(
        f'<option value="{i}"{" selected" if i == start else ""}>{html.escape(n)}</option>' for i, n in enumerate(names)
    )
    choice = f'<label>Scorer <select id="scorer">{options}</select></label>' if len(names) > 1 else ""
    return f'<div class="tools">{choice}<button type="button" id="theme" aria-pressed="false">Dark colours</button></div>'


def _body(part: str, evaluation: Evaluation, names: Names) -> str:
    """The HTML of one section."""
    words = paragraphs(WORDS.get(part, ""))
    if part == "examples":
        return paragraphs(note(), "note") + per_scorer(evaluation, lambda name: examples(evaluation, name, names))
    if part == "summary":
        return words + per_scorer(evaluation, lambda name: summary(evaluation.scorers.get(name)))
    if part == "rows":
        return words + "".join(map(_rows, ([r for r in evaluation.rows if ("auroc" in r) == told] for told in (True, False))))
    plot = f'<div class="plot" id="plot-{part}"></div><p class="missing" id="missing-{part}" hidden></p>'
    behind = (
        f'<details><summary>The same as a table</summary><div class="scroll"><table id="table-{part}"></table></div></details>'
    )
    return words + plot + CONTROLS.get(part, "") + behind


CONTROLS = {
    "scores": """<div class="slide"><label for="threshold">Threshold</label>
<input type="range" id="threshold" min="0" max="1" step="1">
<button type="button" id="back">Back to the start</button></div>
<output id="rates" for="threshold" aria-live="polite"></output>
<div class="scroll"><table id="flagged"></table></div>""",
    "clips": """<div class="slide" id="clip-slide"><label for="clip">Clip</label>
<input type="range" id="clip" min="0" max="0" step="1">
<span class="ends"><span>∞, to detect</span><span>0, the model</span></span></div>
<output id="clipped" for="clip" aria-live="polite"></output>""",
}


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of one kind as a table: detection on OOD sets, or quality on the in-distribution one."""
    return table(Table([{k: _number(v) for k, v in row.items()} for row in rows])) if rows else ""


def summary(scorer: Any) -> str:
    """A guard's own table, or a word on why there is none."""
    if not isinstance(scorer, Guard):
        return paragraphs("This scorer is no guard: nothing in a model was made random.")
    made = scorer.summary()
    rows = [{k: _number(v) for k, v in row.items()} for row in made.rows[:MOST_ROWS]]
    more = [f"… and {len(made.rows) - MOST_ROWS} more parameters."] if len(made.rows) > MOST_ROWS else []
    return table(Table(rows)) + paragraphs("\n\n".join([*more, *made.notes]), "note")


def _left_out(studies: Sequence[dict[str, Any]], shown: Sequence[str]) -> str:
    """What the page does not have, and why."""
    why = {**MISSING, "clips": next((s["clips"] for s in studies if isinstance(s["clips"], str)), "")}
    words = [f"{TITLES[part]} is left out: {reason[:1].lower()}{reason[1:]}" for part, reason in why.items() if part not in shown]
    return "\n\n".join([*words, f"Written by offmap {__version__}. This page loads nothing and sends nothing."])


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "∞" if value > 0 else str(value)
    return "" if value is None else str(value)
