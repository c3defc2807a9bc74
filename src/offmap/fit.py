"""How guards are made: `fit` on trained models, and `guard` over any Predictive."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from offmap import checks, conformal
from offmap._torch_private import tree_leaves
from offmap._types import IGNORED, Data, Inputs, ScoreFn
from offmap.data import Batches, Place, Rows, as_batches, fork_rng, load_rows
from offmap.data.batch import is_image, rows_of, take_rows
from offmap.data.batches import (
    Examples,
    Stream,
    all_gather_rows,
    is_sharded,
    load_train_valid,
    map_rows,
    mark_repeats,
    read_through,
    sample_examples,
    watch_repeats,
    without_augmentation,
)
from offmap.data.image_spec import ImageSpec, warn_if_inaccurate
from offmap.detector import Calibration, concat_results, keep_small, merge_parts, reduce_positions
from offmap.distributed.group import SINGLE_PROCESS, Group, all_gather_concat, join_group, shard_slice
from offmap.errors import ConfigError, DataError, ModelError, ShapeError
from offmap.guard import DrawSampler, Guard, check_clip, check_draws
from offmap.likelihoods import Categorical, Likelihood, Prediction, resolve
from offmap.maxwent import solve as maxwent
from offmap.maxwent.checkpoint import Checkpoint, check_same_on_all, identify
from offmap.maxwent.config import CONFIGS, Config, Runtime, override
from offmap.model.forward import OutputFn, first_tensor
from offmap.model.inspect import UNREACHED, check_model, count_products, restore_state
from offmap.model.params import LAST_LAYER, ParamSelection, StackedModel, as_models, check_same_function, choose, stack_models
from offmap.posterior.parameterization import as_law
from offmap.posterior.predictive import CachedPredictive, Predictive, Sampled, as_predictive
from offmap.progress import print_status
from offmap.random import generator, permutation
from offmap.scores.combine import WeightedScore
from offmap.scores.score import SCORES, FunctionScore, ScoreData
from offmap.scores.terms import TERMS

logger: logging.Logger = logging.getLogger("offmap")

CLIPS = (math.inf, 10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.0)
"""The paper's grid of clips."""

REFERENCE_ROWS = 4096
"""Training rows to compare distances with: with more of them, nearer ones are found, at some cost in memory and time."""


MOST_PRODUCTS = 2 * 10**9
"""Multiplications of weights in one pass over `valid`, above which the default is the last layer: minutes on one core."""

