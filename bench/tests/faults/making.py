"""Models, data and options for generated calls, good and bad, drawn from a seeded generator."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import trained
from offmap.model.forward import first_tensor
from zoo import ZOO


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, or several, and what makes good data for it: `data(rows)` gives inputs and targets."""

    name: str
    nets: Any
    data: Callable[[int], tuple[Any, Any]]
    options: dict[str, Any]


def _zoo(name: str) -> Subject:
    case = ZOO[name]
    return Subject(name, case.build(), case.data, {} if case.output_fn is first_tensor else {"output_fn": case.output_fn})


def _train(name: str, nets: Any, data: Callable[[int], tuple[Any, Any]]) -> Subject:
    return Subject(name, nets, data, {})


TRAINED: dict[str, Callable[[], Subject]] = {
    "regressor": lambda: _train("regressor", trained.regressor(), trained.regression),
    "two targets": lambda: _train("two targets", trained.regressor(0, 2), lambda n: trained.regression(n, 0, 2)),
    "log-variance": lambda: _train("log-variance", trained.regressor(0, 1, log_variance=True), trained.regression),
    "classifier": lambda: _train("classifier", trained.classifier(), trained.classes),
    "binary": lambda: _train("binary", trained.binary_classifier(), trained.binary),
    "ensemble": lambda: _train("ensemble", [trained.regressor(seed) for seed in range(3)], trained.regression),
    "classifiers": lambda: _train("classifiers", [trained.classifier(seed) for seed in range(2)], trained.classes),
    "double": lambda: _train("double", trained.regressor().double(), trained.regression),
    "flat": lambda: _train("flat", trained.Reshaped(trained.regressor()), trained.regression),
}


def _spoil(change: Callable[[nn.Sequential], Any]) -> Callable[[], Any]:
    def make() -> Any:
        net = trained.regressor()
        return change(net) or net

    return make


BAD_NETS: dict[str, Callable[[], Any]] = {
    "text": lambda: "net",
    "nothing": lambda: None,
    "class": lambda: nn.Linear,
    "none of several": list,
    "text among nets": lambda: [trained.regressor(), "net"],
    "function": lambda: torch.sin,
    "no parameters": nn.ReLU,
    "NaN": _spoil(lambda net: net[0].weight.data.fill_(math.nan) is None),
    "infinite": _spoil(lambda net: net[2].bias.data.fill_(math.inf) is None),
    "complex": _spoil(lambda net: net.to(torch.complex64)),
    "half": _spoil(lambda net: net.half()),
    "random": lambda: nn.Sequential(nn.Dropout(0.5), *trained.regressor()).train(),
    "other width": lambda: nn.Linear(7, 1),
    "members differ": lambda: [trained.regressor(), trained.classifier()],
    "one twice": lambda: [trained.regressor()] * 2,
    "zero": _spoil(lambda net: [p.data.zero_() for p in net.parameters()] and None),
    "huge": _spoil(lambda net: [p.data.mul_(1e18) for p in net.parameters()] and None),
    "lazy": lambda: nn.LazyLinear(1),
    "none out": lambda: trained.Reshaped(nn.Linear(3, 0), 0),
    "embedding": lambda: nn.Embedding(5, 2),
    "meta": lambda: trained.regressor().to("meta"),
}


# ---------------------------------------------------------------------------------------------------------------- data


def _each(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    return lambda inputs: tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, inputs)


