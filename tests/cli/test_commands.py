"""`offmap fit`, `score` and `evaluate` in real processes on real files: what comes out, and how they fail."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import offmap
from offmap.data.tables.table import open_table
from offmap.serve.model import Model
from offmap.serve.parsing import RequestError, parse_inputs
from shells import ENVIRONMENT, Shell
from trained import classes, classifier, regression, regressor

arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'offmap[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")

MODULE = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))

def make_classifier():
    return nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 3))

def make_images():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))

def make_pair():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))

class Imputing(nn.Sequential):
    def forward(self, x):
        return super().forward(x.nan_to_num())

def make_imputing():
    return Imputing(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))

def make_wide():
    return nn.Sequential(nn.Linear(3, 13), nn.ReLU(), nn.Linear(13, 1))

def make_list():
    return [1, 2]

def make_trouble():
    raise RuntimeError("no luck today")

number = 3
"""
MODEL = ("--model", "my_module:make_model")
NAMES = ("a", "b", "c", "y")
TEXT = 150
"""Rows of `new.csv`."""


def table(n: int, seed: int, shift: float = 0.0) -> dict[str, np.ndarray]:
    x, y = regression(n, seed)
    return dict(zip(NAMES, [*(x + shift).numpy().astype(np.float64).T, y.numpy().astype(np.float64)], strict=True))


