"""Trained weights of others, as plain tensors: files that could run code are not opened."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from offmap.errors import ConfigError, FileError, nearest
from offmap_bench.tasks.pixels import data_root

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
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes are, they are no weights
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileError(f"Expected a dict of tensors at {path}, but it cannot be read: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise FileError(f"Expected a dict of tensors at {path}, but it holds something else. Save `net.state_dict()`.")
    return dict(state)
