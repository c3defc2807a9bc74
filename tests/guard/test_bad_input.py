"""Whatever is wrong with nets, data or options gets one clear error of offmap.errors, before any work is lost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import offmap
from offmap.errors import ConfigError, DataError, ModelError, OffmapError, ShapeError
from trained import Reshaped, binary, binary_classifier, classes, classifier, inputs, quick, regression, regressor

NAN = math.nan
TRAIN, VALID = regression(40, 0), regression(40, 1)


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), TRAIN, VALID)


@pytest.fixture(scope="module")
def sorter() -> offmap.Guard:
    return quick(classifier(), classes(40, 0), classes(40, 1))


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any fit that begins is a failure: errors must come before."""

    def begun(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the fit began")

    monkeypatch.setattr("offmap.maxwent.solve.fit", begun)


def spoil(part: str, value: float, row: int = 3) -> tuple[Tensor, Tensor]:
    x, y = regression(40, 0)
    (x[:, 1] if part == "inputs" else y)[row] = value
    return x, y


# ---------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["inputs", "targets"])
@pytest.mark.parametrize("place", ["train", "valid", "calibration"])
@pytest.mark.usefixtures("no_work")
def test_numbers_that_are_not_finite(value: float, part: str, place: str) -> None:
    data: dict[str, Any] = {"train": TRAIN, "valid": VALID, place: spoil(part, value)}
    message = f"Expected finite {part}, but row 3 of `{place}` holds NaN or infinite values. Drop or impute such rows."
    with pytest.raises(DataError, match=message):
        quick(regressor(), **data)


@pytest.mark.parametrize("part", ["inputs", "targets"])
@pytest.mark.parametrize("solver", ["closed-form", "refine"])
def test_numbers_that_are_not_finite_in_a_loader(part: str, solver: str) -> None:
    loader = DataLoader(TensorDataset(*spoil(part, NAN, row=25)), batch_size=10)
    with pytest.raises(DataError, match=f"Expected finite {part}, but row 5 of batch 2 of `train`"):
        quick(regressor(), loader, VALID, solver=solver)


@pytest.mark.parametrize("value", [NAN, math.inf])
@pytest.mark.parametrize("ask", ["score", "predict", "__call__", "interval", "samples"])
def test_numbers_that_are_not_finite_when_asking(guard: offmap.Guard, value: float, ask: str) -> None:
    x = inputs(9, 5)
    x[4, 0] = value
    with pytest.raises(DataError, match="Expected finite inputs, but row 4 of the inputs holds NaN or infinite values"):
        getattr(guard, ask)(x)
    with pytest.raises(DataError, match="Expected finite inputs, but row 0 of the inputs"):
        getattr(guard, ask)(DataLoader(TensorDataset(x), batch_size=2))


EMPTY: dict[str, Any] = {
    "tensors": (torch.zeros(0, 3), torch.zeros(0)),
    "arrays": (np.zeros((0, 3)), np.zeros(0)),
    "loader": DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0))),
    "loader that drops": DataLoader(TensorDataset(*regression(5, 0)), batch_size=10, drop_last=True),
}


@pytest.mark.parametrize("form", EMPTY)
@pytest.mark.parametrize("place", ["train", "valid", "calibration"])
@pytest.mark.usefixtures("no_work")
def test_data_without_rows(form: str, place: str) -> None:
    data: dict[str, Any] = {"train": TRAIN, "valid": VALID, place: EMPTY[form]}
    with pytest.raises(DataError, match=f"Expected at least one example in `{place}`, but it is empty"):
        quick(regressor(), **data)


@pytest.mark.parametrize("form", ["tensors", "loader"])
def test_no_data_to_split(form: str) -> None:
    with pytest.raises(DataError, match="one example in `train`, but it is empty|but `train` has 0. Pass `valid=`"):
        quick(regressor(), EMPTY[form])


def test_nothing_to_score(guard: offmap.Guard) -> None:
    for x in (torch.zeros(0, 3), np.zeros((0, 3)), DataLoader(TensorDataset(torch.zeros(0, 3)))):
        with pytest.raises(DataError, match="Expected at least one input, but got none"):
            guard.score(x)


