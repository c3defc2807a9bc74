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
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offmap import checks
from offmap._types import Inputs
from offmap._version import __version__
from offmap.assessment import Assessment
from offmap.detector import Detector
from offmap.evaluation import Evaluation, Example
from offmap.guard import Guard
from offmap.report import page
from offmap.report.assessment import describe_assessment, find_assessments
from offmap.report.curves import areas, curves, quality
from offmap.report.page import Array
from offmap.table import Table

MOST_ROWS, COLUMNS, CHARACTERS = 120, 8, 60
"""Parameters that the summary lists; columns of a table of examples, and characters of what is not a number."""


def write_page(
    evaluation: Evaluation, path: str | Path, *, title: str = "What is out of distribution?", columns: Sequence[str] = (),
    classes: Sequence[str] = (), image_shape: tuple[int, ...] | None = None,
) -> Path:  # fmt: skip
    """Write an evaluation as one HTML file that needs no network, atomically, and return its full path; below 2 MB for a guard.

    Args:
        evaluation: What `offmap.evaluate` returned.
        path: The file to write; its folder must exist.
        title: The title of the page.
        columns: Names of the input columns, for the tables of examples.
        classes: Names of the classes.
        image_shape: (height, width) or (channels, height, width) of images that come as flat rows.
    """
    target = page.check_path(checks.path("path", path))
    names, parts = Names(columns, classes, image_shape), {key: {**part} for key, part in page.texts()["sections"].items()}
    scorers, start = list(evaluation.scores), list(evaluation.scores).index(best(evaluation))
    numbers = [curves(evaluation, name) for name in scorers]
    seen = find_assessments(evaluation.detectors)
    parts["clips"]["missing"] = next((n["clips"] for n in numbers if isinstance(n["clips"], str)), "")
    drawn = {p for p in parts for n in numbers if n.get(p) and not isinstance(n[p], str)}
    shown = [p for p in parts if not parts[p].get("missing") or p in drawn or (p == "assessment" and seen)]
    missing = {part: words["missing"] for part, words in parts.items() if "missing" in words}
    omitted = [f"{parts[p]['title']} is left out: {why[:1].lower()}{why[1:]}" for p, why in missing.items() if p not in shown]
    data = {"start": start, "missing": missing, "map": page.MAP, "classes": list(map(str, classes)), "scorers": numbers}
    script = "\n".join(map(page.resource, ("plot.js", "evaluation.js", "clips.js", "choices.js")))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()  # this script alone may run
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    options = "".join(f'<option value="{i}"{" selected" * (i == start)}>{html.escape(n)}</option>' for i, n in enumerate(scorers))
    choice = f'<label>Scorer <select id="scorer">{options}</select></label>' if len(scorers) > 1 else ""
    tools = f'<div class="tools">{choice}<button type="button" id="theme" aria-pressed="false">Dark colours</button></div>'
    verdicts = _per_scorer(evaluation, lambda name: page.paragraphs(verdict(evaluation, name), "lead"))
    text = page.render(
        title,
        "",
        [page.Section(parts[part]["title"], _body(part, parts[part], evaluation, names, seen)) for part in shown],
        heading=headline(evaluation),
        foot="\n\n".join([*omitted, f"Written by offmap {__version__}. This page loads nothing and sends nothing."]),
        head=f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n<style>{page.resource("evaluation.css")}</style>',
        above=f'<div class="top"><p class="eyebrow">{html.escape(title)}</p>{tools}</div>',
        below=f"{verdicts}<noscript>{page.paragraphs(page.texts()['no_script'])}</noscript>",
        end=f'<script type="application/json" id="data">{embed_json(data)}</script>\n<script>{script}</script>',
    )
    return page.write(text, target)