def write_csv(path: Path, columns: dict[str, np.ndarray]) -> Path:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare(folder: Path) -> None:
    """The files of a user."""
    (folder / "my_module.py").write_text(MODULE)
    (folder / "broken_module.py").write_text("import nothing_of_this_name\n")
    save_file(regressor().state_dict(), folder / "w.safetensors")
    save_file(classifier().state_dict(), folder / "classes.safetensors")
    for seed in (0, 1):
        torch.save(regressor(seed).state_dict(), folder / f"w{seed}.pt")
    parquet.write_table(arrow.table(table(120, 0)), folder / "train.parquet")
    np.savez(folder / "valid.npz", **table(60, 1))
    parquet.write_table(arrow.table(table(80, 2)), folder / "test.parquet")
    np.savez(folder / "far.npz", **{name: column for name, column in table(50, 3, shift=9.0).items() if name != "y"})
    new = table(TEXT, 4)
    mixed = {"id": np.array([f"r{i}" for i in range(TEXT)]), "c": new["c"], "y": new["y"], "a": new["a"], "b": new["b"]}
    write_csv(folder / "new.csv", mixed)
    x, y = classes(120, 0)
    words = np.array(["blue", "green", "red"])[y.numpy()]
    write_csv(folder / "words.csv", {**dict(zip("abc", x.numpy().T, strict=True)), "colour": words})


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell in a folder with a fitted guard."""
    folder = tmp_path_factory.mktemp("user")
    prepare(folder)
    shell = Shell(folder)
    words = ["fit", *MODEL, "--weights", "w.safetensors", "--train", "train.parquet", "--valid", "valid.npz", "-o", "guard"]
    done = shell(*words, "--solver", "closed-form", "--draws", 10)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("The guard is at guard\n  model      my_module:make_model, 1 model\n  inputs     3: a, b, c\n")
    assert "\n  rows       120 train, 60 valid\n" in done.out
    yield shell
    shell.close()


def score_in_python(folder: Path, path: str) -> offmap.Result:
    """What the guard says in Python, columns put in order by hand."""
    guard = offmap.load(folder / "guard", regressor())
    with open_table(folder / path) as file:
        x = np.concatenate([block.x for block in file.blocks(["a", "b", "c"])])
    return guard(x)


def test_a_real_process_scores_columns_by_name_as_python_does(shell):
    """Columns in another order, and others between them; the text of the file is all that the process has."""
    words = [sys.executable, "-m", "offmap", "score", "guard", "new.csv", *MODEL, "--keep", "id", "-o", "scores.csv"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=shell.folder, env=ENVIRONMENT)
    result = score_in_python(shell.folder, "new.csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("150 rows scored in ")
    assert done.stdout.endswith(f"{int(result.ood.sum())} ({100 * float(result.ood.float().mean()):.1f} %) off the map. "
                                "The scores are at scores.csv\n")  # fmt: skip
    lines = (shell.folder / "scores.csv").read_text().splitlines()
    assert lines[0] == "id,score,ood,p_value,mean,std"
    cells = [line.split(",") for line in lines[1:]]
    assert [row[0] for row in cells] == [f"r{i}" for i in range(TEXT)]
    assert [row[2] for row in cells] == ["true" if value else "false" for value in result.ood.tolist()]
    for place, name in ((1, "score"), (3, "p_value"), (4, "mean"), (5, "std")):
        values = torch.tensor([float(row[place]) for row in cells])
        torch.testing.assert_close(values, getattr(result, name), msg=name)


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
def test_scores_in_other_formats_are_the_same_to_the_bit(suffix, shell):
    done = shell("score", "guard", "far.npz", *MODEL, "-o", f"far-scores.{suffix}", "--json")
    assert (done.code, done.err) == (0, "")
    record = json.loads(done.out)
    assert (record["rows"], record["off_map"], record["out"]) == (50, 50, f"far-scores.{suffix}")
    result = score_in_python(shell.folder, "far.npz")
    with open_table(shell.folder / f"far-scores.{suffix}") as file:
        assert file.names == ["score", "ood", "p_value", "mean", "std"]
        (block,) = file.blocks(file.names)
    for place, name in enumerate(["score", "ood", "p_value", "mean", "std"]):
        assert np.array_equal(block.x[:, place], getattr(result, name).double().numpy()), name


def test_unused_columns_are_named_and_scores_may_go_to_standard_output(shell):
    done = shell("score", "guard", "new.csv", *MODEL, "-o", "-")
    assert done.code == 0
    assert len(done.out.splitlines()) == TEXT + 1
    assert done.err.splitlines()[0] == "Note: new.csv has columns that the guard does not use: id."
    assert done.err.splitlines()[1].startswith("Note: 150 rows scored in ")
    quiet = shell("score", "guard", "new.csv", *MODEL, "-o", "-", "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, done.out, "")


def test_a_guard_is_evaluated_with_a_page(shell):
    words = ["evaluate", "guard", *MODEL, "--test", "test.parquet", "--ood", "far=far.npz", "--ood", "near=new.csv"]
    done = shell(*words, "--report", "page.html", "--json")
    assert (done.code, done.err) == (0, "")
    record = json.loads(done.out)
    guard = offmap.load(shell.folder / "guard", regressor())
    x = {path: np.stack([table(n, seed, shift)[name] for name in "abc"], 1) for path, (n, seed, shift) in
         {"test": (80, 2, 0.0), "far": (50, 3, 9.0), "near": (TEXT, 4, 0.0)}.items()}  # fmt: skip
    found = offmap.evaluate(guard, (x["test"], table(80, 2)["y"]), {name: x[name] for name in ("far", "near")})
    for row in found.rows:
        for name, value in row.items():
            if name not in ("scorer", "set"):
                assert record["metrics"][row["set"]][name] == pytest.approx(value, rel=1e-4), (row["set"], name)
    assert record["rows"] == {"test": 80, "far": 50, "near": TEXT}
    assert record["flagged"]["far"] == 1.0
    page = (shell.folder / "page.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert "far" in page
    text = shell(*words)
    assert text.code == 0
    assert "AUROC" in text.out
    assert text.out.splitlines()[-1].startswith("At the threshold ")


def test_whole_groups_calibrate_and_their_column_is_no_input(shell):
    for path, rows, seed in (("train-runs.csv", 120, 0), ("runs.csv", 60, 1)):
        write_csv(shell.folder / path, {"run": np.array([f"run {i // 3}" for i in range(rows)]), **table(rows, seed)})
    words = ["fit", *MODEL, "--weights", "w.safetensors", "--train", "train-runs.csv", "--groups", "run", "-o", "grouped"]
    done = shell(*words, "--valid", "runs.csv", "--solver", "closed-form", "--draws", 10)
    assert (done.code, done.err) == (0, "")
    assert "inputs     3: a, b, c" in done.out
    calibration = offmap.load(shell.folder / "grouped", regressor()).calibration
    assert (calibration.groups, calibration.exact) == (20, False)
    assert "groups that were left out" not in done.out  # runs of three rows are too short to stand in for OOD data
    assert "Expected --calibration or --valid beside --groups" in shell(*words).err
    missing = shell(*words[:-3], "runs", "-o", "grouped", "--valid", "runs.csv")
    assert "Expected --groups to name a column of runs.csv" in missing.err
    write_csv(shell.folder / "nameless.csv", {"run": np.array(["N/A", *["run 1"] * 59]), **table(60, 1)})
    nameless = shell(*words, "--valid", "nameless.csv", "--solver", "closed-form", "--draws", 10)
    assert "Expected a label for each row in `groups`, but some are missing" in nameless.err


def test_groups_of_training_rows_are_left_out_when_the_score_tunes_itself(shell):
    for path, rows, seed, sites in (("train-sites.csv", 120, 0, 4), ("sites.csv", 60, 1, 20)):
        write_csv(shell.folder / path, {"site": np.array([f"site {i % sites}" for i in range(rows)]), **table(rows, seed)})
    words = ["fit", *MODEL, "--weights", "w.safetensors", "--groups", "site", "-o", "sites", "--solver", "closed-form"]
    done = shell(*words, "--draws", 10, "--train", "train-sites.csv", "--valid", "sites.csv", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["assessment"]["kinds"]["group"]["tried"] == 4
    guard = offmap.load(shell.folder / "sites", regressor())
    assert {s.name for s in guard.assess().kinds()["group"]} == {f"group site {i}" for i in range(4)}
    done = shell(*words, "--draws", 10, "--train", "train.parquet", "--valid", "sites.csv", "--json")
    assert (done.code, done.err) == (0, "")
    assert "group" not in json.loads(done.out)["assessment"]["kinds"]
    done = shell(*words, "--draws", 10, "--train", "train-sites.csv", "--calibration", "sites.csv", "--json")
    assert done.code == 0
    assert "group" not in json.loads(done.out)["assessment"]["kinds"]


def test_fit_and_assess_tell_what_the_guard_can_see(shell):
    guard = offmap.load(shell.folder / "guard", regressor())
    done = shell("assess", "guard", *MODEL)
    assert (done.code, done.err) == (0, "")
    weights = ", ".join(f"{name} {weight:.2f}" for name, weight in guard.assess().weights.items())
    title = "What guard can see, from in-distribution data alone"
    assert done.out == f"{title}\n{guard.assess()}\nWeights of the score: {weights}\n"
    assert "column `" in done.out
    words = ["fit", *MODEL, "--weights", "w.safetensors", "--train", "train.parquet", "--valid", "valid.npz"]
    fitted = shell(*words, "--solver", "closed-form", "--draws", 10, "-o", "guard2")
    assert (fitted.code, fitted.err) == (0, "")
    table = f"What this guard can see, from in-distribution data alone\n{guard.assess()}\n"
    assert fitted.out.endswith(f" -o scores.csv\n\n{table}")


def test_an_assessment_is_json_for_machines(shell):
    expected = offmap.load(shell.folder / "guard", regressor()).assess().to_dict()
    done = shell("assess", "guard", "--trust-model", "--json")
    assert (done.code, done.err) == (0, "")
    record = json.loads(done.out)
    assert record.pop("guard") == "guard"
    assert record == expected
    words = ["fit", *MODEL, "--weights", "w.safetensors", "--train", "train.parquet", "--valid", "valid.npz", "--json"]
    done = shell(*words, "--solver", "closed-form", "--draws", 10, "-o", "guard3")
    assert json.loads(done.out)["assessment"] == expected


def test_a_guard_that_cannot_be_assessed_is_one_sentence(shell):
    words = ["fit", *MODEL, "--weights", "w.safetensors", "--train", "train.parquet", "--valid", "valid.npz", "-o", "paper"]
    done = shell(*words, "--solver", "closed-form", "--draws", 10, "--score", "paper")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1].startswith("Next: offmap score paper ")
    done = shell(*words, "--solver", "closed-form", "--draws", 10, "--score", "paper", "--json")
    assert json.loads(done.out)["assessment"] is None
    done = shell("assess", "paper", *MODEL)
    assert done.code == 1
    assert done.sentence == (
        "Expected a guard that compares with training rows, as score='default' does, to assess, but got score 'paper'. Fit with "
        "score='default', and pass training rows."
    )
    done = shell("assess", "paper")
    assert done.code == 2
    assert done.sentence.startswith("paper needs the model that it guards: pass --model my_module:make_model, with which it was")


def test_classes_are_words_and_come_back_as_words(shell):
    words = ["--model", "my_module:make_classifier", "--weights", "classes.safetensors"]
    done = shell("fit", *words, "--train", "words.csv", "-o", "colours", "--solver", "closed-form", "--draws", 10, "--json")
    assert done.code == 0
    assert done.err.startswith("No validation data: 12 rows of `train`, which the model has seen, set the threshold")
    assert done.err.splitlines()[1].startswith(
        "The threshold is infinite, so nothing will be flagged: 12 calibration rows are too few"
    )
    record = json.loads(done.out)
    assert (record["classes"], record["likelihood"], record["targets"]) == (["blue", "green", "red"], "categorical", ["colour"])
    assert record["calibrated"] is False
    done = shell("score", "colours", "words.csv", "--trust-model", "-o", "colours.parquet")
    assert done.code == 0
    assert "Threshold and p-values are uncalibrated: the model was trained on the rows that set them." in done.out
    scores = parquet.read_table(shell.folder / "colours.parquet")
    assert scores.column_names == ["score", "ood", "p_value", "label", *(f"probability_{w}" for w in ("blue", "green", "red"))]
    labels, true = scores["label"].to_pylist(), (shell.folder / "words.csv").read_text().splitlines()[1:]
    assert sum(b.endswith(a) for a, b in zip(labels, true, strict=True)) > 100
    done = shell("evaluate", "colours", "--trust-model", "--test", "words.csv", "--ood", "far.npz", "--json")
    assert done.code == 0
    record = json.loads(done.out)
    assert record["metrics"]["test"]["accuracy"] > 0.8
    assert record["calibrated"] is False
    assert "conformal_coverage" not in record["metrics"]["test"]
    done = shell("fit", *words, "--train", "words.csv", "--classes", "blue,red", "-o", "colours2")
    assert done.code == 1
    assert "Expected 3 classes in the target 'colour' of words.csv, as many as my_module:make_classifier tells" in done.sentence


KINDS = {
    "images": ("make_images", "images.npz", [], ["label", "probability_0", "probability_1", "probability_2"]),
    "truth": ("make_model", "truth.parquet", [], ["label", "probability_False", "probability_True"]),
    "two targets": ("make_pair", "test.parquet", ["--target", "c", "--target", "y"], ["mean_c", "mean_y", "std_c", "std_y"]),
    "too few columns": ("make_model", "truth.parquet", ["--target", "a", "--drop", "truth", "--drop", "b"], None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_predicted_follows_from_target_and_model(kind, shell):
    rng = np.random.RandomState(0)
    np.savez(shell.folder / "images.npz", x=rng.rand(60, 1, 4, 4), y=rng.randint(0, 3, 60))
    truth = {"truth": rng.rand(60) > 0.5}
    parquet.write_table(arrow.table(table(60, 0) | truth).drop(["y"]), shell.folder / "truth.parquet")
    model, data, options, predicted = KINDS[kind]
    (shell.folder / "seeded.py").write_text(
        f"import torch, my_module\n\ndef make():\n    torch.manual_seed(0)\n    return my_module.{model}()\n"
    )
    words = ["--model", "seeded:make", "--solver", "closed-form", "--draws", 5, "-q"]
    done = shell("fit", *words, "--train", data, *options, "-o", "kind")
    if predicted is None:
        assert done.code == 1
        assert "The model of seeded:make cannot be called with rows of truth.parquet, (1,) each: " in done.sentence
        return
    assert (done.code, done.err) == (0, "")
    done = shell("score", "kind", data, "--trust-model", "-q", "-o", "kind.parquet")
    assert (done.code, done.err) == (0, "")
    assert parquet.read_table(shell.folder / "kind.parquet").column_names == ["score", "ood", "p_value", *predicted]


def test_an_ensemble_has_several_weights(shell):
    words = [*MODEL, "--weights", "w0.pt", "--weights", "w1.pt", "--train", "train.parquet", "--valid", "valid.npz"]
    done = shell("fit", *words, "-o", "two", "--solver", "closed-form", "--draws", 5, "--params", "2.*", "--set", "noise=normal")
    assert (done.code, done.err) == (0, "")
    assert "my_module:make_model, 2 models" in done.out
    guard = offmap.load(shell.folder / "two", [regressor(0), regressor(1)])
    assert guard.about["weights"] == ["w0.pt", "w1.pt"]
    done = shell("score", "two", "far.npz", *MODEL, "-o", "two.npz")
    assert done.code == 0
    with np.load(shell.folder / "two.npz") as file:
        np.testing.assert_array_equal(file["score"], expected_two(guard, shell.folder))


def expected_two(guard: offmap.Guard, folder: Path) -> np.ndarray:
    with np.load(folder / "far.npz") as file:
        return guard.score(np.stack([file[name] for name in "abc"], 1)).numpy()


def test_a_guard_made_in_python_takes_all_columns_in_order(shell):
    guard = offmap.load(shell.folder / "guard", regressor())
    replace(guard, about={}).save(shell.folder / "plain")
    words = ["plain", *MODEL, "--weights", "w.safetensors"]
    done = shell("score", *words, "test.parquet", "--drop", "y", "-o", "plain.npz")
    assert (done.code, done.err) == (0, "")
    with np.load(shell.folder / "plain.npz") as file:
        np.testing.assert_array_equal(file["score"], score_in_python(shell.folder, "test.parquet").score)
    done = shell("score", *words, "test.parquet", "-o", "bad-out.npz")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert list_partial(shell.folder) == []
    done = shell("evaluate", *words, "--test", "test.parquet", "--ood", "far.npz", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["metrics"]["far"]["auroc"] > 0.99


BAD_DATA = {
    "missing value": ("a,b,c\n1,2,3\n1,,3\n", "Expected a finite number in each row of bad.csv, but row 2 has no value in"),
    "wrong separator": ("a b c\n1 2 3\n", "Expected several columns in bad.csv, but got one, 'a b c'."),
    "separator of the rows": ("a,b,c\n1;2;3\n", "Expected 3 values in each row of bad.csv, but row 1 has 1. Is the file cut"),
    "text": ("a,b,c\n1,2,3\n4,green,6\n", "Expected numbers in column 'b' of bad.csv, but row 2 has 'green'."),
    "missing columns": ("c,d\n1,2\n", "Expected the columns of fit time in bad.csv, but 'a' and 1 more are missing: it has"),
    "missing column": ("a,c\n1,2\n", "Expected the columns of fit time in bad.csv, but 'b' is missing: it has 'a', 'c'."),
    "cut": ("a,b,c\n1,2,3\n4,5\n", "Expected 3 values in each row of bad.csv, but row 2 has 2. Is the file cut"),
    "no rows": ("a,b,c\n", "Expected rows in bad.csv, but there are none."),
    "empty": ("", "Expected a header row in bad.csv, but the file is empty."),
}  # fmt: skip


def list_partial(folder: Path) -> list[str]:
    """Files that begin like a half-written output, and the output."""
    return [file.name for file in folder.iterdir() if ".part" in file.name or file.name.startswith("bad-out")]


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_sentence_and_leaves_no_output(case, shell):
    (text, message), suffix = BAD_DATA[case], ("csv", "npz", "parquet")[len(case) % 3]
    (shell.folder / "bad.csv").write_text(text)
    done = shell("score", "guard", "bad.csv", *MODEL, "-o", f"bad-out.{suffix}")
    assert done.code == 1
    assert done.sentence.startswith(message)
    assert list_partial(shell.folder) == []


@pytest.mark.parametrize("name", ["test.parquet", "far.npz"])
def test_a_file_that_ends_in_the_middle_is_one_sentence(name, shell):
    content = (shell.folder / name).read_bytes()
    (shell.folder / f"cut-{name}").write_bytes(content[: len(content) // 2])
    done = shell("score", "guard", f"cut-{name}", *MODEL, "-o", "bad-out.csv")
    assert done.code == 1
    assert f"at cut-{name}, but it cannot be read: " in done.sentence
    assert list_partial(shell.folder) == []


def test_a_bad_row_far_down_leaves_what_was_there(shell):
    """The first block is scored and written before the second one is refused."""
    more = [f"more{i}" for i in range(253)]  # a block has 4,096 rows of 256 values
    lines = [",".join(["a", "b", "c", *more])] + ["0.5" + ",0.5" * 255] * 4200 + ["0.5,oops" + ",0.5" * 254]
    (shell.folder / "bad.csv").write_text("\n".join(lines) + "\n")
    (shell.folder / "old.csv").write_text("old\n")
    done = shell("score", "guard", "bad.csv", *MODEL, "-o", "old.csv", "-q")
    assert done.code == 1
    assert done.sentence.startswith("Expected numbers in column 'b' of bad.csv, but row 4201 has 'oops'.")
    assert (shell.folder / "old.csv").read_text() == "old\n"
    assert list_partial(shell.folder) == []


BAD_MODELS = {
    "my_modul:make_model": "Cannot import 'my_modul' for --model: there is no such module in ",
    "broken_module:make_model": "Cannot import 'broken_module' for --model: it needs 'nothing_of_this_name', which is not "
                                "installed.",
    "my_module:make_models": "Expected 'make_models' of --model to be one of ['Imputing', 'make_classifier', 'make_images', "
                           "'make_imputing', 'make_list', 'make_model', 'make_pair', 'make_trouble', 'make_wide'] "
                           "(did you mean 'make_model'?), but",
    "my_module:number": "Expected 'my_module:number' to be a function or class that makes a model, but it is of type int.",
    "my_module:make_list": "Expected my_module:make_list to give a torch.nn.Module, but it gave list.",
    "my_module:make_trouble": "Expected my_module:make_trouble to make a model when called without arguments, but it failed: "
                              "RuntimeError: no luck today.",
    "my_module:make_wide": "The weights of w.safetensors do not fit the model of my_module:make_wide: '0.weight' is (12, 3) in "
                           "the file and (13, 3) in the model.",
}  # fmt: skip


@pytest.mark.parametrize("model", BAD_MODELS)
def test_a_model_that_cannot_be_made_is_one_sentence(model, shell):
    done = shell("fit", "--model", model, "--weights", "w.safetensors", "--train", "train.parquet", "-o", "bad-out")
    assert done.code == 1
    assert done.sentence.startswith(BAD_MODELS[model])
    assert list_partial(shell.folder) == []


def test_nothing_is_imported_because_a_file_says_so(shell):
    done = shell("score", "guard", "new.csv", "-o", "bad-out.csv")
    assert done.code == 2
    assert done.sentence == (
        "guard needs the model that it guards: pass --model my_module:make_model, with which it was fitted, or --trust-model to "
        "import that because the file says so."
    )
    assert shell("score", "guard", "far.npz", "--trust-model", "-o", "-").code == 0


SCORE = ("score", "guard", "new.csv")
FIT = ("fit", *MODEL, "--weights", "w.safetensors", "--train", "train.parquet", "-o", "bad-out", "-q")
MISUSES = {
    "model without a colon": ([*SCORE, "--model", "my_module", "-o", "bad-out.csv"], "Expected --model as MODULE:CALLABLE, "),
    "output on the input": ([*SCORE, *MODEL, "-o", "new.csv"], "Expected --out to be another file than the data"),
    "output of another kind": ([*SCORE, *MODEL, "-o", "bad-out.xlsx"], "Expected a table to write to end in one of ['.csv', "),
    "data of another kind": (["score", "guard", "w0.pt", *MODEL, "-o", "-"], "Expected a table to end in one of ['.csv', "),
    "unknown kept column": ([*SCORE, *MODEL, "--keep", "idd", "-o", "-"], "Expected --keep to name a column of new.csv, one of"),
    "ood set": (
        ["evaluate", "guard", *MODEL, "--test", "test.parquet", "--ood", "test=far.npz"],
        "Expected --ood as NAME=FILE, each name once and none of them 'test', but got 'test=far.npz'.",
    ),
    "setting": ([*FIT, "--set", "steps"], "Expected --set as NAME=VALUE, such as steps=1000, but got 'steps'."),
    "unknown setting": ([*FIT, "--set", "stepz=1"], "Expected the name in --set stepz=1 to be one of ['adam_epsilon', "),
    "parameters": ([*FIT, "--params", "nothing"], "Expected `params` to pick at least one parameter, but 'nothing' fits none of"),
    "likelihood": (
        [*FIT, "--likelihood", "gausian"], "Expected --likelihood to be one of ['bernoulli', 'categorical', 'gaussian'"
    ),
    "false alarms": ([*FIT, "--false-alarms", "2"], "Expected `false_alarms` "),
    "score": ([*FIT, "--score", "papr"], "Expected `score` to be one of "),
    "target": (
        [*FIT, "--target", "z"], "Expected --target to name a column of train.parquet, one of ['a', 'b', 'c', 'y'], but got 'z'."
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_one_sentence_and_exit_code_2(case, shell):
    words, message = MISUSES[case]
    done = shell(*words)
    assert done.code == 2
    assert done.sentence.startswith(message)
    assert list_partial(shell.folder) == []


@pytest.mark.parametrize("words", [["score"], ["fit", "--solver", "magic"], ["evaluate", "guard", "--tset", "x"], ["scores"]])
def test_what_cannot_be_parsed_is_exit_code_2(words, shell):
    done = shell(*words)
    assert (done.code, done.out) == (2, "")
    assert "Error: " in done.err
    assert "Traceback" not in done.err


UNWRITABLE = {
    "no/bad-out.csv": "Cannot write no/bad-out.csv: No such file or directory.",
    "new.csv/bad-out.csv": "Cannot write new.csv/bad-out.csv: Not a directory.",
    "folder.csv": "Cannot write folder.csv: Is a directory.",
}


@pytest.mark.parametrize("path", UNWRITABLE)
def test_an_output_that_cannot_be_written_is_one_sentence(path, shell):
    (shell.folder / "folder.csv").mkdir(exist_ok=True)
    done = shell("score", "guard", "far.npz", *MODEL, "-o", path)
    assert done.code == 1
    assert done.sentence.startswith(UNWRITABLE[path])
    done = shell("fit", *MODEL, "--weights", "w.safetensors", "--train", "train.parquet", "-o", path)
    assert done.code == 1
    assert str(path) in done.sentence
    assert list_partial(shell.folder) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", tmp_path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"needs to mount a small tmpfs: {made.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("suffix", ["csv", "npz", "parquet"])
def test_a_full_disk_is_one_sentence_and_nothing_is_left_on_it(suffix, shell, small_disk):
    columns = {name: np.random.RandomState(0).randn(20_000) for name in "abc"}
    np.savez(shell.folder / "long.npz", **columns)
    (small_disk / f"scores.{suffix}").write_text("old")
    done = shell("score", "guard", "long.npz", *MODEL, "-o", small_disk / f"scores.{suffix}")
    assert done.code == 1
    assert done.sentence.startswith(f"Cannot write {small_disk}/scores.{suffix}: No space left on device.")
    assert (small_disk / f"scores.{suffix}").read_text() == "old"
    assert [file.name for file in small_disk.iterdir()] == [f"scores.{suffix}"]


def test_debug_shows_where_an_error_comes_from(shell):
    for words in (
        ["--debug", "score", "guard", "none.csv", *MODEL, "-o", "-"],
        ["score", "guard", "none.csv", *MODEL, "-o", "-", "--debug"],
    ):
        done = shell(*words)
        assert done.code == 1
        assert done.err.startswith("Traceback (most recent call last):")
        assert done.err.endswith("\noffmap: Expected a table at none.csv, but there is no such file.\n")


def test_other_weights_than_at_fit_time_are_refused(shell):
    done = shell("score", "guard", "far.npz", *MODEL, "--weights", "w1.pt", "-o", "bad-out.csv")
    assert done.code == 1
    assert done.sentence.startswith("guard was fitted on other weights: `0.weight` differs (member 0).")
    done = shell("score", "w.safetensors", "far.npz", *MODEL, "-o", "bad-out.csv")
    assert done.code == 1
    assert done.sentence.startswith("w.safetensors is damaged or not a guard file (it was not written by offmap).")


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["fit"], ["score"], ["assess"], ["evaluate"], ["doctor"], ["bench", "run"], ["bench", "page"]]
)
def test_every_help_has_an_example(command, shell):
    done = shell(*command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"offmap {' '.join(command)}".strip() in done.out.partition("Options")[0].split("Usage")[1].partition("\n")[2]


def test_the_shell_completes_commands_and_options(shell):
    def run_completion(text: str) -> list[str]:
        done = shell(_OFFMAP_COMPLETE="complete_bash", COMP_WORDS=f"offmap {text}", COMP_CWORD=str(len(text.split())))
        return done.out.split()

    assert run_completion("sc") == ["score"]
    assert "--trust-model" in run_completion("score --tr")
    done = shell(_OFFMAP_COMPLETE="source_bash")
    assert "complete -o" in done.out


SLOW = """
import time
from pathlib import Path
from torch import nn