@pytest.mark.parametrize("place", ["valid", "calibration"])
@pytest.mark.parametrize("form", [tuple, lambda data: DataLoader(TensorDataset(*data))])
@pytest.mark.usefixtures("no_work")
def test_fewer_than_two_rows_of_validation(place: str, form: Callable[[Any], Any]) -> None:
    data: dict[str, Any] = {"train": TRAIN, "valid": VALID, place: form(regression(1, 0))}
    with pytest.raises(DataError, match=f"Expected at least 2 rows in `{place}`, but got 1. Pass more, or leave it out."):
        quick(regressor(), **data)


def test_one_row_to_calibrate(guard: offmap.Guard) -> None:
    with pytest.raises(DataError, match="Expected at least 2 rows in `valid`, but got 1"):
        guard.calibrate(regression(1, 0))


@pytest.mark.parametrize("place", ["train", "valid", "calibration"])
@pytest.mark.usefixtures("no_work")
def test_numbers_of_rows_that_differ(place: str) -> None:
    data: dict[str, Any] = {"train": TRAIN, "valid": VALID, place: (inputs(40), torch.zeros(39))}
    with pytest.raises(ShapeError, match=f"Expected as many inputs as targets in `{place}`, but got 40 and 39"):
        quick(regressor(), **data)


@pytest.mark.usefixtures("no_work")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(guard: offmap.Guard, layout: torch.layout) -> None:
    nested = torch.nested.as_nested_tensor(list(TRAIN[0]), layout=layout)
    for ask in (lambda: quick(regressor(), (nested, TRAIN[1]), VALID), lambda: guard.score(nested)):
        with pytest.raises(DataError, match="one that is nested; pass `torch.nested.to_padded_tensor"):
            ask()


def test_masked_arrays_are_not_read_as_if_nothing_were_masked(guard: offmap.Guard) -> None:
    x, y = (np.ma.masked_array(t.numpy(), copy=True) for t in TRAIN)
    assert torch.equal(guard.score(x), guard.score(TRAIN[0]))  # nothing is masked yet
    x[3, 1] = y[5] = np.ma.masked
    asks = (lambda: quick(regressor(), (x, TRAIN[1]), VALID), lambda: quick(regressor(), (TRAIN[0], y), VALID))
    for ask in (*asks, lambda: guard.score(x), lambda: guard.calibrate((TRAIN[0], y))):
        with pytest.raises(DataError, match=r"arrays without masked values, but got 1 of them. Fill them, `array.filled"):
            ask()


def test_text_arrays() -> None:
    with pytest.raises(DataError, match="Expected numeric arrays, but got <U5. Encode text, dates and missing values first"):
        quick(regressor(), (np.full((40, 3), "three"), TRAIN[1]), VALID)


@pytest.mark.parametrize("low", [-1, 1])
@pytest.mark.parametrize("place", ["train", "valid", "calibration"])
@pytest.mark.parametrize("form", ["tensors", "loader", "dataset"])
def test_classes_out_of_range(low: int, place: str, form: str) -> None:
    x, y = classes(40, 0)
    bad: Any = (x, y + low)
    if form != "tensors":
        bad = TensorDataset(x, y + low) if form == "dataset" else DataLoader(TensorDataset(x, y + low), batch_size=40)
    data: dict[str, Any] = {"train": (x, y), "valid": (x, y), place: bad}
    with pytest.raises(
        DataError, match=f"from 0 to 2 for 3 classes, but `{place}` holds values from {low} to {2 + low}. Relabel"
    ):
        quick(classifier(), **data)


@pytest.mark.parametrize("y", [torch.arange(40) % 3, (torch.arange(40) % 2).float() / 2])
def test_binary_targets_out_of_range(y: Tensor) -> None:
    with pytest.raises(DataError, match="from 0 to 1 for 2 classes, but `valid` holds values from 0 to 2|holds fractions"):
        quick(binary_classifier(), (inputs(40), y), (inputs(40), y), likelihood="bernoulli")


