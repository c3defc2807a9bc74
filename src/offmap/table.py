"""Rows of named values that print as an aligned table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """`rows` are plain dicts; `str(table)` aligns them, `notes` stand below.

    >>> print(Table([{"set": "near", "auroc": 0.91234}, {"set": "far", "auroc": 1.0}]))
    set   auroc
    near  0.9123
    far   1.0000
    """

    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = field(default=())

    @property
    def columns(self) -> list[str]:
        """All names, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def __str__(self) -> str:
        cells = [self.columns, *([_text(row.get(c)) for c in self.columns] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 10 or 0 < abs(value) < 1e-3 else f"{value:.4f}"
    return "" if value is None else str(value)
