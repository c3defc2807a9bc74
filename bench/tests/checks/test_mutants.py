"""Mutants: where they may be, which tests they are given to, and that a changed module is what those import."""

import subprocess
import sys

import pytest

from offmap_bench.checks.coverage import own_test, package_of, shares, statement
from offmap_bench.checks.mutants import annotations, changed_line, count_positional, mutants_of, subjects
from offmap_bench.paths import ROOT


def test_annotations_are_spared_and_defaults_are_not():
    text = "def f(x: int | None = 1 + 2) -> a | b:\n    y: c | d = 3 | 4\n"
    spans = annotations(text)
    assert len(spans) == 3
    for sign, spared in [("int |", True), ("1 +", False), ("a |", True), ("c |", True), ("3 |", False)]:
        line, column = next((n, row.index(sign) + len(sign) - 1) for n, row in enumerate(text.splitlines(), 1) if sign in row)
        assert any(start <= (line, column) and (line, column + 1) <= stop for start, stop in spans) is spared, sign


@pytest.mark.parametrize(
    ("text", "line", "lines"),
    [
        ("def f():\n    if a:\n        b = (1 +\n             2)\n", 4, [3, 4]),
        ("def f():\n    if a:\n        b = 1\n", 2, [2]),
        ("def f():\n    while (a and\n           b):\n        c()\n", 3, [2, 3]),
        ("def f(x=1):\n    a = 1\n    return a\n", 1, [1, 2, 3]),
        ("@cache\ndef f():\n    return 1\n", 1, [2, 3]),
        ("class A:\n    x = 1\n    def f(self):\n        return 1\n", 2, []),
        ("a = 1\n", 1, []),
    ],
)
def test_the_statement_of_a_line(text: str, line: int, lines: list[int]):
    assert statement(text, line) == lines


def test_the_line_of_a_change_is_empty_where_it_is_gone():
    assert changed_line("a = 1\nb = 2\n", "a = 1\nb = 3\n", 2) == ("b = 2", "b = 3")
    assert changed_line("@cache\ndef f(): ...\n", "def f(): ...\n", 1) == ("@cache", "")


def test_a_star_between_arguments_is_no_product():
    assert count_positional("def f(a, *, b): return a * b") == count_positional("def f(a, *, b): return a / b")
    assert count_positional("def f(a, *, b): return a * b") != count_positional("def f(a, /, b): return a * b")


def test_files_and_their_own_tests():
    assert package_of("/somewhere/src/offmap/posterior/noise.py") == "posterior"
    assert own_test("src/offmap/scores/uncertainty.py") == "tests/scores/test_uncertainty.py"
    assert all((ROOT / file).exists() for file in subjects())


def test_a_file_has_mutants_at_many_places():
    pytest.importorskip("cosmic_ray", reason="needs cosmic-ray: pip install -e 'bench[mutants]'")
    places = mutants_of("src/offmap/conformal.py")
    assert len(places) > 10
    assert all(mutant.text() for mutant in next(iter(places.values())))


def test_shares_count_lines_of_all_packages_together():
    one = {"num_statements": 10, "covered_lines": 9, "num_branches": 0, "covered_branches": 0}
    other = {"num_statements": 30, "covered_lines": 30, "num_branches": 4, "covered_branches": 1}
    assert shares({"a": one, "b": other}) == (39 / 40, 1 / 4)
    assert shares({"a": one}) == (0.9, 1.0)


DOCTEST = "src/offmap/scores/uncertainty.py::offmap.scores.uncertainty.predictive_entropy"
TEST = "tests/scores/test_uncertainty.py::test_entropies_match_the_loop"


def test_a_changed_module_is_what_doctests_and_tests_see():
    """A text that is the same survives, one with another mean or none at all is killed; the file on disk stays as it is."""
    path = ROOT / "src" / "offmap" / "scores" / "uncertainty.py"
    before = path.read_bytes()
    assert b"entr(probs.mean(0))" in before
    command = (
        "import sys, pytest, torch\n"
        "from offmap_bench.checks.mutants import read, trial\n"
        "file = 'src/offmap/scores/uncertainty.py'\n"
        "for test in sys.argv[1:]:\n"
        "    for after in ('entr(probs.mean(0))', 'entr(probs.mean(1))', '('):\n"
        "        print(*trial(file, read(file).replace('entr(probs.mean(0))', after), [test]))\n"
    )
    words = [sys.executable, "-c", command, DOCTEST, TEST]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.splitlines() == [
        "survived ", f"killed {DOCTEST}", "killed src/offmap/scores/uncertainty.py",
        "survived ", f"killed {TEST}", "killed tests/scores/test_uncertainty.py",
    ]  # fmt: skip
    assert path.read_bytes() == before