LARGE = (
    "This model is large: one pass over `valid` takes {:.1e} multiplications of weights, above {:.0e}. Its last layer alone is "
    'random, in closed form; pass `params="all"` to make all of it random, which takes longer.'
)


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
    allow_nan: bool = False,
    score: str | Mapping[str, float] | ScoreFn = "default",
    draws: int = 50,
    groups: Sequence[Any] | Tensor | None = None,
    chunk_size: int | Literal["auto"] = "auto",
    batch_size: int = 128,
    config: Config | Literal["default", "paper", "reference"] = "default",
    seed: int = 0,
    checkpoint: str | Path | None = None,
    ranks: Literal["same", "sharded", "alone"] = "same",
    progress: bool | None = None,
    **options: Any,
) -> Guard:
    """Learn the widest weight distribution around a trained model that still explains the data, and guard the model with it.

    `fit` first looks at the model on a few rows. It refuses one that draws its own random numbers, depends on earlier calls or
    lives on several devices. It logs other findings, and keeps them below `guard.summary()`. It does not change the model.

    Args:
        model: A trained model, or the members of an ensemble.
        train: The data the model was trained on: a DataLoader, a Dataset, or a pair (inputs, targets).
        valid: Rows the model has not seen; they choose τ and the clip. None: a tenth of `train` stands in, with a warning, and
            there are no intervals or prediction sets until `guard.calibrate`. Rows that repeat those of `train` count as none.
        calibration: Separate rows that the model has not seen. They set threshold, p-values and intervals, whose promises are
            then exact. None: the rows of `valid` do, and the promises are approximate.
        false_alarms: The fraction of in-distribution inputs that the guard may flag; it sets `guard.threshold`.
        likelihood: "gaussian", "categorical", "bernoulli", a name in `LIKELIHOODS`, or an object; None: inferred from outputs and
            targets.
        basis: Directions in which weights are random: "svd" of the layer inputs (default) or "identity".
        solver: "refine" (default), "closed-form" without gradient steps, or the paper's "sgd".
        params: The random parameters: "all" (default), "matrices" (two axes or more), "last-layer", patterns of names, or a
            function of (name, tensor). For image classifiers (B, channels, height, width) the default is "last-layer", without
            gradient steps. For large models, too: if one pass over `valid` takes more than 2e9 multiplications of weights
            (parameters × rows of a fully connected net; in a transformer, once per token). A log line says so. Parameters that
            no input reaches stay fixed.
        output_fn: Picks the tensor out of what the model returns; None: a tensor, `.logits`, or the first of a tuple.
        target: The key of the targets where batches are dicts.
        allow_nan: Whether inputs may be missing (NaN), because the model itself imputes or marks them. Distances then take
            two missing numbers as equal, and a missing number as different from any other.
        score: The OOD score. "default" joins the draws' disagreement, energy and generalised entropy of the logits, and distances
            to training rows in inputs and layers, with weights that the training rows choose (`offmap.scores.combine`); "equal"
            gives all of them the same weight, and {"disagreement": 1.0, "inputs": 2.0} those of these names. "distance" is the
            distances alone, "epistemic" the variance of the means or the mutual information, "paper" the mixture variance or
            the entropy of the mean; or a function of outputs, (M·P, B, ...) -> (B,). Distances keep up to 4,096 training rows
            in guard and file.
        draws: Draws of the weights per member for scores and predictions.
        groups: A label for every row of `train`, such as its site, day or speaker. To choose the weights of the default score,
            `fit` leaves out whole groups in turn. `guard.assess()` tells how well the guard sees them.
        chunk_size: Draws that run at once; 1 loops over them.
        batch_size: Rows that run at once.
        config: "default", "paper", "reference" or a `Config`; `basis`, `solver`, `params` and further keywords override its
            fields.
        seed: Decides noise, order and split.
        checkpoint: A file for the state of the fit. If the process dies, call `fit` again with the same arguments: it resumes
            there and gives the same guard. It removes the file at the end.
        ranks: What each rank of a process group (`torchrun`) passes: the "same" data, of which `fit` gives each rank a part, or
            rows of its own, "sharded" (a DistributedSampler tells so). "alone": this process fits by itself. All ranks return
            the same guard.
        progress: Whether to show a progress bar; None: on a terminal. Without a bar, a line on stderr says every ten seconds
            what `fit` is doing; False shows nothing.
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
    checks.one_of("ranks", ranks, ("same", "sharded", "alone"))
    labels = check_groups(groups, valid, ranks)
    pick = first_tensor if output_fn is None else checks.function("output_fn", output_fn, ["output"])
    runtime = Runtime(pick, chunk_size, batch_size, progress)
    reported = nullcontext() if progress is False else print_status(runtime.status)
    # gradients are needed, and tensors made in inference mode would refuse them for good
    with join_group(alone=ranks == "alone") as group, torch.inference_mode(False), fork_rng(seed), reported:
        models = as_models(model)
        place = Place.of(models[0], allow_nan=checks.flag("allow_nan", allow_nan))
        runtime.status.text = "reading data"
        train, valid, calibration, sharded, augmented = read_data(
            train, valid, calibration, place, group, ranks, seed=seed, batch_size=batch_size, target=target
        )
        if labels is not None and isinstance(train, Rows) and len(labels) != train.rows:
            raise ShapeError(f"Expected a label in `groups` for each of {train.rows} rows of `train`, but got {len(labels)}.")
        stacked = stack_models(models)
        group.broadcast(*stacked.module.buffers(), *stacked.fixed.values())  # running means drift apart between ranks
        identity = {"seed": seed, "batch_size": batch_size, "likelihood": likelihood, "output_fn": output_fn}
        data = {"train": None if sharded else train, "valid": valid}
        state = open_checkpoint(checkpoint, stacked, data, settings, identity, group)
        runtime = replace(runtime, group=group, sharded=sharded, checkpoint=state)
        runtime.status.text = "checking the model"
        findings = check_model(stacked.module, valid.inputs, pick)
        restore_state(stacked.module, findings.changing)
        weights = stacked.mean | stacked.fixed
        base = Sampled(runtime.model(stacked.module, weights, valid.inputs), weights)
        check_same_function(models, base.model, weights, valid.inputs)
        if allow_nan:
            check_missing(train, base)
        outputs = base.outputs(valid.inputs, 1)
        likelihood, doubts = find_likelihood(outputs, train, valid, likelihood)
        train = check_targets(train, likelihood, base)
        if calibration is not None:
            check_targets(calibration, likelihood, base)
        image_spec = describe_images(likelihood, train, valid, outputs)
        del outputs  # those of a language model are large
        notes = [note for note in (augmented, *findings.notes, *doubts) if note]
        if config == "default":
            asked = {"params": params, "solver": solver, **options}
            settings, note = limit_random_weights(settings, stacked, valid, pick, asked, images=are_images(likelihood, valid))
            notes += note
        for note in notes:
            logger.warning(note)
        stacked = choose(stacked, valid.inputs, settings.params, pick, unreached=findings.unreached)
        predictive = maxwent.fit(stacked, train, valid, likelihood=likelihood, config=settings, seed=seed, runtime=runtime)
        predictive.q.why.update(dict.fromkeys(findings.unreached, UNREACHED))
        runtime.status.text = "score and threshold"
        guard = build_guard(
            predictive, likelihood, place, train, valid, calibration, score=score, draws=draws, false_alarms=false_alarms,
            seed=seed, target=target, notes=tuple(notes), image_spec=image_spec, groups=labels, group=group, sharded=sharded,
        )  # fmt: skip
        if isinstance(train, Stream):  # its rows are known only now
            if not isinstance(train.source.dataset, IterableDataset):  # the fit may have read them in an earlier run
                read_through(train)
            valid, calibration = mark_repeats(train, valid, calibration, group, sharded=sharded)
            guard = replace(guard, calibration=replace(guard.calibration, seen=(calibration or valid).seen))
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
    score: str | Mapping[str, float] | ScoreFn = "default",
    draws: int = 50,
    clip: float | Literal["choose"] | None = "choose",
    false_alarms: float = 0.05,
    seed: int = 0,
    target: str = "labels",
    allow_nan: bool = False,
) -> Guard:
    """Guard any random model: choose the clip by validation NLL, set threshold and intervals on in-distribution data.

    Args:
        predictive: An object with `members` and `outputs(x, draws, clip=, seed=)`, such as another method's posterior.
        valid: In-distribution rows the model has not seen; such as repeat those of `train` give no intervals.
        train: Rows that the scores "default" and "distance" compare with; without it "default" is the paper's score.
        calibration: Separate rows for threshold and intervals; None: those of `valid`.
        likelihood: A name, an object, or None: inferred from outputs and targets.
        score: What is OOD, as in `fit`.
        draws: Draws per member.
        clip: Bound on the noise of predictions, None for no bound, or "choose".
        false_alarms: The fraction of in-distribution inputs that may be called OOD.
        seed: Decides the noise.
        target: The key of the targets where batches are dicts.
        allow_nan: Whether inputs may be missing (NaN), as in `fit`.

    >>> class Slopes:
    ...     members = 1
    ...     def outputs(self, x, draws, *, clip=None, seed=0):
    ...         return torch.linspace(0.9, 1.1, draws)[:, None] * x[:, 0]
    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> guard(Slopes(), (x, x[:, 0]))(torch.tensor([[0.0], [50.0]])).ood
    tensor([False,  True])
    """
    predictive = as_predictive(predictive)
    draws, seed, false_alarms = check_options(score, draws, seed, false_alarms)
    module = None if predictive.model is None else predictive.model.module
    place = Place.of(module, allow_nan=checks.flag("allow_nan", allow_nan))
    if train is None and score == "distance":
        raise ConfigError("Expected `train=` for score='distance': it compares inputs with training rows.")
    with fork_rng(seed):
        rows = load_rows(as_batches(valid, place, name="valid", target=target), at_least=2)
        outputs: Any = predictive.outputs(rows.inputs, 1, clip=0.0, seed=seed)
        check_outputs(outputs, rows.rows)
        likelihood = resolve(likelihood, outputs, rows.targets)
        separate = load_calibration(calibration, place, target)
        reference = None if train is None else as_batches(train, place, name="train", target=target)
        if isinstance(reference, Rows):
            rows, separate = mark_repeats(watch_repeats(reference, rows, separate), rows, separate)
        guard = build_guard(
            predictive, likelihood, place, reference, rows, separate, score=score,
            draws=draws, clip=clip, false_alarms=false_alarms, seed=seed, target=target,
        )  # fmt: skip
        return replace(guard, probe=make_probe(rows.inputs))


def check_outputs(outputs: Any, rows: int) -> None:
    """Raise unless these can be outputs of a Predictive for so many rows: finite numbers, (M·P, B, ...)."""
    real = isinstance(outputs, Tensor) and outputs.is_floating_point()
    if not real or outputs.ndim < 2 or outputs.shape[1] != rows:
        got = f"{outputs.dtype} {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(
            f"Expected `predictive.outputs` to return floating-point tensors (members · draws, {rows}, ...), but got {got}. "
            "`torch.as_tensor(array).float()` makes one of an array."
        )
    if not bool(outputs.isfinite().all()):
        raise ModelError("Expected `predictive` to give finite outputs, but it gives NaN or infinite values on `valid`.")


def make_probe(x: Inputs) -> Tensor | None:
    """Make up a few inputs with mean and spread of these; None unless they are one tensor of numbers."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    noise = torch.randn((8, *x.shape[1:]), generator=generator(0, "probe"), device="cpu")
    return x.mean(0) + x.std(0) * noise.to(x)


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
    law = options.get("parameterization")
    if law is not None and as_law(law).normal:  # unless another noise is asked for, which is refused
        options = {"noise": "normal"} | options
    keywords = [name for name, p in inspect.signature(fit).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return override(config, {name: value for name, value in named.items() if value is not None} | options, also=keywords)


def limit_random_weights(
    settings: Config, stacked: StackedModel, valid: Rows, pick: OutputFn, asked: Mapping[str, Any], *, images: bool
) -> tuple[Config, list[str]]:
    """Return settings with the last layer alone random for images and large models, where nothing else is `asked`, and notes."""
    if images:
        # draws of convolutions cost accuracy and disagree no better; all draws of the last layer cost one pass of the rest
        settings = replace(settings, params=LAST_LAYER if settings.params is None else settings.params)
        simple = settings.params == LAST_LAYER and all(value is None for name, value in asked.items() if name != "params")
        return (replace(settings, solver="closed-form") if simple else settings), []
    if any(value is not None for value in asked.values()):
        return settings, []
    cost = stacked.members * count_products(stacked.module, valid.inputs, pick)
    if cost <= MOST_PRODUCTS:
        return settings, []
    return replace(settings, params=LAST_LAYER, solver="closed-form"), [LARGE.format(cost, MOST_PRODUCTS)]


def check_groups(groups: Any, valid: Data | None, ranks: str) -> list[Any] | None:
    """Return the labels of the training rows, refused where it is unclear whose they are."""
    if groups is None:
        return None
    if valid is None or ranks == "sharded":
        reason = "`valid`, for rows of `train` stand in for it" if valid is None else "`ranks` other than 'sharded'"
        raise ConfigError(f"Expected {reason}, where `groups` names the group of every training row.")
    return conformal.check_labels(groups)


def check_options(score: Any, draws: Any, seed: Any, false_alarms: Any) -> tuple[int, int, float]:
    """Check the score; return draws, seed and false alarms as plain numbers, whatever library they come from."""
    if isinstance(score, Mapping):
        for name, weight in score.items():
            checks.one_of("a term of `score`", name, TERMS)
            if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise ConfigError(f"Expected the weight of {name!r} in `score` to be a number ≥ 0, but got {weight!r}.")
        if not any(score.values()):
            raise ConfigError("Expected `score` to have a term of positive weight, but it has none.")
    elif not callable(score):
        checks.one_of("score", score, SCORES.keys() - {WeightedScore.name}, ", weights by term, or a function")
    return check_draws(draws), checks.integer("seed", seed), checks.fraction("false_alarms", false_alarms, example=0.05)


def read_data(
    train: Data, valid: Data | None, calibration: Data | None, place: Place, group: Group, ranks: str, *, seed: int,
    batch_size: int, target: str,
) -> tuple[Batches, Rows, Rows | None, bool, str]:  # fmt: skip
    """Read the data in any form; rows that ranks hold apart are gathered, but for those of `train`, if these are `sharded`.

    Also returned: whether they are, and what was found about random augmentation.
    """
    batches, rows = load_train_valid(train, valid, place, seed=seed, batch_size=batch_size, target=target)
    batches, augmented = without_augmentation(batches, valid)
    separate = load_calibration(calibration, place, target)
    if group.size == 1:
        batches = watch_repeats(batches, rows, separate)
        return batches, *mark_repeats(batches, rows, separate), False, augmented
    sharded = (ranks == "sharded" or is_sharded(train)) and not (valid is None and is_sharded(train))  # a split has no sampler
    if sharded if valid is None else ranks == "sharded" or is_sharded(valid):
        rows = all_gather_rows(rows, group)
    if separate is not None and (ranks == "sharded" or is_sharded(calibration)):
        separate = all_gather_rows(separate, group)
    batches = watch_repeats(batches, rows, separate)
    return batches, *mark_repeats(batches, rows, separate, group, sharded=sharded), sharded, augmented


def load_calibration(calibration: Data | None, place: Place, target: str) -> Rows | None:
    """Read the calibration rows into memory."""
    if calibration is None:
        return None
    return load_rows(as_batches(calibration, place, name="calibration", target=target), at_least=2)


def open_checkpoint(
    path: str | Path | None, stacked: StackedModel, data: dict[str, Batches | None], config: Config, options: dict[str, Any],
    group: Group,
) -> Checkpoint | None:  # fmt: skip
    """Return the state of this fit, from an earlier run if there was one; several processes compare that they fit the same."""
    if path is None and group.size == 1:
        return None
    identity = identify(stacked, data, config, **options)
    check_same_on_all(identity, group)
    return None if path is None else Checkpoint(checks.path("checkpoint", path), identity, group)


def find_likelihood(
    outputs: Tensor, train: Batches, rows: Rows, likelihood: str | Likelihood | None
) -> tuple[Likelihood, list[str]]:
    """Return the likelihood that fits the base models' outputs (M, n, ...) and the targets, and what looks wrong about these."""
    valid = rows.targets
    if not bool(outputs.isfinite().all()):
        raise ModelError("Expected a trained model with finite outputs, but it gives NaN or infinite values on `valid`.")
    resolved = resolve(likelihood, outputs, valid)
    first = next(iter(train), None)
    if first is None:
        raise DataError("Expected at least one example in `train`, but it is empty.")
    y = first[1]
    alike = y.shape[1:] == valid.shape[1:] or (y.ndim == valid.ndim and not y.is_floating_point())
    if not alike or y.is_floating_point() != valid.is_floating_point():
        raise DataError(
            f"Expected `valid` targets like `train`'s, {y.dtype} {tuple(y.shape)}, but got {valid.dtype} {tuple(valid.shape)}."
        )
    doubts = [resolved.doubt_outputs(outputs, valid)]
    if likelihood is None and y.is_floating_point():
        doubts.append(resolved.doubt_targets(torch.cat([valid, train.targets if isinstance(train, Rows) else y])))
    return resolved, doubts


def check_missing(rows: Batches, base: Sampled) -> None:
    """Raise unless the model gives finite outputs where inputs are missing, on rows in memory or on the first batch."""
    inputs = rows.inputs if isinstance(rows, Rows) else next(iter(rows))[0]
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim]
    marks = [leaf.isnan().reshape(len(leaf), -1).any(1) for leaf in leaves if leaf.shape[0] == rows_of(inputs)]
    absent = torch.stack(marks).any(0) if marks else torch.zeros(0, dtype=torch.bool, device="cpu")
    few = take_rows(inputs, absent.nonzero().flatten()[:1000])
    if bool(absent.any()) and not bool(base.outputs(few, 1).isfinite().all()):
        raise ModelError(
            "Expected a model that handles missing values, as `allow_nan=True` says, but it gives NaN or infinite values on rows "
            f"of `{rows.name}` with NaN. Impute or mark them inside the model, as with `torch.nan_to_num`, or impute the rows."
        )


