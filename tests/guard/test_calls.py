"""What generated calls brought to light, one by one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import offmap
from offmap.errors import ConfigError, DataError, ModelError
from trained import classes, classifier, inputs, quick, regression, regressor

SORTER = classifier()
TRAIN, VALID = regression(40, 0), regression(40, 1)


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), TRAIN, VALID)


def shuffle_rows(data: Any = VALID) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data), batch_size=9, shuffle=True)


ASKS: dict[str, Callable[[offmap.Guard], Any]] = {
    "calibrate": lambda guard: guard.calibrate(shuffle_rows()),
    "evaluate": lambda guard: offmap.evaluate(guard, shuffle_rows(), {"far": shuffle_rows()}),
    "diagnose": lambda guard: offmap.diagnose(guard, shuffle_rows(TRAIN)),
    "detector": lambda guard: offmap.detect(SORTER, classes(40), classes(40)).calibrate(shuffle_rows(classes(30))),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_shuffled_loader_leaves_the_random_state_alone(guard: offmap.Guard, ask: str) -> None:
    before = torch.random.get_rng_state()
    ASKS[ask](guard)
    assert torch.equal(before, torch.random.get_rng_state())


def test_several_scorers_see_a_shuffled_set_in_one_order(guard: offmap.Guard) -> None:
    found = offmap.evaluate({"a": guard, "b": guard}, shuffle_rows(), {"far": shuffle_rows()})
    for name in ("test", "far"):
        assert torch.equal(found.scores["a"][name], found.scores["b"][name])


class Breaks(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        if row == 25:
            raise OSError("the disk is gone")
        return TRAIN[0][row], TRAIN[1][row]


def test_a_data_set_that_breaks_is_named_with_the_number_of_the_batch(guard: offmap.Guard) -> None:
    loader = DataLoader(Breaks(), batch_size=10)
    with pytest.raises(DataError, match="Reading batch 2 of `train` failed: OSError: the disk is gone"):
        quick(regressor(), loader, VALID)
    with pytest.raises(DataError, match="Reading batch 2 of the inputs failed: OSError: the disk"):
        guard.score(loader)
    with pytest.raises(DataError, match="Reading batch 2 of `far` failed"):
        offmap.evaluate(guard, VALID, {"far": loader})


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (inputs(5).to_sparse(), r"of layout torch.sparse_coo; pass `.to_dense\(\)`"),
        (inputs(5).to("meta"), "on the device 'meta'"),
    ],
)
def test_tensors_without_rows_in_memory_are_refused(guard: offmap.Guard, x: torch.Tensor, kind: str) -> None:
    with pytest.raises(DataError, match=f"Expected dense tensors with values, but got one {kind}"):
        guard.score(x)
    with pytest.raises(DataError, match="Expected dense tensors with values"):
        quick(regressor(), (x, torch.zeros(5)), VALID)


@pytest.mark.parametrize("rows", [1, 4])
def test_arrays_that_run_backwards_are_read(guard: offmap.Guard, rows: int) -> None:
    x = inputs(rows).numpy()
    torch.testing.assert_close(guard.score(x[::-1]), guard.score(inputs(rows)).flip(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(guard.score(np.flip(np.flip(x, 1).copy(), 1)), guard.score(inputs(rows)), rtol=1e-5, atol=1e-6)


def test_a_model_whose_sizes_are_not_known_yet_is_refused() -> None:
    with pytest.raises(ModelError, match="but LazyLinear has parameters without a size. Call it once"):
        quick(nn.LazyLinear(1), TRAIN, VALID)


def test_a_model_that_fails_on_other_inputs_is_named_when_diagnosing(guard: offmap.Guard) -> None:
    with pytest.raises(ModelError, match=r"Sequential failed on inputs of shape \(\d+, 4\)"):
        offmap.diagnose(guard, (inputs(40, features=4), TRAIN[1]))


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"output_fn": 3}, r"Expected `output_fn` to be a function of \(output\), but got 3"),
    ({"risk": len}, r"Expected `risk` to be a function of \(likelihood, outputs, targets\), but got <built-in function len>"),
    ({"risk": dict}, "Expected `risk` to be a function of"),
    ({"regularizer": lambda a, b: a}, r"Expected `regularizer` to be a function of \(φ²\), but got"),
    ({"output_fn": torch.ones(2)}, "Expected `output_fn` to be a function"),
    ({"checkpoint": 3}, "Expected `checkpoint` to be the path of a file, but got 3"),
    ({"checkpoint": ""}, "Expected `checkpoint` to be the path of a file, but got ''"),
    ({"ranks": np.array(["same", "alone"])}, "Expected `ranks` to be one of"),
    ({"solver": np.array([1, 2])}, "Expected `solver` to be one of"),
    ({"draws": 10**30}, "Expected `draws` to be at most 1000000, but got"),
    ({"entropy_weight": 1e300}, r"Expected `entropy_weight` to be at most 3e\+38, but got"),
    ({"max_risk": 1e300}, "Expected `max_risk` to be a finite number or None, but got"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quick(regressor(), TRAIN, VALID, **options)


def test_large_whole_numbers_are_numbers() -> None:
    made = quick(regressor(), TRAIN, VALID, solver="refine", init_fraction=10**3, steps=2, check_every=2)
    assert made.score(inputs(3)).isfinite().all()


REFUSED: list[tuple[Callable[[offmap.Guard], Any], str]] = [
    (lambda g: g.calibrate(VALID, "few"), "Expected `false_alarms` strictly between 0 and 1, such as 0.05, but got 'few'"),
    (lambda g: g.score(inputs(3), reduce=np.array(["mean", "max"])), "Expected `reduce` to be 'mean', 'max' or None"),
    (lambda g: g.predict(inputs(3), clip=np.array([1.0, 2.0])), "Expected `clip` to be a number ≥ 0 or None"),
    (lambda g: g.samples(inputs(3), 10**30), "Expected `draws` to be at most 1000000"),
    (lambda g: g.samples(inputs(3), "3"), "Expected `draws` to be a whole number ≥ 1, but got '3'"),
    (lambda g: g.interval(inputs(3), "0.9"), "Expected `level` strictly between 0 and 1, such as 0.95, but got '0.9'"),
    (lambda g: offmap.diagnose("guard", TRAIN), "Expected a Guard, as `offmap.fit` gives, but got str"),
    (lambda g: offmap.diagnose(g, TRAIN, eps="low"), "Expected `eps` to be at least 0 and below 1, but got 'low'"),
    (lambda g: offmap.distill(g, TRAIN, VALID, rows="all"), "Expected `rows` to be a whole number ≥ 100, but got 'all'"),
    (lambda g: offmap.evaluate(g, VALID, {"far": VALID}, positive=["id"]), "Expected `positive` to be one of"),
    (lambda g: offmap.detect(classifier(), classes(40), method=np.array([1, 2])), "Expected `method` to be one of"),
    (lambda g: offmap.detect(classifier(), classes(40), batch_size="8"), "Expected `batch_size` to be a whole number"),
    (lambda g: offmap.detect(classifier(), classes(40), seed="0"), "Expected `seed` to be a whole number, but got '0'"),
    (lambda g: g.save(""), "Expected `path` to be the path of a file, but got ''"),
    (lambda g: g.save(None), "Expected `path` to be the path of a file, but got None"),
    (lambda g: g.export(b"g.onnx", inputs(3)), "Expected `path` to be the path of a file, but got b'g.onnx'"),
    (lambda g: offmap.load(None, g), "Expected `path` to be the path of a file, but got None"),
    (lambda g: g.to("meta"), "Expected a device that holds numbers, but got 'meta'"),
    (lambda g: g.to(None.__class__), "Expected a device that torch can use here, but got <class 'NoneType'>"),
    (lambda g: offmap.AdaptiveThreshold(g.predictive), "Expected a guard or another detector, but got Stochastic"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED)
def test_arguments_of_another_kind_are_refused(guard: offmap.Guard, ask: Callable[[offmap.Guard], Any], message: str) -> None:
    with pytest.raises(offmap.OffmapError, match=message):
        ask(guard)


def test_truth_values_are_classes_for_detectors() -> None:
    x, y = classes(40)
    found = offmap.detect(nn.Sequential(*SORTER[:-1], nn.Linear(12, 2)), (x, y > 0), (x, y > 0))
    assert found.score(inputs(3)).isfinite().all()


class Strict(nn.Module):
    """Asserts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = regressor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.ndim == 2, "two axes, please"
        return self.net(x)


