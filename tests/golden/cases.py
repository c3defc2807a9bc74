"""Many small fits whose numbers are kept in `golden.json`: each case gives named tensors and floats, the same every time.

Nearly everything is called as a user would call it; what is not public is imported in one place below. Chunks of draws are given
(`chunk_size=`), because the measured choice, "auto", depends on the clock, and other chunks round otherwise. Where a case cannot
give one (the command line, ready nets of the scikit-learn estimators), its net is a plain stack of layers on a table, for which
nothing is measured.

All cases repeat to the bit in another process on one machine and one thread: none is an exception. On another processor, or with
another version of torch, sums may be taken in another order: see `test_golden.py` for what that may change. Left out for that
reason are p-values of the zoo's models (some rows score alike); nets with several ReLUs of one layer that never fire on the data
(eigenvectors of what is always zero are any, so that rounding turns the SVD basis); and the zoo's `unet`, untrained, whose risk
crosses τ more than once, so that the search for the width ends at 0.6 or at 1.6.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

import offmap
from golden.material import (
    Painter,
    Reader,
    Recurrent,
    Squeezed,
    Tagger,
    classifier,
    decider,
    eye,
    kinds,
    labeller,
    labels,
    mean_and_variance,
    means,
    new_images,
    new_rows,
    ood_text,
    pixels,
    quantity,
    rows,
    sequences,
    stripes,
    tag_batches,
    text,
    yes,
)
from offmap.cli import main as command_line
from offmap.data import Place, as_batches, load_rows
from offmap.integrations.sklearn import OffmapClassifier, OffmapDetector, OffmapRegressor
from offmap.metrics import aupr_in, aupr_out, auroc, fpr_at
from offmap.posterior.distribution import scaling, svd
from offmap.posterior.noise import Noise
from offmap_bench.methods import (
    anchored,
    bnn,
    dare,
    deep_ensemble,
    mc_dropout,
    mean_field,
    negative_correlation,
    overall_diversity,
    repulsive,
    swag,
)

# What is not public, in one place: after a change of names only these lines have to follow.
from zoo import ZOO

Numbers: TypeAlias = dict[str, Tensor | float]

CHUNK = 5
"""Draws at once. It does not divide the draws, so that a last, shorter chunk is met too."""

SMALL: dict[str, Any] = {
    "steps": 30, "check_every": 10, "draws": 12, "risk_draws": 12, "batch_size": 32, "chunk_size": CHUNK, "progress": False
}  # fmt: skip
CLOSED: dict[str, Any] = {"solver": "closed-form", "draws": 12, "risk_draws": 12, "chunk_size": CHUNK, "progress": False}

CASES: dict[str, Callable[[], Numbers]] = {}


def case(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
    """Make a function a case, under its own name."""
    return add_case(function.__name__, function)


def add_case(name: str, function: Callable[[], Numbers]) -> Callable[[], Numbers]:
    """Make a function a case of that name, which starts from the same seed and is quiet."""
    assert name not in CASES, name

    def run() -> Numbers:
        torch.manual_seed(0)
        logger = logging.getLogger("offmap")
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            return function()
        finally:
            logger.setLevel(before)

    CASES[name] = run
    return function


# ------------------------------------------------------------------------------------------------------- what is recorded


def score_rows(scorer: Any, x: Any, prefix: str = "") -> Numbers:
    """What a guard, mixture, detector or head answers."""
    result = scorer(x)
    found: Numbers = {"threshold": scorer.threshold}
    for name in ("score", "p_value", "ood", "mean", "std", "probs", "label", "score_map"):
        value = getattr(result, name)
        if value is not None:
            found[name] = value
    return {prefix + name: value for name, value in found.items()}


def whole(guard: Any, x: Any, level: float = 0.8) -> Numbers:
    """All that a guard says of these inputs, and how its fit went."""
    found = score_rows(guard, x)
    if guard.calibration.seen:
        found["seen"] = 1.0
    elif "mean" in found:
        interval = guard.interval(x, level)
        found |= {"lower": interval.lower, "upper": interval.upper}
    else:
        found["prediction_set"] = guard.prediction_set(x, level)
    if hasattr(guard, "terms"):
        found |= {f"term {name}": value for name, value in guard.terms(x).items() if name != "score"}
    if hasattr(guard, "clip"):
        found["clip"] = math.inf if guard.clip is None else guard.clip
    if hasattr(guard, "history") and guard.history.step:
        found |= history_numbers(guard.history)
    return found


def history_numbers(history: Any) -> Numbers:
    """How a fit went."""
    found: Numbers = {
        f"history {name}": torch.tensor(getattr(history, name), dtype=torch.float64)
        for name in ("max_risk", "step", "risk", "entropy", "uncertainty", "kept", "final_risk", "final_entropy")
    }
    return found | {f"history chosen {name}": value for name, value in history.chosen.items()}


def numbers_of(table: Any, *keys: str) -> Numbers:
    """The numbers of a table's rows, under the words of its first columns."""
    found: Numbers = {}
    for row in table:
        words = " ".join(str(row[key]) for key in keys)
        for name, value in row.items():
            if isinstance(value, bool | int | float):
                found[f"{words} {name}"] = float(value)
    return found


