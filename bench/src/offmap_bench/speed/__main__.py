"""`python -m offmap_bench.speed [theme ...]` measures and keeps records; `python -m offmap_bench.speed table` writes the page from them."""

from __future__ import annotations

import argparse
from importlib import import_module

import torch

from offmap_bench.speed import page, record

THEMES = (
    "scoring",
    "peers",
    "exponents",
    "throughput",
    "architectures",
    "basis",
    "fitting",
    "paper_steps",
    "stacking",
    "grids",
    "steps",
    "latency",
    "memory",
    "large",
    "command",
    "export",
    "serving",
)


def main() -> None:
    """Run the themes asked for, all by default, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.speed", description=__doc__)
    parser.add_argument("themes", nargs="*", default="all", choices=["all", *THEMES, "table"], help="table: no measuring")
    asked = parser.parse_args().themes
    torch.set_num_threads(1)
    for theme in (t for t in THEMES if t in asked or "all" in asked):
        measured = _run(theme)
        measured.write()
        page.show(measured)
    written = page.write([kept for theme in THEMES if (kept := record.read(theme)) is not None])
    print(f"The page is {written}")


def _run(theme: str) -> record.Record:
    """Themes are imported when they run: writing the page needs no peer."""
    return import_module(f"offmap_bench.speed.{theme}").run()


if __name__ == "__main__":
    main()