def test_classes_out_of_range_when_calibrating(sorter: offmap.Guard) -> None:
    x, y = classes(40, 0)
    with pytest.raises(DataError, match="but `valid` holds values from 1 to 3"):
        sorter.calibrate((x, y + 1))
    with pytest.raises(ShapeError, match="for the categorical likelihood, but got targets .40,. .torch.float32."):
        sorter.calibrate((x, y.float()))


SHAPES: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "three outputs for one target": (
        classifier, TRAIN, VALID, ShapeError, r"got targets \(40,\) \(torch.float32\) and outputs \(40, 3\)",
    ),
    "five targets": (
        regressor, regression(40, 0, 5), regression(40, 1, 5), ShapeError, r"targets \(40, 5\) .* and outputs \(40, 1\)",
    ),
    "one-hot classes": (
        classifier, (inputs(40), torch.eye(3)[classes(40)[1]].long()), (inputs(40), torch.eye(3)[classes(40)[1]].long()),
        ShapeError, r"integer targets \(B, ...\) with outputs \(B, C, ...\) of logits",
    ),
    "train and valid differ": (
        regressor, regression(40, 0, 1), VALID, DataError, r"`valid` targets like `train`'s, torch.float32 \(40, 1\), but got",
    ),
    "types differ": (
        classifier, TRAIN, classes(40, 1), DataError, r"`train`'s, torch.float32 \(40,\), but got torch.int64 \(40,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.usefixtures("no_work")
def test_targets_that_do_not_fit_the_outputs(case: str) -> None:
    net, train, valid, error, message = SHAPES[case]
    with pytest.raises(error, match=message):
        quick(net(), train, valid)


@pytest.mark.usefixtures("no_work")
def test_calibration_data_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"for the gaussian likelihood, but got targets \(40, 2\)"):
        quick(regressor(), TRAIN, VALID, calibration=regression(40, 2, targets=2))
    with pytest.raises(ModelError, match=r"failed on inputs of shape \(2, 4\)"):
        quick(regressor(), TRAIN, VALID, calibration=(inputs(40, features=4), torch.zeros(40)))


@pytest.mark.parametrize("x", [None, "text", [1.0, 2.0], 3.0, torch.tensor(3.0), TensorDataset(torch.zeros(3, 3)), {}])
def test_inputs_without_rows(guard: offmap.Guard, x: Any) -> None:
    with pytest.raises(
        DataError, match="Expected tensors or arrays with one row per example as the inputs of the guard, but got"
    ):
        guard.score(x)


def test_inputs_of_another_form(guard: offmap.Guard) -> None:
    for x, message in (
        (inputs(9, features=4), r"Sequential failed on inputs of shape \(9, 4\): .*Check that the data have the form"),
        (torch.zeros(9, 3, dtype=torch.int64), r"Sequential failed on inputs of shape \(9, 3\)"),
        (
            inputs(3)[0],
            r"Expected one output row per input row, but Sequential made \(1,\) of 3 rows. Give the inputs a batch axis",
        ),
        ((inputs(9), inputs(9)), "Sequential failed on inputs of shape .*takes 2 positional arguments but 3 were given"),
        (torch.zeros(9, 2, 3), r"whose outputs have 2 axes, as at fit time, but these give \(9, 2, 1\)"),
        ({"a": inputs(9)}, "Sequential failed on inputs of shape .*unexpected keyword argument 'a'"),
    ):
        with pytest.raises(ModelError, match=message):
            guard.score(x)


# --------------------------------------------------------------------------------------------------------------- models


