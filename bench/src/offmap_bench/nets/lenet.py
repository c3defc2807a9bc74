"""LeNet-5 for small grey images, with ReLU and max-pooling."""

from __future__ import annotations

import torch
from torch import nn


def lenet(classes: int = 10, *, channels: int = 1, side: int = 28, seed: int = 0) -> nn.Sequential:
    """Two convolutions and three linear layers, torch's initialisation by `seed`, the caller's random state left alone.

    >>> lenet()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    wide = (side // 2 - 4) // 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * wide * wide, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(),
            nn.Linear(84, classes),
        )  # fmt: skip
