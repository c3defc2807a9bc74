"""The frame of all studies: measure the cells that a record lacks, and write a page from the record and a template."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure

from offmap.atomic import write_whole
from offmap_bench.paths import RECORDS, RESULTS
from offmap_bench.runner.store import significant

TEMPLATES = Path(__file__).parents[1] / "templates"

Runs = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """`records/NAME.json`, `templates/NAME.md` and `docs/results/NAME.md`, with dashes for underscores in the page."""

    name: str
    cells: Callable[[], Mapping[str, Callable[[], Any]]]  # {cell: a function that measures it}
    fields: Callable[[Runs], Mapping[str, Any]]  # the placeholders of the template, from the runs on record
    packages: tuple[str, ...] = ("offmap", "torch")  # distributions whose versions go on record

    @property
    def page(self) -> Path:
        return RESULTS / f"{self.name.replace('_', '-')}.md"

    def read(self) -> dict[str, Any]:
        """Read the record: {"runs": {cell: ...}, "versions": {package: ...}}."""
        path = RECORDS / f"{self.name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": {}, "versions": {}}

    def run(self) -> None:
        """Measure the cells that the record lacks, with four significant digits, and save after each of them."""
        torch.set_num_threads(1)
        record = self.read()
        for cell, measure in self.cells().items():
            if cell not in record["runs"]:
                print(f"{self.name}: {cell}", flush=True)
                record["runs"][cell] = significant(measure(), 4)
                record["versions"] = {name: version(name) for name in self.packages}
                write_whole(RECORDS / f"{self.name}.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())

    def text(self) -> str:
        """Fill the template with numbers of the record."""
        record = self.read()
        versions = {f"{name.replace('-', '_')}_version": value for name, value in record["versions"].items()}
        return fill(self.name, **versions, **self.fields(record["runs"]))


def fill(template: str, **fields: Any) -> str:
    """Fill `templates/TEMPLATE.md`."""
    return (TEMPLATES / f"{template}.md").read_text(encoding="utf-8").format(**fields)


def format_signed(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def mean_over(runs: Runs, suffix: str, *keys: str) -> float:
    """Return the mean of `run[key][key]...` over the cells whose name ends in `suffix`."""
    return fmean(float(reduce(lambda value, key: value[key], keys, run)) for cell, run in runs.items() if cell.endswith(suffix))


def render_svg(figure: Figure) -> str:
    """Return a figure as SVG that is the same whenever it is drawn."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return "\n".join(map(str.rstrip, svg.splitlines())) + "\n"