def take(x: Any, places: slice) -> Any:
    """Some rows of all inputs."""
    return tree_map(lambda t: t[places], x)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def fit_steps(net: Any, data: Callable[[int, int], Any], **options: Any) -> offmap.Guard:
    """A guard after a few gradient steps from the closed form."""
    return offmap.fit(net, data(100, 0), data(60, 1), **SMALL | options)


def fit_closed_form(net: Any, data: Callable[[int, int], Any], **options: Any) -> offmap.Guard:
    """A guard without gradient steps."""
    return offmap.fit(net, data(100, 0), data(60, 1), **CLOSED | options)


# ------------------------------------------------------------------------------------------------------------ likelihoods


@case
def gaussian_mean_and_log_variance() -> Numbers:
    return whole(fit_steps(mean_and_variance(), quantity), new_rows())


@case
def gaussian_means_alone() -> Numbers:
    return whole(fit_steps(means(), quantity), new_rows())


@case
def gaussian_outputs_without_columns() -> Numbers:
    return whole(fit_steps(Squeezed(means()), quantity), new_rows())


@case
def gaussian_several_means() -> Numbers:
    return whole(fit_steps(means(targets=2), lambda n, s: quantity(n, s, 2)), new_rows())


@case
def gaussian_several_means_and_log_variances() -> Numbers:
    return whole(fit_steps(mean_and_variance(targets=2), lambda n, s: quantity(n, s, 2)), new_rows())


@case
def gaussian_given_noise() -> Numbers:
    law = offmap.Gaussian(noise=torch.tensor([0.02]))
    return whole(fit_closed_form(means(), quantity, likelihood=law), new_rows())


@case
def categorical() -> Numbers:
    return whole(fit_steps(classifier(), kinds), new_rows())


@case
def bernoulli() -> Numbers:
    return whole(fit_steps(decider(), yes), new_rows())


@case
def bernoulli_several_labels() -> Numbers:
    return whole(fit_steps(labeller(), labels, likelihood="bernoulli"), new_rows())


@case
def segmentation() -> Numbers:
    x, y = pixels(200, 7)
    net = Painter(x, 6.0 * F.one_hot(y.clamp_min(0), 2).movedim(-1, 1) - 3.0)
    guard = fit_steps(net, pixels)
    seen = torch.cat([pixels(3, 5)[0], 2 + pixels(2, 6)[0]])
    found = whole(guard, seen)
    return found | {"max": guard.score(seen, reduce="max")}


@case
def segmentation_epistemic() -> Numbers:
    x, y = pixels(200, 7)
    net = Painter(x, 6.0 * F.one_hot(y.clamp_min(0), 2).movedim(-1, 1) - 3.0)
    return score_rows(fit_closed_form(net, pixels, score="epistemic"), torch.cat([pixels(3, 5)[0], 2 + pixels(2, 6)[0]]))


@case
def regression_of_every_pixel() -> Numbers:
    def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x = pixels(n, seed)[0]
        return x, 2 * x[:, 0] + 0.1 * torch.randn(n, 4, 4, generator=torch.Generator().manual_seed(seed))

    x, y = data(200, 7)
    net = Painter(x, torch.stack([y, torch.full_like(y, -4.0)], 1))
    return whole(fit_steps(net, data), torch.cat([pixels(3, 5)[0], 2 + pixels(2, 6)[0]]))


