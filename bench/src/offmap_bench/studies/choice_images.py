"""How the default score of image classifiers combines its terms: on in-distribution images and their changes.

OOD images of the benchmark have no part in it: there are fourteen changes of validation images and, for nets that are trained
here on six of ten classes, training images of the other four. Their classes are drawn by a seed that no plan uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.metrics import auroc
from offmap.scores.distance import ZScore
from offmap_bench.runner.images import PRETRAINED, load_classifier, pretrained_net
from offmap_bench.studies.study import Runs, Study, markdown, per_cent
from offmap_bench.tasks.images import images, open_set
from offmap_bench.tasks.task import Task

SEED = 7  # of six known classes; plans have 0 to 4
ID_IMAGES, UNKNOWN_IMAGES = 1_000, 2_000
Terms = dict[str, dict[str, Tensor]]  # {set: {term: (B,)}}


def zoom(x: Tensor) -> Tensor:
    side, edge = x.shape[-1], x.shape[-1] // 4
    return F.interpolate(x[..., edge:-edge, edge:-edge], size=(side, side), mode="bilinear", antialias=True)


def join_halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], x.roll(1, 0)[..., half:]], -1)


def shuffle_patches(x: Tensor) -> Tensor:
    order = torch.from_numpy(np.random.RandomState(0).permutation(16))
    size = x.shape[-1] // 4
    return F.fold(F.unfold(x, size, stride=size)[:, :, order], (4 * size, 4 * size), size, stride=size)


def add_noise(x: Tensor) -> Tensor:
    return (x + 0.1 * torch.from_numpy(np.random.RandomState(1).standard_normal(x.shape)).to(x)).clamp(0, 1)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "blurred": lambda x: F.avg_pool2d(x, 5, 1, 2, count_include_pad=False),
    "channels exchanged": lambda x: x.roll(1, 1),
    "low contrast": lambda x: 0.5 + 0.3 * (x - 0.5),
    "halves of two": join_halves,
    "upside down": lambda x: x.flip(2),
    "grey": lambda x: x.mean(1, keepdim=True).expand_as(x).contiguous(),
    "inverted": lambda x: 1 - x,
    "half the resolution": lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0),
    "mean of two": lambda x: (x + x.roll(1, 0)) / 2,
    "noise": add_noise,
    "turned": lambda x: x.rot90(1, (2, 3)),
    "patches shuffled": shuffle_patches,
    "tiled": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True).repeat(1, 1, 2, 2),
    "zoomed": zoom,
}
COLOURED = ("channels exchanged", "grey")  # changes that leave an image of one channel as it is
NEAR = ("upside down", "turned", "halves of two", "mean of two")  # changes that keep the texture
UNKNOWN, MEAN = "unknown classes", "mean of the scores of single guards"


def soft_maximum(terms: Mapping[str, Tensor], without: str = "") -> Tensor:
    return torch.stack([values for name, values in terms.items() if name != without]).logsumexp(0)


COMBINATIONS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "soft maximum (the default)": soft_maximum,
    "mean": lambda terms: torch.stack(list(terms.values())).mean(0),
    "maximum": lambda terms: torch.stack(list(terms.values())).amax(0),
    **{f"soft maximum without {n}": partial(soft_maximum, without=n) for n in ("disagreement", "logits", "last layer", "layers")},
}


def sets_of(task: Task, unknown: Tensor | None = None) -> dict[str, Tensor]:
    """Validation images that scales come from, others that are in-distribution, their changes, and images of unknown classes."""
    x = task.valid[0]
    shown = x[ID_IMAGES : 2 * ID_IMAGES]
    changes = {name: change(shown) for name, change in CHANGES.items() if x.shape[1] > 1 or name not in COLOURED}
    return {"scales": x[:ID_IMAGES], "ID": shown, **changes, **({} if unknown is None else {UNKNOWN: unknown})}


def terms_of(nets: nn.Module | list[nn.Module], task: Task, sets: Mapping[str, Tensor]) -> Terms:
    guard = offmap.fit(nets, task.train, (task.valid[0][:ID_IMAGES], task.valid[1][:ID_IMAGES]), progress=False)
    return {name: guard.terms(x) for name, x in sets.items()}


def mean_terms(several: Sequence[Terms]) -> Terms:
    """Each term as the mean over nets, in standard deviations over validation images."""
    means = {s: {n: torch.stack([terms[s][n] for terms in several]).mean(0) for n in several[0][s]} for s in several[0]}
    scales = {n: ZScore.fit(values) for n, values in means["scales"].items()}
    return {s: {n: scales[n](values) for n, values in terms.items()} for s, terms in means.items()}


def mean_score(several: Sequence[Terms]) -> dict[str, Tensor]:
    """The mean of the scores of several guards, in standard deviations over validation images."""
    scores = [{s: soft_maximum(terms) for s, terms in each.items()} for each in several]
    scaled = [{s: (x - each["scales"].mean()) / each["scales"].std() for s, x in each.items()} for each in scores]
    return {s: torch.stack([each[s] for each in scaled]).mean(0) for s in scores[0]}


def judge(terms: Terms) -> dict[str, dict[str, float]]:
    """AUROC of every term and combination, {row: {set: value}}."""
    rows = {name: {s: of[name] for s, of in terms.items()} for name in terms["ID"]}
    rows |= {name: {s: combine(of) for s, of in terms.items()} for name, combine in COMBINATIONS.items()}
    return {name: judge_scores(scores) for name, scores in rows.items()}


def judge_scores(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """AUROC of in-distribution images against every OOD set."""
    return {s: round(float(auroc(scores["ID"], values)), 5) for s, values in scores.items() if s not in ("scales", "ID")}


def measure_six(title: str, name: str, members: int = 1) -> dict[str, Any]:
    """Nets trained on six classes; several of them in one guard, and in one for each."""
    task, full = open_set(name, SEED), images(name, SEED, ood=False)
    shown = np.random.RandomState(SEED).permutation(10)[:6]
    unknown = full.train[0][~torch.isin(full.train[1], torch.from_numpy(shown))][:UNKNOWN_IMAGES]
    nets = [load_classifier(task, "plain", {}, SEED, member)[0].net for member in range(members)]
    sets = sets_of(task, unknown)
    rows = judge(terms_of(nets, task, sets))
    if members > 1:
        rows[MEAN] = judge_scores(mean_score([terms_of(net, task, sets) for net in nets]))
    return {title: rows}


def measure_resnets() -> dict[str, Any]:
    """Three given nets, and two ways to combine them."""
    task = images("cifar10", ood=False)
    sets = sets_of(task)
    several = {name: terms_of(pretrained_net(name, 10), task, sets) for name in PRETRAINED}
    each = list(several.values())
    combined = judge(mean_terms(each)) | {MEAN: judge_scores(mean_score(each))}
    return {**{name: judge(terms) for name, terms in several.items()}, "three resnets": combined}


CELLS: dict[str, Callable[[], Any]] = {
    "six digits": partial(measure_six, "six digits", "mnist"),
    "three resnets": measure_resnets,
    "six of cifar10": partial(measure_six, "six of cifar10", "cifar10"),
    "five nets, six digits": partial(measure_six, "five nets, six digits", "mnist", 5),
}


def fields(runs: Runs) -> dict[str, Any]:
    """One table for the given nets, one for those that know six classes."""
    nets = {net: rows for cell in runs.values() for net, rows in cell.items()}
    open_sets = {net for net, rows in nets.items() if UNKNOWN in next(iter(rows.values()))}
    means: dict[str, Callable[[Mapping[str, float]], float]] = {
        "changes": lambda of: fmean(value for s, value in of.items() if s != UNKNOWN),
        "near": lambda of: fmean(of[s] for s in NEAR),
        "unknown": lambda of: of[UNKNOWN],
    }
    tables: dict[str, str] = {}
    for title, is_open in (("given", False), ("six", True)):
        columns = [(net, what) for net in nets if (net in open_sets) is is_open for what in list(means)[: 2 + is_open]]
        names = list(dict.fromkeys(name for net, _ in columns for name in nets[net]))
        rows = [[n, *(per_cent(means[what](nets[net][n])) if n in nets[net] else "–" for net, what in columns)] for n in names]
        tables[title] = markdown(["", *(f"{net}, {what}" for net, what in columns)], rows)
    return tables


STUDY = Study("choice_images", lambda: CELLS, fields)
