"""DRAEM (Zavrtanik et al., 2021), made for defects of products: one net repairs images, another finds what had to be repaired.

Classes are not looked at. Defects are fractals in blots of Perlin noise; the paper takes the textures of DTD, which are OOD
images here. Nets and the window of the score are smaller, as images are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.pixmix import FRACTALS, fractals
from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod


@dataclass(frozen=True)
class Config(TrainConfig):
    """Channels of the first layer, the power γ of the focal loss, and the window over which the score is averaged."""

    width: int = 8
    gamma: float = 2.0
    window: int = 3


def convolve(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Scales(nn.Module):
    """Three scales down and up again, with ways around the lower ones or without: (B, inputs, H, W) -> (B, outputs, H, W)."""

    def __init__(self, inputs: int, outputs: int, width: int, *, around: bool) -> None:
        super().__init__()
        self.around = around
        self.down = nn.ModuleList([convolve(inputs, width), convolve(width, 2 * width), convolve(2 * width, 4 * width)])
        self.up = nn.ModuleList([convolve((4 + 2 * around) * width, 2 * width), convolve((2 + around) * width, width)])
        self.last = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        h = self.down[2](F.max_pool2d(second, 2))
        for layer, beside in zip(self.up, (second, first), strict=True):
            h = F.interpolate(h, size=list(beside.shape[2:]), mode="bilinear", align_corners=False)
            h = layer(torch.cat([h, beside], 1) if self.around else h)
        return self.last(h)


class Repairer(nn.Module):
    """The repaired image, and for every pixel the logit that it was not in order. Of the net only its channels count."""

    def __init__(self, net: nn.Sequential, width: int) -> None:
        super().__init__()
        channels = next(layer.in_channels for layer in net.modules() if isinstance(layer, nn.Conv2d))
        self.repair = Scales(channels, channels, width, around=False)
        self.find = Scales(2 * channels, 1, width, around=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, H, W) -> (B, K, H, W), (B, 1, H, W)."""
        repaired = self.repair(x)
        return repaired, self.find(torch.cat([repaired, x], 1))


def perlin(rows: int, height: int, width: int, cells: tuple[int, int], random: torch.Generator) -> Tensor:
    """Noise of random slopes at the corners of cells, blended in between by 6t⁵ − 15t⁴ + 10t³: (B, H, W)."""
    angle = 2 * torch.pi * torch.rand(rows, cells[0] + 1, cells[1] + 1, generator=random, device="cpu")
    down, right = (torch.arange(n, device="cpu") * count / n for n, count in ((height, cells[0]), (width, cells[1])))
    total = torch.zeros(rows, height, width)
    for a, b in product((0, 1), (0, 1)):
        slope = angle[:, (down.long() + a)[:, None], (right.long() + b)[None]]
        dy, dx = (down.frac() - a)[:, None], (right.frac() - b)[None]
        weight = 1.0
        for t in (1 - dy.abs(), 1 - dx.abs()):
            weight = weight * (6 * t**5 - 15 * t**4 + 10 * t**3)
        total += weight * (slope.cos() * dy + slope.sin() * dx)
    return total * 2**0.5


def damage(x: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Half of the images with fractals of some opacity in blots; and the blots, (B, 1, H, W)."""
    scale = torch.randint(0, 4, (2,), generator=random, device="cpu").tolist()
    noise = perlin(len(x), x.shape[2], x.shape[3], (2 ** scale[0], 2 ** scale[1]), random)
    chosen = torch.randint(0, FRACTALS, (len(x),), generator=random, device="cpu")
    opacity, coin = torch.rand(2, len(x), 1, 1, 1, generator=random, device="cpu")
    blots = ((noise[:, None] > 0.5) & (coin < 0.5)).to(x)
    opacity = (0.1 + 0.9 * opacity).to(x)
    return x + blots * opacity * (fractals(x.shape[1], x.shape[2])[chosen].to(x) - x), blots


def ssim(x: Tensor, z: Tensor) -> Tensor:
    """Structural similarity (Wang et al., 2004) of images from 0 to 1, windows of 11 pixels, σ = 1.5; 1 where they are equal."""
    line = torch.exp(-(torch.arange(-5.0, 6.0, device=x.device, dtype=x.dtype) ** 2) / 4.5)
    window = (line[:, None] * line / line.sum() ** 2).expand(x.shape[1], 1, -1, -1)

    def average(values: Tensor) -> Tensor:
        return F.conv2d(values, window, padding=5, groups=x.shape[1])

    mx, mz = average(x), average(z)
    vx, vz, both = average(x * x) - mx**2, average(z * z) - mz**2, average(x * z) - mx * mz
    return ((2 * mx * mz + 1e-4) * (2 * both + 9e-4) / ((mx**2 + mz**2 + 1e-4) * (vx + vz + 9e-4))).mean()


def focal_loss(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    """−(1 − p)^γ·log p, p the probability of what is true: the mean over all pixels."""
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return ((1 - (-loss).exp()) ** gamma * loss).mean()


def draem_loss(net: Repairer, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """(repaired − x)² + 1 − SSIM(repaired, x) + the focal loss of the blots."""
    damaged, blots = damage(x, moment.random)
    repaired, logits = net(damaged)
    return (repaired - x).square().mean() + 1 - ssim(repaired, x) + focal_loss(logits, blots, config.gamma)


def draem_score(net: Repairer, x: Tensor, config: Config) -> Tensor:
    """The largest mean probability of a defect in a window, (B,)."""
    return F.avg_pool2d(net(x)[1].sigmoid(), config.window, 1, config.window // 2).amax((1, 2, 3))


METHOD = TrainingMethod(Config, draem_loss, draem_score, lambda net, config: Repairer(net, config.width), classes=False)