def embed_json(data: Any) -> str:
    """Return JSON that can stand inside a script element, whatever strings it holds; refuse NaN and infinities."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII alone: U+2028 is escaped with the rest
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _per_scorer(evaluation: Evaluation, make: Callable[[str], str]) -> str:
    """Return HTML for every scorer, of which the script shows one."""
    return "\n".join(f'<div data-scorer="{i}">{make(name)}</div>' for i, name in enumerate(evaluation.scores))


def _body(
    part: str, words: Mapping[str, str], evaluation: Evaluation, names: Names, seen: Mapping[str, Assessment]
) -> str:  # fmt: skip
    """Return the HTML of one section."""
    text = page.paragraphs(words["text"])
    if part == "assessment":
        missing = page.paragraphs(words["missing"])
        return text + _per_scorer(evaluation, lambda name: describe_assessment(seen[name]) if name in seen else missing)
    if part == "examples":
        return text + _per_scorer(evaluation, lambda name: examples(evaluation, name, names))
    if part == "summary":
        return text + _per_scorer(evaluation, lambda name: _summary(evaluation.detectors.get(name)))
    if part == "rows":
        kinds = ([row for row in evaluation.rows if ("auroc" in row) == detection] for detection in (True, False))
        return text + "".join(page.table(Table(rows)) for rows in kinds if rows)
    plot = f'<div class="plot" id="plot-{part}"></div><p class="missing" id="missing-{part}" hidden></p>'
    same = f'<details><summary>The same as a table</summary><div class="scroll"><table id="table-{part}"></table></div></details>'
    return text + plot + words.get("controls", "") + same


def _summary(scorer: Any) -> str:
    if not isinstance(scorer, Guard):
        return page.paragraphs("This scorer is not a guard: it makes no parameters random.")
    summary = scorer.summary()
    more = [f"… and {len(summary.rows) - MOST_ROWS} more parameters."] if len(summary.rows) > MOST_ROWS else []
    return page.table(Table(summary.rows[:MOST_ROWS])) + page.paragraphs("\n\n".join([*more, *summary.notes]), "note")


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
    words = next(words for least, words in page.texts()["grades"] if by_set[lowest] >= least).format(what=what)
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
    detector = scorer if isinstance(scorer := evaluation.detectors.get(name), Detector) else None
    if detector is not None and detector.calibration.seen:
        parts.append("**It is uncalibrated**: the model was trained on the rows that set its threshold.")
    if threshold is None:
        parts.append("This scorer has no threshold of its own: the line below starts where 95 % of in-distribution rows pass.")
    elif not math.isfinite(threshold):
        parts.append("**Its threshold is infinite, so it flags nothing**: it was calibrated on too few rows.")
    else:
        flagged = {label: float((values > threshold).double().mean()) for label, values in scores.items()}
        caught = [f"**{percent(share)} of “{label}”**" for label, share in flagged.items() if label != "test"]
        listed = " and ".join(filter(None, [", ".join(caught[:-1]), caught[-1]]))
        false = f"**{percent(flagged['test'])} of in-distribution rows**"
        parts.append(f"At its own threshold it flags {listed}, and {false} by mistake.")
        if detector is not None:
            rate, share = detector.calibration.false_alarms, flagged["test"]
            words = "more" if share > rate else "less"
            words = words if abs(share - rate) > 2 * _spread(rate, scores["test"], detector) else "within chance"
            parts.append(f"It was set for {percent(rate)} false alarms; this is {words}.")
    if row := quality(evaluation, name):
        right = f"an accuracy of {percent(row['accuracy'])}" if "accuracy" in row else f"an RMSE of {row['rmse']:.3g}"
        kind = "prediction sets" if "accuracy" in row else "intervals"
        predictions = f"On in-distribution data its predictions have {right}"
        share = row.get("conformal_coverage")
        if share is None:
            parts.append(f"{predictions}. **It has no conformal {kind}**: the model was trained on the rows that calibrated it.")
        else:
            parts.append(f"{predictions}, and its 95 % conformal {kind} contain the target for {percent(share)} of rows.")
            if detector is not None and 0.95 - share > 3 * _spread(0.95, scores["test"], detector):
                why = "the model has seen the calibration rows, or the test rows are of another distribution"
                parts.append(f"**These {kind} fail: that is fewer than 95 %, beyond chance**; {why}.")
    return " ".join(parts)


def _spread(rate: float, scores: Tensor, detector: Detector) -> float:
    """Return the standard deviation of a share of test rows, by chance in the test data and in the calibration data."""
    calibration = detector.calibration
    rows = calibration.groups or calibration.effective_rows or len(calibration.scores)
    return math.sqrt(rate * (1 - rate) * (1 / len(scores) + 1 / rows))


def percent(share: float) -> str:
    """Format a share in percent, with a digit more near the ends; never 0 or 100 unless it is."""
    text = f"{100 * share:.1f}".removesuffix(".0") if share < 0.1 or share > 0.9 else f"{100 * share:.0f}"
    text = "< 0.1" if 0 < share < 0.0005 else "> 99.9" if 0.9995 < share < 1 else text
    return f"{text}\u00a0%"


@dataclass(frozen=True)
class Names:
    """The user's names of columns and classes, and the shape of images that come as flat rows."""

    columns: Sequence[str] = ()
    classes: Sequence[str] = ()
    image: tuple[int, ...] | None = None

    def label(self, position: int) -> str:
        """Return a class's name, or its number."""
        return str(self.classes[position]) if 0 <= position < len(self.classes) else str(position)


