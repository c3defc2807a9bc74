"""The examples run as a user would run them, and say what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_guard_of_a_hugging_face_net_tells_strange_sentences(tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "huggingface.py"],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, check=False, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["set", "accuracy", "score", "called", "strange"]
    table = {line[:15].strip(): [float(v.rstrip("%")) for v in line[15:].split() if v != "-"] for line in lines}
    assert set(table) == {"familiar", "shuffled words", "unknown words"}
    assert table["familiar"][0] >= 95
    assert table["familiar"][-1] <= 15
    assert table["shuffled words"][-1] >= 60
    assert table["unknown words"][-1] >= 90
    assert table["familiar"][-2] < table["shuffled words"][-2]
    assert table["familiar"][-2] < table["unknown words"][-2]
    assert not any(tmp_path.iterdir())