def check_targets(rows: Batches, likelihood: Likelihood, base: Sampled) -> Batches:
    """Check that the model runs on the data and targets fit: at once when in memory, else batch by batch as they come."""
    first, _ = next(iter(rows))
    output = base.outputs(take_rows(first, slice(0, 2)), 1)[0]
    if isinstance(rows, Stream):
        return replace(rows, check=lambda y: likelihood.check_targets(output, y, rows.name))
    likelihood.check_targets(output, rows.targets, rows.name)
    return rows


def are_images(likelihood: Likelihood, rows: Rows) -> bool:
    """Whether these are images (B, channels, height, width) of one class each."""
    return isinstance(likelihood, Categorical) and is_image(rows.inputs) and rows.targets.ndim == 1


def describe_images(likelihood: Likelihood, train: Batches, valid: Rows, outputs: Tensor) -> ImageSpec | None:
    """Describe validation images in floating-point numbers, and check training images against them; None for other inputs."""
    if not are_images(likelihood, valid) or not valid.inputs.is_floating_point():
        return None
    spec = ImageSpec.of(valid.inputs)
    spec.check(next(iter(train))[0], "the training inputs")
    counted = (valid.targets != IGNORED).nonzero().flatten()
    few = counted[permutation(len(counted), "accuracy")[:1000]]  # rows may be sorted by class
    if len(few):
        warn_if_inaccurate(spec, outputs[0, few], valid.targets[few], "validation")
    return spec