@dataclass(frozen=True)
class Absolute(offmap.Likelihood):
    """A user's own likelihood: double exponential with scale 0.2 around one number."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return (output[..., 0] - y).abs() / 0.2 + math.log(0.4)

    def predict(self, outputs: Tensor) -> offmap.Prediction:
        each = outputs[..., 0]
        return offmap.Prediction(mean=each.mean(0), std=(each.var(0, correction=0) + 0.08).sqrt())

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].var(0)

    def epistemic(self, outputs: Tensor) -> Tensor:
        return self.score(outputs)


@case
def a_likelihood_of_ones_own() -> Numbers:
    return whole(fit_steps(means(), quantity, likelihood=Absolute(), score="paper"), new_rows())


# ---------------------------------------------------------------------------------------------------- solvers and settings


def setting(name: str, *, net: Callable[[], Any] = mean_and_variance, data: Any = quantity, **options: Any) -> None:
    """A case that fits with these options."""
    add_case(name, lambda: whole(offmap.fit(net(), data(100, 0), data(60, 1), **SMALL | options), new_rows()))


setting("refine_identity", basis="identity")
setting("refine_where_patience_ends", lr=0.5, steps=60, check_every=5, patience=1)
setting("refine_rest_of_steps", steps=25)
setting("closed_form_svd", solver="closed-form")
setting("closed_form_identity", solver="closed-form", basis="identity")
setting("closed_form_classes", solver="closed-form", net=classifier, data=kinds)
setting("closed_form_one_floor", solver="closed-form", eps=1e-2)
setting("sgd_svd", solver="sgd", entropy_weight=300.0, lr=0.2)
setting("sgd_identity", solver="sgd", basis="identity", entropy_weight=300.0, lr=0.2)
setting("noise_normal", noise="normal")
setting("noise_rademacher", noise="rademacher", solver="closed-form", score="paper")
setting("config_paper", config="paper", steps=40, check_every=20, lr=0.3)
setting("config_paper_identity", config="paper", steps=40, check_every=20, lr=0.05, basis="identity")
setting("config_reference", config="reference", steps=40, check_every=20, lr=0.3)
setting("config_object", config=offmap.Config(entropy_weight=3.0, init_fraction=0.5, eps=1e-3), rescale=False)
setting("entropy_weights_several", entropy_weight=(3.0, 300.0))
setting("entropy_log", regularizer="log", draws_per_step=2)
setting("entropy_of_ones_own", regularizer=lambda squares: squares.sqrt())
setting("risk_averaged", risk="averaged-nll", tolerance="smoothed", clip_loss=False)
setting("risk_of_classes", net=classifier, data=kinds, tolerance="reference", clip_loss=False, solver="closed-form")
setting("max_risk_given", max_risk=0.5, solver="closed-form")
setting("seed_other", seed=3)
setting("small_fan_in", fan_in_limit=5)
setting("one_draw_at_a_time", chunk_size=1)


@dataclass(frozen=True)
class Triangle(Noise):
    """A user's own noise: the sum of two uniform numbers, with unit variance."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return (torch.rand(2, *shape, generator=generator).sum(0) - 1) * math.sqrt(6.0)

    def variance(self) -> float:
        return 1.0

    def entropy(self) -> float:
        return 0.5 + 0.5 * math.log(6.0)


setting("noise_of_ones_own", noise=Triangle())


@case
def a_parameterization_of_ones_own() -> Numbers:
    """Weights that are stretched by a bounded factor."""

    def omega(mean: Any, scale: Any, z: Any) -> Any:
        return {n: mean[n] + scale[n] * z[n].tanh() for n in mean}

    def log_density(weights: Any, mean: Any, scale: Any) -> Tensor:
        return -sum(scale[n].log().expand_as(weights[n]).flatten(2).sum(2) for n in weights)

    own = offmap.Parameterization(omega, log_density)
    return whole(fit_steps(means(), quantity, parameterization=own, solver="sgd", noise="normal", lr=0.2), new_rows())


# ----------------------------------------------------------------------------------------------------------------- scores


for _score in ("paper", "epistemic", "distance"):
    setting(f"score_{_score}", score=_score, solver="closed-form")
    setting(f"score_{_score}_of_classes", score=_score, solver="closed-form", net=classifier, data=kinds)


def widest(outputs: Tensor) -> Tensor:
    return outputs[..., 0].amax(0) - outputs[..., 0].amin(0)


setting("score_of_ones_own", score=widest)


@case
def clips_and_samples() -> Numbers:
    guard = fit_closed_form(mean_and_variance(), quantity)
    x, found = new_rows(), {}
    for clip in (0.0, 0.1, 1.0, None):
        said = guard.predict(x, clip=clip)
        found |= {f"mean {clip}": said.mean, f"std {clip}": said.std}
    return found | {"samples": guard.samples(x[::3], 3), "clipped samples": guard.samples(x[::3], 3, clip=0.2)}


@case
def clips_of_classes() -> Numbers:
    guard = fit_closed_form(classifier(), kinds)
    return {f"probs {clip}": guard.predict(new_rows(), clip=clip).probs for clip in (0.0, 0.1, 1.0, None)} | whole(
        guard, new_rows()
    )


@case
def calibration_of_its_own() -> Numbers:
    guard = fit_closed_form(mean_and_variance(), quantity, calibration=quantity(50, 2))
    other = guard.calibrate(quantity(40, 3), false_alarms=0.2)
    return whole(guard, new_rows()) | score_rows(other, new_rows(), "other ")


@case
def summary_of_a_guard() -> Numbers:
    guard = fit_steps(mean_and_variance(), quantity)
    return numbers_of(guard.summary().rows, "parameter")


# ------------------------------------------------------------------------------------------------------------------- data


