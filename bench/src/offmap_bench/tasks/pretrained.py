"""Weights that others trained: given classifiers of CIFAR-10, and ResNet-50 without its last layer. No pickle is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.errors import ConfigError, DataError, FileError, nearest
from offmap_bench.tasks.download import Remote, data_folder, fetch
from offmap_bench.tasks.images import data_root

WEIGHTS = {f"cifar10_resnet{depth}": depth for depth in (20, 32, 56)}
"""Files of given nets, and the depth of the `nets.resnet.cifar_resnet` that they fit."""


def weights(name: str, folder: str | Path | None = None) -> dict[str, Tensor]:
    """The state of a trained net from `<name>.pt`, by default in `weights` below the folder that OFFMAP_DATA names.

    They go into a net with `load_state_dict`, for example `cifar_resnet(20)` for "cifar10_resnet20".
    """
    if folder is None and name not in WEIGHTS:
        raise ConfigError(f"Expected the name of trained weights to be {nearest(name, WEIGHTS)}, but got {name!r}.")
    path = (Path(folder) if folder is not None else data_root("weights/<name>.pt") / "weights") / f"{name}.pt"
    if not path.exists():
        raise FileError(f"Expected trained weights at {path}, but there is no such file. Put it there, or pass `folder=`.")
    state = load_tensors(path, f"a dict of tensors at {path}", FileError)
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise FileError(f"Expected a dict of tensors at {path}, but it holds something else. Save `net.state_dict()`.")
    return dict(state)


def load_tensors(path: Path, expected: str, error: type[Exception]) -> Any:
    """Read a file of `torch.save` without running code from it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as reason:  # whatever the bytes are, they are no weights
        words = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
        raise error(f"Expected {expected}, but it cannot be read: {words}") from reason


# ------------------------------------------------------------------------------------------------ ResNet-50

RESNET50 = Remote("https://download.pytorch.org/models/resnet50-0676ba61.pth", sha256="0676ba61")
"""Trained on ImageNet; files of this kind carry the beginning of their digest in their name."""

BLOCKS = (3, 4, 6, 3)
WIDENING = 4


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions and a way around them, named as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = WIDENING * width
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
        for stage, blocks in enumerate(BLOCKS):
            width = 64 << stage
            layers: list[nn.Module] = []
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, 2 if stage > 0 and block == 0 else 1))
                inputs = WIDENING * width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, h, w) -> (B, 2048)."""
        h = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        for stage in range(len(BLOCKS)):
            h = self.get_submodule(f"layer{stage + 1}")(h)
        return h.mean((2, 3))


def resnet50(path: str | Path | None = None) -> ResNet50:
    """The net with the weights of a torchvision file: by default `weights/resnet50-0676ba61.pth` in the data folder, downloaded
    to there if it is missing.
    """
    path = fetch(RESNET50, data_folder() / "weights" / RESNET50.url.rpartition("/")[2]) if path is None else Path(path)
    if not path.exists():
        raise DataError(f"Expected the weights of ResNet-50 at {path}, but there is no such file. Put {RESNET50.url} there.")
    state = load_tensors(path, f"the weights of ResNet-50 at {path}", DataError)
    with torch.device("meta"):
        net = ResNet50()
    net = net.to_empty(device="cpu").eval()
    shapes = {name: value.shape for name, value in net.state_dict().items()}
    weights = {name: value for name, value in state.items() if name in shapes} if isinstance(state, dict) else {}
    lost = [name for name, shape in shapes.items() if name not in weights or weights[name].shape != shape]
    lost = [name for name in lost if not name.endswith("num_batches_tracked")]  # not in older files, and of no use here
    if lost:
        raise DataError(
            f"Expected the weights of ResNet-50 at {path}, named as in torchvision, but {len(lost)} of them are missing or have "
            f"another shape, such as {lost[0]!r}."
        )
    net.load_state_dict(weights, strict=False)
    return net
