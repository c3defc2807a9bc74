"""The README's code runs as it stands and prints what it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_guard_of_the_readme_flags_the_gap_and_the_outside(tmp_path):
    example = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    printed = io.StringIO()
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(example, str(README), "exec"), {})
    finally:
        os.chdir(here)
    claimed = re.search(r"print\(answer\.ood\)\s+# (.*)", example)
    assert claimed is not None
    assert printed.getvalue().splitlines()[0] == claimed.group(1)
    assert (tmp_path / "guard.safetensors").exists()
