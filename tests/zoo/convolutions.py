"""Models made of convolutions of all kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.case import Case, Through, settle


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(4, 3, 2, dilation=2, bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip


def conv2d() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0)), nn.Tanh(), nn.Conv2d(3, 2, 2, dilation=2, bias=False),
        nn.Tanh(), nn.Conv2d(2, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2),
    )  # fmt: skip


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, (2, 3, 2), stride=(1, 1, 2), padding=(0, 1, 1), dilation=(2, 1, 1)), nn.Tanh(), nn.Flatten(),
        nn.Linear(36, 2),
    )  # fmt: skip


def batchnorm() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding="same", bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, stride=2),
        nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    net.train()
    for _ in range(3):
        net(torch.randn(8, 1, 6, 6))
    return net


def build_padded(layer: type[nn.Module]) -> nn.Module:
    """Every way to pad, one after the other."""
    modes = [layer(2, 2, 3, padding=1, padding_mode=mode) for mode in ("zeros", "reflect", "replicate", "circular")]
    return nn.Sequential(*modes, nn.Tanh(), layer(2, 1, 2, padding="same", dilation=3), nn.Flatten(), nn.LazyLinear(2))


def build_grouped() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.ConvTranspose1d(4, 2, 2), nn.Flatten(), nn.Linear(10, 2))


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False), nn.Conv2d(3, 4, 1), nn.GELU(),
        nn.Conv2d(4, 8, 2, stride=2, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip


def grouped3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(4, 2, 2, groups=2, stride=(2, 1, 1), padding_mode="circular", padding=1), nn.Tanh(), nn.Flatten(),
        nn.LazyLinear(2),
    )  # fmt: skip


def transposed1d() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), nn.Tanh(),
        nn.ConvTranspose1d(3, 2, 2, dilation=2, bias=False), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2),
    )  # fmt: skip


def transposed2d() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1), groups=2), nn.Tanh(),
        nn.ConvTranspose2d(6, 6, 2, groups=6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip


def transposed3d() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose3d(2, 2, (1, 2, 2), stride=(1, 2, 1), output_padding=(0, 1, 0)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)
    )


def groupnorm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv1d(4, 2, 2), nn.Flatten(), nn.Linear(6, 2))


def instancenorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, bias=False),
        nn.InstanceNorm2d(3, affine=True),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 2),
    )


def block() -> nn.Module:
    """A residual block with a projected skip, as in a ResNet."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.n2(s.c2(s.n1(s.c1(x)).relu()))
        return s.head((h + s.nskip(s.skip(x))).relu().mean((2, 3)))

    return Through(
        forward, c1=nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), n1=nn.BatchNorm2d(3),
        c2=nn.Conv2d(3, 3, 3, padding=1, bias=False), n2=nn.BatchNorm2d(3), skip=nn.Conv2d(2, 3, 1, stride=2, bias=False),
        nskip=nn.BatchNorm2d(3), head=nn.Linear(3, 2),
    )  # fmt: skip


def unet() -> nn.Module:
    """Down, up, and across: two logits for every pixel."""

    def forward(s: Any, x: Tensor) -> Tensor:
        fine = s.enter(x).relu()
        coarse = s.bottom(nn.functional.max_pool2d(fine, 2)).relu()
        return s.leave(torch.cat([fine, s.up(coarse)], 1))

    return Through(
        forward, enter=nn.Conv2d(1, 2, 3, padding=1), bottom=nn.Conv2d(2, 3, 3, padding=1),
        up=nn.ConvTranspose2d(3, 2, 2, stride=2), leave=nn.Conv2d(4, 2, 1),
    )  # fmt: skip


def twice() -> nn.Module:
    """One convolution in two places, under two sizes of image."""
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(conv, nn.Tanh(), nn.AvgPool2d(2), conv, nn.Flatten(), nn.Linear(8, 2))


CASES = (
    Case("root_conv", lambda: nn.Conv2d(2, 2, 3, padding=1), (2, 3, 4), positions=(3, 4),
         shows="the root is one Conv2d; per pixel"),
    Case("conv1d", conv1d, (2, 8), shows="Conv1d: stride, padding, dilation, no bias"),
    Case("conv2d", conv2d, (2, 5, 6), shows="Conv2d: sizes that differ by axis"),
    Case("conv3d", conv3d, (1, 4, 3, 4), shows="Conv3d: stride, padding, dilation"),
    Case("channels_last", lambda: conv2d().to(memory_format=torch.channels_last), (2, 5, 6),
         shows="kernels stored channels last"),
    Case("padding1d", lambda: settle(build_padded(nn.Conv1d), 2, 6), (2, 6),
         shows="zeros, reflect, replicate, circular, same; lazy Linear"),
    Case("padding2d", lambda: settle(build_padded(nn.Conv2d), 2, 4, 4), (2, 4, 4), shows="padding modes in two dimensions"),
    Case("padding3d", lambda: settle(build_padded(nn.Conv3d), 2, 2, 3, 2), (2, 2, 3, 2),
         shows="padding modes in three dimensions"),
    Case("grouped", build_grouped, (2, 6), blocks={"0.weight": 2}, shows="grouped Conv1d, ConvTranspose1d"),
    Case("depthwise", depthwise, (3, 5, 5), blocks={"0.weight": 3, "3.weight": 4},
         shows="depthwise, with and without multiplier"),
    Case("grouped3d", lambda: settle(grouped3d(), 4, 2, 2, 2), (4, 2, 2, 2), blocks={"0.weight": 2},
         shows="grouped Conv3d, circular"),
    Case("transposed1d", lambda: settle(transposed1d(), 2, 4), (2, 4),
         shows="ConvTranspose1d: stride, output_padding, dilation"),
    Case("transposed2d", transposed2d, (4, 2, 3), blocks={"0.weight": 2, "2.weight": 6},
         shows="ConvTranspose2d in groups, depthwise"),
    Case("transposed3d", lambda: settle(transposed3d(), 2, 2, 2, 2), (2, 2, 2, 2),
         shows="ConvTranspose3d: stride, output_padding"),
    Case("batchnorm", batchnorm, (1, 6, 6), shows="BatchNorm2d with statistics of its own"),
    Case("groupnorm", groupnorm, (2, 6), shows="GroupNorm"),
    Case("instancenorm", instancenorm, (1, 5, 5), shows="InstanceNorm2d, max pooling"),
    Case("block", block, (2, 4, 4), shows="a residual block with a projected skip"),
    Case("unet", unet, (1, 4, 4), positions=(4, 4), shows="down, up and across; a class per pixel"),
    Case("twice", twice, (2, 4, 4), shows="one convolution in two places"),
)  # fmt: skip
