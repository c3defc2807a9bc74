"""Trained models, remembered: every method of a benchmark starts from the same nets."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from offmap.data import Batches, Place, Rows, as_batches, load_rows
from offmap.integrations.nets import mlp
from offmap.io.atomic import cache_folder, write_whole
from offmap.likelihoods import Likelihood, infer
from offmap.model.params import at, sealed, unsealed
from offmap.model.select import stack_models
from offmap.posterior.predictive import Sampled
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import deep_ensemble
from offmap_bench.tasks.task import Task

logger = logging.getLogger("offmap")

FORMAT = 1
"""Raised whenever the same recipe comes to give other nets."""

APART = 1000
"""Seeds of the starts lie this far apart, so that a member has the same start in ensembles of any size."""


@dataclass(frozen=True)
class Recipe:
    """How models are made: the paper's three layers of 100 ReLU units, trained together."""

    hidden: Sequence[int] = (100, 100, 100)
    members: int = 5
    batch_size: int = 128
    dropout: float = 0.0
    training: deep_ensemble.Config = field(default_factory=deep_ensemble.Config)


@dataclass(frozen=True)
class Trained:
    """Trained members, how many seconds their training took when it was done, and what it chose."""

    nets: list[nn.Module]
    seconds: float
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Way:
    """Another way to train than plainly: all that it depends on, and from untrained members to weights and what was chosen."""

    told: dict[str, Any]
    train: Callable[[Sequence[nn.Module]], tuple[dict[str, Tensor], dict[str, Any]]]


def models(task: Task, seed: int = 0, recipe: Recipe | None = None, folder: str | Path | None = None) -> list[nn.Module]:
    """The trained members for a task, read if they have been trained before, else trained and kept."""
    return trained(task, seed, recipe, folder).nets


def trained(
    task: Task, seed: int = 0, recipe: Recipe | None = None, folder: str | Path | None = None, *, way: Way | None = None
) -> Trained:
    """The members with the time of their training, which is kept with them; trained plainly, unless in another `way`.

    Two processes that need the same models at once both train them; the file is whole at any time.
    """
    recipe = recipe or Recipe()
    name = f"{task.name.replace('/', '-')}-{seed}-{digest(task, seed, recipe, way)}.safetensors"
    path = Path(folder or cache_folder()) / "models" / name
    nets = starts(task, seed, recipe)
    found = _read(path, stack_models(nets).mean)
    if found is None:
        begin = time.perf_counter()
        weights, chosen = (train(nets, task, seed, recipe), dict[str, Any]()) if way is None else way.train(nets)
        told: dict[str, Any] = {
            "task": task.name, "seed": seed, "recipe": asdict(recipe), "torch": str(torch.__version__),
            "seconds": time.perf_counter() - begin, "chosen": chosen,
        }  # fmt: skip
        found = weights, told
        write_whole(path, save({n: w.contiguous() for n, w in weights.items()}, {"offmap": sealed(json.dumps(told), weights)}))
    for member, net in enumerate(nets):
        net.load_state_dict(at(found[0], member))
        net.eval()
    return Trained(nets, float(found[1]["seconds"]), found[1].get("chosen", {}))


def starts(task: Task, seed: int, recipe: Recipe) -> list[nn.Module]:
    """Untrained members: a start depends on the seed and the member's number alone."""
    return [
        mlp(task.inputs, task.outputs, hidden=recipe.hidden, dropout=recipe.dropout, seed=APART * seed + member)
        for member in range(recipe.members)
    ]


def train(nets: Sequence[nn.Module], task: Task, seed: int, recipe: Recipe) -> dict[str, Tensor]:
    """All members in one pass, each with its own best state on the validation data: {name: (M, ...)}."""
    rows, held, law = material(nets, task, recipe)
    runtime = Runtime(progress=False)
    return deep_ensemble.fit(nets, rows, held, likelihood=law, config=recipe.training, seed=seed, runtime=runtime).weights


def material(nets: Sequence[nn.Module], task: Task, recipe: Recipe) -> tuple[Batches, Rows, Likelihood]:
    """What such nets are trained on: batches, validation rows and the likelihood."""
    place = Place.of(nets[0])
    rows = as_batches(task.train, place, name="train", batch_size=recipe.batch_size)
    held = load_rows(as_batches(task.valid, place, name="valid"))
    return rows, held, infer(nets[0](held.inputs).detach(), held.targets, task.likelihood)


def plain(nets: Sequence[nn.Module], task: Task) -> Sampled:
    """Trained nets as they are, nothing random."""
    centred = stack_models(nets)
    weights = centred.mean | centred.fixed
    return Sampled(Runtime(progress=False).model(centred.net, weights, task.valid[0]), weights)


def digest(task: Task, seed: int, recipe: Recipe, way: Way | None = None) -> str:
    """What the nets depend on, in 16 hexadecimal digits: the data themselves, the seed, the recipe and the way, if not plain."""
    told = {
        "format": FORMAT, "task": task.name, "likelihood": task.likelihood, "outputs": task.outputs, "seed": seed,
        "recipe": asdict(recipe),
    } | ({} if way is None else {"way": way.told})  # fmt: skip
    total = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for tensor in (*task.train, *task.valid):
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def _read(path: Path, like: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Weights of the members, {name: (M, ...)}, and what is told of them; None when there are none, or the file is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            told = json.loads(unsealed(file.metadata()["offmap"], weights))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        logger.warning("The cached models at %s cannot be read (%s) and are trained again.", path, error)
        return None
    if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in like.items()}:
        logger.warning("The cached models at %s have other shapes than the nets and are trained again.", path)
        return None
    return weights, told
