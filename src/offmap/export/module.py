"""A guard as one module, and what `Guard.export` writes: frozen draws, the guard's own score, its verdict by a constant."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offmap._torch_private import strict_vmap, tensor_tables, tree_flatten, tree_unflatten
from offmap._types import Inputs, Weights
from offmap.data import as_batches, fork_rng, load_rows
from offmap.data.batch import Shared, is_mapping, is_table, rows_of, take_rows
from offmap.detector import Calibration, Detector, reduce_positions
from offmap.errors import ConfigError, ModelError
from offmap.export.onnx import ExportInfo, ExportTask, check_path, export
from offmap.guard import Guard, check_draws
from offmap.likelihoods import Likelihood
from offmap.model.capture import CONVOLUTIONS, pool_map, pool_tokens
from offmap.model.forward import (
    BatchedModel,
    LastLayer,
    OutputFn,
    Plan,
    call,
    copy_model,
    hook_inputs,
    plan_layers,
    run_layers,
    widen,
)
from offmap.model.params import all_params, at
from offmap.posterior.distribution import NamedTensors
from offmap.posterior.predictive import CachedPredictive, Predictive, Sampled, Stochastic
from offmap.scores.combine import CombinedScore
from offmap.scores.score import EMPTY, Features, Score

logger: logging.Logger = logging.getLogger("offmap")

LARGEST = 100 << 20
"""Bytes of drawn weights up to which a file holds all draws of the guard by default."""

REMEDY = "Fit with score='epistemic', which compares no layers."


def with_weights(predictive: Predictive) -> Stochastic | Sampled:
    """Return the predictive, refused unless its weights can be written down."""
    predictive = predictive.source if isinstance(predictive, CachedPredictive) else predictive
    if isinstance(predictive, Stochastic | Sampled):
        return predictive
    raise ConfigError(
        f"Expected a guard over a model and its drawn weights to export, but got one over {type(predictive).__name__}, which "
        "does not expose them. Fit it with `offmap.fit`."
    )


@dataclass(frozen=True)
class BasePass:
    """Per member: inputs of some layers, {parameter: (B, D)}; those of the last layer, (B, D), if it alone is random; outputs."""

    layer_inputs: list[dict[str, Tensor]]
    last_inputs: list[Tensor]
    outputs: list[Tensor]


class BaseModels(nn.Module):
    """The members with their trained weights, whose layers show their inputs while they run.

    While a graph is traced only modules show what they are given: `nn.Linear`, of whose tokens the mean is taken, and
    convolutions, of whose channels mean and standard deviation.
    """

    def __init__(self, model: BatchedModel, members: Sequence[Weights], names: Sequence[str], *, half: bool = False) -> None:
        super().__init__()
        # in a tuple: the model's own weights are none of this module's, all of them are replaced
        self.model: tuple[nn.Module, OutputFn] = (copy_model(model.module), model.output_fn)
        self.dtypes: dict[str, torch.dtype] = {name: w.dtype for name, w in members[0].items()}
        self.members: nn.ModuleList = nn.ModuleList(NamedTensors(_copy(weights, half)) for weights in members)
        self.owners: dict[str, dict[str, nn.Module]] = {name: layers_of(self.model[0], name) for name in names}
        for name, owners in self.owners.items():
            other = [m for m in owners.values() if not isinstance(m, (nn.Linear, *CONVOLUTIONS))]
            if other:
                raise ModelError(
                    f"Expected `{name}`, whose inputs the default score compares, to belong to an nn.Linear for export, but it "
                    f"belongs to {type(other[0]).__name__}. {REMEDY}"
                )
        self.last_layer: LastLayer | None = model.last_layer

    def forward(self, inputs: Inputs) -> BasePass:
        """Run all members, one after another."""
        passes = [self._run(weights, inputs) for weights in self.members]  # pyright: ignore
        return BasePass(*(list(parts) for parts in zip(*passes, strict=True)))

    def _run(self, weights: NamedTensors, inputs: Inputs) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        model, output_fn = self.model
        paths = {path: path for owners in self.owners.values() for path in owners}
        last = self.last_layer.hooks() if self.last_layer else {}
        with hook_inputs(model, paths) as read, hook_inputs(model, last, last=True) as ends:
            output = call(model, {n: w.to(self.dtypes[n]) for n, w in weights.items()}, inputs, output_fn)
        layer_inputs: dict[str, Tensor] = {}
        for name, owners in self.owners.items():
            path = next((path for path in read if path in owners), None)
            if path is None:
                raise ModelError(f"Expected only its layer to use `{name}`, but the model reads it elsewhere. {REMEDY}")
            maps = isinstance(owners[path], CONVOLUTIONS)
            layer_inputs[name] = pool_map(read[path]) if maps else pool_tokens(read[path], inputs)
        return layer_inputs, self.last_layer.read(ends) if self.last_layer else output, widen(output)


def layers_of(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the layers that hold this parameter, by path."""
    parameter = dict(model.named_parameters())[name]
    return {path: m for path, m in model.named_modules() if any(p is parameter for p in tensor_tables(m)[0].values())}


