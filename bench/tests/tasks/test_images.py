"""Image tasks from generated files of the documented layout, and the true ones where they are at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from offmap.errors import ConfigError, DataError, FileError
from offmap_bench.nets.resnet import cifar_resnet
from offmap_bench.tasks.catalog import task
from offmap_bench.tasks.images import (
    OPENOOD,
    SETTINGS,
    SOURCES,
    array,
    images,
    open_set,
    read_pair,
    resize_images,
    setting_of,
    thin_out,
)
from offmap_bench.tasks.pretrained import weights

GREY = ("mnist", "fashion_mnist", "notmnist_test", "omniglot_small_28")
MANY = {"cifar100_train": 100, "cifar100_test": 100, "tinyimagenet_train": 200, "tinyimagenet_test": 200}
ROWS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every file of the layout, with random images, 40 of each kind; 200 where a task knows more than ten classes."""
    random = np.random.RandomState(0)
    arrays: dict[str, dict[str, object]] = {}
    for source in (SOURCES | OPENOOD).values():
        side = (28, 28) if source["file"] in GREY else (32, 32, 3)
        file = arrays.setdefault(source["file"], {})
        rows, classes = (ROWS, 10) if source["file"] not in MANY else (2 * MANY[source["file"]], MANY[source["file"]])
        file[source.get("x", "x")] = random.randint(0, 256, (rows, *side)).astype(np.uint8)
        file[source.get("y", "y")] = np.arange(rows).astype(np.uint8) % classes
        if "without" in source:
            file[source["without"]] = np.arange(10) < 3
    for name, file in arrays.items():
        np.savez_compressed(tmp_path / f"{name}.npz", **file)
    return tmp_path


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.near])
def test_all_images_have_the_form_of_the_in_distribution_ones(name: str, folder: Path) -> None:
    made, setting = images(name, folder=folder), setting_of(name)
    assert made.name == f"images/{name}"
    assert list(made.ood) == [*setting.near, *setting.far]
    for x in (made.train[0], made.valid[0], made.test[0], *made.ood.values()):
        assert x.shape[1:] == setting.form
        assert x.dtype == torch.float32
        assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert made.train[1].dtype == torch.int64


def test_cifar_is_validated_on_the_first_test_images_and_mnist_on_training_images(folder: Path) -> None:
    cifar, mnist = images("cifar10", folder=folder), images("mnist", folder=folder)
    test = read_pair("cifar10", (3, 32, 32), folder)[0]
    torch.testing.assert_close(torch.cat([cifar.valid[0], cifar.test[0]]), test, rtol=0, atol=0)
    assert [len(part[1]) for part in (mnist.train, mnist.valid, mnist.test)] == [30, 10, 40]
    both = torch.cat([mnist.train[0], mnist.valid[0]]).flatten(1).sum(1)
    every = read_pair("mnist train", (1, 28, 28), folder)[0].flatten(1).sum(1)
    torch.testing.assert_close(both.sort().values, every.sort().values)
    assert not torch.equal(images("mnist", 1, folder).valid[0], mnist.valid[0])
    assert torch.equal(images("cifar10", 1, folder).valid[0], cifar.valid[0])


def test_classes_that_overlap_are_left_out_where_that_matters(folder: Path) -> None:
    assert len(images("cifar10", folder=folder).ood["tinyimagenet"]) == 28  # seven of ten classes
    assert len(images("mnist", folder=folder).ood["tinyimagenet"]) == 40


@pytest.mark.parametrize("seed", [0, 1])
def test_an_open_set_hides_four_classes(seed: int, folder: Path) -> None:
    whole, made = images("mnist", seed, folder), open_set("mnist", seed, folder)
    assert made.outputs == 6
    assert sorted(set(made.train[1].tolist())) == list(range(6))
    assert len(made.test[1]) + len(made.ood["unknown classes"]) == len(whole.test[1])
    for number in range(6):  # all images of a new number had one old class
        shown = made.test[0][made.test[1] == number]
        old = {int(whole.test[1][(whole.test[0] == x).flatten(1).all(1)][0]) for x in shown}
        assert len(old) == 1


@pytest.mark.parametrize(("name", "known", "unknown"), [("openood-cifar100", 50, 50), ("openood-tin", 20, 180)])
def test_the_open_sets_of_openood_show_so_many_classes(name: str, known: int, unknown: int, folder: Path) -> None:
    made = open_set(name, 1, folder)
    assert made.outputs == known
    assert sorted(set(made.train[1].tolist())) == list(range(known))
    rows = len(made.valid[1]) + len(made.test[1]) + len(made.ood["unknown classes"])
    assert rows == pytest.approx(2 * (known + unknown), abs=unknown)  # OOD images of the validation part are left out
    assert made.test[0].shape[1:] == setting_of(name).form


def test_images_in_folders_are_read_as_arrays_are(folder: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (folder / "svhn_test.npz").unlink()
    random = np.random.RandomState(1)
    wide = random.randint(0, 256, (32, 48, 3)).astype(np.uint8)
    for place in ("7/b.png", "7/deep/a.jpg", "3/c.PNG", "3/notes.txt"):
        path = folder / "svhn_test" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text("no image")
        else:
            image.fromarray(wide).save(path)
    x, y = read_pair("svhn", (3, 32, 32), folder)
    assert y.tolist() == [0, 1, 1]  # classes are numbered by name
    torch.testing.assert_close(x[0], torch.from_numpy(wide[:, 8:40]).movedim(2, 0).float() / 255)  # the middle square
    torch.testing.assert_close(x[1], x[0])
    assert torch.equal(read_pair("svhn", (3, 32, 32), folder, rows=2)[0], x[[0, 1]])
    assert torch.equal(images("openood-cifar10", folder=folder).ood["svhn"], x)
    (folder / "svhn_test" / "3" / "c.PNG").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"Expected an image at .*c.PNG, but it cannot be read .*Replace or remove it"):
        read_pair("svhn", (3, 32, 32), folder)
    (folder / "dtd.npz").unlink()
    (folder / "dtd").mkdir()
    with pytest.raises(DataError, match=r"Expected images at .*dtd/<class>/<name>.png or .jpg, but there are none"):
        read_pair("dtd", (3, 32, 32), folder)


