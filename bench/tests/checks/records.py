"""Records of checks: `bench/records/KIND.jsonl`, one line for each entry. Nothing of offmap is imported here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offmap_bench.paths import RECORDS


def read(kind: str) -> list[dict[str, Any]]:
    """Read all entries, none if there is no record."""
    path = RECORDS / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write(kind: str, entries: Iterable[dict[str, Any]]) -> None:
    replace_file(RECORDS / f"{kind}.jsonl", "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))


def replace_file(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
