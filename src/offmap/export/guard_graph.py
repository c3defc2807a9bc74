"""A guard as one graph: what `Guard.export` writes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offmap._torch_private import tree_leaves
from offmap._types import Data, Inputs
from offmap.data.inputs import Shared, rows_of, take_rows
from offmap.detector import attended, reduce_positions
from offmap.export.draws import Own, draws_of, own, together
from offmap.export.graph import Answering, Joined, Measured, Told
from offmap.export.near import Layers, Near, Scaled
from offmap.export.onnx import ExportInfo, Sheet, check_path, export
from offmap.export.passes import Passes
from offmap.guard import Guard, checked_draws
from offmap.model.params import all_params
from offmap.scores.combine import CombinedScore, log_uncertainty
from offmap.scores.features import NARROW, directions, flat
from offmap.scores.images import plain_energy
from offmap.scores.neighbours import FAMILIAR, KNNDistance, Scale

logger = logging.getLogger("offmap")

FEW = 10
"""Draws of a model that must be run once for each, unless said otherwise."""


def export_guard(
    guard: Guard, path: str | Path, example: Inputs, draws: int | None, calibration: Data | None, half: bool
) -> ExportInfo:
    """Write the guard as .onnx or .pt2: see `Guard.export`."""
    path = check_path(path)
    guard = guard if guard.place.device.type == "cpu" else guard.to("cpu")
    predictive = own(guard.predictive)
    rows = next(iter(guard.blocks(example)))
    rows = take_rows(rows, [0, 0]) if rows_of(rows) == 1 else rows  # of one row, tracing makes a constant
    count = _draws(guard, predictive, draws)
    told, exact = _with_draws(guard, count, rows, calibration)
    result = told(rows)
    names = ("mean", "std", "probs", "score", "ood")
    expected = {name: value for name in names if (value := getattr(result, name)) is not None}
    tensors = tuple(leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor))
    size = rows_of(rows)
    module = graph_of(told, rows, half=half)
    sheet = Sheet(
        module,
        tuple(t.as_subclass(Tensor) for t in tensors),
        _names(predictive.model.net, rows, len(tensors)),
        tuple(not isinstance(t, Shared) and t.ndim > 0 and t.shape[0] == size for t in tensors),
        expected,
        module.undecided(rows),
        _facts(told, exact, half),
    )
    return export(sheet, path, draws=count, threshold=told.threshold, exact=exact, half=half)


def graph_of(guard: Guard, example: Inputs, *, half: bool = False) -> Answering:
    """The module that answers as the guard does."""
    predictive = own(guard.predictive)
    compared = guard.familiar if guard.score_with in ("default", "distance") else None
    passes = _passes(predictive, compared, half)
    predicting = draws_of(predictive, guard.draws, clip=guard.clip, seed=guard.seed, half=half)
    same = guard.clip is None or (compared is not None and guard.score_with == "distance")
    judging = None if same else draws_of(predictive, guard.draws, clip=None, seed=guard.seed, half=half)
    judge = Measured(_measure(guard)) if compared is None else _joined(guard, compared, passes, example)
    precise = torch.promote_types(guard.place.dtype, torch.float32)
    return Answering(
        example, passes, predicting, guard.likelihood.predict, judging, judge, guard.threshold, precise
    ).eval()  # fmt: skip


def _passes(predictive: Own, compared: CombinedScore | None, half: bool) -> Passes | None:
    """The plain members, if the score compares layers or all draws share what comes before the last one."""
    names = compared.layers if compared else ()
    if not names and predictive.model.last_layer is None:
        return None
    net = predictive.model.net
    own_ = all_params(net)  # one member alone has its fixed weights in the model itself
    members = [{**own_, **predictive.mean_weights(member)} for member in range(predictive.members)]
    pictures = compared is not None and compared.logits is not None
    return Passes(predictive.model, members, names, pictures=pictures, half=half)


def _joined(guard: Guard, familiar: CombinedScore, passes: Passes | None, example: Inputs) -> Joined:
    """The score that compares with training rows."""
    members, law = guard.predictive.members, guard.likelihood
    default, pictures = guard.score_with == "default", familiar.logits is not None

    def uncertain(outputs: Tensor) -> Tensor:
        return log_uncertainty(law, outputs, members)

    def energy(outputs: Tensor) -> Tensor:
        return plain_energy(law.logits(outputs), members)  # pyright: ignore[reportAttributeAccessIssue]

    layers = None
    if passes is not None and familiar.layers:
        met = passes(take_rows(example, slice(0, 2))).met
        widths = {name: sum(each[name].shape[1] for each in met) for name in familiar.layers}
        precise = torch.promote_types(guard.place.dtype, torch.float32) if not pictures else torch.float32
        wide = {name: directions(width).to(precise) for name, width in widths.items() if width > NARROW}
        layers = Layers(familiar.layers, wide, pictures=pictures)
    return Joined(
        Told(uncertain, _scaled(familiar.disagreement)) if default else None,
        Told(energy, _scaled(familiar.logits)) if default and familiar.logits is not None else None,
        flat,
        None if familiar.inputs is None else _near(familiar.inputs),
        layers,
        [_near(space) for space in familiar.hidden],
    )


def _measure(guard: Guard) -> Callable[[Inputs, Tensor], Tensor]:
    """As `Guard.score_map`, positions reduce_positions to their mean."""

    def measure(inputs: Inputs, outputs: Tensor) -> Tensor:
        scores = guard.scores(outputs)
        kept = attended(inputs, scores) if outputs.ndim > scores.ndim + 1 else None
        return reduce_positions(scores if kept is None else scores.masked_fill(~kept, torch.nan), "mean")

    return measure


def _near(space: KNNDistance) -> Near:
    return Near({name: tensor for name, tensor in space.state().items() if name != "scale"}, _scaled(space.scale))


def _scaled(scale: Scale) -> Scaled:
    return Scaled(float(scale.centre), float(scale.spread), FAMILIAR)


def _draws(guard: Guard, predictive: Own, draws: Any) -> int:
    """All of the guard's draws where products batch them; else ten at most, for the graph holds the model once for each."""
    if draws is None:
        return guard.draws if together(predictive.model) else min(FEW, guard.draws)
    return checked_draws(draws, " or None")