@case
def without_validation_data() -> Numbers:
    return whole(offmap.fit(mean_and_variance(), quantity(200, 0), **SMALL), new_rows())


@case
def from_a_loader() -> Numbers:
    train, valid = TensorDataset(*quantity(100, 0)), TensorDataset(*quantity(60, 1))
    guard = offmap.fit(mean_and_variance(), DataLoader(train, batch_size=16), DataLoader(valid, batch_size=16), **SMALL)
    return whole(guard, new_rows()) | {"loaded score": guard.score(DataLoader(TensorDataset(new_rows()), batch_size=4))}


@case
def from_arrays() -> Numbers:
    train, valid = (tuple(part.numpy() for part in quantity(n, s)) for n, s in ((100, 0), (60, 1)))
    return whole(offmap.fit(mean_and_variance(), train, valid, **SMALL), new_rows().numpy())


# ------------------------------------------------------------------------------------------------------------------ where


setting("params_matrices", params="matrices")
setting("params_last_layer", params="last-layer")
setting("params_last_layer_of_classes", params="last-layer", net=classifier, data=kinds, solver="closed-form")
setting("params_patterns", params=["0.*", "4.bias"])
setting("params_a_function", params=lambda name, tensor: name.endswith("weight") and tensor.shape[0] > 2)


# ------------------------------------------------------------------------------------------------------------------ models


MODELS = (
    "attention", "cross_attention", "hand_made_attention", "encoder", "causal", "grouped", "depthwise", "transposed2d",
    "batchnorm", "root_conv", "block", "twice", "lstm", "gru_time_first", "embedding", "bag_mean", "tied", "tied_embedding",
    "bilinear", "parametrized", "weight_norm", "heads_einsum", "sliced", "keywords", "tokenized", "picked", "float64", "bfloat16",
)  # fmt: skip


def fit_case(name: str) -> Numbers:
    """A model of the zoo, in either basis."""
    model = ZOO[name]
    x, y = model.data(90)
    train, valid = ((take(x, part), y[part]) for part in (slice(0, 50), slice(50, 80)))
    new = take(x, slice(80, 86))
    far = new if model.whole is not None else tree_map(lambda t: 4 * t if t.is_floating_point() else t, new)
    options: dict[str, Any] = {"output_fn": model.output_fn, "chunk_size": CHUNK if model.vmap else 1, "likelihood": None}
    options |= {"steps": 12, "check_every": 6, "draws": 6, "risk_draws": 6}
    guard = offmap.fit(model.build(), train, valid, **SMALL | options)
    plain = offmap.fit(model.build(), train, valid, **CLOSED | options | {"basis": "identity", "solver": "closed-form"})
    found = whole(guard, new) | {"far score": guard.score(far), "identity score": plain.score(far)}
    kept = ("threshold", "score", "mean", "std", "probs", "clip", "far score", "identity score")
    return {n: v for n, v in found.items() if n in kept or n.startswith("history final")}


for _name in MODELS:
    add_case(f"model_{_name}", lambda name=_name: fit_case(name))


# -------------------------------------------------------------------------------------------------------------- ensembles


@case
def ensemble() -> Numbers:
    return whole(fit_steps([mean_and_variance(seed) for seed in (0, 1, 3)], quantity), new_rows())


@case
def ensemble_of_classifiers() -> Numbers:
    return whole(fit_steps([classifier(seed) for seed in range(2)], kinds, score="epistemic"), new_rows())


@case
def ensemble_last_layer() -> Numbers:
    return whole(fit_closed_form([mean_and_variance(seed) for seed in range(2)], quantity, params="last-layer"), new_rows())


# --------------------------------------------------------------------------------------------------------------- pictures


def fit_images(nets: Any, **options: Any) -> offmap.Guard:
    return offmap.fit(nets, stripes(90, 0), stripes(60, 1), **{"draws": 12, "chunk_size": CHUNK, "progress": False} | options)


@case
def images() -> Numbers:
    return whole(fit_images(eye()), new_images())


@case
def images_by_two_nets() -> Numbers:
    return whole(fit_images([eye(0), eye(1)]), new_images())


@case
def images_all_random() -> Numbers:
    return whole(fit_images(eye(), **SMALL | {"params": "all", "steps": 10, "check_every": 5}), new_images())


@case
def images_by_distance() -> Numbers:
    return score_rows(fit_images(eye(), score="distance"), new_images())


@case
def images_epistemic() -> Numbers:
    return score_rows(fit_images(eye(), score="epistemic"), new_images())


# ------------------------------------------------------------------------------------------------------ words, and lengths


