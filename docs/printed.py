"""`python docs/printed.py PAGE ...` runs pages, writes what they print below "It prints:", and draws their pictures."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pictures

CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"(^It prints:\n\n```text\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)


def fill(page: str) -> tuple[str, dict[str, Any]]:
    """Run a page. Return it with what the last block of code before every mark prints, and the names that it defines."""
    names: dict[str, Any] = {"__name__": "__main__"}
    parts: list[str] = []
    start = 0
    for mark in PRINTED.finditer(page):
        parts += [page[start : mark.start()], mark[1], run(page, start, mark.start(), names), mark[3]]
        start = mark.end()
    run(page, start, len(page), names)
    return "".join([*parts, page[start:]]), names


def run(page: str, start: int, end: int, names: dict[str, Any]) -> str:
    """Run the blocks of a part of a page; return what the last one prints."""
    printed = io.StringIO()
    for block in CODE.finditer(page, start, end):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[1], "page", "exec"), names)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # pages may leave files behind
            text, names = fill(path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
        pictures.write(text, names)
