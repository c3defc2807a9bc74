"""Folders of tables and images: a file of scores for each, what is finished is kept, what cannot be read is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offmap
from offmap.cli.folder import NOTES, ScoreResult, ScoreSpec, file_digest, list_shards, score_folder
from offmap.cli.options import UsageError
from offmap.cli.score import score_table
from offmap.data.tables.images import ImageTransform, read_pixels
from offmap.data.tables.schema import Schema
from offmap.data.tables.table import open_table
from offmap.distributed.jobs import Pool
from offmap.errors import ConfigError, DataError
from shells import Shell
from trained import quick, regression, regressor

arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'offmap[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")
image = pytest.importorskip("PIL.Image", reason="needs pillow: pip install 'offmap[images]'")

FILES = ("a.csv", "b.npz", "deep/c.parquet")
SCORES = ("score", "p_value", "mean", "std")


def rows(n: int, seed: int) -> dict[str, np.ndarray]:
    return dict(zip("abc", regression(n, seed)[0].numpy().astype(np.float64).T, strict=True))


def fill(folder: Path) -> Path:
    """Three tables of 30, 40 and 50 rows, and a file that is none."""
    (folder / "deep").mkdir(parents=True)
    text = [",".join("abc"), *(",".join(map(repr, row)) for row in zip(*(c.tolist() for c in rows(30, 1).values()), strict=True))]
    (folder / "a.csv").write_text("\n".join(text) + "\n")
    np.savez(folder / "b.npz", **rows(40, 2))
    parquet.write_table(arrow.table(rows(50, 3)), folder / "deep" / "c.parquet")
    (folder / "_SUCCESS").write_text("")
    return folder


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(100, 0), regression(60, 1), score="paper")


def spec(data: Path, out: Path, **options) -> ScoreSpec:
    return ScoreSpec(data, out, "a guard", Schema(("a", "b", "c")), **options)


def score(guard: offmap.Guard, job: ScoreSpec, *, resume: bool = False, workers: int = 1) -> list[ScoreResult]:
    pool = Pool(workers=workers)
    return score_folder(
        guard, job, list_shards(job.data)[0], score_table, pool=pool, resume=resume, report=lambda number, progress: None
    )


def read(path: Path) -> np.ndarray:
    with open_table(path) as file:
        return np.concatenate([block.x for block in file.blocks(SCORES)])


def modification_times(folder: Path) -> dict[str, tuple[int, int]]:
    """When each file of scores was written."""
    paths = [path for path in folder.rglob("*") if path.is_file() and NOTES not in path.parts]
    return {path.relative_to(folder).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_each_table_has_a_file_of_scores_with_all_its_rows_in_spec(guard, tmp_path):
    data, out = fill(tmp_path / "data"), tmp_path / "out"
    done = score(guard, spec(data, out))
    assert sorted(modification_times(out)) == list(FILES)
    assert [each.rows for each in done] == [30, 40, 50]
    for each, file, (n, seed) in zip(done, FILES, [(30, 1), (40, 2), (50, 3)], strict=True):
        result = guard(np.stack(list(rows(n, seed).values()), 1))
        assert each.off_map == int(result.ood.sum())
        for column, name in enumerate(SCORES):
            wanted = getattr(result, name).double().numpy()
            np.testing.assert_allclose(read(out / file)[:, column], wanted, rtol=1e-8 if file == "a.csv" else 0, err_msg=name)


def test_two_processes_write_the_same_to_the_bit(guard, tmp_path):
    data = fill(tmp_path / "data")
    one, two = (score(guard, spec(data, tmp_path / str(n)), workers=n) for n in (1, 2))
    assert one == two
    for file in FILES:
        np.testing.assert_array_equal(read(tmp_path / "1" / file), read(tmp_path / "2" / file))


def test_what_is_finished_is_kept_and_nothing_else(guard, tmp_path):
    """Scores that were cut, scores of other inputs, and scores that a killed worker left half-written are made again."""
    data, out = fill(tmp_path / "data"), tmp_path / "out"
    first = score(guard, spec(data, out))
    before = modification_times(out)
    again = score(guard, spec(data, out), resume=True)
    assert [replace(each, reused=False) for each in again] == first
    assert all(each.reused for each in again)
    assert modification_times(out) == before
    (out / "a.csv").write_bytes((out / "a.csv").read_bytes()[:-5])
    np.savez(data / "b.npz", **rows(45, 2))
    (out / "deep" / ".c.parquet.1.abc.part").write_text("half")
    again = score(guard, spec(data, out), resume=True)
    assert [(each.rows, each.reused) for each in again] == [(30, False), (45, False), (50, True)]
    after = modification_times(out)
    assert {name for name in FILES if after[name] == before[name]} == {"deep/c.parquet"}
    assert sorted(after) == list(FILES)
    other = score(guard, replace(spec(data, out), guard="another guard"), resume=True)
    assert not any(each.reused for each in other)


def test_scores_without_a_note_are_made_again(guard, tmp_path):
    """A worker may be killed between the two."""
    data, out = fill(tmp_path / "data"), tmp_path / "out"
    score(guard, spec(data, out))
    (out / NOTES / "b.npz.json").unlink()
    (out / NOTES / "a.csv.json").write_text("{")
    assert [each.reused for each in score(guard, spec(data, out), resume=True)] == [False, False, True]


def test_damage_is_named(guard, tmp_path, caplog):
    data, out = fill(tmp_path / "data"), tmp_path / "out"
    score(guard, spec(data, out))
    note = out / NOTES / "a.csv.json"
    note.write_text(note.read_text().replace('"rows": 30', '"rows": 31'))
    (out / "b.npz").write_bytes((out / "b.npz").read_bytes()[:-1])
    with caplog.at_level("WARNING", "offmap"):
        again = score(guard, spec(data, out), resume=True)
    assert [(each.rows, each.reused) for each in again] == [(30, False), (40, False), (50, True)]
    assert caplog.messages == [
        f"{out / name} or its note {out / NOTES / name}.json is missing, damaged or changed: it is scored again."
        for name in ("a.csv", "b.npz")
    ]


def test_a_table_that_cannot_be_read_fails_by_name_and_the_others_are_done(guard, tmp_path):
    data, out = fill(tmp_path / "data"), tmp_path / "out"
    score(guard, spec(data, out))
    (data / "b.npz").write_bytes((data / "b.npz").read_bytes()[:100])
    (data / "deep" / "d.csv").symlink_to(data / "nowhere")
    done = score(guard, spec(data, out), resume=True)
    (cut,), (gone,) = done[1].failed.items(), done[3].failed.items()
    assert cut[0] == "b.npz"
    assert cut[1].startswith(f"Expected arrays of numbers or words at {data / 'b.npz'}, but it cannot be read: ")
    assert gone == ("deep/d.csv", f"Expected a table at {data / 'deep' / 'd.csv'}, but there is no such file.")
    assert [each.rows for each in done] == [30, 0, 50, 0]
    assert sorted(modification_times(out)) == ["a.csv", "deep/c.parquet"]  # no scores of what the table was before


REFUSED = {
    "full": (
        ["x.txt"],
        False,
        "Expected --out to be an empty folder, but {out} holds x.txt. Choose another, or --resume",
    ),
    "other files": (["a.csv"], True, "Expected nothing but scores of {data} in {out}, but it holds a.csv. Choose another"),
    "with more": (
        [f"{NOTES}/x.json", "more.csv"],
        True,
        "Expected nothing but scores of {data} in {out}, but it holds more.csv.",
    ),
    "with notes": ([f"{NOTES}/x.json"], False, "Expected --out to be an empty folder, but {out} holds .offmap."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_holds_something_is_refused_and_left_alone(case, guard, tmp_path):
    files, resume, message = REFUSED[case]
    data, out = fill(tmp_path / "data"), tmp_path / "out"
    for file in files:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text("mine")
    with pytest.raises(UsageError) as error:
        score(guard, spec(data, out), resume=resume)
    assert str(error.value).startswith(message.format(out=out, data=data))
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == set(files)


@pytest.mark.parametrize("place", ["data", "data/scores", "."])
def test_scores_do_not_go_among_the_data(place, guard, tmp_path):
    with pytest.raises(UsageError, match="Expected --out to be a folder apart from the data"):
        score(guard, spec(fill(tmp_path / "data"), tmp_path / place))


def test_a_folder_must_be_of_one_kind_with_names_that_differ(tmp_path):
    with pytest.raises(DataError, match="Expected tables or images in .*, but there are none"):
        list_shards(tmp_path)
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "a.csv.gz").write_text("")
    with pytest.raises(DataError, match="but the scores of a.csv and a.csv.gz would both be a.csv"):
        list_shards(tmp_path)
    (tmp_path / "a.png").write_text("")
    with pytest.raises(DataError, match="it has both, such as a.csv and a.png"):
        list_shards(tmp_path)


# ------------------------------------------------------------------------------------------------------- images


def write_images(folder: Path) -> Path:
    """A grey, a coloured and a transparent image, one that is cut, one that is none."""
    rng = np.random.RandomState(0)
    folder.mkdir()
    image.fromarray(rng.randint(0, 255, (4, 4), np.uint8)).save(folder / "a.png")
    image.fromarray(rng.randint(0, 255, (8, 6, 3), np.uint8)).save(folder / "b.jpg")
    image.fromarray(rng.randint(0, 255, (9, 9, 4), np.uint8)).save(folder / "c.png")
    image.fromarray(rng.randint(0, 255, (40, 40, 3), np.uint8)).save(folder / "d.jpeg")
    (folder / "d.jpeg").write_bytes((folder / "d.jpeg").read_bytes()[:700])
    (folder / "e.png").write_text("no image")
    return folder


def image_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def image_guard() -> offmap.Guard:
    x = torch.rand(80, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return quick(image_model(), (x, torch.arange(80) % 3), (x[:40], torch.arange(40) % 3), score="paper")


def test_images_are_scored_as_their_tensors_and_those_that_are_none_are_named(image_guard, tmp_path):
    data, out = write_images(tmp_path / "data"), tmp_path / "out"
    transform = ImageTransform((1, 4, 4), mean=(0.5,), std=(0.25,))
    (done,) = score(image_guard, spec(data, out, transform=transform))
    assert (done.rows, sorted(done.failed)) == (3, ["d.jpeg", "e.png"])
    assert all(why.startswith(f"Expected an image of eight bits at {data / name}, but") for name, why in done.failed.items())
    with open_table(out / "images-00000.csv") as file:
        assert file.names[:4] == ["file", "score", "ood", "p_value"]
        (block,) = file.blocks(["score"], ["file"])
    assert block.raw["file"] == ["a.png", "b.jpg", "c.png"]
    x = torch.stack([transform(read_pixels(data / name)) for name in block.raw["file"]])
    np.testing.assert_allclose(block.x[:, 0], image_guard.score(x).double().numpy(), rtol=1e-8)
    grey = torch.from_numpy(np.array(image.open(data / "a.png"))).float() / 255
    torch.testing.assert_close(x[0, 0], (grey - 0.5) / 0.25)


def test_images_are_tried_again_until_all_are_read(image_guard, tmp_path):
    data, out = write_images(tmp_path / "data"), tmp_path / "out"
    job = spec(data, out, transform=ImageTransform((1, 4, 4)))
    score(image_guard, job)
    for name in ("d.jpeg", "e.png"):
        (data / name).write_bytes((data / "a.png").read_bytes())
    for before in (False, True):
        (done,) = score(image_guard, job, resume=True)
        assert (done.rows, done.failed, done.reused) == (5, {}, before)


def test_a_folder_without_any_image_that_can_be_read_leaves_no_scores(image_guard, tmp_path):
    data, out = write_images(tmp_path / "data"), tmp_path / "out"
    for name in ("a.png", "b.jpg", "c.png"):
        (data / name).unlink()
    (done,) = score(image_guard, spec(data, out, transform=ImageTransform((1, 4, 4))))
    assert (done.rows, sorted(done.failed), modification_times(out)) == (0, ["d.jpeg", "e.png"], {})


@pytest.mark.parametrize("arguments", [((2, 4, 4),), ((1, 0, 4),), ((1, 4, 4), (0.5, 0.5)), ((1, 4, 4), (), (0.0,))])
def test_impossible_transforms_are_refused(arguments):
    with pytest.raises(ConfigError, match="Expected (images of 1 or 3 channels|a mean for each|a std for each)"):
        ImageTransform(*arguments)


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, guard: offmap.Guard, image_guard: offmap.Guard) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "models.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))\n\n"
        "def image():\n    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))\n"
    )
    for name, made, own in (("rows", guard, regressor()), ("images", image_guard, image_model())):
        save_file(own.state_dict(), folder / f"{name}.weights.safetensors")
        schema = Schema(("a", "b", "c") if name == "rows" else None)
        replace(made, about=schema.to_dict() | {"weights": [f"{name}.weights.safetensors"]}).save(folder / f"{name}.guard")
    fill(folder / "data")
    write_images(folder / "images")
    shell = Shell(folder)
    yield shell
    shell.close()


ROWS = ("score", "rows.guard", "data", "--model", "models:make")
IMAGES = ("score", "images.guard", "images", "--model", "models:image")


def test_the_command_scores_a_folder_and_resumes_it(shell, guard, tmp_path):
    done = shell(*ROWS, "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "Note: 1 files of data are left out, such as _SUCCESS.\n")
    assert done.out.startswith("120 rows in 3 files, 0 kept from an earlier run, ")
    assert done.out.endswith(f" rows off the map, 0 files failed. The scores are in {tmp_path / 'out'}\n")
    score(guard, spec(shell.folder / "data", tmp_path / "here"))
    for file in FILES:
        np.testing.assert_array_equal(read(tmp_path / "out" / file), read(tmp_path / "here" / file))
    again = shell(*ROWS, "-o", tmp_path / "out", "-q")
    assert again.code == 2
    assert again.sentence.startswith(f"Expected --out to be an empty folder, but {tmp_path / 'out'} holds ")
    record = json.loads(shell(*ROWS, "-o", tmp_path / "out", "--resume", "--json").out)
    assert (record["files"], record["before"], record["rows"], record["failed"]) == (3, 3, 120, {})


def test_the_command_lists_what_failed(shell, tmp_path):
    words = [*IMAGES, "-o", tmp_path / "out", "--image", "1x4x4", "--mean", "0.5", "--std", "0.25"]
    done = shell(*words)
    assert done.code == 1
    lines = done.err.splitlines()
    assert [line.split(": Expected an image of eight bits at ")[0] for line in lines] == ["Failed: d.jpeg", "Failed: e.png"]
    assert done.out.startswith("3 rows in 1 files, ")
    assert ", 2 files failed." in done.out


MISUSES = {
    "images without a shape": (
        [*IMAGES],
        "images holds images: pass what the model takes as --image CxHxW, such as --image 3x32x32.",
    ),
    "shape": ([*IMAGES, "--image", "4x4"], "Expected --image like 3x32x32 and --mean, --std like 0.5,0.5,0.5, but got '4x4'"),
    "channels": ([*IMAGES, "--image", "2x4x4"], "Expected images of 1 or 3 channels"),
    "images with columns": ([*IMAGES, "--image", "1x4x4", "--keep", "a"], "Expected --keep, --drop and --separator with tables"),
    "tables with a shape": (
        [*ROWS, "--image", "1x4x4"],
        "Expected --image, --mean and --std with images, but data holds tables.",
    ),
    "address": ([*ROWS, "--address", "here:1"], "Expected an address only with the engine 'ray', but got 'here:1' with 'local'."),
    "one table": (
        ["score", "rows.guard", "data/a.csv", "--model", "models:make", "--resume"],
        "Expected --engine ray, --jobs, --re",
    ),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_one_sentence_and_exit_code_2(case, shell, tmp_path):
    words, message = MISUSES[case]
    done = shell(*words, "-q", "-o", tmp_path / "out")
    assert done.code == 2
    assert done.sentence.startswith(message)
    assert not (tmp_path / "out").exists()


def test_a_digest_is_of_the_content_and_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("b")
    (tmp_path / "c.csv").write_text("b")
    assert (
        file_digest(tmp_path / "b.csv")
        == file_digest(tmp_path / "c.csv")
        != file_digest(tmp_path / "a.csv")
        == file_digest(tmp_path / "d.csv")
    )