class DataDependent(nn.Module):
    """Branches on a number that it computes, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = regressor()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out if out.abs().max().item() < 1e9 else out.clamp(-1, 1)


def test_a_model_that_vmap_cannot_run_names_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"`vmap` cannot run DataDependent \(.*\). Pass `chunk_size=1` to loop over draws"):
        quick(DataDependent(), TRAIN, VALID, chunk_size=5)


@pytest.mark.parametrize("chunk_size", ["auto", 1])
@pytest.mark.parametrize("solver", ["closed-form", "refine"])
def test_the_remedy_works(chunk_size: Any, solver: str) -> None:
    guard = quick(DataDependent(), TRAIN, VALID, chunk_size=chunk_size, solver=solver, steps=3, check_every=3)
    plain = quick(regressor(), TRAIN, VALID, solver=solver, steps=3, check_every=3)
    assert guard.predictive.model.chunk_size == 1
    assert guard.score(inputs(9, 5)).isfinite().all()
    assert guard.score(inputs(9, 5)).shape == plain.score(inputs(9, 5)).shape


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1]


def _with_nan() -> nn.Module:
    net = regressor()
    net[2].bias.data[0] = NAN
    return net


def _nan_in_a_buffer() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    net[1].running_mean[0] = NAN
    return net


class Returns(nn.Module):
    """Computes what its function says."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.make = regressor(), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.net(x))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no net": (lambda: "net", "Expected a torch.nn.Module or a list of them, but got str"),
    "nothing": (lambda: None, "Expected a torch.nn.Module or a list of them, but got NoneType"),
    "a class": (lambda: nn.Linear, "Expected a torch.nn.Module or a list of them, but got type"),
    "no members": (list, "Expected a torch.nn.Module or a list of them, but got list"),
    "no net among members": (lambda: [regressor(), "net"], "Expected a torch.nn.Module or a list of them, but got list"),
    "a generator": (lambda: (regressor() for _ in range(2)), "a list of them, but got generator"),
    "no parameters": (nn.ReLU, "Expected a model with floating-point parameters, but ReLU has none"),
    "no floating parameters": (Integers, "Expected a model with floating-point parameters, but Integers has none"),
    "NaN weights": (_with_nan, "Expected a trained model with finite weights, but `2.bias` holds NaN or infinite values"),
    "NaN buffer": (_nan_in_a_buffer, "a trained model with finite outputs, but it gives NaN or infinite values on `valid`"),
    "other inputs": (lambda: nn.Linear(4, 1), r"Linear failed on inputs of shape \(2, 3\): .*the form the model was trained on"),
    "a dict": (
        lambda: Returns(lambda out: {"y": out}),
        "Expected a model that returns a tensor, .*but got dict. Pass `output_fn=",
    ),
    "a number": (lambda: Returns(lambda out: out.mean()), r"one output row per input row, but Returns made \(\) of 2 rows"),
    "no division": (lambda: Returns(lambda out: 1 // 0), "Returns failed on inputs of shape .*: integer"),
    "classes": (lambda: Returns(Tensor.long), "floating-point outputs, .*but Returns returns torch.int64. Return what comes"),
    "complex": (lambda: Returns(torch.fft.fft), "floating-point outputs, .*but Returns returns torch.complex64"),
    "eight bits": (
        lambda: regressor().to(torch.float8_e4m3fn), "16 bits or more, but `0.weight` is torch.float8_e4m3fn. Fit a copy"
    ),
    "one row": (lambda: Returns(lambda out: out[:1]), r"one output row per input row, but Returns made \(1, 1\) of 2 rows"),
    "other architecture": (
        lambda: [regressor(), nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 1))],
        r"members of one architecture, but `0.weight` is \(12, 3\) in member 0 and \(7, 3\) in member 1",
    ),
    "other function": (
        lambda: [regressor(0), nn.Sequential(*regressor(1)[:1], nn.Tanh(), *regressor(1)[2:])],
        "members that differ in weights and buffers alone, but member 1 computes something else",
    ),
    "other attribute": (
        lambda: [Reshaped(nn.Sequential(regressor(0), nn.LeakyReLU(slope)), 1) for slope in (0.1, 0.9)],
        "but member 1 computes something else than member 0 with its weights. Keep what differs in buffers, or fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.usefixtures("no_work")
def test_models_that_cannot_be_used(case: str) -> None:
    build, message = MODELS[case]
    with pytest.raises(ModelError, match=message):
        quick(build(), TRAIN, VALID)


def test_a_failed_fit_leaves_the_model_as_it_was() -> None:
    net = regressor().train()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(DataError):
        quick(net, spoil("inputs", NAN), VALID)
    assert net.training
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())


