"""Methods on image classifiers: post-hoc detectors that share one pass of a net, guards, and classifiers trained otherwise."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offmap.atomic import cache_folder
from offmap.detectors.posthoc import DETECTORS, FitData, find_method, prepare_fit_data
from offmap.detectors.posthoc import fit_detector as fit_posthoc
from offmap.ensemble import combine
from offmap.errors import ConfigError, nearest
from offmap.fit import fit
from offmap.guard import Guard
from offmap.maxwent import config as maxwent
from offmap.maxwent.config import override
from offmap.posterior.predictive import Scorer
from offmap_bench.classifiers.losses import TRAININGS
from offmap_bench.classifiers.training import Ensemble, Learned, TrainConfig, train
from offmap_bench.nets.lenet import lenet
from offmap_bench.nets.resnet import cifar_resnet, resnet
from offmap_bench.runner.base_models import SEED_STEP, read_cached, update_digest, write_cached
from offmap_bench.runner.context import FitContext, Fitted, Method, Settings, config_of, fill_defaults
from offmap_bench.tasks.pretrained import WEIGHTS, weights
from offmap_bench.tasks.task import Pair, Task

FORMAT = 2
"""Raised whenever the same training and data come to give other nets."""

TIMED = 500
"""Images whose scoring is timed."""

DEFAULTS: dict[str, dict[str, Any]] = {"grey": {"epochs": 5}, "colour": {"epochs": 15, "augment": True}}
"""How nets of grey and of coloured images are trained unless a plan says otherwise."""

PRETRAINED = tuple(name.removeprefix("cifar10_") for name in WEIGHTS)
"""Names of nets with given weights."""

NET_KEYS = frozenset(f.name for f in fields(TrainConfig))
"""Settings that say how nets are trained."""

Result = TypeVar("Result")


# ------------------------------------------------------------------------------------------------ nets


def pretrained_name(task: Task) -> str | None:
    """The name of the pretrained net that belongs to a task, such as "resnet20"; None: nets are trained."""
    return next((part for part in task.name.split("/") if part.startswith("resnet")), None)


def pretrained_net(name: str, classes: int) -> nn.Module:
    """A pretrained net by its name, such as "resnet20"."""
    net = cifar_resnet(int(name.removeprefix("resnet")), classes).eval()
    net.load_state_dict(weights(f"cifar10_{name}"))
    return net


def untrained(task: Task, seed: int) -> nn.Sequential:
    """A LeNet for grey images; for coloured ones a residual net of eight layers."""
    channels, side = task.train[0].shape[1:3]
    return lenet(task.outputs, side=side, seed=seed) if channels == 1 else resnet(task.outputs, blocks=1, seed=seed)


def train_config(training: str, settings: Settings, channels: int) -> Any:
    """The config of a training, from settings that state differences only."""
    return replace(TRAININGS[training].config(), **{**DEFAULTS["grey" if channels == 1 else "colour"], **settings})


def learned(
    task: Task, training: str, settings: Settings, seed: int, member: int = 0, folder: Path | None = None
) -> tuple[Learned, float]:
    """The classifier, read if it has been trained before, else trained and cached; and the seconds that its training took."""
    name = pretrained_name(task)
    if name is not None:
        return Learned(TRAININGS["plain"], pretrained_net(name, task.outputs), TrainConfig()), 0.0
    method, start, config = (
        TRAININGS[training],
        SEED_STEP * seed + member,
        train_config(training, settings, task.train[0].shape[1]),
    )
    header: dict[str, Any] = {"format": FORMAT, "training": training, "config": asdict(config), "seed": start}
    key = hashlib.sha256(json.dumps([header, data_digest(task)], sort_keys=True).encode()).hexdigest()[:16]
    path = (folder or cache_folder()) / "classifiers" / f"{task.name.replace('/', '-')}-{training}-{start}-{key}.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        net = method.build(untrained(task, start), config)
    cached = read_cached(path, "classifier is trained again")
    if cached is None:
        begin = time.process_time()
        train(method, net, task.train, task.valid, config=config, seed=start)
        seconds: dict[str, Any] = {"task": task.name, "seconds": time.process_time() - begin}
        cached = net.state_dict(), header | seconds
        write_cached(path, *cached)
    net.load_state_dict(cached[0])
    return Learned(method, net.eval(), config), float(cached[1]["seconds"])


def data_digest(task: Task) -> str:
    """SHA-256 of the data that a net is trained on."""
    return _digest(task.outputs, *task.train, *task.valid)


@lru_cache(maxsize=1)
def _digest(outputs: int, *tensors: Tensor) -> str:
    total = hashlib.sha256(str(outputs).encode())
    update_digest(total, *tensors)
    return total.hexdigest()


# ------------------------------------------------------------------------------------------------ methods


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """A result, and the seconds that this process computed meanwhile: other work on the machine does not count."""
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def fitted(scorer: Scorer, task: Task, seconds: float, **options: Any) -> Fitted:
    """A fit whose scoring is timed, for a thousand images."""
    x = task.test[0][:TIMED]
    _, spent = timed(lambda: scorer.score(x))
    return Fitted(scorer=scorer, seconds=seconds, thousand=1000 * spent / len(x), **options)


def subset(rows: Pair, most: int | None, seed: int) -> Pair:
    """At most so many of the rows, at random by the seed."""
    if most is None or len(rows[1]) <= most:
        return rows
    index = torch.randperm(len(rows[1]), generator=torch.Generator().manual_seed(seed), device="cpu")[:most].sort().values
    return rows[0][index], rows[1][index]


def net_settings(settings: Settings) -> dict[str, Any]:
    """The settings of the training of nets."""
    return {key: settings[key] for key in NET_KEYS if key in settings}


def other_settings(settings: Settings, *names: str) -> dict[str, Any]:
    """The settings that are neither of the training of nets nor of these names."""
    return {key: value for key, value in settings.items() if key not in NET_KEYS and key not in names}


@dataclass
class FitDataCache:
    """The last pass of a net over a task, and the seconds it took: detectors that come one after another share it."""

    key: tuple[Task, str] | None = None
    data: tuple[FitData, float] | None = None

    def get(self, context: FitContext, settings: Settings) -> tuple[FitData, float]:
        """The pass over this task of a net that is trained so."""
        key = context.task, repr((context.seed, sorted(settings.items())))
        if self.data is None or self.key is None or self.key[0] is not key[0] or self.key[1] != key[1]:
            net = learned(context.task, "plain", settings, context.seed)[0].net
            train, valid = context.task.train, context.task.valid
            self.key, self.data = key, timed(lambda: prepare_fit_data(net, train, valid, seed=context.seed))
        return self.data


FIT_DATA = FitDataCache()


def fit_detector(context: FitContext, settings: Settings) -> Fitted:
    """A post-hoc detector; its seconds are those of the pass, which others share, and its own."""
    data, passing = FIT_DATA.get(context, net_settings(settings))
    made, seconds = timed(lambda: fit_posthoc(settings["method"], data, **other_settings(settings, "method")))
    fresh = replace(made, classifier=replace(made.classifier, cache=None))
    return replace(fitted(fresh, context.task, passing + seconds), scorer=made)


def detector_settings(settings: Settings) -> dict[str, Any]:
    """A detector's settings with those of its net, refused if they are impossible."""
    find_method(str(settings.get("method")), other_settings(settings, "method"))
    return {**DEFAULTS, **settings}


