"""A guard's score from one plain pass: `distill` trains the head of `export/distilled.py`, `DistilledGuard` answers with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from offmap import checks
from offmap._types import Data, Inputs
from offmap.data import as_batches, fork_rng, load_rows, sample_rows
from offmap.data.inputs import rows_of, take_rows
from offmap.detector import Calibration, Detector
from offmap.errors import ConfigError, DataError
from offmap.export.distilled import Distilled, Looks, Plain, distil, strange
from offmap.export.draws import own
from offmap.export.graph import Answering
from offmap.export.onnx import ExportInfo, Sheet, check_path, export
from offmap.export.passes import CONVOLUTIONS, Passed, Passes
from offmap.guard import Guard
from offmap.likelihoods import Prediction
from offmap.model.capture import features
from offmap.model.params import all_params
from offmap.scores.combine import LAYERS, ROWS
from offmap.scores.features import NARROW, STEP, WIDEST, blocks, directions, spread_out

logger = logging.getLogger("offmap")

LEAST = 20
"""In-distribution rows that OOD ones can be made of."""

SHARE = 6
"""For so many OOD rows there is one in-distribution row in the lesson, at least."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DistilledGuard(Detector):
    """A detector that reads a guard's score off one pass of the first base model, whose prediction it gives.

    Args:
        guard: The teacher.
        passes: One pass of the first member, which shows some of its layers.
        judge: The head that was trained on the guard's scores.
    """

    guard: Guard
    passes: Passes
    judge: Distilled

    def _describe(self) -> str:
        return f"one pass, taught by a guard of {self.guard.draws} draws"

    def block_rows(self) -> int:
        """As many as one pass takes."""
        return min(STEP, self.guard.block_rows())

    @torch.no_grad()
    def _features(self, rows: Inputs) -> tuple[Tensor, Passed]:
        rows = checked(rows)
        return rows, self.passes(rows)

    @torch.no_grad()
    def _score(self, features: tuple[Tensor, Passed]) -> Tensor:
        rows, passed = features
        return self.judge(rows, None, passed).to(self.precision)

    def _predict(self, features: tuple[Tensor, Passed]) -> Prediction:
        return self.guard.likelihood.predict(features[1].outputs[0].unsqueeze(0))

    def export(self, path: str | Path, example: Inputs) -> ExportInfo:
        """Write pass, score and verdict as one graph, `.onnx` or `.pt2`, with the outputs and checks of `Guard.export`."""
        path = check_path(path)
        if self.guard.place.device.type != "cpu":
            raise ConfigError(
                f"Expected a guard on the CPU for export, but it is on {self.guard.place.device}. Start from `guard.to('cpu')`."
            )
        rows = checked(next(self.blocks(example)))
        rows = take_rows(rows, [0, 0]) if rows_of(rows) == 1 else rows  # of one row, tracing makes a constant
        precise = torch.promote_types(self.guard.place.dtype, torch.float32)
        predict = self.guard.likelihood.predict
        module = Answering(rows, self.passes, Plain(), predict, None, self.judge, self.threshold, precise).eval()
        result = self(rows)
        names = ("mean", "std", "probs", "score", "ood")
        expected = {name: value for name in names if (value := getattr(result, name)) is not None}
        facts = {"threshold": self.threshold, "false_alarms": self.calibration.false_alarms, "exact": True, "draws": 1, "members": 1,
                 "half": False, "levels": _levels(self.calibration.scores), "score": "one pass"}  # fmt: skip
        assert isinstance(rows, Tensor)
        sheet = Sheet(module, (rows.as_subclass(Tensor),), ("input",), (True,), expected, None, facts)
        return export(sheet, path, draws=1, threshold=self.threshold, exact=True)


