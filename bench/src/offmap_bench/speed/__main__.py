"""`python -m offmap_bench.speed [THEME ...]` measures themes, all by default; `... table` writes the page from records."""

from __future__ import annotations

import argparse
from importlib import import_module

import torch

from offmap_bench.speed import growth, page
from offmap_bench.speed.measure import read


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.speed", description=__doc__)
    parser.add_argument("themes", nargs="*", default="all", choices=["all", *page.THEMES, "table"], help="table: measure nothing")
    asked = parser.parse_args().themes
    torch.set_num_threads(1)
    for name, theme in page.THEMES.items():
        if name in asked or "all" in asked:
            record = getattr(import_module(f"offmap_bench.speed.{theme['module']}"), name)()
            record.write()
            page.show(record)
    if (record := read("exponents")) is not None:
        growth.draw(record)
    print(f"The page is {page.write()}")


if __name__ == "__main__":
    main()
