"""CutMix (Yun et al., 2019): a box of one image is pasted into another, and the answer is shared by area."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from offmap_bench.classifiers.mixup import shared_loss
from offmap_bench.classifiers.training import Moment, TrainConfig, TrainingMethod

Box = tuple[slice, slice]


def box(height: int, width: int, random: torch.Generator) -> Box:
    """Of a share of the area that is uniform from 0 to 1, around a uniform centre, cut at the edges."""
    share, down, right = torch.rand(3, generator=random, device="cpu").tolist()
    side = math.sqrt(1 - share) / 2
    rows, columns = (
        slice(max(0, round((centre - side) * length)), min(length, round((centre + side) * length)))
        for centre, length in ((down, height), (right, width))
    )
    return rows, columns


def paste_box(x: Tensor, order: Tensor, region: Box) -> tuple[Tensor, float]:
    """Images with the box of x[order], and the share of x that is left: (B, K, H, W) -> the same."""
    mixed = x.clone()
    mixed[:, :, region[0], region[1]] = x[order][:, :, region[0], region[1]]
    return mixed, 1 - mixed[0, 0, region[0], region[1]].numel() / mixed[0, 0].numel()


def loss(net: nn.Module, x: Tensor, y: Tensor, config: TrainConfig, moment: Moment) -> Tensor:
    """Every image gets a box of another one of the batch, all the same box."""
    order = torch.randperm(len(x), generator=moment.random, device="cpu").to(x.device)
    mixed, share = paste_box(x, order, box(x.shape[2], x.shape[3], moment.random))
    return shared_loss(net(mixed), y, order, share)


TRAINING = TrainingMethod(loss=loss)