class Sequential(nn.Sequential):
    def forward(self, x):
        there = " ".join(path.name for path in Path().iterdir())
        Path("starting").write_text(there)
        Path("starting").rename("started")
        time.sleep(60)
        return super().forward(x)

def make_model():
    return Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_process_leaves_nothing(number, code, shell):
    (shell.folder / "slow_module.py").write_text(SLOW)
    (shell.folder / "started").unlink(missing_ok=True)
    words = ["score", "guard", "far.npz", "--model", "slow_module:make_model", "-o", "bad-out.csv"]
    done = shell(*words, stop=("started", number))
    assert done.code == code
    assert "Traceback" not in done.err
    assert "bad-out.csv" in (shell.folder / "started").read_text()
    assert list_partial(shell.folder) == []


def test_the_commands_of_the_page_run_as_they_stand(shell, tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    module, data = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "my_module.py").write_text(module)
    with contextlib.chdir(tmp_path), torch.random.fork_rng(devices=[]):
        exec(compile(module + data, "cli.md", "exec"), {})
    for line in "".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)).splitlines():
        done = shell(*shlex.split(line)[1:], folder=tmp_path)
        assert (done.code, done.err) == (0, ""), line
    with open_table(tmp_path / "scores.csv") as file:
        assert sum(len(block.x) for block in file.blocks(["score", "p_value", "mean", "std"])) == 300


