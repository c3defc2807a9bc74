"""Methods on image classifiers: post-hoc detectors that share one pass of a net, guards, and classifiers trained otherwise."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offmap import Guard, Scorer, combine, fit
from offmap.checks import one_of
from offmap.data.batch import rows_of, take_rows
from offmap.detectors.posthoc import DETECTORS, FitData, find_method, prepare_fit_data
from offmap.detectors.posthoc import fit_detector as fit_posthoc
from offmap.errors import ConfigError
from offmap.maxwent import config as maxwent
from offmap.maxwent.config import override
from offmap_bench.cache import Entry, cache_folder, read_or_make
from offmap_bench.classifiers.catalog import TRAININGS
from offmap_bench.classifiers.training import Ensemble, Learned, TrainConfig, train
from offmap_bench.nets.lenet import lenet
from offmap_bench.nets.resnet import cifar_resnet, resnet
from offmap_bench.runner.base_models import SEED_STEP, digest_with
from offmap_bench.runner.methods import FitContext, Fitted, Method, Settings, config_keys, config_of, fill_defaults, without
from offmap_bench.tasks.pretrained import WEIGHTS, weights
from offmap_bench.tasks.task import Pair, Task

FORMAT = 2  # raised whenever the same training and data come to give other nets
TIMED = 500  # rows whose scoring is timed
DEFAULTS: dict[str, dict[str, Any]] = {"grey": {"epochs": 5}, "colour": {"epochs": 15, "augment": True}}
"""How nets of grey and of coloured images are trained unless a plan says otherwise."""

PRETRAINED = tuple(name.removeprefix("cifar10_") for name in WEIGHTS)
NET_KEYS = frozenset(f.name for f in fields(TrainConfig))  # settings that say how nets are trained

Result = TypeVar("Result")


def pretrained_name(task: Task) -> str | None:
    """Return the name of the pretrained net that belongs to a task, such as "resnet20"; None: nets are trained."""
    return next((part for part in task.name.split("/") if part.startswith("resnet")), None)


def pretrained_net(name: str, classes: int) -> nn.Module:
    net = cifar_resnet(int(name.removeprefix("resnet")), classes).eval()
    net.load_state_dict(weights(f"cifar10_{name}"))
    return net


def init_net(task: Task, seed: int) -> nn.Sequential:
    """Return a LeNet for grey images; for coloured ones a residual net of eight layers."""
    channels, side = task.train[0].shape[1:3]
    return lenet(task.outputs, side=side, seed=seed) if channels == 1 else resnet(task.outputs, blocks=1, seed=seed)


def train_config(training: str, settings: Settings, channels: int) -> Any:
    """Return the config of a training, from settings that state differences only."""
    return replace(TRAININGS[training].config(), **{**DEFAULTS["grey" if channels == 1 else "colour"], **settings})


def load_classifier(
    task: Task, training: str, settings: Settings, seed: int, member: int = 0, folder: Path | None = None
) -> tuple[Learned, float]:
    """Return the classifier, read if it has been trained before, and the seconds that its training took."""
    name = pretrained_name(task)
    if name is not None:
        return Learned(TRAININGS["plain"], pretrained_net(name, task.outputs), TrainConfig()), 0.0
    method, start = TRAININGS[training], SEED_STEP * seed + member
    config = train_config(training, settings, task.train[0].shape[1])
    header: dict[str, Any] = {"format": FORMAT, "training": training, "config": asdict(config), "seed": start}
    key = hashlib.sha256(json.dumps([header, digest_of(task)], sort_keys=True).encode()).hexdigest()[:16]
    path = (folder or cache_folder()) / "classifiers" / f"{task.name.replace('/', '-')}-{training}-{start}-{key}.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        net = method.build(init_net(task, start), config)

    def train_net() -> Entry:
        _, seconds = time_work(lambda: train(method, net, task.train, task.valid, config=config, seed=start))
        return header | {"task": task.name, "seconds": seconds}, net.state_dict()

    header, state = read_or_make(path, train_net, net.state_dict())
    net.load_state_dict(dict(state))
    return Learned(method, net.eval(), config), float(header["seconds"])


@lru_cache(maxsize=1)
def digest_of(task: Task) -> str:
    """Return the SHA-256 of the data that a net is trained on."""
    return digest_with(str(task.outputs), *task.train, *task.valid)


def time_work(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return a result, and the seconds that this process computed meanwhile: other work on the machine does not count."""
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def time_scoring(scorer: Scorer, task: Task, seconds: float, **options: Any) -> Fitted:
    """Time the scoring of a thousand images."""
    x = take_rows(task.test[0], slice(0, TIMED))
    _, spent = time_work(lambda: scorer.score(x))
    return Fitted(scorer=scorer, seconds=seconds, thousand=1000 * spent / rows_of(x), **options)


def subset(rows: Pair, most: int | None, seed: int) -> Pair:
    """Return at most so many of the rows, at random by the seed."""
    if most is None or len(rows[1]) <= most:
        return rows
    index = torch.randperm(len(rows[1]), generator=torch.Generator().manual_seed(seed), device="cpu")[:most].sort().values
    return rows[0][index], rows[1][index]