# ------------------------------------------------------------------------------------------------------------- options

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"stpes": 3}, r"did you mean 'steps'\?\), but got 'stpes'"),
    ({"entropy_weigth": 3}, r"did you mean 'entropy_weight'\?\), but got 'entropy_weigth'"),
    ({"batchsize": 3}, r"did you mean 'batch_size'\?\), but got 'batchsize'"),
    ({"calibrate": 3}, r"did you mean 'calibration'\?\), but got 'calibrate'"),
    ({"num_draws": 3}, r"\?\), but got 'num_draws'"),
    ({"solver": "closedform"}, r"Expected `solver` to be one of \[.*did you mean 'closed-form'\?\), but got 'closedform'"),
    ({"basis": "SVD "}, r"Expected `basis` to be one of \['identity', 'svd'\], but got 'SVD '"),
    ({"basis": "svdd"}, r"did you mean 'svd'\?\), but got 'svdd'"),
    ({"score": "epistemc"}, r"`score` to be one of .*did you mean 'epistemic'\?\), weights by term, or a function, but got 'ep"),
    ({"score": 5}, "Expected `score` to be one of .* or a function, but got 5"),
    ({"score": ["paper"]}, "Expected `score` to be one of .* or a function, but got .'paper'."),
    ({"config": "papre"}, r"Expected `config` to be one of .*did you mean 'paper'\?\), but got 'papre'"),
    ({"config": {"steps": 3}}, "or an offmap.Config, but got dict. Pass single settings as keywords, such as `steps=500`"),
    ({"noise": "gaussian"}, "Expected `noise` to be one of .'normal', 'rademacher', 'uniform'., but got 'gaussian'"),
    ({"noise": "nomal"}, r"did you mean 'normal'\?\), but got 'nomal'"),
    ({"noise": 3}, "Expected `noise` to be a name or an `offmap.posterior.noise.Noise`, but got 3"),
    ({"likelihood": "gausian"}, r"Expected `likelihood` as one of .*did you mean 'gaussian'\?\) or an `offmap"),
    ({"likelihood": object()}, "or an `offmap.Likelihood`, but got object"),
    ({"likelihood": offmap.Gaussian}, "or an `offmap.Likelihood`, but got the class Gaussian"),
    (
        {"regularizer": "logg"},
        r"Expected `regularizer` to be one of .*did you mean 'log'\?\) or a function of φ², but got 'logg'",
    ),
    ({"regularizer": 3}, "or a function of φ², but got 3"),
    ({"risk": "zero_one"}, r"Expected `risk` to be one of .*did you mean 'zero-one'\?\) or a function, but got 'zero_one'"),
    ({"risk": 3}, "or a function, but got 3"),
    ({"tolerance": "papre"}, r"Expected `tolerance` to be one of .*did you mean 'paper'\?\), but got 'papre'"),
    ({"draws": 1}, "Expected `draws` to be a whole number ≥ 2, but got 1"),
    ({"draws": 2.5}, "Expected `draws` to be a whole number ≥ 2, but got 2.5"),
    ({"draws": "50"}, "Expected `draws` to be a whole number ≥ 2, but got '50'"),
    ({"seed": "0"}, "Expected `seed` to be a whole number, but got '0'"),
    ({"seed": 10**5000}, "Expected `seed` to be a whole number of at most 4096 bits, but got 16610"),
    ({"lr": 10**5000}, "Expected `lr` to be a whole number of at most 4096 bits"),
    ({"lr": 10**400}, "Expected `lr` to be a number above 0, but got 1000"),
    ({"false_alarms": 10**5000}, "Expected `false_alarms` to be a whole number of at most 4096 bits"),
    ({"seed": 0.5}, "Expected `seed` to be a whole number, but got 0.5"),
    ({"chunk_size": 0}, "Expected `chunk_size` to be 'auto' or a whole number ≥ 1, but got 0"),
    ({"chunk_size": "atuo"}, "Expected `chunk_size` to be 'auto' or a whole number ≥ 1, but got 'atuo'"),
    ({"batch_size": 0}, "Expected `batch_size` to be a whole number ≥ 1, but got 0"),
    ({"batch_size": 1.5}, "Expected `batch_size` to be a whole number ≥ 1, but got 1.5"),
    ({"steps": 0}, "Expected `steps` to be a whole number above 0, but got 0"),
    ({"steps": 10.0}, "Expected `steps` to be a whole number above 0, but got 10.0"),
    ({"check_every": -1}, "Expected `check_every` to be a whole number above 0, but got -1"),
    ({"risk_draws": 2.5}, "Expected `risk_draws` to be a whole number above 0, but got 2.5"),
    ({"draws_per_step": 0}, "Expected `draws_per_step` to be a whole number above 0, but got 0"),
    ({"lr": -1.0}, "Expected `lr` to be a number above 0, but got -1.0"),
    ({"lr": NAN}, "Expected `lr` to be a number above 0, but got nan"),
    ({"lr": math.inf}, "Expected `lr` to be a number above 0, but got inf"),
    ({"lr": "fast"}, "Expected `lr` to be a number above 0, but got 'fast'"),
    ({"entropy_weight": 0}, "Expected `entropy_weight` to be a number above 0, but got 0"),
    ({"entropy_weight": [1.0, -1.0]}, "Expected `entropy_weight` to be a number above 0, but got -1.0"),
    ({"entropy_weight": []}, "Expected `entropy_weight` to be a number above 0, but got"),
    ({"entropy_weight": None}, "Expected `entropy_weight` to be a number above 0, but got None"),
    ({"eps": 0.0}, "Expected `eps` to be a number above 0, but got 0.0"),
    ({"init_fraction": 0.0}, "Expected `init_fraction` to be a number above 0, but got 0.0"),
    ({"max_risk": "low"}, "Expected `max_risk` to be a finite number or None, but got 'low'"),
    ({"max_risk": NAN}, "Expected `max_risk` to be a finite number or None, but got nan"),
    ({"initial_raw_scale": "small"}, "Expected `initial_raw_scale` to be a finite number or None, but got 'small'"),
    ({"params": "3.*"}, "Expected `params` to pick at least one parameter, but '3..' fits none of .'0.weight'"),
    ({"params": 3}, "Expected `params` to be a pattern, a list of them, a function or None, but got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[f"{next(iter(o))} {i}" for i, (o, _) in enumerate(OPTIONS)])
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quick(regressor(), TRAIN, VALID, **options)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return TRAIN[0][row], TRAIN[1][row]


def test_a_bad_batch_size_is_refused_before_a_loader_is_made_with_it() -> None:
    with pytest.raises(ConfigError, match="Expected `batch_size` to be a whole number ≥ 1, but got 0"):
        quick(regressor(), Rows(), VALID, batch_size=0)


@pytest.mark.parametrize("own", [lambda out: out.mean(), lambda out: out[..., 0], lambda out: out[0, :3, 0]])
def test_a_score_function_must_give_one_number_per_row(own: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        ShapeError, match=r"Expected `score` to turn stacked outputs \(8, 40, 1\) into one number per example, \(40,\)"
    ):
        quick(regressor(), TRAIN, VALID, score=own)


@pytest.mark.parametrize("predictive", [None, "net", 3, regressor(), regressor])
def test_what_is_no_predictive(predictive: Any) -> None:
    with pytest.raises(ConfigError, match="Expected `predictive` to have `members` and `outputs`, but got"):
        offmap.guard(predictive, VALID)


class Bare:
    """A Predictive of the user's that returns what `change` makes of its outputs (2, B, 1)."""

    members = 1

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Any:
        return self.change(torch.zeros(2, len(x), 1))


SHAPE = r"`predictive.outputs` to return floating-point tensors \(members · draws, 40, ...\), but got "
BARE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "array": (Tensor.numpy, f"{SHAPE}ndarray. `torch.as_tensor"),
    "classes": (Tensor.long, rf"{SHAPE}torch.int64 \(2, 40, 1\)"),
    "no rows": (lambda out: out[:, 0], rf"{SHAPE}torch.float32 \(2, 1\)"),
    "NaN": (
        lambda out: out * NAN,
        "Expected `predictive` to give finite outputs, but it gives NaN or infinite values on `valid`",
    ),
}


