"""`python docs/printed.py PAGE ...` runs the Python of pages, and writes what it prints below "It prints:"."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"(^It prints:\n\n```text\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)


def fill(page: str) -> str:
    """Return a page with what the last block of code before every mark prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    parts: list[str] = []
    start = 0
    for mark in PRINTED.finditer(page):
        printed = io.StringIO()
        for block in CODE.finditer(page, start, mark.start()):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block[1], "page", "exec"), names)
        lines = "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())
        parts += [page[start : mark.start()], mark[1], lines, mark[3]]
        start = mark.end()
    return "".join([*parts, page[start:]])


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