def net_settings(settings: Settings) -> dict[str, Any]:
    return {key: settings[key] for key in NET_KEYS if key in settings}


@lru_cache(maxsize=1)  # detectors that come one after another share it
def pass_over(task: Task, seed: int, settings: tuple[tuple[str, Any], ...]) -> tuple[FitData, float]:
    """Return the pass over a task of a net that is trained so, and the seconds it took."""
    net = load_classifier(task, "plain", dict(settings), seed)[0].net
    return time_work(lambda: prepare_fit_data(net, task.train, task.valid, seed=seed))


def fit_detector(context: FitContext, settings: Settings) -> Fitted:
    """Fit a post-hoc detector; its seconds are those of the pass, which others share, and its own."""
    data, passing = pass_over(context.task, context.seed, tuple(sorted(net_settings(settings).items())))
    return fit_on(data, passing, context.task, without(settings, *NET_KEYS))


def fit_on(data: FitData, passing: float, task: Task, settings: Settings) -> Fitted:
    """Fit the detector that `settings` name to a pass that took so many seconds."""
    detector, seconds = time_work(lambda: fit_posthoc(settings["method"], data, **without(settings, "method")))
    fresh = replace(detector, classifier=replace(detector.classifier, cache=None))
    return replace(time_scoring(fresh, task, passing + seconds), scorer=detector)


def detector_settings(settings: Settings) -> dict[str, Any]:
    """Return a detector's settings with those of its net, refused if they are impossible."""
    find_method(str(settings.get("method")), without(settings, "method", *NET_KEYS))
    return {**DEFAULTS, **settings}


def fit_guard(context: FitContext, settings: Settings) -> Fitted:
    """Fit a guard around the nets, one or several; or an ensemble of guards around pretrained `nets` of different kinds."""
    task, options = context.task, without(settings, "members", "rows", "nets", *NET_KEYS)
    rows, members = subset(task.train, settings.get("rows"), context.seed), range(settings.get("members", 1))

    def fit_around(nets: list[nn.Module]) -> Guard:
        return fit(nets, rows, task.valid, seed=context.seed, progress=False, **options)

    if "nets" in settings:
        nets = [pretrained_net(name, task.outputs) for name in settings["nets"]]
        mixed, seconds = time_work(lambda: combine([fit_around([net]) for net in nets], task.valid))
        return time_scoring(mixed, task, seconds)
    nets = [load_classifier(task, "plain", net_settings(settings), context.seed, m)[0].net for m in members]
    guard, seconds = time_work(lambda: fit_around(nets))
    return time_scoring(guard, task, seconds, steps=max(guard.history.step, default=0))


def guard_settings(settings: Settings) -> dict[str, Any]:
    """Return a guard's settings with defaults filled in, refused if they are impossible."""
    names = [one_of("nets", name, PRETRAINED) for name in settings.get("nets", PRETRAINED)]
    if len(names) < 2:
        raise ConfigError(f"Expected two or more `nets` to mix, but got {len(names)}.")
    options = without(settings, "members", "rows", "nets", *NET_KEYS)
    config = config_of(maxwent, options, "config", maxwent.CONFIGS)
    return {"members": 1, **DEFAULTS, **settings, **fill_defaults(config, options)}


def fit_classifier(context: FitContext, settings: Settings) -> Fitted:
    """Train a classifier in a way of its own, or an ensemble of such; its seconds are those of the training."""
    options, members = without(settings, "training", "members"), range(settings.get("members", 1))
    fits = [load_classifier(context.task, settings["training"], options, context.seed, member) for member in members]
    scorer = fits[0][0] if len(fits) == 1 else Ensemble([net for net, _ in fits])
    return time_scoring(scorer, context.task, sum(seconds for _, seconds in fits))


def classifier_settings(settings: Settings) -> dict[str, Any]:
    """Return a classifier's settings with defaults filled in, refused if they are impossible."""
    training, options = one_of("training", settings.get("training"), TRAININGS), without(settings, "training", "members")
    config = override(TRAININGS[training].config(), options)
    return {"training": training, "members": settings.get("members", 1), **DEFAULTS, **asdict(config), **options}


DETECTOR_KEYS = NET_KEYS | {"method"} | {option for each in DETECTORS.values() for option in each.options}
GUARD_KEYS = NET_KEYS | config_keys(maxwent.Config) | {"members", "rows", "nets", "config", "chunk_size"}
CLASSIFIER_KEYS = frozenset({"training", "members"} | {f.name for each in TRAININGS.values() for f in fields(each.config)})

IMAGE_METHODS: dict[str, Method] = {
    "detector": Method(fit_detector, detector_settings, DETECTOR_KEYS, scores_only=True),
    "image_guard": Method(fit_guard, guard_settings, GUARD_KEYS, scores_only=True, score="default"),
    "classifier": Method(fit_classifier, classifier_settings, CLASSIFIER_KEYS, scores_only=True),
}
