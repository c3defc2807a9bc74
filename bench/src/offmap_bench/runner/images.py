"""Methods on image classifiers: detectors that share one pass of a net, guards, and classifiers trained in other ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offmap.detectors.base import DETECTORS, FitData, find_method
from offmap.detectors.posthoc import fit_detector as fit_posthoc
from offmap.detectors.posthoc import prepare_fit_data
from offmap.ensemble import combine
from offmap.errors import ConfigError, nearest
from offmap.fit import fit
from offmap.guard import Guard
from offmap.maxwent import config as maxwent
from offmap.posterior.protocol import Scorer, override
from offmap_bench.classifiers.catalog import WAYS
from offmap_bench.classifiers.ensemble import Ensemble
from offmap_bench.classifiers.training import Learned, TrainConfig
from offmap_bench.runner.context import FitContext, Fitted, Method, Settings
from offmap_bench.runner.pretrained import maxwent_settings
from offmap_bench.runner.trained_classifiers import GIVEN, SCHOOLS, given_net, learned
from offmap_bench.tasks.task import Pair, Task

TIMED = 500
"""Images whose scoring is timed."""

HOST = frozenset(f.name for f in fields(TrainConfig))
"""Keys that say how models are trained."""

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What work gives, and the seconds that this process computed meanwhile: other work on the machine does not count."""
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin


def judged(scorer: Scorer, task: Task, seconds: float, **beside: Any) -> Fitted:
    """A fit whose scoring is timed, for a thousand images."""
    x = task.test[0][:TIMED]
    _, own = timed(lambda: scorer.score(x))
    return Fitted(scorer=scorer, seconds=seconds, thousand=1000 * own / len(x), **beside)


def some(rows: Pair, most: int | None, seed: int) -> Pair:
    """At most so many of the rows, at random by the seed."""
    if most is None or len(rows[1]) <= most:
        return rows
    kept = torch.randperm(len(rows[1]), generator=torch.Generator().manual_seed(seed), device="cpu")[:most].sort().values
    return rows[0][kept], rows[1][kept]


def host_of(settings: Settings) -> dict[str, Any]:
    """What settings say of the models."""
    return {key: settings[key] for key in HOST if key in settings}


@dataclass
class Looking:
    """The last look of a model at a task, and the seconds it took: detectors that come one after another share it."""

    key: tuple[Task, str] | None = None
    found: tuple[FitData, float] | None = None

    def at(self, ground: FitContext, model: dict[str, Any]) -> tuple[FitData, float]:
        """The look at this task, with models trained so."""
        key = ground.task, repr((ground.seed, sorted(model.items())))
        if self.found is None or self.key is None or self.key[0] is not key[0] or self.key[1] != key[1]:
            net = learned(ground.task, "plain", model, ground.seed)[0].net
            self.key, self.found = (
                key,
                timed(lambda: prepare_fit_data(net, ground.task.train, ground.task.valid, seed=ground.seed)),
            )
        return self.found


LOOKING = Looking()


def fit_detector(ground: FitContext, settings: Settings) -> Fitted:
    """One of the classic detectors; its seconds are those of the look, which others share, and its own."""
    data, looking = LOOKING.at(ground, host_of(settings))
    options = {key: value for key, value in settings.items() if key not in HOST and key != "method"}
    made, own = timed(lambda: fit_posthoc(settings["method"], data, **options))
    fresh = replace(made, classifier=replace(made.classifier, cache=None))
    return replace(judged(fresh, ground.task, looking + own), scorer=made)


def detector_settings(settings: Settings) -> dict[str, Any]:
    """A config of a detector with the defaults of its model filled in, refused if it is impossible."""
    options = {key: value for key, value in settings.items() if key not in HOST and key != "method"}
    find_method(str(settings.get("method")), options)
    return {**SCHOOLS, **settings}


def fit_guard(ground: FitContext, settings: Settings) -> Fitted:
    """`offmap.fit` on the models, one or several, as a Scorer; or a mixture of guards around given `nets` of different kinds."""
    task, options = ground.task, options_of(settings)
    rows = some(task.train, settings.get("rows"), ground.seed)

    def guard(nets: list[nn.Module]) -> Guard:
        return fit(nets, rows, task.valid, seed=ground.seed, progress=False, **options)

    if "nets" in settings:
        given = [given_net(name, task.outputs) for name in settings["nets"]]
        mixed, own = timed(lambda: combine([guard([net]) for net in given], task.valid))
        return judged(mixed, task, own)
    nets = [learned(task, "plain", host_of(settings), ground.seed, m)[0].net for m in range(settings.get("members", 1))]
    made, own = timed(lambda: guard(nets))
    return judged(made, task, own, steps=max(made.history.step, default=0))


def options_of(settings: Settings) -> dict[str, Any]:
    """What settings say of the fit itself."""
    return {key: value for key, value in settings.items() if key not in HOST and key not in ("members", "rows", "nets")}


def guard_settings(settings: Settings) -> dict[str, Any]:
    """A config of a guard with defaults filled in, refused if it is impossible."""
    if "nets" in settings:
        names = list(settings["nets"])
        for name in names:
            if name not in GIVEN:
                raise ConfigError(f"Expected `nets` to be {nearest(str(name), GIVEN)}, but got {name!r}.")
        if len(names) < 2:
            raise ConfigError(f"Expected two or more `nets` to mix, but got {len(names)}.")
    return {"members": 1, **SCHOOLS, **settings, **maxwent_settings(options_of(settings))}


def fit_classifier(ground: FitContext, settings: Settings) -> Fitted:
    """A classifier trained in a way of its own, or several together; its seconds are those of the training."""
    own = {key: value for key, value in settings.items() if key not in ("way", "members")}
    made = [learned(ground.task, settings["way"], own, ground.seed, member) for member in range(settings.get("members", 1))]
    nets: list[Learned] = [net for net, _ in made]
    scorer = nets[0] if len(nets) == 1 else Ensemble(nets)
    return judged(scorer, ground.task, sum(seconds for _, seconds in made), steps=0)


def classifier_settings(settings: Settings) -> dict[str, Any]:
    """A config of a way to train with its defaults filled in, refused if it is impossible."""
    way, members = settings.get("way"), settings.get("members", 1)
    if way not in WAYS:
        raise ConfigError(f"Expected `way` to be {nearest(str(way), WAYS)}, but got {way!r}.")
    own = {key: value for key, value in settings.items() if key not in ("way", "members")}
    return {"way": way, "members": members, **SCHOOLS, **asdict(override(WAYS[way].config(), own)), **own}


def accuracy(scorer: Scorer, rows: tuple[Tensor, Tensor]) -> float | None:
    """The share of right classes; None if it predicts none."""
    predict = getattr(scorer, "predict", None)
    label = None if predict is None else predict(rows[0]).label
    return None if label is None else float((label == rows[1]).double().mean())


DETECTOR_KEYS = HOST | {"method"} | {option for each in DETECTORS.values() for option in each.options}
MAXWENT_KEYS = {f.name for f in fields(maxwent.Config)} - {"parameterization"}
GUARD_KEYS = HOST | MAXWENT_KEYS | {"members", "rows", "nets", "config", "score", "draws", "chunk_size"}
WAY_KEYS = frozenset({"way", "members"} | {f.name for way in WAYS.values() for f in fields(way.config)})

PICTURES: dict[str, Method] = {
    "detector": Method(fit_detector, detector_settings, DETECTOR_KEYS, single=True),
    "image_guard": Method(fit_guard, guard_settings, GUARD_KEYS, single=True),
    "classifier": Method(fit_classifier, classifier_settings, WAY_KEYS, single=True),
}