def test_missing_values_pass_from_the_table_to_the_graph_where_the_model_takes_them(shell):
    for path, rows, seed in (("gaps-train.csv", 120, 0), ("gaps-valid.csv", 60, 1), ("gaps.csv", 30, 2)):
        columns = {name: values.astype(object) for name, values in table(rows, seed).items()}
        columns["b"][::3] = "" if seed < 2 else "NaN"
        write_csv(shell.folder / path, columns)
    model = ("--model", "my_module:make_imputing")
    words = ["fit", *model, "--weights", "w.safetensors", "--train", "gaps-train.csv", "--valid", "gaps-valid.csv", "-o", "gaps"]
    refused = shell(*words)
    assert refused.err.endswith("Fill or drop it, or fit with --allow-nan if the model handles missing values.\n")
    plain = shell(*words, "--allow-nan", "--model", "my_module:make_model")
    assert "Expected a model that handles missing values" in plain.err
    done = shell(*words, "--allow-nan", "--solver", "closed-form", "--draws", 10)
    assert (done.code, done.err) == (0, "")
    assert shell("score", "gaps", "gaps.csv", *model, "-o", "gaps.npz").code == 0
    assert shell("export", "gaps", "gaps.onnx", *model).code == 0
    x, _ = regression(30, 2)
    x[::3, 1] = torch.nan
    scores = np.load(shell.folder / "gaps.npz")["score"]
    assert np.isfinite(scores).all()
    served = Model.load(shell.folder / "gaps.onnx")
    cells = [[None if v != v else v for v in row] for row in x.tolist()]
    rows = [dict(zip("abc", row, strict=True)) for row in cells]
    bodies = {"null": {"inputs": cells}, "NaN": {"inputs": x.tolist()}, "rows": {"rows": rows}}
    for kind, body in bodies.items():
        inputs = parse_inputs("application/json", json.dumps(body).encode(), served.inputs, 100, served.columns)
        np.testing.assert_allclose(served(inputs)["score"], scores, rtol=1e-4, atol=1e-4, err_msg=kind)
    with pytest.raises(RequestError, match="Expected finite float32 numbers in `input`"):
        parse_inputs("application/json", b'{"inputs": [[1e39, null, 1]]}', served.inputs, 100)
    with pytest.raises(RequestError, match="Infinity is not a JSON number"):
        parse_inputs("application/json", b'{"inputs": [[Infinity, null, 1]]}', served.inputs, 100)