@case
def tokens_with_a_mask() -> Numbers:
    def data(n: int, seed: int) -> dict[str, Tensor]:
        x = text(n, 6, seed)
        return {**x, "labels": x["input_ids"][:, 0] % 2}

    train, valid = ((x, x.pop("labels")) for x in (data(80, 0), data(50, 1)))
    guard = offmap.fit(Reader(), train, valid, **SMALL | {"steps": 15, "check_every": 5})
    return whole(guard, text(5, 6, 5)) | score_rows(guard, ood_text(4, 6, 6), "OOD ")


@case
def tokens_from_a_loader_of_dicts() -> Numbers:
    parts = [text(20, length, 20 + length) for length in (5, 7, 4, 6)]
    data = [{**x, "goal": x["input_ids"][:, 0] % 2} for x in parts]
    train, valid = (DataLoader(some, batch_size=None) for some in (data[:2], data[2:]))  # pyright: ignore[reportArgumentType]
    guard = offmap.fit(Reader(), train, valid, target="goal", **CLOSED | {"draws": 8, "risk_draws": 8})
    return whole(guard, text(5, 6, 5)) | score_rows(guard, ood_text(4, 9, 6), "OOD ")


@case
def tags_of_variable_lengths() -> Numbers:
    guard = offmap.fit(Tagger(), tag_batches(4, 7, 5), tag_batches(6, 3, 8, seed=10), **SMALL | {"steps": 15, "check_every": 5})
    x = text(4, 5, 5)
    return whole(guard, x) | {"max": guard.score(x, reduce="max"), "loaded": guard.score(tag_batches(3, 6, n=3, seed=20))}


@case
def sequences_of_variable_lengths() -> Numbers:
    guard = offmap.fit(
        Recurrent(), sequences(4, 6, 5), sequences(6, 6), **CLOSED | {"chunk_size": 1, "draws": 8, "risk_draws": 8}
    )
    return {"score": guard.score(sequences(3, 7, n=4)), "threshold": guard.threshold} | history_numbers(guard.history)


@case
def inputs_that_all_rows_share() -> Numbers:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor, mix: Tensor) -> Tensor:
            return self.head((x @ mix).tanh())

    mix = offmap.shared(torch.eye(3) + 0.5)
    (x, y), (v, w) = quantity(80, 0), quantity(50, 1)
    return whole(offmap.fit(Between(), ((x, mix), y), ((v, mix), w), **CLOSED), (new_rows(), mix))


# ----------------------------------------------------------------------------------------------- mixtures, one pass, methods


@case
def guards_of_regressions() -> Numbers:
    guards = [fit_closed_form(mean_and_variance(), quantity), fit_closed_form(means(1, hidden=(9,), kind=nn.Tanh), quantity)]
    joined = offmap.combine(guards, quantity(60, 1))
    other = joined.calibrate(quantity(50, 2), false_alarms=0.1)
    return whole(joined, new_rows()) | score_rows(other, new_rows(), "other ")


@case
def guards_of_classifiers() -> Numbers:
    guards = [
        fit_closed_form(classifier(), kinds),
        fit_closed_form(classifier(1, hidden=(9,), kind=nn.Tanh), kinds, score="epistemic"),
    ]
    return whole(offmap.combine(guards, kinds(60, 1), false_alarms=0.1), new_rows())


@case
def distill() -> Numbers:
    guard = fit_closed_form(mean_and_variance(), quantity, draws=6)
    return score_rows(offmap.distill(guard, quantity(100, 0), quantity(60, 1), rows=200), new_rows())


@case
def distill_of_images() -> Numbers:
    guard = fit_images(eye(), draws=6)
    return score_rows(offmap.distill(guard, stripes(90, 0), stripes(60, 1), rows=120, false_alarms=0.1), new_images())


@dataclass(frozen=True)
class Shaken:
    """A user's own Predictive: a net whose outputs are scaled at random, by the seed alone."""

    net: nn.Module
    members: int = 1

    @torch.no_grad()
    def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
        noise = torch.randn(draws, generator=torch.Generator().manual_seed(seed))
        noise = noise if clip is None else noise.clamp(-clip, clip)
        return torch.stack([self.net(x) * (1 + 0.1 * each) for each in noise])


@case
def guard_over_a_predictive() -> Numbers:
    return whole(offmap.guard(Shaken(mean_and_variance()), quantity(60, 1), train=quantity(100, 0), draws=12), new_rows())


@case
def guard_over_a_predictive_without_rows() -> Numbers:
    guard = offmap.guard(Shaken(classifier()), kinds(60, 1), draws=12, clip=None, false_alarms=0.2, calibration=kinds(50, 2))
    return whole(guard, new_rows())


