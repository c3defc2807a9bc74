"""The most and the least in-distribution rows of every set: as pictures where they are images, else as a table."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from offmap._types import Inputs
from offmap.evaluation import KEPT, Evaluation, Example
from offmap.guard import Guard
from offmap.report.axis import label as number
from offmap.report.page import table
from offmap.report.pictures import data_uri, image_of, levels, side_of
from offmap.table import Table

COLUMNS, SIGNS = 8, 60
"""Columns of a table of examples, and signs of what is not a number."""

ENDS = {"test": ("Most in-distribution", "Least in-distribution"), "": ("Strangest", "Least OOD")}


@dataclass(frozen=True)
class Names:
    """What the user calls columns and classes, and the shape of images that come as flat rows."""

    columns: Sequence[str] = ()
    classes: Sequence[str] = ()
    image: tuple[int, ...] | None = None

    def column(self, place: int) -> str:
        """A column's name, or its number."""
        return str(self.columns[place]) if place < len(self.columns) else f"x{place}"

    def label(self, place: int) -> str:
        """A class's name, or its number."""
        return str(self.classes[place]) if 0 <= place < len(self.classes) else str(place)


def examples(evaluation: Evaluation, name: str, names: Names) -> str:
    """HTML of all sets of one scorer, the in-distribution one first."""
    kept = evaluation.seen[name].examples if name in evaluation.seen else {}
    guard = evaluation.scorers.get(name)
    parts: list[str] = []
    images = [image for e in _all(evaluation) if (image := image_of(e.inputs, names.image)) is not None]
    ends, side = (levels(images), side_of(len(images))) if images else ((0.0, 1.0), 0)
    for label, rows in kept.items():
        low, high = rows[: len(rows) // 2], rows[len(rows) // 2 :][::-1]
        halves = (low, high) if label == "test" else (high, low)
        parts.append(f"<h3>{html.escape('CombinedScore data: test' if label == 'test' else f'Strange data: {label}')}</h3>")
        blocks: list[str] = []
        for title, half in zip(ENDS.get(label, ENDS[""]), halves, strict=True):
            said = [result(guard, e.inputs, names) for e in half]
            if half and image_of(half[0].inputs, names.image) is not None:
                body = _pictures(half, said, names, ends, side)
            else:
                body = table(Table([_row(e, s, names) for e, s in zip(half, said, strict=True)]))
            blocks.append(f"<div><h4>{title}</h4>{body}</div>")
        parts.append(f'<div class="halves">{"".join(blocks)}</div>')
    return "\n".join(parts)


def _all(evaluation: Evaluation) -> list[Example]:
    return [e for seen in evaluation.seen.values() for rows in seen.examples.values() for e in rows]


def result(guard: object, inputs: Inputs, names: Names) -> str:
    """What a guard predicts for one row, in a few signs; nothing for other scorers."""
    if not isinstance(guard, Guard):
        return ""
    said = guard.predict(inputs)
    if said.probs is not None and said.label is not None:
        if said.label.numel() > 1:
            return ""
        return f"{names.label(int(said.label))} ({100 * float(said.probs.max()):.0f}\u00a0%)"
    if said.mean is None or said.std is None or said.mean.numel() > 1:
        return ""
    return f"{number(float(said.mean))} ± {number(float(said.std))}"


def target_of(target: Tensor | None, names: Names) -> str:
    """A single target in words."""
    if target is None or target.numel() > 1:
        return ""
    return number(float(target)) if target.is_floating_point() else names.label(int(target))


def _row(example: Example, said: str, names: Names) -> Mapping[str, Any]:
    """One line of a table."""
    row: dict[str, Any] = {"row": example.place, "score": number(example.score)}
    row |= {"truth": truth} if (truth := target_of(example.target, names)) else {}
    row |= {"predicted": said} if said else {}
    return row | {key: value for key, value in cells(example.inputs, names).items() if key not in row}


def cells(inputs: Inputs, names: Names) -> dict[str, str]:
    """The inputs of one row by column, or shortened, by argument.

    >>> import torch
    >>> cells(torch.tensor([[0.5, 2.0]]), Names(["a"]))
    {'a': '0.5', 'x1': '2'}
    """
    if isinstance(inputs, Tensor) and inputs.ndim == 2:
        values = inputs[0].double().tolist()
        shown = {names.column(i): number(v) for i, v in enumerate(values[:COLUMNS])}
        return shown | ({"…": f"{len(values) - COLUMNS} more"} if len(values) > COLUMNS else {})
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs if isinstance(inputs, tuple | list) else [inputs])
    return {names.column(k) if isinstance(k, int) else str(k): _shortened(v) for k, v in pairs}


def _shortened(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)[:SIGNS]
    numbers = value.flatten()[: SIGNS // 2].double().tolist()
    text = " ".join(map(number, numbers))
    return text if len(text) <= SIGNS and value.numel() == len(numbers) else f"{text[: SIGNS - 1].rsplit(' ', 1)[0]} …"


def _pictures(rows: Sequence[Example], said: Sequence[str], names: Names, ends: tuple[float, float], side: int) -> str:
    """Images side by side, with score, prediction and truth below each."""
    figures: list[str] = []
    for example, words in zip(rows, said, strict=True):
        image = image_of(example.inputs, names.image)
        assert image is not None
        truth = target_of(example.target, names)
        facts = [f"score {number(example.score)}", *([f"says {words}"] if words else []), *([f"is {truth}"] if truth else [])]
        alt = html.escape(f"Row {example.place}: {', '.join(facts)}.")
        lines = "".join(f"<span>{html.escape(fact)}</span>" for fact in facts)
        figures.append(
            f'<li><img src="{data_uri(np.asarray(image), ends, side)}" alt="{alt}" width="96" height="96">{lines}</li>'
        )
    return f'<ul class="pictures">{"".join(figures)}</ul>'


def note() -> str:
    """How many rows are shown of how many."""
    return f"At most {KEPT} rows from either end of every set. Rows count from 0."
