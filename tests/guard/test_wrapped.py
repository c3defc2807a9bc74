"""Models as other tools wrap them: compiled, traced and exported ones work like the model itself; others get one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offmap
from offmap.errors import ModelError
from trained import classes, classifier, inputs, quick

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about its own tools

TRAIN, VALID, X = classes(40, 0), classes(40, 1), inputs(8, 5)


def inner_compiled(net: nn.Sequential) -> nn.Module:
    """The hidden layer alone is compiled; parameters keep the names that they have without."""
    hidden: Any = torch.compile(net[0], backend="eager")
    return nn.Sequential(hidden, net[1], net[2])


def export_program(net: nn.Module) -> Any:
    return torch.export.export(net, (X,), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},))


WORK: dict[str, Callable[[nn.Sequential], Any]] = {
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "compiled inside": inner_compiled,
    "traced by fx": torch.fx.symbolic_trace,
    "exported": export_program,
    "module of an exported program": lambda net: export_program(net).module(),
}


@pytest.mark.parametrize("kind", WORK)
def test_wrapped_models_score_like_the_model_and_load_with_what_they_were_fitted_with(kind: str, tmp_path: Path) -> None:
    net = classifier().eval()
    wrapped = WORK[kind](net)
    guard = quick(wrapped, TRAIN, VALID)
    torch.testing.assert_close(guard.score(X), quick(net, TRAIN, VALID).score(X), rtol=1e-4, atol=1e-4)
    found, expected = (offmap.detect(model, TRAIN, VALID, method="mds").score(X) for model in (wrapped, net))
    torch.testing.assert_close(found, expected)
    guard.save(tmp_path / "guard.safetensors")
    assert torch.equal(offmap.load(tmp_path / "guard.safetensors", wrapped).score(X), guard.score(X))
    if "compiled" in kind:  # a compiled model is the model
        assert torch.equal(offmap.load(tmp_path / "guard.safetensors", net).score(X), guard.score(X))


def quantise(net: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, torch.qint8)  # pyright: ignore[reportDeprecated]


SCRIPT = "whose weights can be exchanged, but .* is or holds TorchScript. Pass the module it was made from"
REFUSED: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "script": (torch.jit.script, SCRIPT),
    "trace": (lambda net: torch.jit.trace(net, X), SCRIPT),
    "script inside": (lambda net: nn.Sequential(torch.jit.script(net[:2]), net[2]), SCRIPT),
    "quantised": (quantise, "but Sequential is quantised: pass the model in floating-point numbers that it was made from"),
    "exported for one size": (lambda net: torch.export.export(net, (X,)), "Export it with a batch of any size: `torch.export"),
}


@pytest.mark.parametrize("ask", [quick, offmap.detect])
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_unwrapped_are_refused_with_the_remedy(kind: str, ask: Callable[..., Any]) -> None:
    wrap, message = REFUSED[kind]
    wrapped = wrap(classifier().eval())
    with pytest.raises(ModelError, match=message):
        ask(wrapped, TRAIN, VALID)