def distill(
    guard: Guard, train: Data, valid: Data, *, rows: int = 12_000, false_alarms: float = 0.05, seed: int = 0
) -> DistilledGuard:
    """A scorer that costs about two plain passes instead of draws and neighbours: a small head learns the guard's score.

    It reads inputs and hidden layers of the first net. It is taught by the guard on at most 4,096 rows of `train`, and on `rows`
    OOD ones made of them (`offmap.export.distilled.strange`); no OOD data are needed, the recipe is the same for all. The
    threshold is conformal on `valid`, which the head has not seen. Inputs must be one floating-point tensor or array.

    Look at how well it keeps the guard's order on data of yours before you rely on it (`offmap.evaluate` takes both).
    """
    if not isinstance(guard, Guard):
        raise ConfigError(f"Expected a Guard, as `offmap.fit` gives, but got {type(guard).__name__}.")
    rows, seed = checks.integer("rows", rows, 100), checks.integer("seed", seed)
    data = as_batches(train, guard.place, name="train", target=guard.target)
    with fork_rng(guard.seed):
        valid = load_rows(as_batches(valid, guard.place, name="valid", target=guard.target), at_least=2)
    false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
    with fork_rng(guard.seed):
        known = sample_rows(data, ROWS, guard.seed)
    if len(known) != 1 or rows_of(known[0]) < LEAST:
        raise DataError(f"Expected at least {LEAST} training rows of one shape, but got {[rows_of(part) for part in known]}.")
    familiar = checked(known[0])
    made = strange(familiar.flatten(1), rows, seed).unflatten(1, familiar.shape[1:])
    passes, looks = _looking(guard, familiar)

    def looked(x: Tensor) -> Tensor:
        return torch.cat([looks(block, passes(block)) for block in blocks(guard.predictive, x)])

    with torch.inference_mode(False):
        with torch.no_grad():
            seen, usual, far, near = looked(made), looked(familiar), guard.score(made), guard.score(familiar)
        times = -(-rows // SHARE // len(near))  # what is in-distribution must not be forgotten among so much that is OOD
        seen, scores = torch.cat([seen, usual.repeat(times, 1)]), torch.cat([far, near.repeat(times)])
        head = distil(seen, scores, usual, guard.calibration.scores, seed=seed)
    judge = Distilled(looks, head)
    with torch.no_grad():
        scores = torch.cat([judge(x, None, passes(x)) for x in blocks(guard.predictive, checked(valid.inputs))])
    calibration = Calibration(scores.to(guard.precision), None, false_alarms)
    calibration.warn_if_infinite(valid.rows)
    return DistilledGuard(
        guard=guard, passes=passes, judge=judge, calibration=calibration, place=guard.place, target=guard.target, seed=guard.seed,
        image_spec=guard.image_spec,
    )  # fmt: skip


def checked(inputs: Inputs) -> Tensor:
    """One floating-point tensor of one row per example, or an error with the remedy."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise DataError(
            f"Expected one floating-point tensor or array per example, but got {_kind(inputs)}: OOD rows are mixed from "
            "in-distribution ones, and ids, masks or several inputs do not mix. Use the guard itself, with fewer `draws` if it must be "
            "fast, or fit it with where='last-layer', whose draws share one pass."
        )
    if not 1 <= inputs[0].numel() <= WIDEST:
        raise DataError(f"Expected 1 to {WIDEST} numbers per example, but got {inputs[0].numel()}. Use the guard itself.")
    return inputs


def _kind(inputs: Inputs) -> str:
    return f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__


def _looking(guard: Guard, familiar: Tensor) -> tuple[Passes, Looks]:
    """A pass of the first plain member, and what is read off it: the inputs and some layers, spread over the depth."""
    predictive = own(guard.predictive)
    model = predictive.model
    weights = {**all_params(model.net), **predictive.mean_weights(0)}
    few = take_rows(familiar, slice(0, 4))
    met = features(model.net, weights, few, model.output_fn, maps=True)
    names = [n for n, h in met.items() if _shown(model.net, n) and not torch.equal(h, few.flatten(1).to(h))]
    names = spread_out(names, LAYERS)
    passes = Passes(model, [weights], names, pictures=True)
    with torch.no_grad():
        shown = passes(few).met[0]
    widths = [few.flatten(1).shape[1], *(shown[name].shape[1] for name in names)]
    precise = torch.promote_types(guard.place.dtype, torch.float32)
    wide = {place: directions(w).to(familiar.device, precise) for place, w in enumerate(widths) if w > NARROW}
    return passes, Looks(names, wide)


def _shown(net: nn.Module, name: str) -> bool:
    """Whether a parameter belongs to layers that show what they are given."""
    parameter = dict(net.named_parameters())[name]
    owners = [m for m in net.modules() if any(p is parameter for p in vars(m)["_parameters"].values())]
    return all(isinstance(m, (nn.Linear, *CONVOLUTIONS)) for m in owners)


def _levels(scores: Tensor) -> str:
    """What splits the scores of in-distribution data into ten equal parts."""
    kept = scores[scores.isfinite()].double()
    shares = torch.linspace(0.1, 0.9, 9, dtype=torch.float64, device=kept.device)
    return " ".join(f"{level:.6g}" for level in kept.quantile(shares).tolist()) if len(kept) else ""
