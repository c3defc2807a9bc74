"""Residual nets for small images: 6n + 2 layers in three stages, each with half the side and twice the channels of the last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 × 3 convolutions and a way around them; where the shape changes, the way around is a 1 × 1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.around = nn.Identity() if same else around

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) -> (B, outputs, h / stride, w / stride)."""
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.around(x))


def resnet(classes: int, *, channels: int = 3, width: int = 16, blocks: int = 3, seed: int = 0) -> nn.Sequential:
    """He-initialised by `seed`, the caller's random state left alone; three blocks a stage and width 16 are ResNet-20.

    >>> resnet(10, blocks=1, width=4).eval()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in resnet(10).parameters())
    272474
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for stage in range(3):
            for place in range(blocks):
                first = place == 0 and stage > 0
                size = width << stage
                layers.append(Block(size // 2 if first else size, size, 2 if first else 1))
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 2, classes))
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
