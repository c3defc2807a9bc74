"""Compute all golden cases and write `golden.json`: `python tests/golden/record.py [NAME ...]`; names record those cases alone.

Record only where a change of numbers is meant, and say why where it is recorded.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("golden.json")


def to_plain(value: Any) -> Any:
    """A tensor or number as lists of numbers; what JSON lacks as words."""
    if isinstance(value, Tensor):
        return to_plain(
            value.detach().cpu().double().tolist() if value.is_floating_point() else value.detach().cpu().int().tolist()
        )
    if isinstance(value, list):
        return [to_plain(each) for each in value]
    if isinstance(value, int):
        return int(value)
    return shortest(float(value)) if math.isfinite(value) else str(float(value))


def shortest(value: float) -> float:
    """The shortest number that is the same in single precision; of a double that is none, twelve digits.

    >>> shortest(0.10000000149011612), shortest(1 / 3)
    (0.1, 0.333333333333)
    """
    single = torch.tensor(value, dtype=torch.float32)
    if single.double().item() != value:
        return float(f"{value:.12g}")
    return next(short for digits in (6, 7, 8, 9) if torch.tensor(short := float(f"{value:.{digits}g}")) == single)


def to_json(records: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for every key, so that a difference is easily read."""
    cases = []
    for name, record in records.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in record.items()]
        cases.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(cases) + "\n}\n"


def main(names: list[str]) -> None:
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    from golden.cases import CASES

    torch.set_num_threads(1)
    known = json.loads(FILE.read_text(encoding="utf-8")) if names and FILE.exists() else {}
    begun = time.process_time()
    for name in names or CASES:
        start = time.process_time()
        known[name] = {key: to_plain(value) for key, value in CASES[name]().items()}
        print(f"{time.process_time() - start:6.2f} s  {name}", flush=True)
    FILE.write_text(to_json({name: known[name] for name in CASES if name in known}), encoding="utf-8")
    print(f"{len(known)} cases, {time.process_time() - begun:.1f} s, {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
