"""How guards are made: `fit` on trained nets, and `guard` over any Predictive."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from offmap import checks
from offmap._types import Data, ScoreFn
from offmap.calibration import are_images, build_guard, check_score, choose_image_config, describe_images
from offmap.data import (
    Batches,
    Place,
    Rows,
    Stream,
    all_gather_rows,
    as_batches,
    fork_rng,
    is_sharded,
    load_rows,
    load_train_valid,
)
from offmap.data.inputs import take_rows
from offmap.distributed.group import Group
from offmap.distributed.process_group import join_group
from offmap.errors import ConfigError, DataError, ModelError, nearest
from offmap.guard import Guard, check_draws
from offmap.likelihoods import Likelihood, resolve
from offmap.maxwent import solve as maxwent
from offmap.maxwent.checkpoint import Checkpoint
from offmap.maxwent.config import CONFIGS, Config, Runtime, override
from offmap.maxwent.identity import check_same_on_all, identify
from offmap.model.forward import OutputFn, first_tensor
from offmap.model.inspect import UNREACHED, Findings, examine, restore_state
from offmap.model.params import ParamSelection
from offmap.model.select import StackedModel, as_models, check_same_function, choose, stack_models
from offmap.posterior.predictive import Predictive, Sampled, as_predictive

logger = logging.getLogger("offmap")

RANKS = ("same", "sharded", "alone")


def fit(
    nets: nn.Module | Sequence[nn.Module],
    train: Data,
    valid: Data | None = None,
    *,
    calibration: Data | None = None,
    likelihood: str | Likelihood | None = None,
    basis: Literal["svd", "identity"] | None = None,
    solver: Literal["refine", "closed-form", "sgd"] | None = None,
    params: ParamSelection = None,
    output_fn: OutputFn | None = None,
    target: str = "labels",
    score: str | ScoreFn = "default",
    draws: int = 50,
    chunk_size: int | Literal["auto"] = "auto",
    batch_size: int = 128,
    config: Config | str = "default",
    seed: int = 0,
    checkpoint: str | Path | None = None,
    ranks: Literal["same", "sharded", "alone"] = "same",
    progress: bool | None = None,
    **options: Any,
) -> Guard:
    """Learn the widest weight distribution around one trained net (or an ensemble of them) that still explains the data.

    `valid` chooses τ and the clip; without it a tenth of `train` is set aside. With separate `calibration` data the threshold,
    p-values and intervals are exact; otherwise they come from `valid` and are approximate. `basis` and `solver` default to the
    configuration's ("svd" and "refine"); further options are fields of `config`, such as `steps=` or `entropy_weight=`.

    `params` picks the random parameters: "all", "matrices" (two axes or more), "last-layer" (weight and bias of the last matrix
    product before the output), name patterns, or a function of (name, tensor). The default is "all": the paper makes every weight
    random, hidden layers are where off-map inputs first look OOD, and a parameter that stays fixed cannot disagree. For
    image classifiers, (B, channels, height, width), it is "last-layer", without gradient steps. Frozen
    parameters (`requires_grad=False`) are weights like the others; parameters that no input reaches stay fixed, and are named.

    `score` says what is OOD. "default" joins the draws' disagreement with the distance to training rows, in inputs and hidden
    layers (`scores/combine.py`; for image classifiers with the energy of the logits and distances in layers alone,
    `scores/images.py`; the paper's score for dense outputs, or fewer than three rows); "distance" is the distance alone,
    "epistemic" the variance of the means or the mutual information, "paper" the mixture variance or the entropy of the mean; or a
    function of outputs, (M·P, B, ...) -> (B,). The first two keep up to 4,096 training rows in guard and file, others none.

    The model is looked at on a few rows first: one that draws its own randomness, depends on earlier calls or lives on several
    devices is refused; what can be borne is logged, and stands below `guard.summary()`.

    With `checkpoint` the fit keeps its state in that file now and then. Killed and called again with the same arguments, it goes
    on from there, and gives the same guard; at the end the file is removed.

    Under `torchrun`, or in a process group of yours, all ranks call `fit` and share its work; each returns the same guard.
    `ranks` says what they pass: the "same" data, which are divided here, or rows of their own, "sharded" (a DataLoader with a
    DistributedSampler is taken so anyway); or that this process fits "alone".
    """
    settings = _settings(config, {"basis": basis, "solver": solver, "params": params}, options)
    draws, seed = _check_options(score, draws, seed)
    checks.one_of("ranks", ranks, RANKS)
    if output_fn is not None:
        checks.function("output_fn", output_fn, ["output"])
    runtime = Runtime(first_tensor if output_fn is None else output_fn, chunk_size, batch_size, progress)
    # gradients are needed, and tensors made in inference mode would refuse them for good
    with join_group(alone=ranks == "alone") as group, torch.inference_mode(False), fork_rng(seed):
        models = as_models(nets)
        place = Place.of(models[0])
        apart = partial(_apart, given=ranks == "sharded", group=group)
        rows, held = load_train_valid(train, valid, place, seed=seed, batch_size=batch_size, target=target)
        sharded = apart(train) and not (valid is None and is_sharded(train))  # a split loader has no sampler any more
        held = all_gather_rows(held, group) if (sharded if valid is None else apart(valid)) else held
        at = stack_models(models)
        group.broadcast(*at.net.buffers(), *at.fixed.values())  # buffers, such as running means, drift apart in training
        same = partial(
            identify, at, config=settings, seed=seed, batch_size=batch_size, likelihood=likelihood, output_fn=output_fn
        )
        kept = _checkpoint(checkpoint, partial(same, {"train": None if sharded else rows, "valid": held}), group)
        runtime = replace(runtime, group=group, sharded=sharded, checkpoint=kept)
        findings = _examined(at, held, runtime)
        plain = Sampled(runtime.model(at.net, at.mean | at.fixed, held.inputs), at.mean | at.fixed)
        check_same_function(models, plain.model, plain.weights, held.inputs)
        law = likelihood_of(plain, rows, held, likelihood)
        rows = _checked(rows, law, plain)
        spec = describe_images(law, rows, held, lambda x: plain.outputs(x, 1)[0])
        familiar = held
        if calibration is not None:
            familiar = _calibrating(calibration, place, target)
            familiar = all_gather_rows(familiar, group) if apart(calibration) else familiar
            _checked(familiar, law, plain)
        if config == "default" and are_images(law, held):
            settings = choose_image_config(settings, trained=solver is not None or bool(options))
        at = choose(at, held.inputs, settings.params, runtime.output_fn, unreached=findings.unreached)
        predictive = maxwent.fit(at, rows, held, likelihood=law, config=settings, seed=seed, runtime=runtime)
        predictive.q.why.update(dict.fromkeys(findings.unreached, UNREACHED))
        guard = build_guard(
            predictive, law, place, rows, held, None if calibration is None else familiar, score=score, draws=draws, seed=seed,
            target=target, notes=findings.notes, image_spec=spec, group=group, sharded=sharded,
        )  # fmt: skip
        kept.done()
        return guard


def guard(
    predictive: Predictive,
    valid: Data,
    *,
    train: Data | None = None,
    calibration: Data | None = None,
    likelihood: str | Likelihood | None = None,
    score: str | ScoreFn = "default",
    draws: int = 50,
    clip: float | Literal["choose"] | None = "choose",
    false_alarms: float = 0.05,
    seed: int = 0,
    target: str = "labels",
) -> Guard:
    """The same verdicts for any method: choose the clip by validation NLL, set threshold and intervals on in-distribution data.

    The scores "default" and "distance" compare with rows of `train`; without it "default" is the paper's score.
    """
    predictive = as_predictive(predictive)
    draws, seed = _check_options(score, draws, seed)
    model = predictive.model
    place = Place.of(model.net) if model else Place(torch.device("cpu"), torch.float32)
    if train is None and score == "distance":
        raise ConfigError("Expected `train=` for score='distance': rows of it are what inputs are compared with.")
    with fork_rng(seed):
        held = load_rows(as_batches(valid, place, name="valid", target=target), at_least=2)
        likelihood = resolve(likelihood, predictive.outputs(held.inputs, 1, clip=0.0, seed=seed), held.targets)
        rows = None if train is None else as_batches(train, place, name="train", target=target)
        separate = None if calibration is None else _calibrating(calibration, place, target)
        return build_guard(
            predictive, likelihood, place, rows, held, separate, score=score, draws=draws, clip=clip, false_alarms=false_alarms,
            seed=seed, target=target,
        )  # fmt: skip


def _calibrating(calibration: Data, place: Place, target: str) -> Rows:
    return load_rows(as_batches(calibration, place, name="calibration", target=target), at_least=2)


def _checkpoint(path: str | Path | None, words: Callable[[], dict[str, str]], group: Group) -> Checkpoint:
    """Where the state of a fit is kept, told by what the fit is of; several processes compare that in any case."""
    if path is None and group.size == 1:
        return Checkpoint()
    told = words()
    check_same_on_all(told, group)
    return Checkpoint(None if path is None else checks.path("checkpoint", path), told, group)


def _examined(at: StackedModel, held: Rows, runtime: Runtime) -> Findings:
    """What a look at the model found, said; state that it changes by itself is forgotten."""
    findings = examine(at.net, held.inputs, runtime.output_fn)
    for note in findings.notes:
        logger.warning(note)
    restore_state(at.net, findings.changing)
    return findings


def _apart(data: Data, *, given: bool, group: Group) -> bool:
    """Whether each rank passed rows of its own."""
    return group.size > 1 and (given or is_sharded(data))


def likelihood_of(plain: Sampled, train: Batches, valid: Rows, likelihood: str | Likelihood | None) -> Likelihood:
    """The likelihood that fits the base models' outputs and the targets."""
    outputs = plain.outputs(valid.inputs, 1)
    if not bool(outputs.isfinite().all()):
        raise ModelError("Expected a trained model with finite outputs, but it gives NaN or infinite values on `valid`.")
    law = resolve(likelihood, outputs, valid.targets)
    for _, y in train:
        alike = y.shape[1:] == valid.targets.shape[1:] or (y.ndim == valid.targets.ndim and not y.is_floating_point())
        if not alike or y.is_floating_point() != valid.targets.is_floating_point():
            raise DataError(
                f"Expected targets of `train` and `valid` alike, but got {tuple(y.shape)} ({y.dtype}) and "
                f"{tuple(valid.targets.shape)} ({valid.targets.dtype})."
            )
        break
    else:
        raise DataError("Expected at least one example in `train`, but it is empty.")
    return law


def _settings(config: Config | str, named: dict[str, Any], options: dict[str, Any]) -> Config:
    if isinstance(config, str):
        if config not in CONFIGS:
            raise ConfigError(f"Expected `config` to be {nearest(config, CONFIGS)}, but got {config!r}.")
        config = CONFIGS[config]
    if not isinstance(config, Config):
        raise ConfigError(
            f"Expected `config` to be one of {sorted(CONFIGS)} or an offmap.Config, but got {type(config).__name__}. "
            "Pass single settings as keywords, such as `steps=500`."
        )
    given = {name: value for name, value in named.items() if value is not None}
    return override(config, given | options, also=_keywords(fit))


def _keywords(function: Callable[..., Any]) -> list[str]:
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]


def _check_options(score: str | ScoreFn, draws: Any, seed: Any) -> tuple[int, int]:
    """Draws and seed as plain whole numbers, whatever library they come from."""
    check_score(score)
    try:
        seed = operator.index(seed)
    except TypeError as error:
        raise ConfigError(f"Expected `seed` to be a whole number, but got {seed!r}.") from error
    return check_draws(draws), seed


def _checked(data: Batches, law: Likelihood, plain: Sampled) -> Batches:
    """Data on which the model runs and whose targets are known to fit: at once when in memory, else batch by batch."""
    first, _ = next(iter(data))
    output = replace(plain, weights={n: w[:1] for n, w in plain.weights.items()}).outputs(take_rows(first, slice(0, 2)), 1)[0]

    def check(y: torch.Tensor) -> None:
        law.check_targets(output, y, data.name)

    if isinstance(data, Stream):
        return replace(data, check=check)
    check(data.targets)
    return data
