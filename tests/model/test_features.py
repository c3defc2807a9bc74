"""Layer inputs as features, against what forward hooks see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offmap.errors import ModelError
from offmap.integrations.nets import mlp
from offmap.model.capture import features
from offmap_bench.nets.resnet import resnet
from trained import inputs


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in [*net.named_parameters(), *net.named_buffers()]}


def read_by_hooks(net: nn.Module, x: Any, names: list[str]) -> dict[str, Tensor]:
    """The first input of these Linear layers, by the name of their weight, as hooks see it."""
    found: dict[str, Tensor] = {}
    hooks = [
        net.get_submodule(n).register_forward_pre_hook(lambda _, args, n=n: found.setdefault(f"{n}.weight", args[0].detach()))
        for n in names
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    return found


class Classifier(nn.Module):
    """A transformer over (B, 5, 8) whose mean over positions goes into a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


MODELS: dict[str, tuple[nn.Module, Tensor, list[str]]] = {
    "mlp": (mlp(3, 2, hidden=[5, 4], seed=0), inputs(9), ["0", "2", "4"]),
    "resnet": (resnet(3, channels=1, width=2, blocks=2).eval(), inputs(6, features=64).reshape(6, 1, 8, 8), []),
    "transformer": (Classifier().eval(), inputs(7, features=40).reshape(7, 5, 8), ["head.0", "head.2"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_features_are_what_forward_hooks_see(kind: str) -> None:
    net, x, names = MODELS[kind]
    names = names or [[n for n, m in net.named_modules() if isinstance(m, nn.Linear)][-1]]  # of a ResNet, only the head
    found, expected = features(net, weights(net), x), read_by_hooks(net, x, names)
    assert list(found) == list(expected)
    for name, expected_rows in expected.items():
        torch.testing.assert_close(found[name], expected_rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("inference", [False, True])
def test_features_of_few_rows_are_those_among_many(kind: str, inference: bool) -> None:
    net, x, _ = MODELS[kind]
    whole = features(net, weights(net), x)
    for rows in (slice(0, 1), slice(2, 3), slice(1, 3), slice(-1, None)):
        with torch.inference_mode(inference):
            some = features(net, weights(net), x[rows].clone())
        assert list(some) == list(whole)
        for name, rows_of_some in some.items():
            torch.testing.assert_close(rows_of_some, whole[name][rows], rtol=1e-4, atol=1e-5)


def test_only_named_matrices_are_kept_and_the_model_is_untouched() -> None:
    net, x, _ = MODELS["mlp"]
    before, state = {n: t.clone() for n, t in weights(net).items()}, torch.get_rng_state()
    other = {n: 2 * t for n, t in weights(net).items()}
    assert list(features(net, other, x, names=["2.weight"])) == ["2.weight"]
    assert all(torch.equal(t, before[n]) for n, t in weights(net).items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_fails_is_named_with_the_shape_it_was_given() -> None:
    net, _, _ = MODELS["mlp"]
    with pytest.raises(ModelError, match=r"Sequential failed on inputs of shape \(4, 7\): .*Check that the data have the form"):
        features(net, weights(net), torch.zeros(4, 7))


def test_maps_are_described_by_mean_and_deviation_of_every_channel() -> None:
    net, x, _ = MODELS["resnet"]
    seen: dict[str, Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, n=n: seen.setdefault(f"{n}.weight", args[0]))
        for n, m in net.named_modules()
        if isinstance(m, nn.Conv2d)
    ]
    found = features(net, weights(net), x, maps=True)
    for hook in hooks:
        hook.remove()
    assert len(seen) > 10
    for name, x_map in seen.items():
        wanted = torch.cat([x_map.mean((2, 3)), x_map.var((2, 3), correction=0).sqrt()], 1)
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5)
    assert len(found) == len(seen) + 1  # and the head
