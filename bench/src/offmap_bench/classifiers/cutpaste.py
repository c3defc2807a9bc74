"""CutPaste (Li et al., 2021), made for defects of products: whole images are told from those with a pasted patch or scar.

Classes are not looked at. Scars have twice the paper's share of the side, at least a pixel: its images have 256 pixels a side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.detectors.input_distance import mahalanobis_distance, shrunk_covariance
from offmap_bench.classifiers.training import BLOCK, Moment, TrainConfig, TrainingMethod, body_and_head


@dataclass(frozen=True)
class Config(TrainConfig):
    """Ranges of a patch's share of the area and of a scar's shares of the side; the largest aspect ratio and change of light."""

    area: tuple[float, float] = (0.02, 0.15)
    aspect: float = 10 / 3
    scar_width: tuple[float, float] = (4 / 256, 32 / 256)
    scar_length: tuple[float, float] = (20 / 256, 50 / 256)
    jitter: float = 0.1


class Pasted(nn.Module):
    """Features, logits of the three kinds of image, and the Gaussian of the features of whole ones."""

    mean: Tensor
    covariance: Tensor

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, head = body_and_head(net)
        width, device = head.in_features, head.weight.device
        self.kinds = nn.Linear(width, 3, device=device)
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64, device=device))
        self.register_buffer("covariance", torch.eye(width, dtype=torch.float64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """√((h − m)ᵀ Σ⁻¹ (h − m)): (B, ...) -> (B,)."""
        return mahalanobis_distance(self.body(x), self.mean, self.covariance)


def paste(x: Tensor, source: Tensor, target: Tensor, size: Tensor, angle: Tensor, light: Tensor) -> Tensor:
    """Copy the box around `source` to `target`, turned by `angle` and times `light`: (B, K, H, W) -> the same.

    `source`, `target` and `size` are rows and columns of pixels, (B, 2); the others (B,).
    """
    height, width = x.shape[2:]
    down, right = torch.meshgrid(*(torch.arange(n, dtype=source.dtype, device=x.device) for n in (height, width)), indexing="ij")
    gap = torch.stack([down, right], 2).flatten(0, 1) - target[:, None]  # (B, H·W, 2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    inside_box = torch.stack([gap[..., 0] * cos + gap[..., 1] * sin, gap[..., 1] * cos - gap[..., 0] * sin], 2)
    inside = (inside_box.abs() <= size[:, None] / 2).all(2).view(-1, 1, height, width)
    row, column = (source[:, None] + inside_box).round().long().unbind(2)
    pixel = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    copied = x.flatten(2).gather(2, pixel[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return torch.where(inside, (copied * light.to(x)[:, None, None, None]).clamp(0, 1), x)


def damage(x: Tensor, config: Config, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """The images with a patch each, and with a scar each."""
    side = torch.tensor(x.shape[2:], dtype=torch.float32, device="cpu")

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(len(x), *shape, generator=random, device="cpu")

    def paste_at_random(size: Tensor, angle: Tensor) -> Tensor:
        size = size.clamp_min(1).minimum(side)
        source = (size - 1) / 2 + uniform(0, 1, 2) * (side - size)  # a whole box
        target, light = uniform(0, 1, 2) * (side - 1), uniform(1 - config.jitter, 1 + config.jitter)
        return paste(x, *(part.to(x.device) for part in (source, target, size, angle, light)))

    aspect = (uniform(-1, 1) * math.log(config.aspect)).exp()
    patch = (uniform(*config.area) * side.prod())[:, None].sqrt() * torch.stack([aspect.sqrt(), 1 / aspect.sqrt()], 1)
    scar = torch.stack([uniform(*config.scar_length) * side[0], uniform(*config.scar_width) * side[1]], 1)
    angle = uniform(-math.pi / 4, math.pi / 4)
    return paste_at_random(patch, torch.zeros(len(x))), paste_at_random(scar, angle)


def cutpaste_loss(net: Pasted, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The cross-entropy of three kinds: whole, with a patch, with a scar."""
    kinds = torch.arange(3, device=x.device).repeat_interleave(len(x))
    return F.cross_entropy(net.kinds(net.body(torch.cat([x, *damage(x, config, moment.random)]))), kinds)


@torch.no_grad()
def fit_gaussian(net: Pasted, x: Tensor, y: Tensor, config: Config) -> None:
    """The Gaussian of validation images, which training has not drawn together; Ledoit and Wolf's covariance."""
    features = torch.cat([net.body(part) for part in x.split(BLOCK)])
    net.mean.copy_(features.double().mean(0))
    net.covariance.copy_(shrunk_covariance(features))


METHOD = TrainingMethod(
    Config, cutpaste_loss, lambda net, x, config: net(x), lambda net, config: Pasted(net), settle=fit_gaussian, classes=False
)