@case
def guard_over_a_predictive_by_distance() -> Numbers:
    return whole(offmap.guard(Shaken(means()), quantity(60, 1), train=quantity(100, 0), score="distance", seed=4), new_rows())


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "anchored": (anchored, {}), "bnn": (bnn, {"tradeoff": 100.0, "lr": 0.3}), "dare": (dare, {}),
    "deep_ensemble": (deep_ensemble, {}), "mc_dropout": (mc_dropout, {"dropout": 0.2}), "mean_field": (mean_field, {}),
    "negative_correlation": (negative_correlation, {}), "overall_diversity": (overall_diversity, {}),
    "repulsive": (repulsive, {}), "swag": (swag, {"collect_every": 2, "lr": 1e-4}),
}  # fmt: skip


def by_method(name: str) -> Numbers:
    """Two nets, trained a little further by another method, with a guard around them."""
    method, options = METHODS[name]
    nets: list[nn.Module] = [mean_and_variance(seed) for seed in (0, 1)]
    if name == "mc_dropout":
        nets = [nn.Sequential(*net[:2], nn.Dropout(0.2), *net[2:]) for net in nets]  # pyright: ignore[reportIndexIssue]
    place = Place(torch.device("cpu"), torch.float32)
    train = load_rows(as_batches(quantity(100, 0), place, name="train", batch_size=32))
    valid = load_rows(as_batches(quantity(60, 1), place, name="valid"))
    checked = {} if name == "swag" else {"check_every": 10}
    config = method.Config(**{"steps": 20, "lr": 0.003, **checked, **options})
    made = method.fit(nets, train, valid, likelihood=offmap.Gaussian(), config=config, seed=1)
    guard = offmap.guard(made, quantity(60, 1), train=quantity(100, 0), draws=8)
    return whole(guard, new_rows())


for _name in METHODS:
    add_case(f"method_{_name}", lambda name=_name: by_method(name))


# -------------------------------------------------------------------------------------------------------------- detectors


def detector_numbers(found: Mapping[str, Any], x: Tensor) -> Numbers:
    numbers: Numbers = {}
    for name, detector in found.items():
        result = detector(x)
        numbers |= {f"{name} score": result.score, f"{name} threshold": detector.threshold, f"{name} p_value": result.p_value}
    return numbers


@case
def detectors_of_a_table() -> Numbers:
    return detector_numbers(offmap.detect_all(classifier(), kinds(100, 0), kinds(60, 1)), new_rows())


@case
def detectors_of_images() -> Numbers:
    return detector_numbers(offmap.detect_all(eye(), stripes(90, 0), stripes(60, 1)), new_images())


@case
def detectors_with_options() -> Numbers:
    asks: dict[str, dict[str, Any]] = {"knn": {"k": 3}, "energy": {}, "mds": {}}
    made = {
        name: offmap.detect(classifier(), kinds(120, 0), method=name, false_alarms=0.1, seed=2, **options)
        for name, options in asks.items()
    }
    other = made["knn"].calibrate(kinds(40, 3), 0.2)
    return detector_numbers(made | {"other": other}, new_rows()) | score_rows(made["energy"], new_rows(), "whole ")


# -------------------------------------------------------------------------------------------------- evaluation, diagnosis


@dataclass(frozen=True)
class Nearest:
    """A user's own Scorer."""

    known: Tensor

    def score(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.known).amin(1)


@case
def evaluation_of_regression() -> Numbers:
    scorers = {"guard": fit_closed_form(mean_and_variance(), quantity), "nearest": Nearest(quantity(100, 0)[0])}
    ood = {"far": 3 + rows(40, 6), "wide": (2 * rows(30, 8), rows(30, 8)[:, 0])}
    found = offmap.evaluate(scorers, quantity(60, 2), ood)
    own = found.details["guard"]
    losses = own.losses
    assert losses is not None
    extremes = [example.score for example in own.examples["far"]]
    curves: Numbers = {f"reliability {name}": curve for name, curve in own.reliability.items()}
    return numbers_of(found.rows, "scorer", "set") | curves | {"losses": losses[:10], "extremes": torch.tensor(extremes)}


@case
def evaluation_of_classes() -> Numbers:
    guards = [fit_closed_form(classifier(), kinds), fit_closed_form(classifier(1), kinds)]
    scorers = {
        "guard": guards[0], "mixture": offmap.combine(guards, kinds(60, 1)),
        "vim": offmap.detect(classifier(), kinds(100, 0), kinds(60, 1), method="vim"),
    }  # fmt: skip
    found = offmap.evaluate(scorers, kinds(60, 2), {"far": 3 + rows(40, 6)}, positive="ood")
    return numbers_of(found.rows, "scorer", "set") | {f"{n} far": each["far"][:8] for n, each in found.scores.items()}


