"""A table of cars as a user may have it, and a way to spoil one of its values."""

from __future__ import annotations

from pathlib import Path

import numpy as np

ROWS = 60


def cars(path: Path, rows: int = ROWS, **changed: str) -> Path:
    """A table of cars: two numbers, a word, a region, a price; `changed` are whole columns by name."""
    rng = np.random.RandomState(0)
    table = {
        "power": [f"{value:.2f}" for value in rng.normal(100, 20, rows)],
        "age": [str(value) for value in rng.randint(0, 15, rows)],
        "fuel": [("petrol", "diesel", "none of these")[i % 3] for i in range(rows)],
        "region": [("north", "south", "west", "east")[i % 4] for i in range(rows)],
        "price": [f"{value:.1f}" for value in rng.normal(20000, 3000, rows)],
    }
    table |= {name: [value] * rows for name, value in changed.items()}
    lines = [",".join(table), *(",".join(row) for row in zip(*table.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def edit(path: Path, row: int, column: int, value: str) -> Path:
    lines = [line.split(",") for line in path.read_text().splitlines()]
    lines[row][column] = value
    path.write_text("\n".join(",".join(line) for line in lines) + "\n")
    return path