def _copy(weights: Weights, half: bool) -> Weights:
    """Copy, in half precision if `half`: a view would be written to the file with all that it is a view of."""
    return {n: w.detach().half() if half and w.dtype == torch.float32 else w.detach().clone() for n, w in weights.items()}


class FrozenDraws(nn.Module):
    """A model over a fixed stack of weights: inputs of B rows -> (S, B, ...), member-major. Nothing random is left.

    Three ways: of a model whose last layer alone is random, only that is run, on its inputs in a pass of every member; a plain
    stack of layers runs in batched products; others run once for every weight set, in a loop, which takes any number of rows, or
    tables under `vmap` if `batched`: a graph a third as long, which not every model can be traced to.
    Random weights are `drawn`, {name: (S, ...)}, the others `fixed`, {name: (M, ...)}; `half` stores them in half precision.
    """

    def __init__(self, model: BatchedModel, drawn: Weights, fixed: Weights, members: int = 1, *, half: bool = False) -> None:
        super().__init__()
        self.model: tuple[nn.Module, OutputFn] = (copy_model(model.module), model.output_fn)
        self.members: int = members
        self.batched: bool = False
        self.sets: int = len(next(iter(drawn.values())))
        self.last_layer: LastLayer | None = model.last_layer
        self.dtypes: dict[str, torch.dtype] = {name: w.dtype for name, w in {**drawn, **fixed}.items()}
        self.layers: Plan | None = plan_layers(self.model[0]) if model.layers and self.last_layer is None else None
        self.drawn: NamedTensors = NamedTensors(_copy(drawn, half))
        self.fixed: NamedTensors = NamedTensors({} if self.last_layer else _copy(fixed, half))

    def forward(self, inputs: Inputs, base: BasePass | None = None) -> Tensor:
        """Return outputs of every weight set, in float32 at least."""
        model, output_fn = self.model
        drawn = {name: w.to(self.dtypes[name]) for name, w in self.drawn.items()}
        fixed = {name: w.to(self.dtypes[name]) for name, w in self.fixed.items()}
        times = self.sets // self.members
        if self.last_layer is not None:
            assert base is not None
            return widen(self.last_layer.apply(tuple(base.last_inputs), drawn))
        if (self.layers is not None or self.batched) and is_table(inputs):
            weights = drawn | {name: w.repeat_interleave(times, 0) for name, w in fixed.items()}
            if self.layers is None:
                with strict_vmap():
                    return widen(torch.vmap(lambda w: call(model, w, inputs, output_fn))(weights))
            with torch.enable_grad():  # in one piece: tiles would fix the number of rows
                return widen(run_layers(self.layers, weights, inputs))
        sets = [at(drawn, i) | at(fixed, i // times) for i in range(self.sets)]
        return widen(torch.stack([call(model, weights, inputs, output_fn) for weights in sets]))


def freeze_draws(
    predictive: Stochastic | Sampled, draws: int, *, clip: float | None, seed: int, half: bool = False
) -> FrozenDraws:
    """Freeze the draws that `predictive.outputs` runs; clip 0 and a predictive without randomness give the members."""
    members = predictive.members
    if isinstance(predictive, Sampled):
        drawn = predictive.weights if predictive.draw is None or clip == 0 else predictive.draw(range(draws), seed)
        return FrozenDraws(predictive.model, drawn, {}, members, half=half)
    q = predictive.q
    drawn = q.draw(range(1 if clip == 0 else draws), seed=seed, clip=clip)
    return FrozenDraws(predictive.model, {n: drawn[n] for n in q.mean}, dict(q.fixed.items()), members, half=half)


class PValue(nn.Module):
    """Conformal p-values of scores, (B,) -> (B,): a search in two steps, as graphs have no `searchsorted`.

    `table` holds the sorted calibration scores, row by row, and `values` the p-value by the number of them below, (n + 1,).
    """

    table: Tensor
    values: Tensor

    def __init__(self, calibration: Calibration, dtype: torch.dtype) -> None:
        super().__init__()
        scores = calibration.raised.to(dtype).sort().values
        highest, width = scores.new_full((1,), torch.inf), math.isqrt(len(scores) - 1) + 1
        padded = torch.cat([scores, highest.expand(width * width - len(scores))])
        self.register_buffer("table", padded.view(width, width))
        self.register_buffer("values", calibration.p_value(torch.cat([scores, highest])))

    def forward(self, scores: Tensor) -> Tensor:
        """Find how many calibration scores are below each score, and so its p-value."""
        width = len(self.table)
        rows = (self.table[:, -1] < scores.unsqueeze(1)).sum(1).clamp_max(width - 1)  # wholly below
        return self.values[rows * width + (self.table[rows] < scores.unsqueeze(1)).sum(1)]


class GuardModule(nn.Module):
    """Tensors of the inputs, in order -> outputs by name; values of the example that are no tensors stay what they are.

    Outputs are "mean" and "std", or "probs"; "score", "ood" and "p_value", (B,); "terms", (B, T), of a score that has some;
    "threshold", one number.

    `base` are the members with their trained weights, if somebody reads them; `predicting` clipped draws (None: the first
    member's trained weights); `scoring` unclipped draws, if the score reads other ones than those that predict.
    """

    bound: Tensor  # the threshold; that name is an output's

    def __init__(
        self, example: Inputs, likelihood: Likelihood, score: Score, calibration: Calibration, dtype: torch.dtype,
        base: BaseModels | None, predicting: FrozenDraws | None = None, scoring: FrozenDraws | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.leaves, self.form = tree_flatten(example)
        self.likelihood: Likelihood = likelihood
        self.score: Score = score
        self.dtype: torch.dtype = dtype
        self.base: BaseModels | None = base
        self.predicting: FrozenDraws | None = predicting
        self.scoring: FrozenDraws | None = scoring
        self.p_value: PValue = PValue(calibration, dtype)
        self.register_buffer("bound", torch.tensor(calibration.threshold, dtype=dtype, device=calibration.scores.device))

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return B rows of every output by name."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        features, clipped = self.run(tree_unflatten(leaves, self.form))
        terms = self.score.terms(features) if isinstance(self.score, CombinedScore) else {}
        joined = self.score.join(terms) if isinstance(self.score, CombinedScore) else self.score(features)
        score = reduce_positions(joined, "mean").to(self.dtype)
        verdict = {"score": score, "ood": score > self.bound, "p_value": self.p_value(score)}
        stacked = {"terms": torch.stack(list(terms.values()), 1).to(self.dtype)} if terms else {}
        return select_outputs(self.likelihood.predict(clipped)) | verdict | stacked | {"threshold": self.bound.clone()}

    def run(self, inputs: Inputs) -> tuple[Features, Tensor]:
        """Return what the score reads, and the outputs that predict."""
        base, reads = None if self.base is None else self.base(inputs), self.score.reads
        members = [] if base is None else base.outputs
        clipped = members[0].unsqueeze(0) if self.predicting is None else self.predicting(inputs, base)
        features = Features(
            inputs,
            self.likelihood,
            len(members) or (self.predicting.members if self.predicting else 1),
            EMPTY if not reads.draws else clipped if self.scoring is None else self.scoring(inputs, base),
            torch.stack(members) if reads.base else EMPTY,
            [] if base is None else base.layer_inputs,
        )
        return features, clipped


def select_outputs(result: Any) -> dict[str, Tensor]:
    """Return the fields of a prediction or result that a graph gives."""
    names = ("mean", "std", "probs", "score", "ood", "p_value")
    return {name: value for name in names if (value := getattr(result, name, None)) is not None}


def guard_module(guard: Guard, example: Inputs, *, half: bool = False) -> GuardModule:
    """Return the module that computes what the guard does."""
    predictive, score = with_weights(guard.predictive), guard.score_module
    reads, base, scoring = score.reads, None, None
    if reads.layers or reads.base or predictive.model.last_layer is not None:
        params = all_params(predictive.model.module)  # one member alone has its fixed weights in the model itself
        weights = [{**params, **predictive.mean_weights(member)} for member in range(predictive.members)]
        base = BaseModels(predictive.model, weights, reads.layers, half=half)
    predicting = freeze_draws(predictive, guard.draws, clip=guard.clip, seed=guard.seed, half=half)
    if guard.clip is not None and reads.draws:
        scoring = freeze_draws(predictive, guard.draws, clip=None, seed=guard.seed, half=half)
    return GuardModule(example, guard.likelihood, score, guard.calibration, guard.precision, base, predicting, scoring).eval()


def export_guard(guard: Guard, path: str | Path, example: Inputs, draws: int | None, calibration: Any, half: bool) -> ExportInfo:
    """Write the guard as .onnx or .pt2: see `Guard.export`."""
    path = check_path(path)
    guard = guard if guard.place.device.type == "cpu" else guard.to("cpu")
    model, rows = with_weights(guard.predictive).model, example_rows(guard, example)
    draws = check_draws(fitting_draws(guard, half) if draws is None else draws, optional=True)
    guard, exact = with_draws(guard, draws, rows, calibration)
    name = guard.score_module.name or "own"
    facts = {"exact": exact, "draws": guard.draws, "members": guard.predictive.members, "half": half, "score": name}
    return export_module(guard, guard_module(guard, rows, half=half), rows, path, model.module, facts)


def fitting_draws(guard: Guard, half: bool) -> int:
    """Return the guard's draws, or as many as LARGEST bytes of weights hold, but ten at least."""
    predictive = with_weights(guard.predictive)
    weights = predictive.q.mean if isinstance(predictive, Stochastic) else predictive.weights
    numbers = sum(w[0].numel() for w in weights.values()) * predictive.members * (1 if guard.clip is None else 2)
    return min(guard.draws, max(10, LARGEST // max(1, numbers * (2 if half else 4))))


def example_rows(detector: Detector, example: Inputs) -> Inputs:
    """Return the example's first block, two rows at least: of one, tracing makes a constant."""
    rows = next(detector.blocks(example))
    return take_rows(rows, [0, 0]) if rows_of(rows) == 1 else rows


def with_draws(guard: Guard, draws: int, rows: Inputs, calibration: Any) -> tuple[Guard, bool]:
    """Return the guard with so many draws and a threshold for them, and whether that keeps its rate of false alarms.

    Scores of other draws are other numbers, so calibration rows are scored anew: those passed, or those that the guard keeps.
    Without any, scores and threshold move as the example's scores do in the median, which is logged.
    """
    other, known = replace(guard, draws=draws), guard.calibration
    if calibration is not None:
        scores = other.score(calibration_inputs(guard, calibration, rows))
        renewed = Calibration(scores, None, known.false_alarms)
        renewed.warn_if_infinite(len(scores), "calibration")
        return replace(other, calibration=renewed), True
    if draws == guard.draws:
        return other, True
    if known.inputs is not None:
        return replace(other, calibration=replace(known, scores=other.score(known.inputs))), True
    moved = other.score(rows) - guard.score(rows)
    if bool((moved == 0).all()):  # the score reads no draws
        return other, True
    shift = float(moved.nan_to_num(0.0, 0.0, 0.0).median())
    logger.warning(
        "The guard's threshold belongs to %d draws, the file has %d, and the guard keeps no calibration rows: scores are shifted "
        "by %.3g, the median shift of the example's, and the false alarm rate is only about %g. Pass `calibration=` "
        "(in-distribution data, as to `calibrate`), or draws=%d.",
        guard.draws, draws, shift, known.false_alarms, guard.draws,
    )  # fmt: skip
    return replace(other, calibration=replace(known, scores=known.scores + shift)), False


def calibration_inputs(guard: Guard, calibration: Any, example: Inputs) -> Inputs:
    """Return the inputs of calibration data, with targets as `calibrate` takes them, or without: then in the example's form."""
    if isinstance(example, tuple):  # of a model with several inputs, (a, b) are these, ((a, b), y) has targets
        alone = isinstance(calibration, tuple | list) and isinstance(calibration[0], Tensor | np.ndarray)
    else:
        alone = isinstance(calibration, Tensor | np.ndarray) or is_mapping(calibration)
    if alone:
        return calibration
    with fork_rng(guard.seed):
        return load_rows(as_batches(calibration, guard.place, name="calibration", target=guard.target), at_least=2).inputs


def export_module(
    detector: Detector, module: GuardModule, rows: Inputs, path: Path, model: nn.Module, facts: dict[str, Any]
) -> ExportInfo:
    """Write a module that computes what the detector does; `levels` split scores of calibration rows into ten equal parts."""
    calibration = detector.calibration
    scores = calibration.scores.double()
    scores, shares = scores[scores.isfinite()], torch.arange(1, 10, dtype=torch.float64, device=scores.device) / 10
    levels = scores.quantile(shares).tolist() if len(scores) else []
    terms = detector.terms(rows) if isinstance(detector, Guard) and isinstance(module.score, CombinedScore) else {}
    facts = {
        "threshold": detector.threshold,
        "false_alarms": calibration.false_alarms,
        "calibration_rows": calibration.groups or calibration.effective_rows or len(calibration.scores),
        "calibrated": json.dumps(facts["exact"] and not calibration.seen),
        "allow_nan": json.dumps(detector.place.allow_nan),
        "levels": " ".join(f"{level:.6g}" for level in levels),
        "terms": json.dumps(list(terms)),
        "columns": json.dumps(find_columns(detector, rows)),
        **facts,
    }
    expected = select_outputs(detector(rows)) | ({"terms": torch.stack(list(terms.values()), 1)} if terms else {})
    tensors, size = [leaf for leaf in module.leaves if isinstance(leaf, Tensor)], rows_of(rows)
    task = ExportTask(
        module,
        tuple(t.as_subclass(Tensor) for t in tensors),
        _input_names(model, rows, len(tensors)),
        tuple(not isinstance(t, Shared) and t.ndim > 0 and t.shape[0] == size for t in tensors),
        expected | {"threshold": module.bound},
        calibration,
        module.score.ties(module.run(rows)[0]),
        facts,
    )
    unrolled = [m for m in module.modules() if isinstance(m, FrozenDraws) and m.layers is None and m.last_layer is None]
    if unrolled and is_table(rows):
        for each in unrolled:
            each.batched = True
        with suppress(Exception):  # the loop raises what it cannot run either
            return export(task, path)
        for each in unrolled:
            each.batched = False
    return export(task, path)


def find_columns(detector: Detector, rows: Inputs) -> list[str] | None:
    """Return the names of the input's columns, if the guard keeps one for each."""
    guard = getattr(detector, "guard", detector)
    names = guard.about.get("inputs") if isinstance(guard, Guard) else None
    if not isinstance(names, list) or not isinstance(rows, Tensor) or rows.ndim != 2 or len(names) != rows.shape[1]:
        return None
    return [str(name) for name in names]


def _input_names(model: nn.Module, inputs: Inputs, count: int) -> tuple[str, ...]:
    """Name the graph's inputs: a dict's keys, the model's own for a tuple, "input" for a tensor alone."""
    if isinstance(inputs, Tensor):
        return ("input",)
    if isinstance(inputs, dict):
        names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    else:
        names = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return tuple(names[:count]) if len(names) >= count else tuple(f"input_{i}" for i in range(count))
