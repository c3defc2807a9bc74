"""What a guard can and cannot see, told from in-distribution data alone: `Guard.assess`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from offmap.errors import ConfigError
from offmap.scores.combine import CombinedScore
from offmap.table import Table

if TYPE_CHECKING:
    from offmap.guard import Guard

KINDS = {
    "beyond": "inputs beyond the data",
    "between": "inputs between the data",
    "cluster": "clusters of inputs that were left out",
    "class": "classes that were left out",
    "group": "groups that were left out",
    "corruption": "corrupted inputs",
}
RELIABLE, BLIND = 80.0, 65.0
"""AUROC, in per cent, from which a shift is seen reliably, and below which it is hardly seen."""

MUCH_BETTER = 0.1
"""How much higher the rank correlation of a term with the model's errors must be than the score's to be mentioned."""

LISTED = 5
"""Shifts that are not seen, and that `str` lists."""


@dataclass(frozen=True)
class Shift:
    """A stand-in for OOD rows: a part of the training rows that terms were fitted without, or corrupted validation rows.

    Attributes:
        kind: "beyond", "between", "cluster", "class", "group" or "corruption".
        name: What it is, in words.
        auroc: How well the score tells its rows from the others, in per cent.
        flagged: Which share of its rows is above the threshold, in per cent.
        terms: The AUROC of every term alone.
    """

    kind: str
    name: str
    auroc: float
    flagged: float
    terms: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Assessment:
    """What a guard can and cannot see.

    Attributes:
        shifts: Stand-ins for OOD rows, and how well each is seen.
        weights: The weight of every term in the score.
        errors: Rank correlation of every term, and of the score, with the models' errors on validation rows, −1 to 1.
        false_alarms: The fraction of in-distribution rows that may be called OOD.

    `str(assessment)` is a table of the kinds of shift, with what is not seen in words.
    """

    shifts: Sequence[Shift]
    weights: Mapping[str, float]
    errors: Mapping[str, float]
    false_alarms: float

    @property
    def auroc(self) -> float:
        """The mean over kinds of shift of their mean AUROC, in per cent; NaN if nothing was tried."""
        kinds = self.kinds().values()
        return fmean(fmean(s.auroc for s in shifts) for shifts in kinds) if kinds else math.nan

    @property
    def best_ranking(self) -> str | None:
        """The term that ranks the model's errors best, where it does so much better than the score; else None."""
        terms = {name: value for name, value in self.errors.items() if name != "score" and not math.isnan(value)}
        best = max(terms, key=lambda name: terms[name], default=None)
        score = self.errors.get("score", math.nan)
        return best if best is not None and terms[best] > score + MUCH_BETTER else None

    def kinds(self) -> dict[str, list[Shift]]:
        """Return the shifts by their kind."""
        kinds = list(dict.fromkeys(shift.kind for shift in self.shifts))
        return {kind: [shift for shift in self.shifts if shift.kind == kind] for kind in kinds}

    def blind(self) -> list[str]:
        """Say in words which shifts are not seen reliably, the worst first."""
        poor = sorted((s for s in self.shifts if s.auroc < RELIABLE), key=lambda s: s.auroc)
        degree = {True: "hardly seen", False: "not reliably seen"}
        return [f"{s.name}: {s.auroc:.0f} % AUROC, {s.flagged:.0f} % flagged, {degree[s.auroc < BLIND]}" for s in poor]

    def table(self) -> Table:
        """Return a row per kind of shift, with what is not seen and how errors are ranked below."""
        rows: list[dict[str, Any]] = []
        for kind, shifts in self.kinds().items():
            terms = mean_terms(shifts)
            best = max(terms, key=lambda name: terms[name], default="")
            rows.append({
                "shift": KINDS.get(kind, kind), "tried": len(shifts), "AUROC": f"{fmean(s.auroc for s in shifts):.1f}",
                "flagged": f"{fmean(s.flagged for s in shifts):.0f} %", "worst": f"{min(s.auroc for s in shifts):.0f}",
                "best term": f"{best} {terms[best]:.1f}" if best else "",
            })  # fmt: skip
        return Table(rows, self.notes())

    def notes(self) -> list[str]:
        """Say what is not seen, and how well errors are ranked."""
        return [*self.sight_notes(), *self.error_notes()]

    def sight_notes(self) -> list[str]:
        """Say how many shifts are not seen, and name some of them."""
        if not self.shifts:
            return ["Nothing was tried: there are too few training rows to leave some out."]
        blind, notes = self.blind(), ["All shifts that were tried are seen reliably."]
        if blind:
            more = [f"  and {len(blind) - LISTED} more"] if len(blind) > LISTED else []
            listed = [f"  {words}" for words in blind[:LISTED]]
            notes = [f"Not reliably seen: {len(blind)} of {len(self.shifts)} shifts", *listed, *more]
        if set(self.kinds()) == {"corruption"}:
            notes.append("No training rows were left out: there are too few of them.")
        return notes

    def error_notes(self) -> list[str]:
        """Say how well the score ranks the model's errors, and which term ranks them much better; nothing where unknown."""
        score, best = self.errors.get("score", math.nan), self.best_ranking
        if math.isnan(score):
            return []
        notes = [f"The score ranks the model's errors with correlation {score:+.2f}."]
        if best is not None:
            better = f"The term {best!r} ranks them much better, {self.errors[best]:+.2f}"
            notes.append(f"{better}: to find errors rather than OOD inputs, use `guard.terms(x)[{best!r}]`.")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        kinds = {
            kind: {
                "tried": len(shifts),
                "auroc": fmean(s.auroc for s in shifts),
                "worst": min(s.auroc for s in shifts),
                "flagged": fmean(s.flagged for s in shifts),
            }
            for kind, shifts in self.kinds().items()
        }
        result = {"auroc": self.auroc, "kinds": kinds, "blind": self.blind()}
        return result | {"weights": dict(self.weights), "errors": dict(self.errors), "false_alarms": self.false_alarms}

    def __str__(self) -> str:
        return str(self.table()).lstrip("\n")  # a table without rows begins with an empty line

    __repr__ = __str__