def test_a_small_task_has_some_images_of_every_part(folder: Path) -> None:
    whole = images("mnist", folder=folder)
    made = thin_out(lambda seed: whole, {"train": 7, "valid": 500, "test": 4, "OOD": 5}, "few")
    assert made.name == "images/mnist/few"
    assert torch.equal(made.test[0], whole.test[0][[0, 10, 20, 30]])
    assert torch.equal(made.test[1], whole.test[1][[0, 10, 20, 30]])
    assert len(made.train[1]) == 7
    assert torch.equal(made.valid[0], whole.valid[0])
    assert {name: len(x) for name, x in made.ood.items()} == dict.fromkeys(whole.ood, 5)


def test_the_first_rows_are_those_of_the_whole_file(folder: Path) -> None:
    path = folder / "cifar10_test.npz"
    assert np.array_equal(array(path, "x", 7), array(path, "x")[:7])
    assert len(array(path, "x", 10_000)) == ROWS


def test_grey_images_are_repeated_and_colours_weighed() -> None:
    grey = torch.arange(16, dtype=torch.uint8).reshape(1, 4, 4)
    torch.testing.assert_close(resize_images(grey, (3, 4, 4)), (grey.float() / 255).expand(1, 3, 4, 4))
    colour = torch.tensor([[[[100, 200, 50]]]], dtype=torch.uint8)
    assert float(resize_images(colour, (1, 1, 1))) == pytest.approx((0.299 * 100 + 0.587 * 200 + 0.114 * 50) / 255)
    assert resize_images(colour.expand(3, 1, 1, 3), (3, 1, 1))[2].flatten().tolist() == pytest.approx(
        [100 / 255, 200 / 255, 50 / 255]
    )


def test_bad_files_are_refused_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "dtd10_32.npz").unlink()
    with pytest.raises(DataError, match="dtd10_32.npz, but there is no such file. Put it there, or set OFFMAP_DATA"):
        images("cifar10", folder=folder)
    np.savez(folder / "dtd10_32.npz", x=np.zeros((3, 32, 32, 3), np.float32), y=np.zeros(3, np.uint8))
    with pytest.raises(DataError, match=r"of dtype uint8 and N classes at .*, but `x` is \(3, 32, 32, 3\) of dtype float32"):
        images("cifar10", folder=folder)
    np.savez(folder / "dtd10_32.npz", y=np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="Expected an array `x` at .*, but it has none"):
        images("cifar10", folder=folder)
    (folder / "dtd10_32.npz").write_bytes(b"PK no zip at all")
    with pytest.raises(DataError, match="Expected an npz file with an array `x` at .*, but it cannot be read"):
        images("cifar10", folder=folder)
    np.savez(folder / "dtd10_32.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1, np.uint8))
    with pytest.raises(DataError, match="cannot be read: Object arrays cannot be loaded"):
        images("cifar10", folder=folder)
    with pytest.raises(ConfigError, match="image task to be .*did you mean 'cifar10'.*but got 'cifar'"):
        images("cifar", folder=folder)
    monkeypatch.delenv("OFFMAP_DATA", raising=False)
    with pytest.raises(DataError, match="Expected OFFMAP_DATA to name the folder"):
        task("images/mnist")


def test_weights_are_read_without_running_code(tmp_path: Path) -> None:
    net = cifar_resnet(8, width=4)
    torch.save(net.state_dict(), tmp_path / "mine.pt")
    other = cifar_resnet(8, width=4, seed=1)
    other.load_state_dict(weights("mine", tmp_path))
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(other.eval()(x), net.eval()(x))
    torch.save(net, tmp_path / "whole.pt")
    with pytest.raises(FileError, match="Expected a dict of tensors at .*whole.pt, but it cannot be read: "):
        weights("whole", tmp_path)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(FileError, match="but it holds something else"):
        weights("list", tmp_path)
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    with pytest.raises(FileError, match="cannot be read"):
        weights("bad", tmp_path)
    with pytest.raises(FileError, match="but there is no such file"):
        weights("absent", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'cifar10_resnet32'"):
        weights("cifar10_resnet2")
    with pytest.raises(ConfigError, match="Expected `depth` to be 6n . 2, such as 20, 32 or 56, but got 21"):
        cifar_resnet(21)


@pytest.mark.parametrize(("depth", "right"), [(20, 99), (32, 99), (56, 99)])
def test_the_given_nets_know_their_training_images(depth: int, right: int, data_folder: Path) -> None:
    net = cifar_resnet(depth)
    net.load_state_dict(weights(f"cifar10_resnet{depth}", data_folder / "weights"))
    x, y = read_pair("cifar10 train", (3, 32, 32), data_folder / "images", rows=100)
    with torch.no_grad():
        assert int((net.eval()(x).argmax(1) == y).sum()) >= right


def test_the_true_files_have_their_images(data_folder: Path) -> None:
    for name, source in SOURCES.items():
        x, y = read_pair(name, (1, 28, 28), data_folder / "images", rows=20)
        assert 0 < len(x) <= 20, source
        assert len(x) == len(y)
    mnist = read_pair("mnist train", (1, 28, 28), data_folder / "images", rows=2000)[0]
    assert float(mnist.mean()) == pytest.approx(0.1307, abs=0.003)
