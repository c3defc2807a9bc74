"""The wheels hold what they should: the library alone, small enough to read, and the experiments apart from it."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = (13_500, 22_000)
"""Lines of code of the library, and of both packages: a change that adds to them says why."""

SMOKE = """
import torch, offmap
x = torch.rand(60, 2)
train, valid = (x[:40], x[:40, :1]), (x[40:], x[40:, :1])
guard = offmap.fit(torch.nn.Linear(2, 1), train, valid, solver="closed-form", draws=4, progress=False)
offmap.write_page(offmap.evaluate(guard, (x, x[:, :1]), {"far": x + 9}), "page.html")
print(offmap.__file__)
"""


def build(project: Path, folder: Path) -> Path:
    """Build a wheel without the network, unpack it, and return the folder."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", project]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="needs build: pip install 'offmap[test]'")
    return build(ROOT, tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="needs build: pip install 'offmap[test]'")
    return build(ROOT / "bench", tmp_path_factory.mktemp("experiments"))


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def count_code(path: Path) -> int:
    """Count lines that are neither blank, nor comments, nor docstrings, which the public names are asked to have."""
    text = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        code |= set() if token.type in skipped else set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def test_lines_of_code_are_counted(tmp_path: Path) -> None:
    lines = ['"""Doc."""', "", "# why", 'x = """a', 'b"""  # three', "", "def f():", '    """Doc', '    more."""', "    return x"]
    (tmp_path / "a.py").write_text("\n".join(lines))
    assert count_code(tmp_path / "a.py") == 4


def test_the_wheel_holds_the_library_alone(library: Path) -> None:
    assert {path.name for path in library.iterdir() if path.suffix != ".dist-info"} == {"offmap"}
    assert {path.name for path in (library / "offmap").iterdir() if path.name == "py.typed"} == {"py.typed"}


def test_the_wheels_stay_small(library: Path, experiments: Path) -> None:
    lines, more = (sum(map(count_code, sources(folder))) for folder in (library, experiments))
    assert len(sources(library)) <= 120
    assert lines <= MOST_LINES[0]
    assert lines + more <= MOST_LINES[1]


def test_the_library_does_not_import_the_experiments(library: Path) -> None:
    assert [str(path) for path in sources(library) if any(name.startswith("offmap_bench") for name in imports(path))] == []


def test_the_unpacked_wheel_fits_and_writes_a_page(library: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(library)!r})\n{SMOKE}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.split()[-1]).is_relative_to(library)
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_the_experiments_are_a_package_with_two_commands(experiments: Path) -> None:
    assert {path.name for path in experiments.iterdir() if path.suffix != ".dist-info"} == {"offmap_bench"}
    (points,) = experiments.glob("*.dist-info/entry_points.txt")
    lines = points.read_text(encoding="utf-8").split()
    assert lines[0] == "[offmap.commands]"
    assert {line for line in lines if line in ("bench", "demo")} == {"bench", "demo"}
    assert list((experiments / "offmap_bench" / "plans").glob("*.toml"))
