"""Image classifiers in a benchmark: nets that are kept, detectors that share a pass, and a page of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.errors import ConfigError
from offmap.metrics import auroc
from offmap_bench.runner.images import init_net, load_classifier, pass_over, pretrained_name, subset, train_config
from offmap_bench.runner.methods import FitContext
from offmap_bench.runner.plan import METHODS, Cell, cells, digest, narrow_plan, parse
from offmap_bench.runner.run import Bench, run
from offmap_bench.runner.store import Record, Records, read_records, settings_of
from offmap_bench.runner.table import Results, kind_of, ranks_markdown
from offmap_bench.tasks.task import Task

SIDE = 12
NET = {"epochs": 3, "lr": 3e-3, "batch_size": 16}


def stripes(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Upright or lying stripes in noise, (B, 1, 12, 12)."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (rows,), generator=random)
    grid = torch.arange(SIDE).expand(SIDE, SIDE)
    x = torch.stack([grid, grid.mT])[y] % 4 < 2
    return (x + 0.2 * torch.randn(rows, SIDE, SIDE, generator=random))[:, None], y


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path / "cache"))
    noise = torch.rand(30, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(9))
    return Task("images/mnist", stripes(96, 0), stripes(40, 1), stripes(30, 2), {"fashion": noise, "cifar10": 1 - noise},
                likelihood="categorical", outputs=2)  # fmt: skip


def test_a_net_is_trained_once_and_read_afterwards(task: Task, tmp_path: Path) -> None:
    first, seconds = load_classifier(task, "godin", NET, seed=1)
    assert seconds > 0
    (path,) = (tmp_path / "cache" / "classifiers").iterdir()
    written = path.stat().st_mtime_ns
    again, same = load_classifier(task, "godin", NET, seed=1)
    assert same == pytest.approx(seconds)
    assert path.stat().st_mtime_ns == written
    x = task.test[0]
    assert torch.equal(first.score(x), again.score(x))
    assert not torch.equal(load_classifier(task, "godin", NET, seed=2)[0].score(x), first.score(x))
    assert not torch.equal(load_classifier(task, "godin", NET, seed=1, member=1)[0].score(x), first.score(x))
    other = replace(task, train=stripes(96, 5))
    assert not torch.equal(load_classifier(other, "godin", NET, seed=1)[0].score(x), first.score(x))


def test_a_damaged_file_is_said_and_the_net_trained_again(task: Task, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = load_classifier(task, "plain", NET, seed=0)
    (path,) = (tmp_path / "cache" / "classifiers").iterdir()
    path.write_bytes(path.read_bytes()[:200])
    again, _ = load_classifier(task, "plain", NET, seed=0)
    assert "cannot be read" in caplog.text
    assert "is made again" in caplog.text
    assert torch.equal(first.score(task.test[0]), again.score(task.test[0]))


def test_the_form_of_the_images_decides_on_the_net(task: Task) -> None:
    assert init_net(task, 0)(task.test[0][:2]).shape == (2, 2)
    colour = replace(task, train=(torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])), outputs=6)
    assert init_net(colour, 0)(torch.rand(2, 3, 32, 32)).shape == (2, 6)
    assert train_config("plain", {}, 3).augment
    assert not train_config("plain", {}, 1).augment
    assert train_config("mixup", {"alpha": 0.3, "epochs": 2}, 3).alpha == 0.3
    assert pretrained_name(task) is None
    assert pretrained_name(replace(task, name="images/cifar10/resnet20/few")) == "resnet20"


def test_detectors_are_those_of_detect_and_look_once(task: Task) -> None:
    context = FitContext(task, 0)
    fits = {name: METHODS["detector"].fit(context, {"method": name, **NET}) for name in ("energy", "knn", "odin")}
    net = load_classifier(task, "plain", NET, seed=0)[0].net
    passes: list[int] = []
    model = pass_over(task, 0, tuple(sorted(NET.items())))[0].classifier.model
    hook = model.register_forward_hook(lambda m, args, out: passes.append(len(args[0])))
    for name, fitted in fits.items():
        alone = offmap.detect(net, task.train, task.valid, method=name)
        assert fitted.scorer is not None
        torch.testing.assert_close(fitted.scorer.score(task.test[0]), alone.score(task.test[0]), rtol=1e-4, atol=1e-5)
        assert fitted.seconds > 0
        assert fitted.thousand is not None and fitted.thousand > 0  # noqa: PT018
    assert sum(passes) == 3 * 30  # one pass for energy and knn together, two more that odin takes
    hook.remove()


def test_a_guard_takes_one_net_or_several_and_some_rows(task: Task) -> None:
    context = FitContext(task, 0)
    one, two = (METHODS["image_guard"].fit(context, {**NET, "members": m, "rows": 50, "draws": 5}).scorer for m in (1, 2))
    assert isinstance(one, offmap.Guard)
    assert isinstance(two, offmap.Guard)
    assert (one.predictive.members, two.predictive.members) == (1, 2)
    x, y = subset(task.train, 50, 0)
    assert len(x) == len(y) == 50
    for image, label in zip(x, y, strict=True):
        (row,) = (task.train[0] == image).flatten(1).all(1).nonzero()[0].tolist()
        assert task.train[1][row] == label
    assert subset(task.train, None, 0)[0] is task.train[0]


def test_pretrained_nets_of_different_kinds_are_mixed(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"resnet20": 6, "resnet32": 10}

    def net_of(name: str, classes: int) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, sizes[name], 5), nn.ReLU(), nn.Conv2d(sizes[name], 6, 3), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(6 * (SIDE - 6) ** 2, classes)).eval()

    monkeypatch.setattr("offmap_bench.runner.images.pretrained_net", net_of)
    made = METHODS["image_guard"].fit(FitContext(task, 0), {"nets": list(sizes), "draws": 5})
    assert isinstance(made.scorer, offmap.GuardEnsemble)
    guards = [offmap.fit(net_of(name, 2), task.train, task.valid, draws=5) for name in sizes]
    alone = offmap.combine(guards, task.valid)
    torch.testing.assert_close(made.scorer.score(task.test[0]), alone.score(task.test[0]))


def cell(name: str, config: dict[str, Any]) -> Cell:
    return Cell("images/mnist", name, "any", {**config, **NET}, 0)


@pytest.mark.parametrize(
    ("method", "config"),
    [("detector", {"method": "msp"}), ("classifier", {"training": "arpl"}), ("classifier", {"training": "plain", "members": 2}),
     ("classifier", {"training": "svdd"}), ("classifier", {"training": "cutpaste"}), ("image_guard", {"draws": 5})],
)  # fmt: skip
def test_a_cell_tells_detection_accuracy_and_seconds(method: str, config: dict[str, Any], task: Task) -> None:
    bench = Bench(_task=(("images/mnist", 0), task))
    record = bench.run(cell(method, config))
    assert record.traceback is None
    assert set(record.metrics) >= {"test", "fashion", "cifar10"}
    assert 0 <= record.metrics["fashion"]["auroc"] <= 1
    assert ("accuracy" in record.metrics["test"]) is (config.get("training") not in ("svdd", "cutpaste"))
    assert record.metrics["test"].get("accuracy", 1.0) > 0.8
    assert {"fit", "score", "thousand"} == set(record.seconds)
    assert Records({digest(record.cell): record}, {}).state(cell(method, config)) == "ok"


def test_a_guard_in_a_cell_has_the_score_that_the_cell_names(task: Task) -> None:
    bench = Bench(_task=(("images/mnist", 0), task))
    net, found = load_classifier(task, "plain", NET, 0)[0].net, list[float]()
    for name in ("default", "paper"):
        record = bench.run(cell("image_guard", {"draws": 5, "score": name}))
        guard = offmap.fit(net, task.train, task.valid, draws=5, score=name)
        found.append(float(auroc(guard.score(task.test[0]), guard.score(task.ood["fashion"]))))
        assert record.metrics["fashion"]["auroc"] == pytest.approx(found[-1], abs=1e-5)
    assert found[0] != pytest.approx(found[1], abs=1e-2)


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("detector", {"method": "enrgy"}, "Expected `method` to be .*did you mean 'energy'"),
        ("detector", {"method": "msp", "k": 3}, "Expected options of 'msp' to be .*but got 'k'"),
        ("classifier", {"training": "mixpu"}, "Expected `training` to be .*did you mean 'mixup'.*but got 'mixpu'"),
        ("classifier", {"training": "plain", "alpha": 0.1}, "Expected options to be .*but got 'alpha'"),
        ("classifier", {"training": "plain", "epochs": 0}, "Expected `epochs` to be a whole number above 0, but got 0"),
        (
            "image_guard",
            {"nets": ["resnet20", "resnet3"]},
            "Expected `nets` to be .*did you mean 'resnet32'.*but got 'resnet3'",
        ),
        ("image_guard", {"nets": ["resnet20"]}, "Expected two or more `nets` to mix, but got 1"),
        ("image_guard", {"members": 0}, "Expected `members` to be a whole number above 0, but got 0"),
    ],
)
def test_impossible_settings_are_refused_before_anything_runs(method: str, config: dict[str, Any], message: str) -> None:
    settings = ", ".join(f"{key} = {value!r}".replace("'", '"') for key, value in config.items())
    text = f'name = "x"\nseeds = [0]\ntasks = ["images/mnist"]\n[[method]]\nname = "{method}"\nconfig = {{{settings}}}\n'
    with pytest.raises(ConfigError, match=message):
        parse(text, "x.toml")


PLAN = """
name = "small"
page = "ranks"
seeds = [0, 1]
tasks = ["images/mnist", "images/cifar10/resnet20", "images/mnist/open"]

