"""Plans: what a file says, what it may not say, and the cells it stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offmap.errors import ConfigError, FileError
from offmap_bench.methods.variational import ABLATION
from offmap_bench.runner.methods import candidates
from offmap_bench.runner.plan import METHODS, Cell, cells, narrow_plan, parse, read_packaged, read_plan

NAMES = [
    "bnn-ablation", "bnn-moons", "citycam", "openood", "openood-ways", "shifts", "synthetic", "tradeoff", "uci",
    "uci-bnn-causes", "uci-bnn-short", "uci-budget", "uci-competitors", "uci-competitors-short", "uci-id", "uci-last",
    "uci-paper", "uci-reference", "uci-tried",
]  # fmt: skip

TEXT = """
name = "small"
seeds = [0, 1]
tasks = ["regression", "uci/yacht/*"]

[defaults]
steps = 40
draws = 7

[defaults.deep_ensemble]
steps = 90

[[method]]
name = "deep_ensemble"
label = "plain"

[[method]]
name = "maxwent"
label = "wide"
members = 5
from = "plain"
config = {basis = "identity", draws = 9, score = "paper"}

[[method]]
name = "nearest"

[[method]]
name = "maxwent"
label = "wide, alone"
config = {basis = "identity", draws = 9, score = "epistemic"}