def examples(evaluation: Evaluation, name: str, names: Names) -> str:
    """Return the HTML of the rows of lowest and highest score in all sets of one scorer: images, or else tables."""
    every = [e for details in evaluation.details.values() for rows in details.examples.values() for e in rows]
    images = [image for e in every if (image := as_image(e.inputs, names.image)) is not None]
    parts: list[str] = []
    for label, rows in evaluation.details[name].examples.items() if name in evaluation.details else ():
        low, high = rows[: len(rows) // 2], rows[len(rows) // 2 :][::-1]
        halves, blocks = {"Least OOD": low, "Most OOD": high}, list[str]()
        for title, half in halves.items() if label == "test" else reversed(halves.items()):
            facts = [_facts(evaluation.detectors.get(name), e, names) for e in half]
            if half and as_image(half[0].inputs, names.image) is not None:
                body = _images(half, facts, names, images)
            else:
                firsts = [{"row": e.index, **fact} for e, fact in zip(half, facts, strict=True)]
                body = page.table(Table([f | cells(e.inputs, names) | f for e, f in zip(half, firsts, strict=True)]))
            blocks.append(f"<div><h4>{title}</h4>{body}</div>")
        heading = html.escape("In-distribution data: test" if label == "test" else f"OOD data: {label}")
        parts.append(f'<h3>{heading}</h3>\n<div class="halves">{"".join(blocks)}</div>')
    return "\n".join(parts)


def _facts(guard: object, example: Example, names: Names) -> dict[str, str]:
    """Return the score of one row, its target, and what a guard predicts for it, where these are single numbers."""
    facts, target = {"score": page.format_number(example.score)}, example.target
    if target is not None and target.numel() == 1:
        facts["truth"] = page.format_number(float(target)) if target.is_floating_point() else names.label(int(target))
    if isinstance(guard, Guard):
        p = guard.predict(example.inputs)
        if p.probs is not None and p.label is not None and p.label.numel() == 1:
            facts["predicted"] = f"{names.label(int(p.label))} ({100 * float(p.probs.max()):.0f}\u00a0%)"
        elif p.mean is not None and p.std is not None and p.mean.numel() == 1:
            facts["predicted"] = f"{page.format_number(float(p.mean))} ± {page.format_number(float(p.std))}"
    return facts


def cells(inputs: Inputs, names: Names) -> dict[str, str]:
    """Return the inputs of one row by column, or shortened, by argument."""
    if isinstance(inputs, Tensor) and inputs.ndim == 2:
        values = inputs[0].double().tolist()
        pairs = [*enumerate(map(page.format_number, values[:COLUMNS]))]
        pairs += [("…", f"{len(values) - COLUMNS} more")] if len(values) > COLUMNS else []
    else:
        parts = inputs if isinstance(inputs, Mapping | tuple | list) else [inputs]
        pairs = [(k, _shorten(v)) for k, v in (parts.items() if isinstance(parts, Mapping) else enumerate(parts))]
    columns = {i: str(name) for i, name in enumerate(names.columns)}
    return {columns.get(k, f"x{k}") if isinstance(k, int) else str(k): text for k, text in pairs}


def _shorten(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)[:CHARACTERS]
    numbers = value.flatten()[: CHARACTERS // 2].double().tolist()
    text = " ".join(map(page.format_number, numbers))
    return text if len(text) <= CHARACTERS and value.numel() == len(numbers) else f"{text[: CHARACTERS - 1].rsplit(' ', 1)[0]} …"


def as_image(inputs: Inputs, shape: tuple[int, ...] | None) -> Array | None:
    """Return one row as (height, width, 1 or 3), if it is an image: (1, 1 or 3, h, w), or flat numbers that `shape` folds."""
    if not isinstance(inputs, Tensor):
        return None
    row = inputs[0].double().numpy()
    if shape is not None and row.size == np.prod(shape):
        row = row.reshape(shape if len(shape) == 3 else (1, *shape))
    return row.transpose(1, 2, 0) if row.ndim == 3 and row.shape[0] in (1, 3) else None


def _images(rows: Sequence[Example], facts: Sequence[Mapping[str, str]], names: Names, images: Sequence[Array]) -> str:
    """Set images side by side, with score, prediction and truth below; all `images` of the page share grey scale and bytes."""
    low, high = min(float(i.min()) for i in images), max(float(i.max()) for i in images)
    black, white = (0.0, 1.0 if high <= 1 else 255.0) if low >= 0 and (high <= 1 or 32 < high <= 255) else (low, high)
    white = white if white > black else black + 1
    side = int(np.clip((700_000 / (3 * len(images))) ** 0.5, 16, 96))  # all images take at most 700 kB before compression
    items: list[str] = []
    for example, fact in zip(rows, facts, strict=True):
        image = as_image(example.inputs, names.image)
        assert image is not None
        step = -(-max(image.shape[:2]) // side)
        shares = (np.nan_to_num(image[::step, ::step], nan=black) - black) / (white - black)
        source = base64.b64encode(png((np.clip(shares, 0, 1) * 255).round().astype(np.uint8))).decode()
        verbs = {"score": "score", "predicted": "says", "truth": "is"}
        lines = [f"{verb} {fact[key]}" for key, verb in verbs.items() if key in fact]
        alt = html.escape(f"Row {example.index}: {', '.join(lines)}.")
        spans = "".join(f"<span>{html.escape(line)}</span>" for line in lines)
        items.append(f'<li><img src="data:image/png;base64,{source}" alt="{alt}" width="96" height="96">{spans}</li>')
    return f'<ul class="images">{"".join(items)}</ul>'


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode (height, width, 1 or 3) bytes as a PNG file."""
    height, width, channels = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # 0: no filter
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
