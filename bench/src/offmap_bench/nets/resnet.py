"""Residual nets for small images: 6n + 2 layers in three stages, each with half the side and twice the channels of the last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.errors import ConfigError


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


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of colours from 0 to 1, by which widely shared image nets standardise."""


class PlainBlock(nn.Module):
    """As `Block`, but the way around has no weights: every second pixel, and zeros for the channels that are new."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.stride, self.new = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) -> (B, outputs, h / stride, w / stride)."""
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        around = x[:, :, :: self.stride, :: self.stride]
        return F.relu(h + F.pad(around, (0, 0, 0, 0, self.new, self.new)))


class CifarResNet(nn.Module):
    """He et al.'s nets for CIFAR-10, named as in widely shared weights. Pixels are from 0 to 1 and standardised inside."""

    def __init__(self, depth: int = 20, classes: int = 10, *, width: int = 16) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, blocks)
        self.layer2 = self._stage(width, 2 * width, blocks)
        self.layer3 = self._stage(2 * width, 4 * width, blocks)
        self.linear = nn.Linear(4 * width, classes)
        # not part of the state: files of weights have none
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(MEAN, device=torch.get_default_device()).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD, device=torch.get_default_device()).view(3, 1, 1), persistent=False)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
        first = PlainBlock(inputs, outputs, 1 if inputs == outputs else 2)
        return nn.Sequential(first, *(PlainBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> (B, classes)."""
        h = F.relu(self.bn1(self.conv1((x - self.mean) / self.std)))
        return self.linear(self.layer3(self.layer2(self.layer1(h))).mean((2, 3)))


def cifar_resnet(depth: int = 20, classes: int = 10, *, width: int = 16, seed: int = 0) -> CifarResNet:
    """He-initialised by `seed`, the caller's random state left alone; `depth` is 6n + 2, such as 20, 32 or 56.

    >>> cifar_resnet(8, width=4).eval()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in cifar_resnet(20).parameters())
    269722
    """
    if depth < 8 or depth % 6 != 2:
        raise ConfigError(f"Expected `depth` to be 6n + 2, such as 20, 32 or 56, but got {depth!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = CifarResNet(depth, classes, width=width)
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
    return net


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions and a way around them, named as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.downsample = around if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) -> (B, 4·width, h / stride, w / stride)."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return F.relu(h + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """Four stages of bottlenecks, then the mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for stage, blocks in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            layers: list[nn.Module] = []
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, 2 if stage > 0 and block == 0 else 1))
                inputs = 4 * width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, h, w) -> (B, 2048)."""
        h = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        for stage in range(4):
            h = self.get_submodule(f"layer{stage + 1}")(h)
        return h.mean((2, 3))