def fit_guard(context: FitContext, settings: Settings) -> Fitted:
    """`offmap.fit` around the nets, one or several; or an ensemble of guards around pretrained `nets` of different kinds."""
    task, options = context.task, other_settings(settings, "members", "rows", "nets")
    rows = subset(task.train, settings.get("rows"), context.seed)

    def guard(nets: list[nn.Module]) -> Guard:
        return fit(nets, rows, task.valid, seed=context.seed, progress=False, **options)

    if "nets" in settings:
        nets = [pretrained_net(name, task.outputs) for name in settings["nets"]]
        mixed, seconds = timed(lambda: combine([guard([net]) for net in nets], task.valid))
        return fitted(mixed, task, seconds)
    nets = [learned(task, "plain", net_settings(settings), context.seed, m)[0].net for m in range(settings.get("members", 1))]
    made, seconds = timed(lambda: guard(nets))
    return fitted(made, task, seconds, steps=max(made.history.step, default=0))


def guard_settings(settings: Settings) -> dict[str, Any]:
    """A guard's settings with defaults filled in, refused if they are impossible."""
    names = list(settings.get("nets", PRETRAINED))
    for name in names:
        if name not in PRETRAINED:
            raise ConfigError(f"Expected `nets` to be {nearest(str(name), PRETRAINED)}, but got {name!r}.")
    if len(names) < 2:
        raise ConfigError(f"Expected two or more `nets` to mix, but got {len(names)}.")
    options = other_settings(settings, "members", "rows", "nets")
    config = config_of(maxwent, options, "config", maxwent.CONFIGS)
    return {"members": 1, **DEFAULTS, **settings, **fill_defaults(config, options)}


def fit_classifier(context: FitContext, settings: Settings) -> Fitted:
    """A classifier trained in a way of its own, or an ensemble of such; its seconds are those of the training."""
    options = {key: value for key, value in settings.items() if key not in ("training", "members")}
    members = range(settings.get("members", 1))
    fits = [learned(context.task, settings["training"], options, context.seed, member) for member in members]
    scorer = fits[0][0] if len(fits) == 1 else Ensemble([net for net, _ in fits])
    return fitted(scorer, context.task, sum(seconds for _, seconds in fits))


def classifier_settings(settings: Settings) -> dict[str, Any]:
    """A classifier's settings with defaults filled in, refused if they are impossible."""
    training, members = settings.get("training"), settings.get("members", 1)
    if training not in TRAININGS:
        raise ConfigError(f"Expected `training` to be {nearest(str(training), TRAININGS)}, but got {training!r}.")
    options = {key: value for key, value in settings.items() if key not in ("training", "members")}
    config = override(TRAININGS[training].config(), options)
    return {"training": training, "members": members, **DEFAULTS, **asdict(config), **options}


DETECTOR_KEYS = NET_KEYS | {"method"} | {option for each in DETECTORS.values() for option in each.options}
CONFIG_KEYS = {f.name for f in fields(maxwent.Config)} - {"parameterization"}
GUARD_KEYS = NET_KEYS | CONFIG_KEYS | {"members", "rows", "nets", "config", "score", "draws", "chunk_size"}
CLASSIFIER_KEYS = frozenset({"training", "members"} | {f.name for each in TRAININGS.values() for f in fields(each.config)})

IMAGE_METHODS: dict[str, Method] = {
    "detector": Method(fit_detector, detector_settings, DETECTOR_KEYS, scores_only=True),
    "image_guard": Method(fit_guard, guard_settings, GUARD_KEYS, scores_only=True),
    "classifier": Method(fit_classifier, classifier_settings, CLASSIFIER_KEYS, scores_only=True),
}
