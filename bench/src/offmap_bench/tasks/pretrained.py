"""Weights that others trained: given classifiers of CIFAR-10, and ResNet-50 without its last layer. No pickle is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offmap.errors import DataError, FileError
from offmap_bench.nets.resnet import ResNet50
from offmap_bench.tasks.download import data_folder, fetch
from offmap_bench.tasks.task import check_name, data_root

WEIGHTS = {f"cifar10_resnet{depth}": depth for depth in (20, 32, 56)}
"""Files of given nets, and the depth of the `nets.resnet.cifar_resnet` that they fit."""


def weights(name: str, folder: str | Path | None = None) -> dict[str, Tensor]:
    """The state of a trained net from `<name>.pt`, by default in `weights` below the folder that OFFMAP_DATA names.

    They go into a net with `load_state_dict`, for example `cifar_resnet(20)` for "cifar10_resnet20".
    """
    if folder is None:
        check_name("the name of trained weights to be", name, WEIGHTS)
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


RESNET50 = "https://download.pytorch.org/models/resnet50-0676ba61.pth"
RESNET50_SHA256 = "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a"
"""ResNet-50, trained on ImageNet. The name of the file carries the first eight digits of its digest."""


def resnet50_path() -> Path:
    """Return where the weights of ResNet-50 are looked for."""
    return data_folder() / "weights" / RESNET50.rpartition("/")[2]


def resnet50(path: str | Path | None = None) -> ResNet50:
    """The net with the weights of a torchvision file: by default `weights/resnet50-0676ba61.pth` in the data folder, downloaded
    to there if it is missing.
    """
    path = fetch(RESNET50, resnet50_path(), sha256=RESNET50_SHA256) if path is None else Path(path)
    if not path.exists():
        raise DataError(f"Expected the weights of ResNet-50 at {path}, but there is no such file. Put {RESNET50} there.")
    state = load_tensors(path, f"the weights of ResNet-50 at {path}", DataError)
    with torch.device("meta"):
        net = ResNet50()
    net = net.to_empty(device="cpu").eval()
    shapes = {name: value.shape for name, value in net.state_dict().items()}
    state = state if isinstance(state, dict) else {}
    weights = {name: state[name] for name, shape in shapes.items() if name in state and state[name].shape == shape}
    lost = [name for name in shapes if name not in weights and not name.endswith("num_batches_tracked")]  # of no use here
    if lost:
        raise DataError(
            f"Expected weights of ResNet-50 at {path}, but {len(lost)} are missing or of another shape, such as {lost[0]!r}."
        )
    net.load_state_dict(weights, strict=False)
    return net
