"""Generated calls of the readers of tables, with files of good and bad columns."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from faults.making import WRONG, Maker
from offmap_bench.tasks import tabular
from offmap_bench.tasks.tabular import read

COLUMNS: dict[str, Any] = {
    "numbers": lambda n: np.linspace(-1, 2, n).tolist(),
    "other numbers": lambda n: np.sin(np.arange(n)).tolist(),
    "whole": lambda n: list(range(n)),
    "few": lambda n: [i % 3 for i in range(n)],
    "words": lambda n: ["red", "blue", "green"] * (n // 3) + ["red"] * (n % 3),
    "truth": lambda n: ["true", "false"] * (n // 2) + ["true"] * (n % 2),
    "constant": lambda n: [1.0] * n,
}
BAD: dict[str, Any] = {
    "gaps": lambda n: [None if i % 3 else i for i in range(n)],
    "nothing": lambda n: [None] * n,
    "infinite": lambda n: [float("inf")] * n,
    "huge": lambda n: [1e300] * n,
    "mixed": lambda n: ["x" if i == 1 else i for i in range(n)],
    "quotes": lambda n: ['"a"', "b\nc", "d,e", ""] * (n // 4) + ["'"] * (n % 4),
    "distinct words": lambda n: [f"w{i}" for i in range(n)],
    "NaN": lambda n: ["nan"] * n,
}


def _write(make: Maker, path: Path, columns: dict[str, list[Any]]) -> bool:
    """In the format that the suffix asks for; whether it was cut then."""
    lacks = [["" if value is None else value for value in values] for values in columns.values()]
    if path.suffix == ".npz":
        plain = {name: np.array([np.nan if v is None else v for v in values]) for name, values in columns.items()}
        np.savez(path, **{name: values.astype(str) if values.dtype == object else values for name, values in plain.items()})
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        alike = {name: values if "x" not in values else [*map(str, values)] for name, values in columns.items()}
        parquet.write_table(pyarrow.table(alike), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=make.pick(",;\t")).writerows([list(columns), *zip(*lacks, strict=True)])
    cut = make.rng.random() < make.wild / 4
    if cut:
        whole = path.read_bytes()
        path.write_bytes(whole[: make.rng.randrange(len(whole))])
    return cut


def tables(make: Maker, folder: Path) -> None:
    """A file, read as columns and as a task: no numbers are lost, none of a task is infinite."""
    n = make.rng.choice([1, 3, 30, 60]) if make.now() else 40
    kinds = COLUMNS | (BAD if make.now() else {})
    columns = {name: kinds[name](n) for name in make.rng.sample(sorted(kinds), make.rng.randint(2, 4))}
    path = folder / f"table{make.pick(['.csv', '.npz', '.parquet'])}"
    cut = _write(make, path, columns)
    found = read(path, words=[make.pick(columns)] if make.now() else [])
    assert cut or {len(values) for values in found.values()} == {n}
    good = {
        "ood": ("extrapolation", "interpolation", None), "kind": (None, "regression", "classification"),
        "missing": ("refuse", "impute"), "drop": ((), [make.pick(columns)]), "words": ((), [make.pick(columns)]),
        "shares": ((0.2, 0.2), (0.5, 0.1)),
    }  # fmt: skip
    options = make.options(good, 2)
    options = {name: value for name, value in options.items() if name in good}
    target = make.pick(WRONG) if make.rng.random() < make.wild / 3 else make.pick(columns)
    task = tabular.task(path, target, seed=make.rng.randrange(5), **options)
    for x in (task.train[0], task.valid[0], task.test[0], *task.ood.values()):
        assert x.isfinite().all()