def test_what_a_model_asserts_is_reported() -> None:
    with pytest.raises(ModelError, match=r"Strict failed on inputs of shape \(2, 3, 1\): two axes, please"):
        quick(Strict(), (TRAIN[0][..., None], TRAIN[1]), (VALID[0][..., None], VALID[1]))


def test_a_clip_beyond_single_precision_bounds_nothing(guard: offmap.Guard) -> None:
    x = inputs(4)
    assert torch.equal(guard.samples(x, 3, clip=1e300), guard.samples(x, 3))
    assert torch.equal(guard.samples(x, 3, clip=10**30), guard.samples(x, 3))


def test_bad_validation_data_are_refused_before_the_head_is_trained(guard: offmap.Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the training began")

    monkeypatch.setattr(importlib.import_module("offmap.export.distill"), "train_head", begun)
    with pytest.raises(DataError, match="Expected finite inputs, but row 0 of `valid`"):
        offmap.distill(guard, TRAIN, (VALID[0] * torch.nan, VALID[1]), rows=100)
    with pytest.raises(ConfigError, match="Expected `false_alarms` strictly between 0 and 1"):
        offmap.distill(guard, TRAIN, VALID, rows=100, false_alarms=None)


def test_a_state_that_is_no_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(
        offmap.errors.FileError, match=r"is damaged or not the state of a fit \(a header of 1099511627776 bytes\)"
    ):
        quick(regressor(), TRAIN, VALID, checkpoint=path)