@case
def metrics() -> Numbers:
    id_scores, ood_scores = rows(50, 1)[:, 0], 1 + rows(40, 2)[:, 0]
    id_scores, ood_scores = (t.mul(4).round() for t in (id_scores, ood_scores))  # with ties
    found = {"auroc": auroc(id_scores, ood_scores), "in": aupr_in(id_scores, ood_scores), "out": aupr_out(id_scores, ood_scores)}
    return found | {f"fpr {word}": fpr_at(id_scores, ood_scores, positive=word) for word in ("id", "ood")}


def diagnose_guard(**options: Any) -> Numbers:
    draws = options.pop("draws_met", 0)
    seen = offmap.diagnose(fit_steps(mean_and_variance(), quantity, **options), quantity(100, 0), draws=draws)
    found = numbers_of(seen.table().rows, "layer")
    for layer in seen.layers:
        found |= {f"{layer.name} amplitude": layer.amplitude, f"{layer.name} scale": layer.scale}
    return found


add_case("diagnosis_svd", lambda: diagnose_guard())
add_case("diagnosis_identity", lambda: diagnose_guard(basis="identity"))
add_case("diagnosis_of_draws", lambda: diagnose_guard(draws_met=3))


# --------------------------------------------------------------------------------------------------------- files, and export


def again(guard: offmap.Guard, nets: Any) -> offmap.Guard:
    """The guard after a way through a file."""
    with folder() as here:
        guard.save(here / "guard.safetensors")
        return offmap.load(here / "guard.safetensors", nets)


@case
def saved_and_loaded() -> Numbers:
    return whole(again(fit_steps(mean_and_variance(), quantity), mean_and_variance()), new_rows())


@case
def saved_and_loaded_ensemble_of_classifiers() -> Numbers:
    def nets() -> list[nn.Module]:
        return [classifier(seed) for seed in (0, 1)]

    return whole(again(fit_closed_form(nets(), kinds, noise="normal", params="matrices"), nets()), new_rows())


@case
def saved_and_loaded_images() -> Numbers:
    return whole(again(fit_images(eye()), eye()), new_images())


def export_numbers(scorer: Any, suffix: str, example: Tensor, x: Tensor, **options: Any) -> Numbers:
    """What an exported file answers."""
    with folder() as here, warnings.catch_warnings(action="ignore"):
        info = scorer.export(here / f"guard.{suffix}", example, **options)
        if suffix == "onnx":
            import onnxruntime

            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = 1
            session = onnxruntime.InferenceSession(here / "guard.onnx", settings, providers=["CPUExecutionProvider"])
            names = [node.name for node in session.get_outputs()]
            said = dict(zip(names, session.run(names, {session.get_inputs()[0].name: x.numpy()}), strict=True))
            found: Numbers = {name: torch.from_numpy(value) for name, value in said.items()}
        else:
            found = dict(torch.export.load(here / "guard.pt2").module()(x))
    return found | {"threshold": info.threshold, "draws": float(info.draws)}


@case
def exported_regression_for_torch() -> Numbers:
    guard = fit_closed_form(mean_and_variance(), quantity)
    return export_numbers(guard, "pt2", quantity(20, 2)[0], new_rows())


@case
def exported_classes_for_onnx() -> Numbers:
    guard = fit_closed_form(classifier(), kinds, score="epistemic")
    return export_numbers(guard, "onnx", kinds(20, 2)[0], new_rows())


@case
def exported_images_for_onnx() -> Numbers:
    return export_numbers(fit_images(eye()), "onnx", stripes(20, 2)[0], new_images())


@case
def exported_fewer_draws_for_torch() -> Numbers:
    guard = fit_closed_form(Squeezed(means()), quantity, score="paper")
    return export_numbers(guard, "pt2", quantity(20, 2)[0], new_rows(), draws=4, calibration=quantity(50, 3))


# ----------------------------------------------------------------------------------------------- scikit-learn, command line


ESTIMATED: dict[str, Any] = {"hidden": (10,), "steps": 60, "draws": 12, "random_state": 1}


def estimator_numbers(estimator: Any, x: np.ndarray[Any, Any]) -> Numbers:
    found: Numbers = {
        name: torch.from_numpy(np.asarray(getattr(estimator, name)(x)))
        for name in ("score_samples", "off_map", "predict", "predict_proba", "decision_function")
        if hasattr(estimator, name)
    }
    return found | {"threshold": estimator.guard_.threshold}


@case
def sklearn_regressor() -> Numbers:
    x, y = (part.numpy() for part in quantity(120, 0))
    made = OffmapRegressor(**ESTIMATED).fit(10 * x + 3, 5 * y)
    new = 10 * new_rows().numpy() + 3
    return estimator_numbers(made, new) | {"std": torch.from_numpy(made.predict(new, return_std=True)[1])}


@case
def sklearn_classifier() -> Numbers:
    x, y = (part.numpy() for part in kinds(120, 0))
    return estimator_numbers(OffmapClassifier(**ESTIMATED, members=2, false_alarms=0.1).fit(x, y + 4), new_rows().numpy())