[quick]
seeds = [3]
steps = 2
"""


def plan(text: str = TEXT, **options: Any):
    return parse(text, "small.toml", **options)


def cell(**changes: Any) -> Cell:
    made = Cell("regression", "maxwent", "any", {"basis": "svd"}, 0, 5, source={"method": "deep_ensemble", "config": {}})
    return replace(made, **changes)


def test_a_plan_is_every_method_on_every_task_with_every_seed() -> None:
    made = cells(plan())
    assert len(made) == 2 * 3 * 4
    assert len({c.hash for c in made}) == len(made)
    assert {c.task for c in made} == {"regression", "uci/yacht/extrapolation", "uci/yacht/interpolation"}


def test_cells_that_share_a_fit_are_neighbours() -> None:
    first = cells(plan())[:4]
    assert [c.label for c in first] == ["plain", "wide", "wide, alone", "nearest"]
    assert first[1].fit_key == first[2].fit_key
    assert len({c.fit_key for c in first}) == 3


def test_a_method_says_more_than_its_defaults_and_quick_more_than_both() -> None:
    plain, wide, nearest, _ = plan().entries
    assert plain.config == {"steps": 90, "score": "paper"}
    assert wide.config == {"steps": 40, "draws": 9, "basis": "identity", "score": "paper"}
    assert nearest.config == {}
    assert wide.source == {"method": "deep_ensemble", "config": {"steps": 90}}
    quick = plan(quick=True)
    assert (quick.name, quick.seeds) == ("small-quick", (3,))
    assert [entry.config.get("steps") for entry in quick.entries] == [2, 2, None, 2]
    assert quick.entries[1].source == {"method": "deep_ensemble", "config": {"steps": 2}}


def test_a_competitor_has_its_own_score_unless_the_plan_names_another() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plans.md").read_text(encoding="utf-8")
    text = page.split("```toml\n")[1].split("```")[0].replace("my_methods:Middle", "nearest").replace("{power = 1.0}", "{k = 3}")
    shown = parse(text, "page.toml")
    assert shown.scores == {"deep_ensemble": "paper", "MaxWEnt": "default", "nearest": "own"}
    (ensemble, *_) = cells(shown)
    assert ensemble.config["score"] == "paper"
    assert parse(text.replace("members = 5", 'members = 5\nconfig = {score = "distance"}', 1), "x").entries[0].score == "distance"
    assert parse(text + '\n[defaults]\nscore = "epistemic"', "x").entries[0].score == "epistemic"
    for name, method in [(name, method) for name, method in METHODS.items() if ":" not in name]:
        guard = name in ("maxwent", "image_guard", "shift_guard")
        assert method.score == ("default" if guard else "own" if method.scores_only else "paper")


def test_base_models_follow_the_defaults_when_no_method_of_the_plan_trains_them() -> None:
    text = TEXT.replace('name = "deep_ensemble"', 'name = "mahalanobis"').replace('from = "plain"\n', "")
    assert plan(text).entries[1].source == {"method": "deep_ensemble", "config": {"steps": 90}}


def test_a_hash_never_changes() -> None:
    assert cell().hash == "666e6eb4663e2211"


@pytest.mark.parametrize(
    "changes",
    [{"task": "moons"}, {"method": "mc_dropout"}, {"config": {"basis": "identity"}}, {"seed": 1}, {"members": 1},
     {"grid": {"lr": [1]}}, {"source": {"method": "deep_ensemble", "config": {"steps": 1}}}],
)  # fmt: skip
def test_everything_but_the_label_matters_to_the_hash(changes: dict[str, Any]) -> None:
    assert cell(**changes).hash != cell().hash
    assert cell(label="other").hash == cell().hash


def test_the_order_of_keys_does_not_matter_to_the_hash() -> None:
    assert cell(config={"a": 1, "b": 2}).hash == cell(config={"b": 2, "a": 1}).hash


def test_several_tradeoffs_are_left_to_the_method_and_other_keys_to_the_benchmark() -> None:
    text = TEXT.replace(
        'label = "wide"', 'label = "wide"\ngrid = {entropy_weight = [1, 10], lr = [0.1, 0.2], init_fraction = [1, 2]}'
    )
    made = next(c for c in cells(plan(text)) if c.label == "wide")
    assert made.config["entropy_weight"] == [1, 10]
    assert candidates(made.grid) == [
        {"lr": 0.1, "init_fraction": 1}, {"lr": 0.1, "init_fraction": 2},
        {"lr": 0.2, "init_fraction": 1}, {"lr": 0.2, "init_fraction": 2},
    ]  # fmt: skip
    assert candidates(cells(plan())[0].grid) == [{}]


def test_a_part_of_a_plan_has_the_hashes_of_the_whole() -> None:
    whole = {c.hash for c in cells(plan())}
    part = cells(narrow_plan(plan(), label="wide*", seeds=[1]))
    assert len(part) == 2 * 3
    assert {c.hash for c in part} < whole
    with pytest.raises(ConfigError, match="Expected a label to be .*did you mean 'plain'.*but got 'plane'"):
        narrow_plan(plan(), label="plane")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "small"', 'nam = "small"', "a key of the plan to be .*did you mean 'name'.*but got 'nam'"),
        ('name = "small"\n', "", "`name` to be a string, but it is missing"),
        (
            'name = "small"',
            'name = "small"\nfigures = ["tradeof"]',
            "`figures` to hold .*did you mean 'tradeoff'.*but got 'tradeof'",
        ),
        ('name = "nearest"', 'name = "nearest"\nlabel = 3', "`label` to be a string, but got 3"),
        ("seeds = [0, 1]", "seeds = 3", "`seeds` to be a list, but got 3"),
        ("seeds = [0, 1]", "seeds = [-1]", r"`seeds` to be whole numbers ≥ 0, but got \[-1\]"),
        ("seeds = [0, 1]", "seeds = [true]", r"`seeds` to be whole numbers ≥ 0, but got \[True\]"),
        ('"regression"', '"regresion"', "did you mean 'regression'.*but got 'regresion'"),
        ('"regression"', "1", "`tasks` to be names of tasks, but got"),
        ('name = "nearest"', 'name = "nearst"', r"`name` of a \[\[method\]\] to be .*did you mean 'nearest'.*but got 'nearst'"),
        ('name = "nearest"', "members = 1", r"`name` of a \[\[method\]\] to be .*but got None"),
        ('name = "nearest"', 'name = "nearest"\nlable = "x"', r"a key of \[\[method\]\] to be .*did you mean 'label'.*'lable'"),
        ('name = "nearest"', 'name = "nearest"\nmembers = 5', "`members` of 'nearest' to be left out, as it has none, but got 5"),
        ('name = "nearest"', 'name = "nearest"\ngrid = {k = [1, 2]}', "no `grid` of 'nearest', which predicts nothing"),
        ('name = "nearest"', 'name = "nearest"\nfrom = "plain"', "`from` only on methods that start from trained nets"),
        ('name = "nearest"', 'name = "nearest"\nlabel = "plain"', "labels that differ, but two methods have 'plain'"),
        ("members = 5", "members = 3", "`members` of 'maxwent' to be 1 or 5, but got 3"),
        ('from = "plain"', 'from = "plan"', "`from` of 'wide' to be .*did you mean 'plain'.*but got 'plan'"),
        (
            'label = "plain"',
            'label = "plain"\ngrid = {lr = [1]}',
            "`from` of 'wide' to name nets without a `grid`, but 'plain'",
        ),
        ("basis =", "bases =", "a key of `config` of 'maxwent' to be .*did you mean 'basis'.*but got 'bases'"),
        ("members = 5", "grid = {lr = 1}", "`grid` of 'maxwent' to hold lists of settings of the fit, but 'lr' is 1"),
        ("members = 5", 'grid = {score = ["paper"]}', "`grid` of 'maxwent' to hold lists of settings of the fit, but 'score'"),
        ("members = 5", "grid = {l = [1]}", "a key of `grid` of 'maxwent' to be .*did you mean 'lr'.*but got 'l'"),
        ("draws = 7", "drws = 7", r"a key of \[defaults\] to be .*did you mean 'draws'.*but got 'drws'"),
        ("steps = 90", "stepps = 90", r"a key of \[defaults.deep_ensemble\] to be .*did you mean 'steps'.*but got 'stepps'"),
        ("seeds = [3]", "seed = [3]", r"a key of \[quick\] to be .*did you mean 'seeds'.*but got 'seed'"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_the_nearest_key(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=f"^small.toml: Expected .*{message}"):
        plan(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ('basis = "svt"', "Expected `basis` to be .*did you mean 'svd'.*but got 'svt'"),
        ('config = "papr"', "Expected `config` to be .*did you mean 'paper'.*but got 'papr'"),
        ("lr = -1", "Expected `lr` to be a number above 0, but got -1"),
        ('steps = "many"', "Expected `steps` to be a whole number above 0, but got 'many'"),
        ("clip_loss = 1", "Expected `clip_loss` to be true or false, but got 1"),
        ("params = [1]", r"Expected `params` to be a pattern of names of parameters, or a list of such, but got \[1\]"),
        ('chunk_size = "all"', "Expected `chunk_size` to be \"auto\" or a whole number above 0, but got 'all'"),
    ],
)
def test_an_impossible_setting_is_refused_before_any_work(new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^small.toml: `config` of 'maxwent': {message}"):
        plan(TEXT.replace('basis = "identity"', new, 1))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("deep_ensemble", "steps = 1.5", "Expected `steps` to be a whole number above 0, but got 1.5"),
        ("deep_ensemble", "hidden = 3", "Expected `hidden` to be a list of whole numbers above 0, but got 3"),
        ("deep_ensemble", 'score = "papr"', "Expected `score` to be .*did you mean 'paper'.*but got 'papr'"),
        ("mc_dropout", "dropout = 1.0", "Expected `dropout` to be a number from 0 to below 1, but got 1.0"),
        ("nearest", 'k = "one"', "Expected `k` to be a whole number above 0, but got 'one'"),
        ("bnn", "tradeoff = -1", "Expected `tradeoff` to be a number ≥ 0, but got -1"),
    ],
)
def test_a_wrong_type_is_refused_before_any_work(name: str, config: str, message: str) -> None:
    entry = f'name = "{name}"\nlabel = "x"\nconfig = {{{config}}}'
    with pytest.raises(ConfigError, match=f"^small.toml: `config` of '{name}': {message}"):
        plan(TEXT.replace('name = "nearest"', entry, 1))


def test_every_value_of_a_grid_is_looked_at() -> None:
    with pytest.raises(ConfigError, match="^small.toml: `grid` of 'maxwent': Expected `lr` to be a number above 0, but got 'x'"):
        plan(TEXT.replace("members = 5", 'grid = {lr = [0.1, "x"]}', 1))


def test_files_that_cannot_be_read_are_named(tmp_path) -> None:
    with pytest.raises(FileError, match="Expected TOML in small.toml, but it cannot be read: Invalid value"):
        plan("name = ")
    with pytest.raises(FileError, match="Expected a plan at .*absent.toml, but it cannot be read"):
        read_plan(tmp_path / "absent.toml")
    with pytest.raises(
        ConfigError, match="Expected a plan to be .*did you mean 'uci'.* or the path of a .toml file, but got ucy"
    ):
        read_plan("ucy")


def test_a_file_of_ones_own_is_read(tmp_path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(TEXT, encoding="utf-8")
    assert read_plan(path) == plan()


def test_the_plans_that_come_with_offmap() -> None:
    assert list(read_packaged()) == NAMES
    uci = read_plan("uci")
    for name in ("paper", "reference"):
        theirs = read_plan(f"uci-{name}")
        assert (uci.seeds, theirs.seeds) == ((0, 1, 2), (0,))
        assert len(uci.tasks) == len(theirs.tasks) == 16
        assert {(e.config["config"], e.config["basis"], e.members) for e in theirs.entries} == {
            (name, b, m) for b in ("svd", "identity") for m in (1, 5)
        }
    assert len(cells(uci)) == 16 * 3 * 17


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_plan_and_its_quick_variant_are_valid(name: str) -> None:
    assert read_plan(name).name == name
    assert read_plan(name, quick=True).seeds == (0,)
    few, all_of_them = (cells(read_plan(name, quick=quick)) for quick in (True, False))
    assert len(few) <= len(all_of_them)
    assert len({cell.hash for cell in few} - {cell.hash for cell in all_of_them}) > len(few) / 2  # most are shortened themselves


def test_the_ablation_of_the_paper_and_a_short_one_beside_maxwent() -> None:
    whole, short = read_plan("bnn-ablation"), read_plan("uci-bnn-short")
    settings = {(name, members) for name in ABLATION for members in (1, 5)}
    assert {(e.config["setting"], e.members) for e in whole.entries} == settings
    assert {METHODS["bnn"].settings(e.config)["steps"] for e in whole.entries} == {50_000}
    assert {(e.config["setting"], e.members) for e in short.entries if e.name == "bnn"} == settings
    baselines = {(e.config["config"], e.config["basis"], e.members) for e in short.entries if e.name == "maxwent"}
    assert baselines == {("paper", basis, members) for basis in ("svd", "identity") for members in (1, 5)}
    assert {e.config["steps"] for e in short.entries} == {5_000}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('setting = "svd_frozen_big"', "Expected `setting` to be .*did you mean 'svd_frozen_large'.*but got 'svd_frozen_big'"),
        ('setting = "svd_frozen_large", mean = "trained"', "Expected `mean='frozen'` with `basis='svd'`"),
    ],
)
def test_an_impossible_posterior_is_refused_before_any_work(config: str, message: str) -> None:
    entry = f'name = "bnn"\nconfig = {{{config}}}'
    with pytest.raises(ConfigError, match=f"^small.toml: `config` of 'bnn': {message}"):
        plan(TEXT.replace('name = "nearest"', entry, 1))
