"""Small data, and models that are good at once: random features with a last layer by least squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import offmap
from offmap.integrations.nets import mlp

NOISE = 0.1


def inputs(n: int, seed: int = 0, features: int = 3) -> Tensor:
    return torch.randn(n, features, generator=torch.Generator().manual_seed(seed))


def regression(n: int = 60, seed: int = 0, targets: int | None = None) -> tuple[Tensor, Tensor]:
    """y = x₀ + tanh x₁ (+ k) plus noise of standard deviation 0.1; (n,), or (n, K)."""
    x = inputs(n, seed)
    noise = NOISE * torch.randn(n, targets or 1, generator=torch.Generator().manual_seed(seed + 1000))
    y = (x[:, :1] + x[:, 1:2].tanh()) * torch.arange(1.0, (targets or 1) + 1) + noise
    return x, y if targets else y[:, 0]


def classes(n: int = 60, seed: int = 0, count: int = 3) -> tuple[Tensor, Tensor]:
    x = inputs(n, seed)
    return x, x[:, :count].argmax(1)


def binary(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = inputs(n, seed)
    return x, x[:, 0] > x[:, 1]


def model(x: Tensor, outputs: Tensor, *, hidden: int = 12, seed: int = 0) -> nn.Sequential:
    """A net with one hidden layer whose outputs are close to those wanted, (n, W)."""
    net = mlp(x.shape[1], outputs.shape[1], hidden=[hidden], seed=seed)
    with torch.no_grad():
        net[0].bias.copy_(torch.linspace(-1, 1, hidden))
        features = torch.cat([net[:2](x), torch.ones(len(x), 1)], 1).double()
        ridge = 1e-3 * torch.eye(hidden + 1, dtype=torch.float64)
        solution = torch.linalg.solve(features.mT @ features + ridge, features.mT @ outputs.double())
        net[-1].weight.copy_(solution[:-1].mT)
        net[-1].bias.copy_(solution[-1])
    return net


def regressor(seed: int = 0, targets: int = 1, *, log_variance: bool = False) -> nn.Sequential:
    x, y = regression(200, 7, targets)
    width = [y, torch.full_like(y, -4.0)] if log_variance else [y]
    return model(x, torch.cat(width, 1), seed=seed)


def classifier(seed: int = 0) -> nn.Sequential:
    x, y = classes(200, 7)
    return model(x, 6.0 * nn.functional.one_hot(y, 3), seed=seed)


def binary_classifier(seed: int = 0) -> nn.Sequential:
    x, y = binary(200, 7)
    return model(x, 12.0 * y[:, None].float() - 6.0, seed=seed)


class Reshaped(nn.Module):
    """A net whose outputs are given another shape per row."""

    def __init__(self, net: nn.Module, *shape: int) -> None:
        super().__init__()
        self.net, self.shape = net, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).reshape(len(x), *self.shape)


def quick(nets: Any, train: Any, valid: Any = None, **options: Any) -> offmap.Guard:
    """`offmap.fit` without gradient steps and with few draws."""
    return offmap.fit(nets, train, valid, **{"solver": "closed-form", "draws": 8, "risk_draws": 8, **options})