def _with_draws(guard: Guard, draws: int, rows: Inputs, calibration: Data | None) -> tuple[Guard, bool]:
    """The guard with so many draws and a threshold for them, and whether that keeps its rate of false alarms.

    Scores of other draws are other numbers. With `calibration` data the threshold is found anew; without, it moves as the
    example's scores do in the median, which is said.
    """
    told = replace(guard, draws=draws)
    if calibration is not None:
        return told.calibrate(calibration, guard.calibration.false_alarms), True
    drawless = guard.familiar is not None and guard.score_with == "distance"
    if draws == guard.draws or drawless:
        return told, True
    moved = float((told.score(rows) - guard.score(rows)).nan_to_num(0.0, 0.0, 0.0).median())
    logger.warning(
        "The guard's threshold belongs to %d draws, the file has %d: it is moved by %.3g, as the example's scores are in the "
        "median, and the rate of false alarms is no longer %g for sure. Pass `calibration=` (in-distribution data, as to `calibrate`), "
        "or draws=%d.", guard.draws, draws, moved, guard.calibration.false_alarms, guard.draws,
    )  # fmt: skip
    return replace(told, calibration=replace(guard.calibration, scores=guard.calibration.scores + moved)), False


def _facts(guard: Guard, exact: bool, half: bool) -> dict[str, Any]:
    """What whoever runs the file may want to know; `levels` split the scores of in-distribution data into ten equal parts."""
    scores = guard.calibration.scores.double()
    kept = scores[scores.isfinite()]
    levels = kept.quantile(torch.linspace(0.1, 0.9, 9, dtype=torch.float64, device=kept.device)).tolist() if len(kept) else []
    return {
        "threshold": guard.threshold, "false_alarms": guard.calibration.false_alarms, "exact": exact, "draws": guard.draws,
        "members": guard.predictive.members, "half": half, "levels": " ".join(f"{level:.6g}" for level in levels),
        "score": guard.score_with if isinstance(guard.score_with, str) else "own",
    }  # fmt: skip


def _names(net: nn.Module, inputs: Inputs, count: int) -> tuple[str, ...]:
    """Names of the graph's inputs: a dict's keys, the model's own for a tuple, "input" for a tensor alone."""
    if isinstance(inputs, Tensor):
        return ("input",)
    if isinstance(inputs, dict):
        names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    else:
        names = [name for name, p in inspect.signature(net.forward).parameters.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return tuple(names[:count]) if len(names) >= count else tuple(f"input_{i}" for i in range(count))