def build_guard(
    predictive: Predictive, likelihood: Likelihood, place: Place, train: Batches | None, valid: Rows, separate: Rows | None, *,
    score: str | Mapping[str, float] | ScoreFn, draws: int, false_alarms: float, seed: int, target: str,
    clip: float | str | None = "choose", notes: tuple[str, ...] = (), image_spec: ImageSpec | None = None,
    groups: Sequence[Any] | None = None, group: Group = SINGLE_PROCESS, sharded: bool = False,
) -> Guard:  # fmt: skip
    """Build a guard, complete: fit its score, choose its clip, set threshold and intervals on in-distribution rows."""
    sampler = DrawSampler(predictive, likelihood, draws, seed)

    def read_train() -> list[Examples]:
        return [] if train is None else sample_examples(train, REFERENCE_ROWS, seed, group, sharded=sharded)

    data = ScoreData(read_train, valid.inputs, valid.targets, sampler, place.allow_nan, groups, false_alarms)
    if isinstance(score, str):
        module = SCORES[score].fit(data).eval()
    else:
        module = FunctionScore(score) if callable(score) else WeightedScore.fit_weights(score, data).eval()
    # clip, threshold and intervals ask for the same outputs
    cached = replace(sampler, predictive=CachedPredictive(predictive))
    clip = choose_clip(cached, valid, group) if clip == "choose" else check_clip(clip)
    reference = separate or valid
    cached.check_targets(reference)

    def predict(x: Inputs) -> dict[str, Tensor]:
        blocks = (likelihood.predict(cached.outputs(block, clip)) for block in cached.blocks(x))
        return {name: t for name, t in vars(merge_parts(blocks, concat_results)).items() if t is not None}

    prediction = Prediction(**map_rows(predict, reference.inputs, group))
    residuals = likelihood.residual(prediction, reference.targets)
    mine = take_rows(reference.inputs, shard_slice(group, reference.rows))
    known = data.has_all_features and separate is None and group.size == 1
    features = data.scale_features if known else (cached.features(rows, module.reads) for rows in cached.blocks(mine))
    parts = [reduce_positions(module(block), "mean") for block in features]
    scores = all_gather_concat(group, torch.cat(parts) if parts else None).to(torch.promote_types(place.dtype, torch.float32))
    group.broadcast(scores, residuals, *module.buffers())  # as rank 0 has them: other machines may round otherwise
    calibration = Calibration(
        scores, residuals, false_alarms, exact=separate is not None, seen=reference.seen,
        effective_rows=conformal.effective_rows(scores, reference.targets), inputs=keep_small(reference.inputs),
    )  # fmt: skip
    calibration.warn_if_infinite(reference.rows, reference.name)
    calibration.warn_if_series()
    return Guard(
        predictive=predictive, likelihood=likelihood, score_module=module, clip=clip, draws=draws, notes=notes,
        calibration=calibration, place=place, target=target, seed=seed, image_spec=image_spec,
    )  # fmt: skip


def choose_clip(sampler: DrawSampler, valid: Rows, group: Group = SINGLE_PROCESS) -> float | None:
    """Choose the clip of the paper's grid with the lowest validation NLL, the first of equals; None stands for no clip."""
    few = replace(sampler, draws=min(sampler.draws, -(-50 // sampler.predictive.members)))  # 50 draws, of all members together
    rows = shard_slice(group, valid.rows)
    mine = replace(valid, inputs=take_rows(valid.inputs, rows), targets=valid.targets[rows])
    risks = {c: float(all_gather_concat(group, few.nll(mine, c) if mine.rows else None).mean()) for c in CLIPS}
    best = min(risks, key=lambda c: math.inf if math.isnan(risks[c]) else risks[c])
    return None if best == math.inf else best
