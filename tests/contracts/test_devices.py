"""Everything follows the model's device: only noise is made on the CPU, by its address, and moved."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

import offmap
from offmap.likelihoods import Categorical, Gaussian
from offmap.model.forward import copy_model, forward
from offmap.posterior.distribution import WeightDistribution
from zoo import ZOO, Case

HOME = Path(offmap.__file__).parent
NOISE = "core/noise.py"
"""The one file that may make tensors on the CPU."""

MODELS = ("mlp", "conv2d", "grouped", "transposed2d", "attention", "cross_attention", "lstm", "embedding", "weight_norm", "unet")
some_models = pytest.mark.parametrize("case", [ZOO[name] for name in MODELS], ids=MODELS)


class Spy(TorchFunctionMode):
    """Notes where the library makes a tensor without naming a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.makers = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.makers and kwargs.get("device") is None and (place := caller(sys._getframe(1))):
            self.seen.add(place)
        return func(*args, **kwargs)


def caller(frame: FrameType | None) -> str:
    """The line that called torch, if it is ours."""
    return (
        f"{path.relative_to(HOME)}:{frame.f_lineno}" if frame and HOME in (path := Path(frame.f_code.co_filename)).parents else ""
    )


def fit(case: Case, **options: Any) -> offmap.Guard:
    return offmap.fit(
        case.build(), case.data(10), case.data(8), output_fn=case.output_fn, draws=4, risk_draws=4, progress=False, **options
    )  # fmt: skip


@pytest.mark.parametrize("solver", ["closed-form", "refine", "sgd"])
@some_models
def test_no_tensor_is_made_without_naming_its_device(case: Case, solver: str):
    with Spy() as spy:
        guard = fit(case, solver=solver, **({} if solver == "closed-form" else {"steps": 20, "check_every": 10}))
        guard(case.inputs(5))
    assert not {place for place in spy.seen if not place.startswith(NOISE)}


def find_unnamed(path: Path) -> list[str]:
    """Calls in a file that make a tensor and name no device."""
    makers = {maker.__name__ for maker in _device_constructors()}
    return [
        f"{path.relative_to(HOME)}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
        and ast.unparse(node.func.value) == "torch" and not any(word.arg == "device" for word in node.keywords)
    ]  # fmt: skip


def test_every_line_that_makes_a_tensor_names_its_device():
    # data come from the user's side, and the demo makes its own
    rooms = ("data", "demo", "report", "batches", "integrations")
    files = [path for path in HOME.rglob("*.py") if path.relative_to(HOME).parts[0] not in rooms]
    assert [line for path in sorted(files) if path != HOME / NOISE for line in find_unnamed(path)] == []


def test_the_spy_sees_what_names_no_device():
    with Spy() as spy:
        namespace: dict[str, Any] = {"torch": torch}
        exec(compile("torch.zeros(3)\ntorch.zeros(3, device='cpu')", str(HOME / "core" / "made_up.py"), "exec"), namespace)
    assert spy.seen == {"core/made_up.py:1"}


@some_models
def test_a_default_device_elsewhere_changes_nothing(case: Case):
    model, data, valid, x = case.build(), case.data(10), case.data(8), case.inputs(5)
    options: dict[str, Any] = {
        "solver": "closed-form",
        "draws": 4,
        "risk_draws": 4,
        "progress": False,
        "output_fn": case.output_fn,
    }
    expected = offmap.fit(model, data, valid, **options)(x)
    with torch.device("meta"):  # whatever is made without naming its device has no numbers
        result = offmap.fit(model, data, valid, **options)(x)
    assert {t.device.type for t in vars(result).values() if isinstance(t, Tensor)} == {"cpu"}
    torch.testing.assert_close(result.score, expected.score, rtol=1e-3, atol=1e-6)


def devices(weights: Iterable[Tensor]) -> set[str]:
    return {w.device.type for w in weights}


@pytest.mark.parametrize("loop", [True, False], ids=["loop", "vmap"])
@pytest.mark.parametrize("name", ["mlp", "conv2d", "grouped", "transposed2d", "attention", "embedding", "keywords"])
def test_draws_gradients_and_outputs_are_on_the_models_device(name: str, loop: bool):
    # a device without numbers stands for a GPU: here too nothing mixes with what is on the CPU
    model, x = copy_model(ZOO[name].build()).to("meta"), tree_map(lambda t: t.to("meta"), ZOO[name].inputs(3))
    q = WeightDistribution({n: p.detach().unsqueeze(0) for n, p in model.named_parameters()})
    drawn = q.draw(range(2), clip=0.1)
    outputs = forward(model, drawn, x, loop=loop)
    outputs.square().sum().backward()
    numbers = [outputs, q.entropy(), q.mean_log_square(), *q.mixture_entropy_bounds()]
    assert devices([*numbers, *drawn.values(), *q.scale().values()]) == {"meta"}
    assert devices(raw.grad for raw in q.raw_scale.values()) == {"meta"}
    assert outputs.shape == (2, 3, 2)


@pytest.mark.parametrize("likelihood", [Gaussian(), Categorical()], ids=["gaussian", "categorical"])
def test_scores_and_predictions_are_on_the_device_of_the_outputs(likelihood: Gaussian | Categorical):
    outputs = torch.empty(4, 3, 2, device="meta")
    found = [likelihood.score(outputs), likelihood.epistemic(outputs), *vars(likelihood.predict(outputs)).values()]
    assert devices(t for t in found if isinstance(t, Tensor)) == {"meta"}
