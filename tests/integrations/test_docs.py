"""The pages' code runs as it stands, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.parametrize(("page", "package"), [("sklearn", "sklearn"), ("lightning", "lightning")])
def test_a_page_prints_what_it_says(page, package, tmp_path, monkeypatch):
    pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{page}.md", "exec"), {"__name__": "page"})
    claimed = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert claimed
    assert printed.getvalue().splitlines() == claimed
