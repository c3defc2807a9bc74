"""What a theme measured and claims, kept as one small JSON file."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from offmap_bench.paths import RECORDS
from offmap_bench.speed.race import Timing

FOLDER = RECORDS


@dataclass(frozen=True)
class Measurement:
    """The best and the middle of several turns; `wall` is the best on the wall clock."""

    what: str
    unit: Literal["s", "ms", "MB", "rows/s"]
    best: float
    median: float
    wall: float | None = None

    @staticmethod
    def of(what: str, timing: Timing, *, unit: Literal["s", "ms"] = "s", per: float = 1.0) -> Measurement:
        """One of `per` equal parts of what was timed."""
        factor = (1.0 if unit == "s" else 1e3) / per
        return Measurement(what, unit, timing.best * factor, timing.median * factor, min(timing.wall) * factor)


@dataclass(frozen=True)
class Claim:
    """A number and the bound that it is to keep."""

    what: str
    value: float
    sense: Literal["at least", "at most"]
    target: float

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.sense == "at least" else self.value <= self.target


@dataclass(frozen=True)
class Record:
    """One theme of one run."""

    theme: str
    title: str
    how: str
    rounds: int
    measurements: list[Measurement]
    claims: list[Claim] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    def write(self) -> Path:
        """To `records/<theme>.json`, numbers with four significant digits."""
        FOLDER.mkdir(exist_ok=True)
        fields = asdict(self) | {"claims": [asdict(c) | {"met": c.met} for c in self.claims]}
        path = FOLDER / f"{self.theme}.json"
        path.write_text(json.dumps(_rounded(fields), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def read(theme: str) -> Record | None:
    """The last record of a theme, if there is one."""
    path = FOLDER / f"{theme}.json"
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    claims = [Claim(**{k: v for k, v in claim.items() if k != "met"}) for claim in fields.pop("claims")]
    return Record(**fields | {"claims": claims, "measurements": [Measurement(**m) for m in fields["measurements"]]})


def machine() -> dict[str, Any]:
    """Versions, threads and processor of this run."""
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("offmap", "torch", "maxwent")},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