def _with(value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        if x.is_floating_point() and x.numel():
            x.view(-1)[x.numel() // 2] = value
        return x

    return change


SPOILED: dict[str, Callable[[Any], Any]] = {
    "NaN": _each(_with(math.nan)),
    "infinite": _each(_with(-math.inf)),
    "huge": _each(lambda x: x * 1e30 if x.is_floating_point() else x + 10**9),
    "large": _each(lambda x: x * 1e6 if x.is_floating_point() else x),
    "tiny": _each(lambda x: x * 1e-30 if x.is_floating_point() else x),
    "constant": _each(lambda x: torch.ones_like(x)),
    "equal rows": _each(lambda x: x[:1].expand_as(x)),
    "empty": _each(lambda x: x[:0]),
    "one row": _each(lambda x: x[:1]),
    "one row less": _each(lambda x: x[:-1]),
    "no batch axis": _each(lambda x: x[0] if len(x) else x),
    "another axis": _each(lambda x: x.unsqueeze(1)),
    "last axis longer": _each(lambda x: torch.cat([x, x[..., :1]], -1) if x.ndim > 1 else x.repeat(2)),
    "number": _each(lambda x: x.sum()),
    "double": _each(lambda x: x.double()),
    "half": _each(lambda x: x.half()),
    "whole": _each(lambda x: x.long()),
    "bytes": _each(lambda x: x.abs().byte()),
    "negative": _each(lambda x: -x.long() - 1),
    "truth": _each(lambda x: x > 0),
    "complex": _each(lambda x: x.to(torch.complex64)),
    "array": _each(lambda x: x.double().numpy() if x.dtype == torch.bfloat16 else x.numpy()),
    "turned array": _each(lambda x: np.asfortranarray(x.float().numpy())[::-1]),
    "big-endian": _each(lambda x: x.double().numpy().astype(">f8")),
    "long double": _each(lambda x: x.double().numpy().astype(np.longdouble)),
    "objects": _each(lambda x: x.double().numpy().astype(object)),
    "words": _each(lambda x: x.double().numpy().astype(str)),
    "dates": _each(lambda x: np.zeros(tuple(x.shape), "datetime64[s]")),
    "lists": _each(lambda x: x.tolist()),
    "ragged": lambda inputs: [[1.0], [2.0, 3.0]],
    "text": lambda inputs: "data",
    "nothing": lambda inputs: None,
    "in a dict": lambda inputs: {"x": inputs},
    "in a tuple": lambda inputs: (inputs,),
    "twice": lambda inputs: (inputs, inputs),
    "empty tuple": lambda inputs: (),
    "strided": _each(lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)),
    "with gradient": _each(lambda x: x.requires_grad_() if x.is_floating_point() else x),
    "sparse": _each(lambda x: x.to_sparse()),
    "meta": _each(lambda x: x.to("meta")),
}  # fmt: skip


class Rows(Dataset[Any]):
    """Examples one by one, as a user's own Dataset gives them."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Any:
        return tree_map(lambda leaf: leaf[row], self.x), self.y[row]


class Endless(IterableDataset[Any]):
    """Examples in a stream that cannot tell its length."""

    def __init__(self, x: Any, y: Any) -> None:
        self.rows = Rows(x, y)

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


def _loader(x: Any, y: Any) -> Any:
    return DataLoader(Rows(x, y), batch_size=7, shuffle=True)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "pair": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "loader": _loader,
    "data set": Rows,
    "stream": Endless,
    "loader of a stream": lambda x, y: DataLoader(Endless(x, y), batch_size=5),
    "tensors": lambda x, y: TensorDataset(x, y),
    "dict": lambda x, y: {**(x if isinstance(x, dict) else {"x": x}), "labels": y},
    "dict without target": lambda x, y: {"x": x},
    "three": lambda x, y: (x, y, y),
    "inputs alone": lambda x, y: x,
    "generator": lambda x, y: (row for row in [(x, y)]),
    "text": lambda x, y: "train",
    "number": lambda x, y: 3,
    "nothing": lambda x, y: None,
    "type": lambda x, y: TensorDataset,
    "arrays": lambda x, y: tree_map(lambda leaf: leaf.numpy() if isinstance(leaf, Tensor) else leaf, (x, y)),
}


# ------------------------------------------------------------------------------------------------------------- options

WRONG: tuple[Any, ...] = (
    None, "", "auto", "svd", "x" * 50, -1, 0, 1, 2, 2.5, -0.5, 0.5, 1e300, 10**30, math.nan, math.inf, True, [], [1, 2], {}, (),
    {"a": 1}, b"bytes", object(), len, torch.tensor(3), torch.tensor([1.0, 2.0]), np.float32(0.5), np.array([1, 2]), type, 1j,
)  # fmt: skip
"""Values that any option may be given."""

FIT: dict[str, tuple[Any, ...]] = {
    "likelihood": ("gaussian", "categorical", "bernoulli"),
    "basis": ("svd", "identity"),
    "solver": ("closed-form", "refine", "sgd"),
    "params": ("all", "matrices", "last-layer", "*weight", ["*bias"], lambda name, tensor: tensor.ndim > 1),
    "output_fn": (lambda out: out, lambda out: out[0], lambda out: None),
    "target": ("labels", "y"),
    "score": ("default", "paper", "epistemic", "distance", lambda out: out.flatten(2).std(0).mean(-1)),
    "draws": (2, 5, np.int64(3)),
    "chunk_size": ("auto", 1, 3),
    "batch_size": (1, 7, 500),
    "config": ("default", "paper", "reference"),
    "seed": (0, 7, -3, 2**63),
    "progress": (None, False),
    "entropy_weight": (0.1, 10, [1.0, 5.0]),
    "noise": ("normal", "uniform", "rademacher"),
    "regularizer": ("log", "sqrt"),
    "eps": (1e-4, (1e-4, 1e-2)),
    "risk": ("nll", "zero-one"),
    "tolerance": ("paper", "reference", "smoothed"),
    "max_risk": (None, 1.5),
    "lr": (0.1, 1e-3),
    "initial_raw_scale": (None, -5.0),
    "ranks": ("same", "alone", "sharded"),
    "patience": (None, 2),
    "clip_loss": (True, False),
    "rescale": (True, False),
    "fan_in_limit": (2, 4096),
    "init_fraction": (0.1, 0.5),
}
"""Good values of options of `fit`."""

MISSPELT = ("stpes", "drawz", "Seed", "kind", "calibrate", "rate", "", "__class__", "nett", "solver ")


@dataclass
class Maker:
    """Draws whole arguments; `wild` is how often each is made badly."""

    rng: random.Random
    wild: float = 0.35

    def now(self) -> bool:
        return self.rng.random() < self.wild

    def pick(self, values: Any) -> Any:
        return self.rng.choice(list(values))

    def subject(self) -> Subject:
        """A model that works, of the zoo or trained, and its data."""
        if self.rng.random() < 0.5:
            return TRAINED[self.pick(TRAINED)]()
        return _zoo(self.pick(ZOO))

    def nets(self, good: Any) -> Any:
        return BAD_NETS[self.pick(BAD_NETS)]() if self.rng.random() < self.wild / 3 else good

    def inputs(self, subject: Subject, rows: int | None = None) -> Any:
        x = subject.data(self.rng.choice([1, 2, 5, 9]) if rows is None else rows)[0]
        return self.spoiled(x) if self.now() else x

    def data(self, subject: Subject) -> Any:
        """A data set in some form, perhaps with inputs or targets spoiled."""
        x, y = subject.data(self.rng.choice([2, 3, 12, 20, 30, 40]))
        x = self.spoiled(x) if self.now() else x
        y = self.spoiled(y) if self.rng.random() < self.wild / 2 else y
        form = self.pick(FORMS) if self.now() else self.rng.choice(["pair", "loader", "list"])
        try:
            return FORMS[form](x, y)
        except Exception:  # it cannot be put in this form outside offmap already
            return x, y

    def spoiled(self, values: Any) -> Any:
        try:
            return SPOILED[self.pick(SPOILED)](copy.copy(values))
        except Exception:  # it cannot be spoiled so
            return values

    def options(self, good: dict[str, tuple[Any, ...]], most: int = 3) -> dict[str, Any]:
        """Some options; wild ones have values of anywhere, or names that nobody knows."""
        names = self.rng.sample(sorted(good), self.rng.randint(0, min(most, len(good))))
        chosen = {name: self.pick(good[name]) for name in names}
        if self.now():
            chosen[self.pick(good)] = self.pick(WRONG)
        if self.rng.random() < self.wild / 5:
            chosen[self.pick(MISSPELT)] = self.pick(WRONG)
        return chosen
