"""Trained image classifiers, remembered: one file for each net, so that a run that is stopped goes on with the next."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from offmap.io.atomic import cache_folder, write_whole
from offmap.model.params import sealed, unsealed
from offmap_bench.classifiers.catalog import WAYS
from offmap_bench.classifiers.training import Learned, TrainConfig, train
from offmap_bench.nets.lenet import lenet
from offmap_bench.nets.resnet import cifar_resnet, resnet
from offmap_bench.runner.base_models import APART
from offmap_bench.tasks.task import Task
from offmap_bench.tasks.weights import WEIGHTS, weights

logger = logging.getLogger("offmap")

FORMAT = 1
"""Raised whenever the same way and data come to give other nets."""

SCHOOLS: dict[str, dict[str, Any]] = {"grey": {"epochs": 5}, "colour": {"epochs": 15, "augment": True}}
"""How nets of grey and of coloured images are trained unless a plan says otherwise."""


GIVEN = tuple(name.removeprefix("cifar10_") for name in WEIGHTS)
"""Names of given nets."""


def given(task: Task) -> str | None:
    """The name of the given net that belongs to a task, such as "resnet20"; None: nets are trained."""
    return next((part for part in task.name.split("/") if part.startswith("resnet")), None)


def given_net(name: str, classes: int) -> nn.Module:
    """A given net by its name, such as "resnet20"."""
    net = cifar_resnet(int(name.removeprefix("resnet")), classes).eval()
    net.load_state_dict(weights(f"cifar10_{name}"))
    return net


def untrained(task: Task, seed: int) -> nn.Sequential:
    """A LeNet for grey images; for coloured ones a residual net of eight layers."""
    channels, side = task.train[0].shape[1:3]
    return lenet(task.outputs, side=side, seed=seed) if channels == 1 else resnet(task.outputs, blocks=1, seed=seed)


def schooling(way: str, settings: dict[str, Any], channels: int) -> Any:
    """The configuration of a way, from settings that state differences only."""
    return replace(WAYS[way].config(), **{**SCHOOLS["grey" if channels == 1 else "colour"], **settings})


def learned(
    task: Task, way: str, settings: dict[str, Any], seed: int, member: int = 0, folder: Path | None = None
) -> tuple[Learned, float]:
    """The classifier, read if it has been trained before, else trained and kept; and how many seconds its training took."""
    named = given(task)
    if named is not None:
        return Learned(WAYS["plain"], given_net(named, task.outputs), TrainConfig()), 0.0
    own, config = APART * seed + member, schooling(way, settings, task.train[0].shape[1])
    told = {"format": FORMAT, "way": way, "config": asdict(config), "seed": own}
    key = hashlib.sha256(json.dumps([told, digest(task)], sort_keys=True).encode()).hexdigest()[:16]
    path = (folder or cache_folder()) / "classifiers" / f"{task.name.replace('/', '-')}-{way}-{own}-{key}.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(own)
        net = WAYS[way].build(untrained(task, own), config)
    seconds = read(path, net)
    if seconds is None:
        begin = time.process_time()
        train(WAYS[way], net, task.train, task.valid, config=config, seed=own)
        seconds = time.process_time() - begin
        state = {name: value.contiguous() for name, value in net.state_dict().items()}
        header = json.dumps({**told, "task": task.name, "seconds": seconds})
        write_whole(path, save(state, {"offmap": sealed(header, state)}))
    return Learned(WAYS[way], net.eval(), config), seconds


def read(path: Path, net: nn.Module) -> float | None:
    """Put a kept state into the net and give the seconds of its training; None when there is none, or the file is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            told = json.loads(unsealed(file.metadata()["offmap"], state))
        net.load_state_dict(state)
        return float(told["seconds"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        logger.warning("The cached classifier at %s cannot be read (%s) and is trained again.", path, error)
        return None


def digest(task: Task) -> str:
    """Of the data that a net is trained on."""
    return _digest(task.outputs, *task.train, *task.valid)


@lru_cache(maxsize=1)
def _digest(outputs: int, *tensors: Tensor) -> str:
    total = hashlib.sha256(str(outputs).encode())
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.contiguous().numpy().data)
    return total.hexdigest()
