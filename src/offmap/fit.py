"""How guards are made: `fit` on trained models, and `guard` over any Predictive."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
from offmap.data.batch import take_rows
from offmap.distributed.group import Group, join_group
from offmap.errors import ConfigError, DataError, ModelError
from offmap.guard import Guard, check_draws
from offmap.likelihoods import Likelihood, resolve
from offmap.maxwent import solve as maxwent
from offmap.maxwent.checkpoint import Checkpoint, check_same_on_all, identify
from offmap.maxwent.config import CONFIGS, Config, Runtime, override
from offmap.model.forward import OutputFn, first_tensor
from offmap.model.inspect import UNREACHED, Findings, check_model, restore_state
from offmap.model.params import ParamSelection, StackedModel, as_models, check_same_function, choose, stack_models
from offmap.posterior.predictive import Predictive, Sampled, as_predictive

logger = logging.getLogger("offmap")

RANKS = ("same", "sharded", "alone")


def fit(
    model: nn.Module | Sequence[nn.Module],
    train: Data,
    valid: Data | None = None,
    *,
    calibration: Data | None = None,
    false_alarms: float = 0.05,
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
    """Learn the widest weight distribution around a trained model that still explains the data, and guard the model with it.

    The model is inspected on a few rows first: one that draws its own randomness, depends on earlier calls or lives on several
    devices is refused; other findings are logged, and stand below `guard.summary()`. The model itself is left untouched.

    Args:
        model: A trained model, or the members of an ensemble.
        train: The data the model was trained on: a DataLoader, a Dataset, or a pair (inputs, targets).
        valid: Rows the model has not seen; they choose τ and the clip. None: a tenth of `train` is set aside, with a warning.
        calibration: Separate rows for threshold, p-values and intervals, which are then exact; None: those of `valid`, and
            guarantees are approximate.
        false_alarms: The fraction of in-distribution inputs that may be called OOD; it sets `guard.threshold`.
        likelihood: "gaussian", "categorical", "bernoulli", a name in `LIKELIHOODS`, or an object; None: inferred from outputs and
            targets.
        basis: Directions in which weights are random: "svd" of the layer inputs (default) or "identity".
        solver: "refine" (default), "closed-form" without gradient steps, or the paper's "sgd".
        params: The random parameters: "all" (default: hidden layers are where OOD inputs first look different), "matrices" (two
            axes or more), "last-layer", patterns of names, or a function of (name, tensor). For image classifiers (B, channels,
            height, width) the default is "last-layer", without gradient steps. Parameters that no input reaches stay fixed.
        output_fn: Picks the tensor out of what the model returns; None: a tensor, `.logits`, or the first of a tuple.
        target: The key of the targets where batches are dicts.
        score: What is OOD. "default" combines the draws' disagreement with distances to training rows in inputs and hidden
            layers (for image classifiers with the energy of the logits); "distance" is the distance alone, "epistemic" the
            variance of the means or the mutual information, "paper" the mixture variance or the entropy of the mean; or a
            function of outputs, (M·P, B, ...) -> (B,). "default" and "distance" keep up to 4,096 training rows in guard and
            file.
        draws: Draws of the weights per member for scores and predictions.
        chunk_size: Draws that run at once; 1 loops over them.
        batch_size: Rows that run at once.
        config: "default", "paper", "reference" or a `Config`; `basis`, `solver`, `params` and further keywords override its
            fields.
        seed: Decides noise, order and split.
        checkpoint: A file for the state of the fit. Killed and called again with the same arguments, `fit` goes on from there and
            gives the same guard; at the end the file is removed.
        ranks: What the ranks of a process group (`torchrun`) pass: the "same" data, which are divided here, rows of their own,
            "sharded" (also seen by a DistributedSampler), or that this process fits "alone". Each returns the same guard.
        progress: Whether to show a progress bar; None: on a terminal.
        **options: Fields of `Config`, such as `steps=` or `entropy_weight=`.

    Returns:
        A guard: `guard(x)` predicts, scores and decides.

    >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
    >>> guard = fit(nn.Linear(1, 1), (x[::2], x[::2, 0]), (x[1::2], x[1::2, 0]), solver="closed-form", progress=False)
    >>> guard(torch.tensor([[0.0], [50.0]])).ood
    tensor([False,  True])
    """
    settings = resolve_config(config, {"basis": basis, "solver": solver, "params": params}, options)
    draws, seed, false_alarms = check_options(score, draws, seed, false_alarms)
    checks.one_of("ranks", ranks, RANKS)
    pick = first_tensor if output_fn is None else checks.function("output_fn", output_fn, ["output"])
    runtime = Runtime(pick, chunk_size, batch_size, progress)
    # gradients are needed, and tensors made in inference mode would refuse them for good
    with join_group(alone=ranks == "alone") as group, torch.inference_mode(False), fork_rng(seed):
        models = as_models(model)
        place = Place.of(models[0])
        data = read_data(train, valid, calibration, place, group, ranks, seed=seed, batch_size=batch_size, target=target)
        stacked = stack_models(models)
        group.broadcast(*stacked.module.buffers(), *stacked.fixed.values())  # running means drift apart between ranks
        identity = {"seed": seed, "batch_size": batch_size, "likelihood": likelihood, "output_fn": output_fn}
        state = open_checkpoint(checkpoint, stacked, data, settings, identity, group)
        runtime = replace(runtime, group=group, sharded=data.sharded, checkpoint=state)
        findings = inspect_model(stacked, data.valid, runtime)
        base = run_base_models(models, stacked, data.valid, runtime)
        likelihood = find_likelihood(base, data, likelihood)
        data = check_targets(data, likelihood, base)
        spec = describe_images(likelihood, data.train, data.valid, lambda x: base.outputs(x, 1)[0])
        if config == "default" and are_images(likelihood, data.valid):
            settings = choose_image_config(settings, trained=solver is not None or bool(options))
        stacked = choose(stacked, data.valid.inputs, settings.params, pick, unreached=findings.unreached)
        predictive = maxwent.fit(
            stacked, data.train, data.valid, likelihood=likelihood, config=settings, seed=seed, runtime=runtime
        )
        predictive.q.why.update(dict.fromkeys(findings.unreached, UNREACHED))
        guard = build_guard(
            predictive, likelihood, place, data.train, data.valid, data.calibration, score=score, draws=draws,
            false_alarms=false_alarms, seed=seed, target=target, notes=findings.notes, image_spec=spec, group=group,
            sharded=data.sharded,
        )  # fmt: skip
        if state is not None:
            state.done()
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
    """Guard any random model: choose the clip by validation NLL, set threshold and intervals on in-distribution data.

    Args:
        predictive: An object with `members` and `outputs(x, draws, clip=, seed=)`, such as another method's posterior.
        valid: In-distribution rows the model has not seen.
        train: Rows that the scores "default" and "distance" compare with; without it "default" is the paper's score.
        calibration: Separate rows for threshold and intervals; None: those of `valid`.
        likelihood: A name, an object, or None: inferred from outputs and targets.
        score: What is OOD, as in `fit`.
        draws: Draws per member.
        clip: Bound on the noise of predictions, None for no bound, or "choose".
        false_alarms: The fraction of in-distribution inputs that may be called OOD.
        seed: Decides the noise.
        target: The key of the targets where batches are dicts.
    """
    predictive = as_predictive(predictive)
    draws, seed, false_alarms = check_options(score, draws, seed, false_alarms)
    place = Place(torch.device("cpu"), torch.float32) if predictive.model is None else Place.of(predictive.model.module)
    if train is None and score == "distance":
        raise ConfigError("Expected `train=` for score='distance': rows of it are what inputs are compared with.")
    with fork_rng(seed):
        rows = load_rows(as_batches(valid, place, name="valid", target=target), at_least=2)
        likelihood = resolve(likelihood, predictive.outputs(rows.inputs, 1, clip=0.0, seed=seed), rows.targets)
        reference = None if train is None else as_batches(train, place, name="train", target=target)
        return build_guard(
            predictive, likelihood, place, reference, rows, load_calibration(calibration, place, target), score=score,
            draws=draws, clip=clip, false_alarms=false_alarms, seed=seed, target=target,
        )  # fmt: skip


def resolve_config(config: Config | str, named: dict[str, Any], options: dict[str, Any]) -> Config:
    """Return the configuration of that name, or the one given, with single options changed."""
    if "threshold" in options:
        raise ConfigError(
            "`fit` takes no `threshold`: pass `max_risk=` to bound the validation risk (τ), or `false_alarms=` to set how many "
            "in-distribution inputs may be called OOD."
        )
    if isinstance(config, str):
        config = CONFIGS[checks.one_of("config", config, CONFIGS)]
    if not isinstance(config, Config):
        raise ConfigError(
            f"Expected `config` to be one of {sorted(CONFIGS)} or an offmap.Config, but got {type(config).__name__}. "
            "Pass single settings as keywords, such as `steps=500`."
        )
    keywords = [name for name, p in inspect.signature(fit).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return override(config, {name: value for name, value in named.items() if value is not None} | options, also=keywords)


def check_options(score: str | ScoreFn, draws: Any, seed: Any, false_alarms: Any) -> tuple[int, int, float]:
    """Return draws, seed and false alarms as plain numbers, whatever library they come from."""
    check_score(score)
    return check_draws(draws), checks.integer("seed", seed), checks.fraction("false_alarms", false_alarms, example=0.05)


@dataclass(frozen=True)
class Datasets:
    """The data of a fit: `sharded` if each rank has training rows of its own."""

    train: Batches
    valid: Rows
    calibration: Rows | None
    sharded: bool


def read_data(
    train: Data, valid: Data | None, calibration: Data | None, place: Place, group: Group, ranks: str, *, seed: int,
    batch_size: int, target: str,
) -> Datasets:  # fmt: skip
    """Read the data in any form; rows that ranks hold apart are gathered, but for those of `train`."""

    def apart(data: Data) -> bool:
        return group.size > 1 and (ranks == "sharded" or is_sharded(data))

    batches, rows = load_train_valid(train, valid, place, seed=seed, batch_size=batch_size, target=target)
    sharded = apart(train) and not (valid is None and is_sharded(train))  # a split loader has no sampler any more
    rows = all_gather_rows(rows, group) if (sharded if valid is None else apart(valid)) else rows
    separate = load_calibration(calibration, place, target)
    separate = all_gather_rows(separate, group) if separate is not None and apart(calibration) else separate
    return Datasets(batches, rows, separate, sharded)


def load_calibration(calibration: Data | None, place: Place, target: str) -> Rows | None:
    """Read the calibration rows into memory."""
    if calibration is None:
        return None
    return load_rows(as_batches(calibration, place, name="calibration", target=target), at_least=2)


def open_checkpoint(
    path: str | Path | None, stacked: StackedModel, data: Datasets, config: Config, options: dict[str, Any], group: Group
) -> Checkpoint | None:
    """Return the state of this fit, from an earlier run if there was one; several processes compare that they fit the same."""
    if path is None and group.size == 1:
        return None
    parts = {"train": None if data.sharded else data.train, "valid": data.valid}
    identity = identify(stacked, parts, config, **options)
    check_same_on_all(identity, group)
    return None if path is None else Checkpoint(checks.path("checkpoint", path), identity, group)


def inspect_model(stacked: StackedModel, valid: Rows, runtime: Runtime) -> Findings:
    """Inspect the model on a few rows, log what is found, and let it restore the state that it changes by itself."""
    findings = check_model(stacked.module, valid.inputs, runtime.output_fn)
    for note in findings.notes:
        logger.warning(note)
    restore_state(stacked.module, findings.changing)
    return findings


def run_base_models(models: Sequence[nn.Module], stacked: StackedModel, valid: Rows, runtime: Runtime) -> Sampled:
    """Return the models with their own weights, as they run stacked; members must compute the same function of their weights."""
    weights = stacked.mean | stacked.fixed
    base = Sampled(runtime.model(stacked.module, weights, valid.inputs), weights)
    check_same_function(models, base.model, base.weights, valid.inputs)
    return base


def find_likelihood(base: Sampled, data: Datasets, likelihood: str | Likelihood | None) -> Likelihood:
    """Return the likelihood that fits the base models' outputs and the targets."""
    outputs, valid = base.outputs(data.valid.inputs, 1), data.valid.targets
    if not bool(outputs.isfinite().all()):
        raise ModelError("Expected a trained model with finite outputs, but it gives NaN or infinite values on `valid`.")
    resolved = resolve(likelihood, outputs, valid)
    first = next(iter(data.train), None)
    if first is None:
        raise DataError("Expected at least one example in `train`, but it is empty.")
    y = first[1]
    alike = y.shape[1:] == valid.shape[1:] or (y.ndim == valid.ndim and not y.is_floating_point())
    if not alike or y.is_floating_point() != valid.is_floating_point():
        raise DataError(
            f"Expected targets of `train` and `valid` alike, but got {tuple(y.shape)} ({y.dtype}) and {tuple(valid.shape)} "
            f"({valid.dtype})."
        )
    return resolved


def check_targets(data: Datasets, likelihood: Likelihood, base: Sampled) -> Datasets:
    """Check that the model runs on the data and targets fit: at once when in memory, else batch by batch as they come."""
    member = replace(base, weights={n: w[:1] for n, w in base.weights.items()})

    def checked(rows: Batches) -> Batches:
        first, _ = next(iter(rows))
        output = member.outputs(take_rows(first, slice(0, 2)), 1)[0]

        def check(y: Tensor) -> None:
            likelihood.check_targets(output, y, rows.name)

        if isinstance(rows, Stream):
            return replace(rows, check=check)
        check(rows.targets)
        return rows

    if data.calibration is not None:
        checked(data.calibration)
    return replace(data, train=checked(data.train))
