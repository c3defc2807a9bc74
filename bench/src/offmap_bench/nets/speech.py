"""A small convolutional net for spectrograms."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def speech_net(classes: int, *, width: int = 16, seed: int = 0) -> nn.Sequential:
    """Four convolutions with batch norm, the mean over all places, and a linear layer; the caller's random state is left alone.

    >>> speech_net(7).eval()(torch.zeros(2, 1, 40, 48)).shape
    torch.Size([2, 7])
    """
    widths = (1, width, width, 2 * width, 2 * width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for place, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if place < 3 else []
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
