"""Write `docs/results/speed.md` from the records, `themes.toml` (titles and texts) and `ratios.toml` (the table of ratios)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from offmap_bench.paths import RESULTS
from offmap_bench.runner.table import format_table
from offmap_bench.speed.measure import THEMES, Record, read
from offmap_bench.studies.study import fill

PAGE = RESULTS / "speed.md"
RATIOS: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_name("ratios.toml").read_text(encoding="utf-8"))
"""{what: {column: [theme, claim]}}, or [theme, contestant that takes longer, contestant that takes less]."""

PEERS = ("maxwent", "laplace-torch", "bayesian-torch", "MC-dropout", "deep ensemble")
LIMITS = ("a bare GEMM", "plain")


def write() -> Path:
    PAGE.write_text(text([record for theme in THEMES if (record := read(theme)) is not None]), encoding="utf-8")
    return PAGE


def text(records: Sequence[Record]) -> str:
    """All ratios, then every record."""
    ratios = ratio_table({record.theme: record for record in records})
    return fill("speed", ratios=ratios, themes="\n".join(map(section, records)))


def section(record: Record) -> str:
    """One theme: its text, what was measured, what is claimed."""
    theme, machine = THEMES[record.theme], record.machine
    rows = [
        [m.what, *("" if v is None else f"{_number(v)} {m.unit}" for v in (m.best, m.median, m.wall))]
        for m in record.measurements
    ]
    claims = [[c.what, _number(c.value), f"{c.sense} {c.target:g}", "yes" if c.met else "NO"] for c in record.claims]
    tables = [format_table(["measured", "best", "median", "best on the wall"], rows) + "\n"]
    tables += [format_table(["claimed", "value", "target", "met"], claims) + "\n"] if claims else []
    versions = ", ".join(f"{name} {machine[name]}" for name in ("offmap", "torch", "maxwent", "python"))
    threads, processor, count = (machine[key] for key in ("threads", "processor", "processors"))
    foot = f"Turns: {record.rounds}; threads: {threads}; {processor}, {count} processors; {versions}."
    how = theme["text"].strip().format(**record.values)
    return "\n".join([f"## {theme['title']}", "", how, "", *tables, foot, ""])


def ratio_table(records: Mapping[str, Record]) -> str:
    """All ratios in one table; a dash where nothing is on record."""
    rows = [
        [what, *(f"{ratio(records, cells[c]):.3g}" if c in cells and cells[c][0] in records else "–" for c in (*PEERS, *LIMITS))]
        for what, cells in RATIOS.items()
    ]
    return format_table(["", *(f"times faster than {peer}" for peer in PEERS), *(f"times {limit}" for limit in LIMITS)], rows)


def ratio(records: Mapping[str, Record], source: Sequence[str]) -> float:
    """The value of a claim, or one best time over another."""
    theme, *names = source
    if len(names) == 1:
        return next(claim.value for claim in records[theme].claims if claim.what == names[0])
    longer, less = (next(m for m in records[theme].measurements if m.what == name) for name in names)
    assert longer.unit == less.unit
    return longer.best / less.best


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
