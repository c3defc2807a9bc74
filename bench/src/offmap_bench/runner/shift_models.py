"""The trained model of every task with a shift, cached on disk: what a user would have trained before fitting a guard."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from offmap.errors import ConfigError
from offmap.integrations.nets import mlp
from offmap_bench.cache import Entry, cache_folder, read_or_make
from offmap_bench.nets.encoders import EncoderClassifier, ImageEncoder, SentenceEncoder
from offmap_bench.nets.speech import speech_net
from offmap_bench.runner.base_models import SEED_STEP, digest_with, load_nets
from offmap_bench.runner.images import load_classifier, pretrained_name
from offmap_bench.tasks.catalog import task as task_of
from offmap_bench.tasks.task import Pair, Task

FORMAT = 1  # raised whenever the same training and data come to give other models


@dataclass(frozen=True)
class Training:
    """AdamW on the cross-entropy. The state of lowest validation loss is kept; `patience` epochs without a lower one end it."""

    epochs: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-2
    batch_size: int = 64
    patience: int = 10


def load_model(task: Task, seed: int = 0, folder: str | Path | None = None) -> nn.Module:
    """Return the trained model of a task in evaluation mode, read if it has been trained before."""
    for pattern, load in MODELS.items():
        if fnmatchcase(task.name, pattern):
            return load(task, seed, Path(folder or cache_folder())).eval()
    raise ConfigError(f"Expected a task with a model, of the kinds {', '.join(MODELS)}, but got {task.name!r}.")


def load_trained(net: nn.Module, task: Task, seed: int, folder: Path, training: Training) -> nn.Module:
    """Return the net with trained weights, read or made."""
    header: dict[str, Any] = {"format": FORMAT, "seed": seed, "training": asdict(training), "net": str(net)}
    key = digest_with(json.dumps(header, sort_keys=True), *task.train, *task.valid)[:16]

    def train() -> Entry:
        train_model(net, task.train, task.valid, training, seed)
        return header | {"task": task.name}, net.state_dict()

    path = folder / "models" / f"{task.name.replace('/', '-')}-{seed}-{key}.safetensors"
    net.load_state_dict(dict(read_or_make(path, train, net.state_dict())[1]))
    return net


def train_model(net: nn.Module, train: Pair, valid: Pair, training: Training, seed: int) -> None:
    """Train a classifier in place, and leave it in evaluation mode; what is random depends on the seed alone."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    random = torch.Generator().manual_seed(seed)
    best, state, waited = math.inf, copy.deepcopy(net.state_dict()), 0
    for _ in range(training.epochs):
        net.train()
        for rows in torch.randperm(len(train[1]), generator=random).split(training.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(net(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            loss = float(F.cross_entropy(net(valid[0]), valid[1]))
        best, state, waited = (loss, copy.deepcopy(net.state_dict()), 0) if loss < best else (best, state, waited + 1)
        if waited == training.patience:
            break
    net.load_state_dict(state)


def load_head(task: Task, seed: int, folder: Path, **net: Any) -> nn.Module:
    return load_trained(mlp(task.inputs, task.outputs, seed=SEED_STEP * seed, **net), task, seed, folder, Training())


def load_speech_net(task: Task, seed: int, folder: Path) -> nn.Module:
    net, training = speech_net(task.outputs, seed=SEED_STEP * seed), Training(epochs=20, lr=3e-3, batch_size=32, patience=5)
    return load_trained(net, task, seed, folder, training)


def load_whole(task: Task, seed: int, folder: Path, encoder: type[nn.Module]) -> nn.Module:
    """Return an encoder with the head of the task on its features."""
    name = f"{task.name.removesuffix('/encoder')}/head"
    return EncoderClassifier(encoder(), load_model(task_of(name, seed), seed, folder))


def load_image_net(task: Task, seed: int, folder: Path) -> nn.Module:
    """Return a given net, or one that is trained on all images of a task of which `task` may have some."""
    whole = task_of(task.name.removesuffix("/medium"), seed) if pretrained_name(task) is None else task
    return load_classifier(whole, "plain", {}, seed, folder=folder)[0].net


MODELS: dict[str, Callable[[Task, int, Path], nn.Module]] = {
    **dict.fromkeys(("uci/*", "tables/*"), lambda task, seed, folder: load_nets(task, seed, folder=folder).nets[0]),
    "text/clinc150/head": partial(load_head, hidden=(256,)),
    "text/clinc150/encoder": partial(load_whole, encoder=SentenceEncoder),
    "sound/*": load_speech_net,
    "images/caltech101/head": partial(load_head, hidden=()),
    "images/caltech101": partial(load_whole, encoder=ImageEncoder),
    "images/*": load_image_net,
}
"""How the model of a task is loaded, by patterns of names; the first counts."""