def mean_terms(shifts: Sequence[Shift]) -> dict[str, float]:
    """Return the mean AUROC of every term over the shifts that it has one of."""
    names = dict.fromkeys(name for s in shifts for name in s.terms)
    return {name: fmean(s.terms[name] for s in shifts if name in s.terms) for name in names}


def can_assess(guard: Guard) -> bool:
    """Return whether the score of a guard compares with training rows, so that its fit measured what it sees."""
    return isinstance(guard.score_module, CombinedScore)


def assess(guard: Guard) -> Assessment:
    """Return what the fit measured; names of columns stand for their numbers where the guard knows them."""
    score = guard.score_module
    if not isinstance(score, CombinedScore):
        raise ConfigError(
            f"Expected a guard that compares with training rows, as score='default' does, to assess, but got score "
            f"{score.name or 'of your own'!r}. Fit with score='default', and pass training rows."
        )
    figures, names = score.figures, list(guard.about.get("inputs") or ())
    columns = {f"of column {number}": f"of column `{name}`" for number, name in enumerate(names)}
    shifts = [Shift(**shift) for shift in figures.get("shifts", ())]
    named = [replace_name(shift, columns) for shift in shifts]
    weights = dict(zip(score.parts, score.weights.tolist(), strict=True))
    return Assessment(named, weights, dict(figures.get("errors", {})), guard.calibration.false_alarms)


def replace_name(shift: Shift, columns: Mapping[str, str]) -> Shift:
    """Put the name of a column in the place of its number."""
    end = next((number for number in columns if shift.name.endswith(number)), None)
    name = shift.name if end is None else shift.name.removesuffix(end) + columns[end]
    return Shift(shift.kind, name, shift.auroc, shift.flagged, shift.terms)