@pytest.mark.parametrize("case", BARE)
def test_outputs_of_a_predictive_that_are_no_stack_of_numbers(case: str) -> None:
    change, message = BARE[case]
    with pytest.raises(ModelError, match=message):
        offmap.guard(Bare(change), VALID)


def test_zero_one_risk_needs_classes() -> None:
    with pytest.raises(ConfigError, match="a classification likelihood for the risk 'zero-one'; use 'nll' for regression"):
        quick(regressor(), TRAIN, VALID, risk="zero-one")


# ---------------------------------------------------------------------------------------------------------- properties

DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
NETS = {1: regressor(), 2: regressor(log_variance=True), 3: classifier()}


@settings(max_examples=40)
@given(
    rows=st.integers(0, 6),
    shape=st.lists(st.integers(0, 4), max_size=2),
    dtype=st.sampled_from(DTYPES),
    top=st.integers(-2, 4),
    outputs=st.sampled_from([1, 2, 3]),
    flat=st.booleans(),
    likelihood=st.sampled_from([None, "gaussian", "categorical", "bernoulli"]),
    array=st.booleans(),
)
def test_any_targets_give_one_of_our_errors_or_a_working_guard(
    rows: int, shape: list[int], dtype: torch.dtype, top: int, outputs: int, flat: bool, likelihood: str | None, array: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    y = torch.randint(min(0, top), max(0, top) + 1, (rows, *shape), generator=generator).to(dtype)
    data = inputs(rows), y.numpy() if array else y
    net = Reshaped(NETS[outputs]) if flat and outputs == 1 else NETS[outputs]
    try:
        guard = quick(net, data, data, likelihood=likelihood, draws=2, risk_draws=2)
    except OffmapError:
        return
    result = guard(inputs(5, 3))
    assert result.score.shape == (5,)
    assert result.score.isfinite().all()


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["tensor", "array", "tuple", "dict", "loader"]),
)
def test_any_inputs_give_one_of_our_errors_or_scores(shape: list[int], dtype: torch.dtype, kind: str) -> None:
    guard = _ask()
    x: Any = torch.ones(shape).to(dtype)
    wrapped = {"tensor": x, "array": x.numpy(), "tuple": (x, x), "dict": {"input": x}}
    try:
        asked = DataLoader(TensorDataset(x), batch_size=2) if kind == "loader" and x.ndim and len(x) else wrapped.get(kind, x)
        result = guard(asked)
    except OffmapError:
        return
    assert result.score.shape == (shape[0],)
    assert result.score.isfinite().all()


