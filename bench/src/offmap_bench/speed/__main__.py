"""`python -m offmap_bench.speed [THEME ...]` measures themes, all by default; `... table` writes the page from records."""

import argparse
from importlib import import_module

import torch
from rich.console import Console
from rich.markdown import Markdown

from offmap_bench.speed import page, scoring
from offmap_bench.speed.measure import THEMES, read

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.speed", description=__doc__)
    parser.add_argument("themes", nargs="*", default="all", choices=["all", *THEMES, "table"], help="table: measure nothing")
    asked = parser.parse_args().themes
    torch.set_num_threads(1)
    for name, theme in THEMES.items():
        if name in asked or "all" in asked:
            record = getattr(import_module(f"offmap_bench.speed.{theme['module']}"), name)()
            record.write()
            Console().print(Markdown(page.section(record)))
    if (record := read("exponents")) is not None:
        scoring.draw_exponents(record)
    print(f"The page is {page.write()}")
