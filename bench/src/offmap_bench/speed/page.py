"""Records as tables: on the terminal, and as `docs/speed.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from offmap_bench.paths import DOCS
from offmap_bench.speed import ratios
from offmap_bench.speed.record import Claim, Measurement, Record

PAGE = DOCS / "speed.md"

INTRODUCTION = """# Speed and memory

Measured with `make bench`; `python -m offmap_bench.speed table` writes this page from `bench/records/`. The net, where no other
is named, is 8-100-100-100-2 with ReLU; all is float32 on one thread; the peer is the authors' package, `maxwent`. Contestants of
a theme take turns in one process and the best turn of each counts. Times are of the processor, so that other work on the machine
does not count; the wall clock agrees on an idle core.

A bare GEMM of the same FLOPs is what the matrix products and convolutions of a contestant, counted by torch's `FlopCounterMode`,
would take at the rate of a 1024 × 1024 × 1024 float32 product in the same race. Eigenvectors, random numbers, sorting and
whatever treats every number alike are left out.
"""


def show(record: Record) -> None:
    """Print one record."""
    for header, rows in (_measured(record.measurements), _claimed(record.claims)):
        table = Table(*header, title=record.title if header[0] == "measured" else None, title_justify="left")
        for row in rows:
            table.add_row(*row)
        if rows:
            Console().print(table)


def write(records: Sequence[Record]) -> Path:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(records), encoding="utf-8")
    return PAGE


def page(records: Sequence[Record]) -> str:
    """All ratios, then every record."""
    together = _markdown(*ratios.table({record.theme: record for record in records}))
    return "\n".join([INTRODUCTION, ratios.TEXT, together + "\n", *map(_section, records)])


def _section(record: Record) -> str:
    tables = [_markdown(*t) for t in (_measured(record.measurements), _claimed(record.claims)) if t[1]]
    m = record.machine
    versions = ", ".join(f"{name} {m[name]}" for name in ("offmap", "torch", "maxwent", "python"))
    foot = f"Turns: {record.rounds}; threads: {m['threads']}; {m['processor']}, {m['processors']} processors; {versions}."
    return "\n".join([f"## {record.title}", "", record.how, "", *(t + "\n" for t in tables), foot, ""])


def _measured(measurements: Iterable[Measurement]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [m.what, *(f"{_number(v)} {m.unit}" if v is not None else "" for v in (m.best, m.median, m.wall))] for m in measurements
    ]
    return ["measured", "best", "median", "best on the wall"], rows


def _claimed(claims: Iterable[Claim]) -> tuple[list[str], list[list[str]]]:
    rows = [[c.what, _number(c.value), f"{c.sense} {c.target:g}", "yes" if c.met else "NO"] for c in claims]
    return ["claimed", "value", "target", "met"], rows


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
