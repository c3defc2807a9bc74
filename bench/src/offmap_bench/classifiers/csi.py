"""CSI (Tack et al., 2020), the variant with labels: images that are turned belong to other classes.

A contrast of two views draws images of one class and turn together, and apart from all others; a linear classifier of class and
turn reads the features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod, body_and_head

TURNS = 4


@dataclass(frozen=True)
class Config(TrainConfig):
    """Cosines are divided by `temperature`. Views have at least a share `crop` of the area (the paper's: 0.08)."""

    temperature: float = 0.07
    width: int = 128
    crop: float = 0.5
    jitter: float = 0.4


class Turned(nn.Module):
    """Features, a projection of them for the contrast, and logits of class c turned k times, at k·C + c."""

    def __init__(self, net: nn.Sequential, width: int) -> None:
        super().__init__()
        self.body, head = body_and_head(net)
        self.joint = nn.Linear(head.in_features, TURNS * head.out_features)
        self.projection = nn.Sequential(nn.Linear(head.in_features, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The mean over k of the logits of (c, k) for images turned k times: (B, ...) -> (B, C)."""
        logits = self.joint(self.body(turn(x))).unflatten(0, (TURNS, len(x))).unflatten(2, (TURNS, -1))
        return torch.stack([logits[k, :, k] for k in range(TURNS)]).mean(0)


def turn(x: Tensor) -> Tensor:
    """Turn by 0°, 90°, 180° and 270°: (B, K, S, S) -> (4·B, K, S, S)."""
    return torch.cat([x.rot90(k, (2, 3)) for k in range(TURNS)])


def view(x: Tensor, config: Config, random: torch.Generator) -> Tensor:
    """Crop each image at random, back to its size, and change its brightness."""
    area, light = torch.rand(2, len(x), generator=random, device="cpu")
    side = (config.crop + (1 - config.crop) * area).sqrt()
    centre = (1 - side)[:, None] * (2 * torch.rand(len(x), 2, generator=random, device="cpu") - 1)
    theta = torch.cat([side[:, None, None] * torch.eye(2, device="cpu"), centre[..., None]], 2).to(x)
    cropped = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
    return (cropped * (1 + config.jitter * (2 * light - 1)).to(x).view(-1, 1, 1, 1)).clamp(0, 1)


def contrast(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """−mean_i mean_{j ≠ i: y_j = y_i} log(exp s_ij / Σ_{a ≠ i} exp s_ia), s the cosines / τ: (B, D), (B,) -> a scalar.

    >>> contrast(torch.eye(4), torch.tensor([0, 0, 1, 1]), 1.0).exp()  # one of three others, all alike
    tensor(3.)
    """
    z, itself = F.normalize(z, dim=1), torch.eye(len(z), dtype=torch.bool, device=z.device)
    log_p = (z @ z.mT / temperature).masked_fill(itself, -torch.inf).log_softmax(1)
    alike = (y[:, None] == y) & ~itself
    return -(log_p.masked_fill(~alike, 0).sum(1) / alike.sum(1).clamp_min(1)).mean()


def csi_loss(net: Turned, x: Tensor, y: Tensor, config: Config, moment: Moment) -> Tensor:
    """The contrast of two views of all turns, and the cross-entropy of (class, turn), which teaches the linear layer alone."""
    classes = net.joint.out_features // TURNS
    turned, labels = turn(x).repeat(2, 1, 1, 1), torch.cat([y + classes * k for k in range(TURNS)]).repeat(2)
    features = net.body(view(turned, config, moment.random))
    read = F.cross_entropy(net.joint(features.detach()), labels)
    return contrast(net.projection(features), labels, config.temperature) + read


METHOD = TrainingMethod(Config, csi_loss, build=lambda net, config: Turned(net, config.width))
