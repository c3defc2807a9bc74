"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import offmap
from offmap import cli
from offmap_bench.demo.run import METHODS, PLANS
from pages import check_page


def command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `offmap words...`, run here."""
    monkeypatch.setattr(sys, "argv", ["offmap", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_the_demo_runs_as_a_real_process_and_writes_a_self_contained_page(tmp_path):
    out = tmp_path / "demo.html"
    words = [sys.executable, "-m", "offmap", "demo", "--quick", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"The page is at {out}"
    text = out.read_text(encoding="utf-8")
    page = check_page(text)
    for plan in PLANS:
        assert f">{plan.title}</h2>" in text
        assert plan.title in done.stdout
    for method in METHODS:
        assert text.count(f"<b>{method}</b>") >= 3  # a panel per task at least
        assert done.stdout.count(method) >= 3
    assert len(page.labels) == 7 + 7 + 2 + 3 * 8 + 4  # bands, maps, digits; histograms; ROC panels
    assert [file.name for file in tmp_path.iterdir()] == ["demo.html"]


def test_an_impossible_path_is_one_sentence_before_any_work(monkeypatch, capsys, tmp_path):
    code, out, err = command(monkeypatch, capsys, "demo", "--out", str(tmp_path / "no" / "page.html"))
    assert (code, out) == (1, "")
    assert err == (
        f"offmap: Cannot write {tmp_path}/no/page.html: the folder {tmp_path}/no does not exist. "
        "Create it, or choose another path.\n"
    )


def test_a_missing_package_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = command(monkeypatch, capsys, "demo", "--out", str(tmp_path / "page.html"))
    assert code == 1
    assert err == "offmap: matplotlib is needed here and is not installed: pip install 'offmap[figures]'\n"


def test_version(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "--version") == (0, f"offmap {offmap.__version__}\n", "")


def test_an_unknown_option_is_named(monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, "demo", "--sede", "3")
    assert code == 2
    assert "--sede" in err
    assert "Traceback" not in err


def test_a_mistake_of_ours_is_one_line_that_names_debug(monkeypatch, capsys):
    def fails(**_: object) -> None:
        raise ZeroDivisionError("nobody thought of this\nand more")

    monkeypatch.setattr("offmap.cli.doctor.examine_installation", fails)
    code, out, err = command(monkeypatch, capsys, "doctor")
    assert (code, out) == (1, "")
    assert err == "offmap: Unexpected ZeroDivisionError: nobody thought of this (add --debug to see where)\n"
    code, _, err = command(monkeypatch, capsys, "doctor", "--debug")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")


def test_the_doctor_tells_machines_what_is_installed(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "doctor", "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["versions"]["offmap"] == offmap.__version__
    assert record["test"]["passed"] is True


def test_help_lists_the_demo(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "--help")
    assert code == 0
    assert "demo" in out


def test_the_quick_uci_plan_runs_to_its_tables(monkeypatch, capsys, tmp_path, data_folder):
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OFFMAP_DATA", str(data_folder))
    monkeypatch.chdir(tmp_path)
    code, out, err = command(monkeypatch, capsys, "bench", "run", "uci", "--quick", "--seeds", "0")
    assert (code, err) == (0, "")
    assert out == "34 cells done, 0 failed, 0 were there before. Records: bench/records/uci-quick.jsonl\n"
    code, out, err = command(monkeypatch, capsys, "bench", "run", "uci", "--quick", "--only", "Nearest row")
    assert (code, err) == (0, "")
    assert out == "0 cells done, 0 failed, 2 were there before. Records: bench/records/uci-quick.jsonl\n"
    done = command(monkeypatch, capsys, "bench", "table", "uci", "--quick")
    assert done == (0, "The tables are at docs/results/uci-quick.md\n", "")
    page = (tmp_path / "docs" / "results" / "uci-quick.md").read_text(encoding="utf-8")
    assert "from 34 of 34 records" in page
    for label in ("Plain net", "MaxWEnt ×5, default score", "Mahalanobis"):
        assert page.count(f"| {label} |") >= 4


def test_failed_cells_are_listed_with_their_reason(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("OFFMAP_DATA", str(tmp_path / "nowhere"))
    words = ["bench", "run", "uci", "--quick", "--only", "Nearest row", "--records", str(tmp_path / "records")]
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 1
    assert out == f"0 cells done, 2 failed, 0 were there before. Records: {tmp_path / 'records'}\n"
    assert err.startswith("2 failed: offmap.errors.DataError: Expected the data set at ")


def test_an_unknown_plan_or_label_is_one_sentence(monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, "bench", "run", "uciii")
    assert code == 1
    assert err.startswith("offmap: Expected a plan to be one of [")
    assert "(did you mean 'uci'?) or the path of a .toml file, but got uciii." in err
    code, _, err = command(monkeypatch, capsys, "bench", "run", "uci", "--only", "Nearest")
    assert code == 1
    assert "did you mean 'Nearest row'?" in err


def test_comparison_figures_and_page_of_a_plan_that_was_not_run_say_so(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = "uci-bnn-short"
    done = command(monkeypatch, capsys, "bench", "compare", name)
    assert done == (0, f"The comparison is at docs/results/{name}-compare.md\n", "")
    text = (tmp_path / "docs" / "results" / f"{name}-compare.md").read_text(encoding="utf-8")
    assert "**48 of 48 cells not run yet:**" in text
    assert "Of 0 printed numbers that we have too" in text
    code, out, _ = command(monkeypatch, capsys, "bench", "compare", name, "--json")
    assert (code, json.loads(out)) == (0, {"page": f"docs/results/{name}-compare.md"})
    assert command(monkeypatch, capsys, "bench", "figures", name) == (0, f"0 figures are in docs/figures/{name}\n", "")
    assert command(monkeypatch, capsys, "bench", "page", name) == (0, f"The page is at {tmp_path}/{name}.html\n", "")
    assert "48 of 48 cells not run yet" in (tmp_path / f"{name}.html").read_text(encoding="utf-8")
    code, out, err = command(monkeypatch, capsys, "bench", "compare", "uci-tried")
    assert (code, out) == (1, "")
    assert err.startswith("offmap: Expected a plan with printed numbers to compare with, one of [")


def test_a_malformed_plan_is_refused_before_anything_runs(monkeypatch, capsys, tmp_path):
    plan = tmp_path / "mine.toml"
    plan.write_text('name = "mine"\nseeds = [0]\ntasks = ["regression"]\n[[method]]\nname = "nearst"\n', encoding="utf-8")
    code, out, err = command(monkeypatch, capsys, "bench", "run", str(plan), "--records", str(tmp_path / "records"))
    assert (code, out) == (1, "")
    assert err.startswith(f"offmap: {plan}: Expected `name` of a [[method]] to be one of [")
    assert "(did you mean 'nearest'?), but got 'nearst'." in err
    assert not (tmp_path / "records").exists()


def test_a_damaged_record_is_set_aside_with_a_warning(monkeypatch, capsys, tmp_path):
    plan, records = tmp_path / "mine.toml", tmp_path / "records.jsonl"
    plan.write_text('name = "mine"\nseeds = [0]\ntasks = ["regression"]\n[[method]]\nname = "nearest"\n', encoding="utf-8")
    words = ["bench", "run", str(plan), "--records", str(records)]
    code, out, err = command(monkeypatch, capsys, *words, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"done": 1, "failed": 0, "before": 0, "records": str(records), "failures": {}, "damaged": {}}
    records.write_text("{", encoding="utf-8")
    code, out, err = command(monkeypatch, capsys, *words)
    assert (code, out) == (0, f"1 cells done, 0 failed, 0 were there before. Records: {records}\n")
    assert err.startswith(f"Warning: Expected a record at {records}")
    assert err.endswith(" The line is now in records.jsonl.damaged.\n")
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".jsonl", ".damaged")) == [
        "records.jsonl",
        "records.jsonl.damaged",
    ]


@pytest.mark.parametrize("words", [["bench", "run", "uci", "--quick"], ["demo"], ["bench", "--help"]], ids=str)
def test_experiments_that_are_not_installed_are_one_sentence(words, monkeypatch, capsys):
    monkeypatch.setattr("offmap.cli.app.entry_points", lambda group: [])
    code, out, err = command(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    install = "`pip install ./bench` in a clone of the repository"
    assert err == f"offmap: `offmap {words[0]}` belongs to the experiments: install them with {install}.\n"


def test_entry_points_add_sub_commands(monkeypatch, capsys):
    def hello() -> None:
        """Say hello."""
        print("hello")

    monkeypatch.setattr("offmap.cli.app.entry_points", lambda group: [SimpleNamespace(name="hello", load=lambda: hello)])
    assert command(monkeypatch, capsys, "hello") == (0, "hello\n", "")
    assert "hello" in command(monkeypatch, capsys, "--help")[1]