def test_export_writes_a_graph_with_the_columns_of_fit_time_and_says_how_it_was_checked(shell):
    runtime = pytest.importorskip("onnxruntime")
    done = shell("export", "guard", "g.onnx", *MODEL, "--example", "new.csv")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(
        r"Wrote g\.onnx: [\d.]+ MB, 10 draws, input -> mean, std, score, ood, p_value, terms, threshold; threshold [\d.]+\. "
        r"Tested on 150 rows: numbers within \S+ of the guard's, 0 verdicts differ; \S+ ms for one row, \S+ in a batch of 32\.\n",
        done.out,
    )
    session, result = runtime.InferenceSession(shell.folder / "g.onnx"), score_in_python(shell.folder, "new.csv")
    assert json.loads(session.get_modelmeta().custom_metadata_map["offmap.columns"]) == ["a", "b", "c"]
    with open_table(shell.folder / "new.csv") as file:
        x = np.concatenate([block.x for block in file.blocks(["a", "b", "c"])])
    p_value, score = session.run(["p_value", "score"], {"input": x.astype(np.float32)})
    torch.testing.assert_close(torch.from_numpy(score), result.score, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(p_value), result.p_value, rtol=0, atol=0.02)
    done = shell("export", "guard", "g.pt2", *MODEL, "--draws", 4)
    assert (done.code, done.err) == (
        2,
        "offmap: The threshold is for 10 draws; for 4, pass in-distribution rows: --calibration TABLE.\n",
    )
    done = shell("export", "guard", "g.pt2", *MODEL, "--draws", 4, "--calibration", "test.parquet", "--json")
    assert (done.code, done.err) == (0, "")
    guard = replace(offmap.load(shell.folder / "guard", regressor()), draws=4).calibrate(regression(80, 2))
    assert json.loads(done.out)["threshold"] == pytest.approx(guard.threshold, rel=1e-6)
    done = shell("export", "guard", "g.pt2", *MODEL)
    assert "Tested on 256 random rows" in done.out
