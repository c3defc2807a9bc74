"""Mutants: where they may be, which tests they are given to, and that a changed module is what those import."""

from pathlib import Path

import pytest

from checks import coverage, mutants
from checks.coverage import Reach, own_test, package_of, shares
from checks.mutants import changed_line, count_positional, find_annotations, mutants_of
from offmap_bench.paths import ROOT


def test_annotations_are_spared_and_defaults_are_not():
    text = "def f(x: int | None = 1 + 2) -> a | b:\n    y: c | d = 3 | 4\n"
    spans = find_annotations(text)
    assert len(spans) == 3
    for sign, spared in [("int |", True), ("1 +", False), ("a |", True), ("c |", True), ("3 |", False)]:
        line, column = next((n, row.index(sign) + len(sign) - 1) for n, row in enumerate(text.splitlines(), 1) if sign in row)
        assert any(start <= (line, column) and (line, column + 1) <= stop for start, stop in spans) is spared, sign


@pytest.fixture
def reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reach:
    """A coverage in which three tests reach the second line of a module, and its first runs on import."""
    pytest.importorskip("coverage", reason="needs coverage: pip install -e 'bench[mutants]'")
    from coverage import CoverageData

    monkeypatch.setattr(coverage, "COVERED", tmp_path)
    monkeypatch.setattr(coverage, "SECONDS", tmp_path / "seconds.json")
    data = CoverageData(str(tmp_path / "data"))
    for name, lines in {"": [1], "tests/a.py::slow": [2], "tests/test_fit.py::own": [2], "tests/a.py::quick@group": [2]}.items():
        data.set_context(name and f"{name}|run")
        data.add_lines({str(ROOT / "src/offmap/fit.py"): lines})
    data.write()
    (tmp_path / "seconds.json").write_text(
        '{"tests/a.py::slow": 3.0, "tests/a.py::quick@group": 0.5, "tests/test_fit.py::own": 1.0}'
    )
    return Reach()


def test_tests_of_a_line_are_its_own_first_then_the_quickest_within_the_budget(reach: Reach):
    assert reach.tests("src/offmap/fit.py", 2, 10) == ["tests/test_fit.py::own", "tests/a.py::quick", "tests/a.py::slow"]
    assert reach.tests("src/offmap/fit.py", 3, 2) == ["tests/test_fit.py::own", "tests/a.py::quick"]


def test_a_line_that_runs_on_import_belongs_to_all_tests_of_the_module(reach: Reach):
    assert set(reach.tests("src/offmap/fit.py", 1, 10)) >= {"tests/a.py::quick", "tests/a.py::slow"}


def test_the_line_of_a_change_is_empty_where_it_is_gone():
    assert changed_line("a = 1\nb = 2\n", "a = 1\nb = 3\n", 2) == ("b = 2", "b = 3")
    assert changed_line("@cache\ndef f(): ...\n", "def f(): ...\n", 1) == ("@cache", "")


def test_a_star_between_arguments_is_no_product():
    assert count_positional("def f(a, *, b): return a * b") == count_positional("def f(a, *, b): return a / b")
    assert count_positional("def f(a, *, b): return a * b") != count_positional("def f(a, /, b): return a * b")


def test_files_and_their_own_tests():
    assert package_of("/somewhere/src/offmap/posterior/noise.py") == "posterior"
    assert own_test("src/offmap/posterior/noise.py") == "tests/posterior/test_noise.py"


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


def test_a_mutant_is_killed_by_a_test_that_sees_its_file_and_the_repository_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("cosmic_ray", reason="needs cosmic-ray: pip install -e 'bench[mutants]'")
    monkeypatch.setattr(mutants, "ROOT", tmp_path / "root")
    monkeypatch.setattr(mutants, "COPY", tmp_path / "copy")
    files = {
        "src/one.py": "def double(x):\n    return 2 * x\n",
        "test_one.py": "from one import double\n\n\ndef test_none(): pass\n\n\ndef test_two(): assert double(3) == 6\n"
        "\n\ndef test_broken(): assert False\n",
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['src']\n",
    }
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text, encoding="utf-8")
    mutant = next(m for choices in mutants_of("src/one.py").values() for m in choices if m.text().endswith("3 * x\n"))
    judge = mutants.Judge()
    assert judge.fate(mutant, ["test_one.py::test_none"]) == ("survived", "", 1)
    assert judge.fate(mutant, ["test_one.py::test_broken", "test_one.py::test_two"]) == ("killed", "test_one.py::test_two", 1)
    assert (tmp_path / "root" / "src" / "one.py").read_text(encoding="utf-8") == files["src/one.py"]