[seeds_of]
"images/cifar10/*" = [0]

[[method]]
name = "image_guard"
label = "ours"

[[method]]
name = "detector"
label = "Entropy"
config = {method = "entropy"}

[[method]]
name = "classifier"
label = "mixed"
tasks = ["images/mnist*"]
config = {training = "mixup"}
"""


def test_methods_and_seeds_may_be_of_some_tasks_only() -> None:
    made = cells(parse(PLAN, "small.toml"))
    assert len(made) == 2 * 3 * 2 + 2
    assert {c.seed for c in made if "cifar10" in c.task} == {0}
    assert {c.task for c in made if c.label == "mixed"} == {"images/mnist", "images/mnist/open"}
    assert not cells(narrow_plan(parse(PLAN, "small.toml"), label="mixed", seeds=[7]))[0].task.startswith("images/cifar10")
    some = cells(narrow_plan(parse(PLAN, "small.toml"), tasks=["images/mnist", "*/open"], seeds=[1]))
    assert {(c.task, c.seed) for c in some} == {("images/mnist", 1), ("images/mnist/open", 1)}
    with pytest.raises(
        ConfigError, match="Expected a task of the plan to be .*did you mean 'images/mnist'.*but got 'images/mnst'"
    ):
        narrow_plan(parse(PLAN, "small.toml"), tasks=["images/mnst"])
    with pytest.raises(ConfigError, match="Expected a task or a pattern of tasks to be .*but got 'images/mnst'"):
        parse(PLAN.replace('["images/mnist*"]', '["images/mnst"]'), "small.toml")
    with pytest.raises(ConfigError, match="small.toml: Expected `page` to be .*did you mean 'ranks'.*but got 'rank'"):
        parse(PLAN.replace('"ranks"', '"rank"'), "small.toml")
    with pytest.raises(ConfigError, match="Expected `seeds` to be whole numbers ≥ 0, but got .'0'"):
        parse(PLAN.replace('"images/cifar10/*" = [0]', '"images/cifar10/*" = ["0"]'), "small.toml")


NEAR = {"ours": 0.9, "Entropy": 0.7, "mixed": 0.8}


def record(made: Cell) -> Record:
    """Near 0.9, 0.7 and 0.8 by method, 0.02 more with seed 1; far 0.05 more, open sets 0.1 less."""
    near = NEAR[made.label] + 0.02 * made.seed
    if made.task.endswith("open"):
        sets = {"unknown classes": near - 0.1}
    elif "mnist" in made.task:
        sets = {"notmnist": near - 0.01, "fashion": near + 0.01, "cifar10": near + 0.05}
    else:
        sets = {"tinyimagenet": near, "mnist": near + 0.05}
    metrics: dict[str, dict[str, Any]] = {"test": {"accuracy": 0.95}} | {name: {"auroc": v} for name, v in sets.items()}
    seconds = {"fit": 12.0, "score": 1.0, "thousand": 0.25}
    return Record(made.as_dict(), "ok", settings_of(made), metrics=metrics, seconds=seconds)


def page(*gone: str) -> list[str]:
    plan = parse(PLAN, "small.toml")
    records = {c.hash: record(c) for c in cells(plan) if f"{c.label} {c.task} {c.seed}" not in gone}
    return ranks_markdown(Results(plan, Records(records, {}))).splitlines()


def part(lines: list[str], title: str) -> list[str]:
    start = lines.index(f"## {title}")
    rest = lines[start + 1 :]
    return rest[: next((i for i, line in enumerate(rest) if line.startswith("## ")), len(rest))]


def test_ranks_are_among_methods_that_ran_on_all_tasks_of_a_table() -> None:
    mnist = part(page(), "mnist, near and far")
    assert "| **ours** | default | 91.0 (1) | 96.0 (1) | 93.5 | 95.0 | 12 | 0.25 |" in mnist
    assert "| mixed | own | 81.0 (2) | 86.0 (2) | 83.5 | 95.0 | 12 | 0.25 |" in mnist
    assert "Mean of ours: +20.0 against the best detector, Entropy; +10.0 against the best of all others, mixed; +20.0 against " \
           "Entropy." in mnist  # fmt: skip
    assert "| **ours** | default | 81.0 (1) | 95.0 | 12 | 0.25 |" in part(page(), "mnist, open sets")
    whole = part(page(), "All tasks")
    assert "| **ours** | default | 90.5 (1) | 95.5 (1) | 81.0 (1) | 89.0 |" in whole
    assert "| mixed | own | – | – | 71.0 (2) | – |" in whole
    rows = "| mixed | own | – | – | 71.0 (2) | – |", "| Entropy | own | 70.5 (2) | 75.5 (2) | 61.0 (3) | 69.0 |"
    assert whole.index(rows[0]) > whole.index(rows[1])


def test_each_set_is_shown_with_its_kind_and_what_is_missing_is_said() -> None:
    lines = page("Entropy images/mnist 1")
    assert "from 13 of 14 records" in lines[2]
    shown = part(lines, "images/mnist")
    assert "| method | score | notmnist (near) | fashion (near) | cifar10 (far) | mean |" in shown
    assert "| ours | default | 90.0 ± 1.4 | 92.0 ± 1.4 | 96.0 ± 1.4 | 92.7 |" in shown
    assert "| Entropy\\* | own | 69.0 | 71.0 | 75.0 | 71.7 |" in shown
    assert any(line.startswith("Mean of ours: +21.0 against the best detector, Entropy; +10.0 against") for line in shown)
    assert "| method | score | unknown classes |" in part(lines, "images/mnist/open")
    assert any(line.startswith("- Entropy, 1: images/mnist (seed 1)") for line in lines)
    assert "\\* not all seeds." in part(lines, "mnist, near and far")
    assert kind_of("images/cifar10/resnet20/few", "mnist") == "far"


def test_a_run_writes_records_that_the_page_reads(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmap_bench.runner.run.task_of", lambda name, seed: replace(task, name=name))
    text = (
        PLAN.replace('"images/cifar10/resnet20", ', "")
        .replace("[0, 1]", "[0]")
        .replace('[seeds_of]\n"images/cifar10/*" = [0]', "")
    )
    plan = parse(text.replace('training = "mixup"', 'training = "mixup", epochs = 1'), "small.toml")
    outcome = run(cells(plan), tmp_path / "small.jsonl")
    assert (outcome.done, outcome.failures) == (6, {})
    assert run(cells(plan), tmp_path / "small.jsonl").before == 6
    assert "from 6 of 6 records" in ranks_markdown(Results(plan, read_records(tmp_path / "small.jsonl")))
