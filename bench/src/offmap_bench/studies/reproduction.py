"""The paper's tables beside what we get at its budget and at a short one, and what is still to be run. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from offmap_bench.runner.compare import FAR, Entry, Printed, compare_table, sheet
from offmap_bench.runner.methods import SIZE, candidates
from offmap_bench.runner.plan import METHODS, Cell
from offmap_bench.runner.table import NOTHING, SHOW, Results, format_table, spread
from offmap_bench.studies.study import Runs, Study

LONG, SHORT = ("uci-competitors", "uci-paper"), ("uci", "uci-competitors-short")
LEFT = {
    "uci-competitors": "table 2, competitors", "uci-paper": "table 2, MaxWEnt", "uci-id": "table 3",
    "citycam": "table 5, with data of your own", "openood": "figure 8", "tradeoff": "appendix B, table 7 on UCI tables",
    "bnn-moons": "table 8", "bnn-ablation": "table 9",
}  # fmt: skip
"""Plans at the paper's budget, and what they answer."""

CAUSES = {
    "was": "BNN ×1, as it was", "means": "BNN ×1, variance of the means, as it was", "raw": "BNN ×1, raw units",
    "every": "BNN ×1, all", "long": "BNN ×1, all, 50,000 steps",
}  # fmt: skip

Answers = dict[str, dict[str, Entry]]
"""{printed name of a method: {column: what we have}}."""


def answer(printed: Printed, several: Sequence[Results]) -> Answers:
    """Return what plans have of every printed cell, the first that has it."""
    found: Answers = {name: {} for name, _ in printed.methods}
    for row in compare_table(printed, several):
        for entry in row.entries:
            if row.printed and entry.ours:
                found[row.printed].setdefault(entry.number.title, entry)
    return found


def tabulate_means(tables: Sequence[Printed], long: Sequence[Results], short: Sequence[Results]) -> str:
    """Tabulate the first number of every table, the mean over tasks: printed, at the paper's budget, at a short one."""
    rows = {name: [name] for name, _ in tables[0].methods}
    for table in tables:
        mean, both = table.numbers[0], [answer(table, results) for results in (long, short)]
        for (name, _), theirs in zip(table.methods, mean.printed, strict=True):
            ours = [found[name].get(mean.title) for found in both]
            rows[name] += [str(theirs), *(NOTHING if e is None else spread(e.ours, SHOW[mean.show]) for e in ours)]
    head = [f"{table.title.rpartition(', ')[2]}, {word}" for table in tables for word in ("printed", "its budget", "short")]
    return format_table(["", *head], list(rows.values()))


def tabulate_gaps(tables: Sequence[Printed], long: Sequence[Results], short: Sequence[Results]) -> str:
    """Tabulate, over the printed cells that have run at the paper's budget, how far both budgets are from the print."""
    rows: list[list[str]] = []
    for place, (name, _) in enumerate(tables[0].methods):
        pairs: list[tuple[Entry, Entry | None]] = []
        for table in tables:
            far, near = (answer(table, results)[name] for results in (long, short))
            pairs += [(entry, near.get(title)) for title, entry in far.items() if title != table.numbers[0].title]
        planned = sum(len(table.numbers) - 1 for table in tables)
        sides = [[e for e, _ in pairs], [e for _, e in pairs if e is not None]]
        rows.append([tables[0].methods[place][0], f"{len(pairs)} of {planned}", *(w for side in sides for w in describe(side))])
    head = ["", "cells at its budget", "gap", f"within {FAR:g}", "short: gap", f"short: within {FAR:g}"]
    return format_table(head, [row for row in rows if not row[1].startswith("0 ")])


def describe(entries: Sequence[Entry]) -> list[str]:
    """Return the mean gap of some cells to the print, with its sign, and how many are within 5 points."""
    gaps = [entry.gap for entry in entries if entry.gap is not None]
    return [f"{fmean(gaps):+.1f}".replace("-", "−"), str(sum(abs(gap) <= FAR for gap in gaps))] if gaps else [NOTHING] * 2


def count_hours(results: Results) -> float:
    """Return the hours of the fits that are left, by (2 + 0.4·nets) ms a step: one idle core, the paper's nets."""
    left = {(cell.task, cell.seed, cell.fit_key): cell for cell in results.cells if results.states[cell.hash] != "ok"}

    def milliseconds(cell: Cell) -> float:
        nets = SIZE * len(candidates(cell.grid))
        return METHODS[cell.method].settings(cell.config).get("steps", 0) * (2 + 0.4 * nets)

    return sum(map(milliseconds, left.values())) / 3_600_000


def tabulate_left() -> str:
    rows: list[list[str]] = []
    for name, what in LEFT.items():
        results = Results.read(name)
        hours = "" if name in ("citycam", "openood") else f"{count_hours(results):.0f}"
        rows.append([f"`{name}`", what, f"{len(results.ok)} of {len(results.cells)}", hours])
    return format_table(["plan", "answers", "cells run", "hours left"], rows)


def fields(_: Runs) -> dict[str, str]:
    tables, long, short = sheet("uci").tables, [Results.read(plan) for plan in LONG], [Results.read(plan) for plan in SHORT]
    causes, names = Results.read("uci-bnn-causes").values("extrapolation", "auroc"), [name for name, _ in tables[0].methods]
    numbers: dict[str, str] = {}
    for number in tables[0].numbers[1:]:
        key, task = number.title, (number.tasks, 0)
        numbers[f"printed_{key}"] = str(number.printed[names.index("BN ×1")])
        for word, label in CAUSES.items():
            numbers[f"{word}_{key}"] = SHOW["percent"](causes[label][task]) if task in causes[label] else NOTHING
    parts = {"means": tabulate_means(tables, long, short), "gaps": tabulate_gaps(tables, long, short), "left": tabulate_left()}
    in_distribution = sheet("uci-id").tables[0]
    found = answer(in_distribution, [Results.read("uci-id")])["DE"]
    entries = [f"{number.title} {found.get(number.title, NOTHING)}" for number in in_distribution.numbers[:3]]
    return parts | numbers | {"table_3": ", ".join(entries)}


STUDY = Study("reproduction", lambda: {}, fields)
