"""Tensors filed under the model's own dotted names."""

from __future__ import annotations

import copy

import pytest
import torch

from offmap.model.params import select_params
from offmap.posterior.distribution import NamedTensors
from zoo import ZOO


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_the_state_dict_has_the_models_names_and_comes_back(name: str, trainable: bool):
    weights = select_params(ZOO[name].build())
    named = NamedTensors(weights, trainable=trainable)
    assert list(named) == list(weights) == list(named.names)
    assert sorted(named.state_dict()) == sorted(weights)
    assert len(list(named.parameters())) == (len(weights) if trainable else 0)
    other = NamedTensors({n: torch.zeros_like(w) for n, w in weights.items()}, trainable=trainable)
    other.load_state_dict(named.state_dict())
    assert all(torch.equal(other[n], w) for n, w in weights.items())
    assert all(torch.equal(a, b) for a, b in zip(other.values(), weights.values(), strict=True))


@pytest.mark.parametrize("trainable", [True, False])
def test_tensors_are_not_copied(trainable: bool):
    weights = {"a.b": torch.zeros(2)}
    assert NamedTensors(weights, trainable=trainable)["a.b"].data_ptr() == weights["a.b"].data_ptr()


def test_names_of_its_own_methods_are_names_like_any_other():
    names = ["values", "items", "names.values", "keys.items.weight", "forward.bias", "state_dict"]
    weights = {n: torch.full((2,), float(i)) for i, n in enumerate(names)}
    for named in (NamedTensors(weights), NamedTensors(weights, trainable=True)):
        assert {n: t.tolist() for n, t in named.items()} == {n: t.tolist() for n, t in weights.items()}
        assert all(torch.equal(copy.deepcopy(named).double()[n], weights[n].double()) for n in names)
        assert "values" in named
        assert "value" not in named
        assert len(named) == len(names)
