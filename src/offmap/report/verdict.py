"""An evaluation in words: what was told apart, what was promised, and how good predictions are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offmap.evaluation import Evaluation

GRADES = (
    (0.97, "tells {what} from in-distribution data reliably"),
    (0.9, "tells {what} from in-distribution data in most cases"),
    (0.75, "tells {what} from in-distribution data in part"),
    (0.6, "hardly tells {what} from in-distribution data"),
    (0.4, "cannot tell {what} from in-distribution data"),
    (0.0, "takes {what} for more in-distribution than in-distribution data"),
)
"""By the lowest AUROC of all OOD sets."""


def grade(area: float, what: str) -> str:
    """An AUROC in words.

    >>> grade(0.99, "strange"), grade(0.5, "strange")
    ('tells OOD from in-distribution data reliably', 'cannot tell OOD from in-distribution data')
    """
    return next(words for least, words in GRADES if area >= least or least == 0).format(what=what)


def areas(evaluation: Evaluation, name: str) -> dict[str, float]:
    """AUROC by OOD set."""
    return {row["set"]: row["auroc"] for row in evaluation.rows if row["scorer"] == name and "auroc" in row}


def best(evaluation: Evaluation) -> str:
    """The scorer whose mean AUROC is the highest."""
    means = {name: sum(found.values()) / len(found) for name in evaluation.scores if (found := areas(evaluation, name))}
    return max(means, key=lambda name: means[name])


def headline(evaluation: Evaluation) -> str:
    """One sentence about all."""
    name = best(evaluation)
    found = areas(evaluation, name)
    what = _what(found)
    words = grade(min(found.values()), what)
    if len(evaluation.scores) == 1:
        subject = "This guard" if name == "guard" else f"“{name}”"
        return f"{subject} {words}."
    return f"Of {len(evaluation.scores)} scorers, “{name}” does best: it {words}."


def _what(found: Mapping[str, float]) -> str:
    """What the lowest AUROC is about: one set by its name; all, where even the lowest is good."""
    if len(found) == 1:
        return f"“{next(iter(found))}”"
    many = "both" if len(found) == 2 else f"all {len(found)}"
    return f"{many} OOD sets" if min(found.values()) >= 0.6 else f"“{min(found, key=lambda label: found[label])}”"


def verdict(evaluation: Evaluation, name: str) -> str:
    """What one scorer does at its threshold, in a paragraph; `**` marks numbers."""
    scores, seen = evaluation.scores[name], evaluation.seen.get(name)
    found = areas(evaluation, name)
    lowest = min(found, key=lambda label: found[label])
    ordered = ", ".join(f"{percent(area)} for “{label}”" for label, area in found.items())
    parts = [f"An OOD row gets a higher score than an in-distribution one with a probability (AUROC) of {ordered}."]
    if len(found) > 1 and found[lowest] < 0.9:
        parts.append(f"The hardest to tell apart is “{lowest}”.")
    threshold = seen.threshold if seen is not None else None
    if threshold is None:
        parts.append("This scorer has no threshold of its own: the line below starts where 95 % of in-distribution rows pass.")
    elif not math.isfinite(threshold):
        parts.append("**Its threshold is infinite, so that it flags nothing**: it was calibrated on too few rows.")
    else:
        flagged = {label: float((values > threshold).double().mean()) for label, values in scores.items()}
        caught = _listed([f"**{percent(share)} of “{label}”**" for label, share in flagged.items() if label != "test"])
        parts.append(
            f"At its own threshold it flags {caught}, and **{percent(flagged['test'])} of in-distribution rows** by mistake."
        )
        parts += _promise(evaluation, name, flagged["test"], len(scores["test"]))
    return " ".join([*parts, *_quality(evaluation, name)])


def _promise(evaluation: Evaluation, name: str, seen: float, rows: int) -> list[str]:
    """Whether false alarms are as many as the threshold was set for."""
    scorer = evaluation.scorers.get(name)
    calibration = getattr(scorer, "calibration", None)
    rate = getattr(calibration, "false_alarms", None) or getattr(scorer, "false_alarms", None)
    known = calibration if isinstance(calibration, Tensor) else getattr(calibration, "scores", None)
    if rate is None or known is None:
        return []
    # two standard deviations of chance, in the test data and in the calibration data
    tolerance = 2 * math.sqrt(rate * (1 - rate) * (1 / rows + 1 / len(known)))
    words = "more than that" if seen > rate + tolerance else "fewer" if seen < rate - tolerance else "as many as chance allows"
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
    r"""A share in percent, with a digit more near the ends; never 0 or 100 unless it is.

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


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