def _ask(made: list[offmap.Guard] = []) -> offmap.Guard:  # noqa: B006
    if not made:
        made.append(quick(regressor(), TRAIN, VALID))
    return made[0]


@settings(max_examples=25)
@given(
    options=st.dictionaries(
        st.sampled_from([
            "steps", "lr", "entropy_weight", "draws", "risk_draws", "chunk_size", "batch_size", "eps", "seed", "noise", "basis",
            "score", "likelihood", "params", "tolerance", "risk", "regularizer", "max_risk", "config", "output_fn",
        ]),
        st.one_of(st.none(), st.integers(-2, 3), st.floats(-2, 2), st.text(max_size=4), st.lists(st.integers(), max_size=2)),
        max_size=2,
    )
)  # fmt: skip
def test_any_options_give_one_of_our_errors_or_a_working_guard(options: dict[str, Any]) -> None:
    try:
        guard = quick(regressor(), TRAIN, VALID, **options)
    except OffmapError:
        return
    assert guard.score(inputs(5, 3)).isfinite().all()


def test_binary_data_as_booleans_in_numpy() -> None:
    x, y = binary(40, 0)
    guard = quick(binary_classifier(), (x.numpy(), y.numpy()), (x.numpy(), y.numpy()))
    assert guard.predict(x).probs.shape == (40, 2)
