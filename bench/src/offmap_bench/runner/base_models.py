"""Trained base models, cached on disk: every method of a benchmark starts from the same nets."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from offmap.data import Batches, Place, Rows, as_batches, load_rows
from offmap.data.batch import take_rows
from offmap.integrations.nets import mlp
from offmap.likelihoods import Likelihood, infer
from offmap.maxwent.config import Runtime, override
from offmap.model.params import at, stack_models
from offmap.posterior.predictive import Sampled
from offmap.random import generator
from offmap_bench.cache import Entry, cache_folder, read_or_make
from offmap_bench.methods import anchored, deep_ensemble, negative_correlation, overall_diversity, repulsive
from offmap_bench.methods.competitor import Competitor
from offmap_bench.methods.stack import Training
from offmap_bench.tasks.task import Task

FORMAT = 2  # raised whenever the same recipe comes to give other nets
SEED_STEP = 1000  # between the seeds of two runs, so that a member has the same start in ensembles of any size

SILENT = Runtime(progress=False)
ENSEMBLES: dict[str, Competitor[Any, Sampled]] = {
    "deep_ensemble": deep_ensemble, "negative_correlation": negative_correlation, "overall_diversity": overall_diversity,
    "anchored": anchored, "repulsive": repulsive,
}  # fmt: skip
"""Methods that train nets of their own, from which others may start."""


@dataclass(frozen=True)
class Recipe:
    """How base models are trained: the paper's three layers of 100 ReLU units, all members together, by one of ENSEMBLES.

    Of several `candidates`, settings of a grid, the nets whose ensemble predicts the validation data best are kept. The last
    three fields do as the authors' code does.
    """

    hidden: Sequence[int] = (100, 100, 100)
    members: int = 5
    batch_size: int = 128
    dropout: float = 0.0
    training: Training = field(default_factory=deep_ensemble.Config)
    method: str = "deep_ensemble"
    candidates: tuple[Mapping[str, Any], ...] = ({},)
    raw_units: bool = False  # variances start at 1 in the unit that targets had in the file, not in their standard deviations
    full_batches: bool = False  # rows are repeated up to 10,000 before they are shuffled and cut, so that no batch is a remainder
    start_std: float | None = None  # weights and biases start at normal numbers of this σ; None: Glorot-uniform and 0


NETS = ("hidden", "batch_size", "raw_units", "full_batches", "start_std")
"""Fields of a recipe that a config may set, beside those of the method."""


@dataclass(frozen=True)
class Trained:
    """Trained members, the seconds that their training took when it was done, and the candidate that was chosen."""

    nets: list[nn.Module]
    seconds: float
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])


def models(task: Task, seed: int = 0, recipe: Recipe | None = None, folder: str | Path | None = None) -> list[nn.Module]:
    """Return the trained members for a task, read if they have been trained before."""
    return load_nets(task, seed, recipe, folder).nets


def load_nets(task: Task, seed: int = 0, recipe: Recipe | None = None, folder: str | Path | None = None) -> Trained:
    """Return the members with the time of their training. Two processes that need the same models at once both train them."""
    recipe = recipe or Recipe()
    nets = init_nets(task, seed, recipe)

    def train_members() -> Entry:
        begin = time.perf_counter()
        weights, chosen = train(nets, task, seed, recipe)
        header = {"task": task.name, "seed": seed, "recipe": asdict(recipe), "torch": str(torch.__version__), "chosen": chosen}
        return header | {"seconds": time.perf_counter() - begin}, weights

    name = f"{task.name.replace('/', '-')}-{seed}-{digest(task, seed, recipe)}.safetensors"
    path = Path(folder or cache_folder()) / "models" / name
    header, weights = read_or_make(path, train_members, stack_models(nets).mean)
    for member, net in enumerate(nets):
        net.load_state_dict(at(weights, member))
        net.eval()
    return Trained(nets, float(header["seconds"]), header.get("chosen", {}))


def init_nets(task: Task, seed: int, recipe: Recipe) -> list[nn.Module]:
    """Return untrained members: a start depends on the seed and the member's number alone."""
    seeds = range(SEED_STEP * seed, SEED_STEP * seed + recipe.members)
    nets = [mlp(task.inputs, task.outputs, hidden=recipe.hidden, dropout=recipe.dropout, seed=start) for start in seeds]
    with torch.no_grad():
        for net, start in zip(nets, seeds, strict=True):
            for name, parameter in net.named_parameters():
                if recipe.start_std is not None:
                    parameter.normal_(0.0, recipe.start_std, generator=generator(start, "init", name))
            if recipe.raw_units and task.likelihood == "gaussian":  # log σ² of the raw targets is 2·log(unit) more
                cast(nn.Linear, net[-1]).bias[task.outputs // 2 :] -= 2 * math.log(task.unit)
    return list(nets)


def train(nets: Sequence[nn.Module], task: Task, seed: int, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights of the members, {name: (M, ...)}, all candidates in one stack, and the one of lowest validation NLL."""
    rows, valid, likelihood = prepare(nets, task, recipe.batch_size, repeats(task, recipe))
    configs = [override(recipe.training, candidate) for candidate in recipe.candidates]
    fits: list[Sampled] = ENSEMBLES[recipe.method].fit_grid(
        nets, rows, valid, likelihood=likelihood, configs=configs, seed=seed, runtime=SILENT
    )
    best = 0
    if len(fits) > 1:
        risks = [float(likelihood.predictive_nll(fit.outputs(valid.inputs, 1), valid.targets).mean()) for fit in fits]
        best = min(range(len(fits)), key=lambda k: math.inf if math.isnan(risks[k]) else risks[k])
    return dict(fits[best].weights), dict(recipe.candidates[best])


def prepare(nets: Sequence[nn.Module], task: Task, batch_size: int, repeats: int = 1) -> tuple[Batches, Rows, Likelihood]:
    """Return batches to train such nets on, validation rows, and the likelihood of their outputs."""
    place, rows = Place.of(nets[0]), task.train
    if repeats > 1:
        copies = torch.arange(len(rows[1])).repeat(repeats)
        rows = take_rows(rows[0], copies), rows[1][copies]
    train = as_batches(rows, place, name="train", batch_size=batch_size)
    return train, load_rows(as_batches(task.valid, place, name="valid")), likelihood_of(task, nets[0])


def repeats(task: Task, recipe: Recipe) -> int:
    """Return how often an epoch has every row."""
    return math.ceil(10_000 / len(task.train[1])) if recipe.full_batches else 1


def likelihood_of(task: Task, net: nn.Module) -> Likelihood:
    """Return the task's likelihood for the outputs of such a net."""
    return infer(net(task.valid[0]).detach(), task.valid[1], task.likelihood)


def as_predictive(nets: Sequence[nn.Module], task: Task) -> Sampled:
    """Return trained nets as they are, nothing random."""
    stacked = stack_models(nets)
    weights = stacked.mean | stacked.fixed
    return Sampled(SILENT.model(stacked.module, weights, task.valid[0]), weights)


def digest(task: Task, seed: int, recipe: Recipe) -> str:
    """Return 16 hexadecimal digits of all that the nets depend on: the data themselves, the seed and the recipe."""
    asked = {name: value for name, value in asdict(recipe).items() if value is not None and value is not False}
    header: dict[str, Any] = {"format": FORMAT, "seed": seed, "recipe": asked}
    header |= {"task": task.name, "likelihood": task.likelihood, "outputs": task.outputs}
    return digest_with(json.dumps(header, sort_keys=True), *task.train, *task.valid)[:16]


def digest_with(header: str, *tensors: Tensor) -> str:
    """Return the SHA-256 of a text and of shapes, dtypes and content of tensors."""
    total = hashlib.sha256(header.encode())
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.contiguous().numpy().data)
    return total.hexdigest()
