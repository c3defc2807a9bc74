"""`python -m offmap_bench.studies NAME ...` measures what the records of studies lack, and writes their pages.

`python -m offmap_bench.studies pages` measures nothing: it writes all pages that come from records, and what is quoted of them.
"""

from __future__ import annotations

import argparse
import logging
import runpy
from importlib import import_module

from offmap_bench.paths import DOCS
from offmap_bench.studies.study import Study

STUDIES = (
    "categories", "choice", "distill", "laplace", "options", "parameterizations", "promises", "quality", "reproduction",
    "schedules", "series", "theory", "scale",
)  # fmt: skip


def load(name: str) -> Study:
    return import_module(f"offmap_bench.{'speed' if name == 'scale' else 'studies'}.{name}").STUDY


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.studies", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*STUDIES, "pages"])
    names = parser.parse_args().names
    logging.getLogger("offmap").setLevel(logging.ERROR)  # few validation rows, rows that are alike: what is measured
    for name in STUDIES if "pages" in names else names:
        study = load(name)
        if name in names:
            study.run()
        study.page.write_text(study.text(), encoding="utf-8")
        print(f"The page is {study.page}")
    if "pages" in names:
        import_module("offmap_bench.speed.page").write()
    runpy.run_path(str(DOCS / "blocks.py"), run_name="__main__")