@case
def sklearn_detector() -> Numbers:
    return estimator_numbers(OffmapDetector(**ESTIMATED, basis="identity").fit(rows(120, 0).numpy()), new_rows().numpy())


@case
def sklearn_around_a_ready_net() -> Numbers:
    x, y = (part.numpy() for part in kinds(120, 0))
    return estimator_numbers(OffmapClassifier(model=classifier(), draws=12, random_state=1).fit(x, y), new_rows().numpy())


NET = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, {outputs}))
"""


def run_commands(module: str, net: nn.Sequential, data: Callable[[int, int], Any], *options: str) -> Numbers:
    """A table through `offmap fit` and `offmap score`."""
    with folder() as here, contextlib.chdir(here), restore_environment():
        Path(f"{module}.py").write_text(NET.format(outputs=net[-1].out_features), encoding="utf-8")
        save_file(net.state_dict(), "w.safetensors")
        for name, (x, y) in {"train": data(100, 0), "valid": data(60, 1), "new": (new_rows(), new_rows()[:, 0])}.items():
            table = np.column_stack([x.double().numpy(), y.double().numpy()])
            np.savetxt(f"{name}.csv", table, delimiter=",", header="speed,load,wear,heat", comments="", fmt="%.9g")
        make = ["--model", f"{module}:make_model"]
        command("fit", *make, "--weights", "w.safetensors", "--train", "train.csv", "--valid", "valid.csv", *options, "-o", "g")
        command("score", "g", "new.csv", *make, "-o", "scores.csv")
        with open("scores.csv", encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    words = {"true": 1.0, "false": 0.0}
    return {
        name: torch.tensor(
            [words[line[name].lower()] if line[name].lower() in words else float(line[name]) for line in lines]
        ).double()
        for name in lines[0]
    }


def command(*words: str) -> None:
    """Run `offmap words...` here, and hold what it prints."""
    printed = io.StringIO()
    sys.argv = ["offmap", *words]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            command_line()
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(printed.getvalue()) from ended


@contextlib.contextmanager
def restore_environment() -> Iterator[None]:
    """Leave arguments, paths and modules as they were."""
    import signal

    argv, path, known, handler = sys.argv, list(sys.path), set(sys.modules), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        signal.signal(signal.SIGTERM, handler)
        for name in set(sys.modules) - known:
            if name.startswith("golden_net"):
                del sys.modules[name]


FEW = ("--draws", "12", "--set", "steps=20", "--set", "check_every=10", "--set", "risk_draws=12", "--quiet")


@case
def command_line_regression() -> Numbers:
    return run_commands("golden_net_a", mean_and_variance(), quantity, *FEW)


@case
def command_line_classes() -> Numbers:
    return run_commands("golden_net_b", classifier(), kinds, *FEW, "--solver", "closed-form", "--score", "epistemic")


# ------------------------------------------------------------------------------------------------------------ weight draws


def draw_numbers(q: offmap.WeightDistribution) -> Numbers:
    """Draws by number, seed, stream and clip, and the entropy."""
    found: Numbers = {}
    ways: dict[str, dict[str, Any]] = {
        "": {}, "seed 3 ": {"seed": 3}, "clip 0.05 ": {"clip": 0.05}, "clip 0 ": {"clip": 0.0}, "fit ": {"stream": "fit"}
    }  # fmt: skip
    for word, options in ways.items():
        for name, weights in q.draw([0, 7], **options).items():
            found[f"{word}{name}"] = weights.detach().flatten(1)[:, :10]
    return found | {"mean log square": q.mean_log_square().detach()}


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@case
def draws_without_a_basis() -> Numbers:
    q = scaling([small_net(0), small_net(1)], initial_scale=0.1)
    return draw_numbers(q) | {"entropy": q.entropy().detach()}


@case
def draws_in_the_svd_basis() -> Numbers:
    q = svd(small_net(), [rows(30, 0), rows(20, 1)], noise="normal", initial_scale=0.1)
    return draw_numbers(q) | {"entropy": q.entropy().detach()}


@case
def draws_of_convolutions() -> Numbers:
    model = ZOO["grouped"]
    return draw_numbers(svd(model.build(), [model.inputs(20)], noise="rademacher", initial_scale=0.1, params="matrices"))


@case
def draws_of_a_distribution_by_hand() -> Numbers:
    mean = {"a": rows(2, 0), "b": rows(2, 1).reshape(2, 1, 3)}
    q = offmap.WeightDistribution(mean, initial_scale={n: 0.1 + t.abs() for n, t in mean.items()})
    q.scale_by(2.0)
    low, high = q.mixture_entropy_bounds()
    return draw_numbers(q) | {"low": low.detach(), "high": high.detach()}
