"""`Detector`: a score, a threshold with a promise, a prediction. Guards, ensembles, distilled and post-hoc ones are its kinds."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler

from offmap import checks, conformal
from offmap._torch_private import tree_leaves, tree_map
from offmap._types import Data, Inputs
from offmap.data import Place, Rows, as_batches, check_finite, fork_rng, load_rows
from offmap.data.batch import check_inputs, concat_padded, drop_targets, is_mapping, mark_shared, rows_of, take_rows
from offmap.data.batches import UNCALIBRATED, iter_batches, mark_seen
from offmap.data.image_spec import ImageSpec
from offmap.errors import ConfigError, DataError, NotFittedError, ShapeError
from offmap.likelihoods import Prediction
from offmap.likelihoods.likelihood import describe_tensors

logger: logging.Logger = logging.getLogger("offmap")

KEPT_BYTES = 1 << 26
"""Calibration inputs that a detector keeps in memory, at most."""

ROUNDING, NOISE = 1e-5, 1e-3
"""What rounding may move a score by: a share of its size and the usual one, as other batches are summed in another order; and at
most a share of the scores' standard deviation, for some scores vary little around a large number."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(Prediction):
    """Prediction (from clipped draws) and verdict (from unclipped ones) for B inputs.

    Attributes:
        score: (B,), higher = more OOD.
        ood: (B,) bool, score > threshold.
        p_value: (B,), conformal: the share of calibration rows whose score is at least as high; uncalibrated where the model has
            seen these (`calibration.seen`).
        score_map: (B, *positions) for dense outputs, NaN at padding, else None. Batches of different lengths are padded to the
            longest with NaN, label −100.
    """

    score: Tensor
    ood: Tensor
    p_value: Tensor
    score_map: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Interval:
    """Ends `lower` and `upper`, in the shape of the mean; infinite when the calibration set is too small for the level."""

    lower: Tensor
    upper: Tensor

    def __repr__(self) -> str:
        return describe_tensors(self)


@dataclass(frozen=True)
class Calibration:
    """Scores and residuals of in-distribution rows that set threshold, p-values and intervals.

    Attributes:
        scores: (n,).
        residuals: (n,) or (n, K), |y − mean|/std or 1 − p(y); one position per row for dense outputs. None without targets.
        false_alarms: Share of in-distribution rows that may be called OOD.
        exact: False when the same rows also chose the risk bound or the clip: guarantees are then approximate.
        seen: True when the rows were part of the model's training data: residuals are then too small, so there are no intervals
            or prediction sets, and threshold and p-values are uncalibrated.
        weights: (n,) of `conformal.group_weights`, on the CPU, where whole groups were calibrated on; None: 1/(n + 1) each.
        effective_rows: How many independent rows they are worth, where neighbours have similar scores; None: no sign of that.
        inputs: The rows themselves, up to 64 MB, for exports of fewer draws to score them anew; no file or copy holds them.
    """

    scores: Tensor = field(repr=False)
    residuals: Tensor | None = field(default=None, repr=False)
    false_alarms: float = 0.05
    exact: bool = True
    seen: bool = False
    weights: Tensor | None = field(default=None, repr=False)
    effective_rows: int | None = None
    inputs: Inputs | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"inputs": None}  # a copy for another process holds no more rows than a file

    @cached_property
    def threshold(self) -> float:
        """The ⌈(1 − false_alarms)(n + 1)⌉-th smallest score, or the quantile by weights; infinite when n is too small.

        >>> Calibration(torch.arange(1.0, 40.0)).threshold
        38.0
        """
        return float(conformal.quantile(self.raised, 1 - self.false_alarms, self.weights))

    @cached_property
    def raised(self) -> Tensor:
        """The scores (n,), ties raised by what rounding may do: else it would decide whether copies of a row are flagged.

        >>> Calibration(torch.tensor([2.0, 1.0, 2.0])).raised > torch.tensor([2.0, 1.0, 2.0])
        tensor([ True, False,  True])
        """
        ordered, order = self.scores.sort()
        finite = ordered.isfinite()
        known = ordered[finite] if bool(finite.any()) else ordered.new_zeros(1)
        most = NOISE * known.std(correction=0)
        rounding = torch.where(finite, torch.minimum(ROUNDING * (ordered.abs() + known.abs().median()), most), 0.0)
        equal = ordered.diff() <= rounding[1:]
        tied = functional.pad(equal, (1, 0)) | functional.pad(equal, (0, 1))
        return torch.empty_like(ordered).scatter(0, order, torch.where(tied, ordered + rounding, ordered))

    @cached_property
    def _sorted_scores(self) -> tuple[Tensor, Tensor | None]:
        """Sorted scores, and the weight of those before each of them and of all, (n + 1,)."""
        scores, order = self.raised.sort()
        before = None if self.weights is None else functional.pad(self.weights[order.cpu()].cumsum(0), (1, 0))
        return scores, before

    def p_value(self, scores: Tensor) -> Tensor:
        """Conformal p-values (1 + #{i : c_i ≥ s}) / (n + 1), at most α with probability at most α: (B,) -> (B,).

        With weights, 1 less the weight of the scores below.

        >>> Calibration(torch.tensor([1.0, 2.0, 3.0])).p_value(torch.tensor([0.0, 2.0, 9.0]))
        tensor([1.0000, 0.7500, 0.2500])
        """
        n = len(self.scores)
        kind = torch.promote_types(scores.dtype, self.scores.dtype)
        ordered, before = self._sorted_scores
        below = torch.searchsorted(ordered.to(kind), scores.to(kind).contiguous())
        if before is not None:
            return (1 - before)[below.cpu()].to(scores)
        return ((1 + n - below).to(kind) / (n + 1)).to(scores)

    def radius(self, level: float) -> Tensor:
        """The conformal quantile of the residuals, () or (K,); infinite when n is too small for `level`."""
        if self.residuals is None:
            raise NotFittedError("Expected a detector that was calibrated with targets; use a Guard.")
        if self.seen:
            raise NotFittedError(
                "Expected a detector calibrated on rows that the model has not seen, but these were part of its training data: "
                "intervals would be too narrow. Call `guard = guard.calibrate(rows the model has not seen)` first."
            )
        return conformal.quantile(self.residuals, level, self.weights)

    def to(self, device: str | torch.device) -> Calibration:
        """Return the same calibration on another device."""
        residuals = None if self.residuals is None else self.residuals.to(device)
        return replace(self, scores=self.scores.to(device), residuals=residuals)

    @property
    def groups(self) -> int | None:
        """How many groups were calibrated on; None: rows."""
        return None if self.weights is None else conformal.count_groups(self.weights)

    def describe(self, *, why: bool = False) -> str:
        """Return the rate of false alarms, by how many rows, groups or independent rows, and how far it is promised, and why."""
        kind = "uncalibrated: the model was trained on them" if self.seen else "exact" if self.exact else "approximate"
        if why and self.seen:
            kind += ", so there are no intervals; call `calibrate` with rows it has not seen"
        elif why:
            kind += ": separate calibration data" if self.exact else ": `valid` also chose τ and the clip"
        groups = "" if self.groups is None else f" in {self.groups} groups"
        worth = "" if self.effective_rows is None else f"; as neighbours are alike, worth about {self.effective_rows}"
        return (
            f"at most {100 * self.false_alarms:g} % false alarms, by {len(self.scores)} calibration rows{groups} ({kind}{worth})"
        )

    def warn_if_infinite(self, rows: int, name: str = "valid") -> None:
        """Warn that nothing will be flagged: too few rows or groups for the false alarm rate, or scores that overflow."""
        needed = math.ceil(1 / self.false_alarms * (1 - 1e-12)) - 1
        count, kind, remedy = rows, "rows", ""
        if self.groups is not None:
            count, kind = self.groups, "groups"
            remedy = f", or `false_alarms={math.ceil(1000 / (count + 1)) / 1000:g}`, the least that {count} can promise"
        if count < needed:
            logger.warning(
                "The threshold is infinite, so nothing will be flagged: %d calibration %s are too few for a false alarm rate "
                "of %g. Pass at least %d%s.", count, kind, self.false_alarms, needed, remedy,
            )  # fmt: skip
        elif self.threshold == math.inf:
            logger.warning("The threshold is infinite, so nothing will be flagged: the scores of `%s` overflow.", name)

    def warn_if_series(self) -> None:
        """Warn that neighbouring rows have similar scores, so that a later stretch may be flagged more often than promised."""
        if self.effective_rows is not None:
            logger.warning(
                "Neighbouring calibration rows have similar scores, as in a time series or a sorted table. The %d rows are worth "
                "about %d independent ones, so more than %g %% of later rows or of another run may be flagged. Pass `groups=` or "
                "`block=` to `guard.calibrate` (docs: guides/series).",
                len(self.scores), self.effective_rows, 100 * self.false_alarms,
            )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Detector(ABC):
    """Base of everything that calls inputs OOD. A kind overrides `_score` and `_predict`, and `_features` for what both read.

    Inputs are a tensor or array, a tuple (`*args` of the model), a dict or what is like one (`**kwargs`; a target among them is
    put aside), or a DataLoader of these, whose batches may differ in length. Results are on the model's device.

    Args:
        calibration: Scores of in-distribution rows, which set the threshold.
        place: Device and dtype of the inputs.
        target: Key of the targets in batches that are one dict.
        seed: Seed of everything random.
        image_spec: Shape and range of image inputs: other shapes are refused, other ranges logged.
    """

    calibration: Calibration
    place: Place
    target: str = "labels"
    seed: int = 0
    image_spec: ImageSpec | None = None

    @abstractmethod
    def _score(self, features: Any) -> Tensor:
        """Score a block: (B,) or (B, *positions), NaN at padding."""

    @abstractmethod
    def _predict(self, features: Any) -> Prediction:
        """Predict a block."""

    def _features(self, rows: Inputs) -> Any:
        """Compute what `_score` and `_predict` both read of a block of inputs; by default the inputs themselves."""
        return rows

    def _residuals(self, rows: Rows) -> Tensor | None:
        """Nonconformity of the predictions at the targets, for intervals; None for kinds that have no intervals."""
        return None

    def _share_repeated(self, inputs: Inputs) -> float:
        """Return which share of the inputs are training rows, as far as the detector holds these."""
        return 0.0

    def check_targets(self, rows: Rows) -> None:  # noqa: B027 (nothing to check by default)
        """Raise unless the targets of these rows fit the predictions; any do by default."""

    def predict_at(self, rows: Rows) -> dict[str, tuple[Prediction, Tensor]]:
        """Predict labelled rows, each with its NLL (n,): "own" is what `predict` returns, "wide" is from unclipped draws."""
        return {}

    def block_rows(self) -> int:
        """Return how many rows `_features` may hold at once."""
        return 4096

    @property
    def threshold(self) -> float:
        """Scores above it are called OOD; infinite when calibration rows are too few."""
        return self.calibration.threshold

    @property
    def precision(self) -> torch.dtype:
        """The dtype of scores: the model's, float32 at least."""
        return torch.promote_types(self.place.dtype, torch.float32)

    def __call__(self, x: Inputs) -> Result:
        """Predict, score and judge every row of `x`."""
        return merge_parts((self._judge(self._features(rows)) for rows in self.blocks(x)), concat_results)

    def _judge(self, features: Any) -> Result:
        prediction, score_map = self._predict(features), self._score(features)
        score = reduce_positions(score_map, "mean")
        verdict = {"score": score, "ood": score > self.threshold, "p_value": self.calibration.p_value(score)}
        return Result(**vars(prediction), **verdict, score_map=score_map if score_map.ndim > 1 else None)

    def score(self, x: Inputs, *, reduce: str | None = "mean") -> Tensor:
        """Score every input: (B,), higher = more OOD.

        Args:
            x: Inputs of B rows.
            reduce: "mean" or "max" over the positions of dense outputs; None keeps them, (B, *positions). Positions that an
                `attention_mask` of the inputs calls padding are left out, and are NaN in the map. The threshold belongs to the
                mean.
        """
        if reduce is not None and not (isinstance(reduce, str) and reduce in ("mean", "max")):
            raise ConfigError(f"Expected `reduce` to be 'mean', 'max' or None, but got {reduce!r}.")
        parts = (reduce_positions(self._score(self._features(rows)), reduce) for rows in self.blocks(x))
        return merge_parts(parts, concat_padded)

    def predict(self, x: Inputs) -> Prediction:
        """Predict every row of `x`."""
        return merge_parts((self._predict(self._features(rows)) for rows in self.blocks(x)), concat_results)

    def interval(self, x: Inputs, level: float = 0.95) -> Interval:
        """Return the conformal interval mean ± q·std around a regression.

        Infinite when calibration rows are too few for the level. Dense outputs are covered on average over their positions.

        Args:
            x: Inputs of B rows.
            level: Share of new targets inside the interval.
        """
        prediction = self.predict(x)
        if prediction.mean is None or prediction.std is None:
            raise NotFittedError("Expected a regression guard for `interval`; use `prediction_set` for classification.")
        radius = self.calibration.radius(level).to(prediction.std) * prediction.std
        return Interval(prediction.mean - radius, prediction.mean + radius)

    def prediction_set(self, x: Inputs, level: float = 0.95) -> Tensor:
        """Return the classes that cannot be ruled out, (B, C) bool; all of them when calibration rows are too few.

        Args:
            x: Inputs of B rows.
            level: Share of new targets inside the set; of dense outputs, (B, C, *positions), on average over positions.
        """
        prediction = self.predict(x)
        if prediction.probs is None:
            raise NotFittedError("Expected a classification guard for `prediction_set`; use `interval` for regression.")
        return 1 - prediction.probs <= self.calibration.radius(level).to(prediction.probs)

    def calibrate(self, valid: Data, false_alarms: float = 0.05, *, groups: Any = None, block: int | None = None) -> Self:
        """Return the same detector with threshold, p-values and intervals from other in-distribution data.

        The promise is for new rows that are exchangeable with these. Rows of a series are not, but its runs, days or sites may
        be: with `groups`, the expected share of rows of a new group that are flagged is at most `false_alarms`, however alike
        rows of one group are. It takes 1/false_alarms − 1 groups, 19 for 5 %; with fewer the threshold is infinite.

        Args:
            valid: In-distribution rows that the model has not seen and on which no choice was made, in their order if there are
                groups or blocks. A score that holds training rows recognises them: they count as seen, with a warning. It
                recognises the whole of `train`, and any part of up to 4,096 rows; other scores and post-hoc detectors none.
            false_alarms: Share of in-distribution rows that may be called OOD.
            groups: A label for each row, such as its run, day or site.
            block: Take so many consecutive rows as a group, for one long series: many more than stay alike.
        """
        false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
        with fork_rng(self.seed):
            rows = load_rows(as_batches(valid, self.place, name="valid", target=self.target), at_least=2)
        rows = mark_seen(rows, self._share_repeated(rows.inputs), UNCALIBRATED)
        weights = find_weights(valid, rows.rows, groups, block)
        scores, residuals = self.score(rows.inputs), self._residuals(rows)
        if weights is not None and residuals is not None and len(residuals) != rows.rows:
            raise DataError("Expected a target in each row of `valid` beside groups, but some are ignored; leave these rows out.")
        effective = conformal.effective_rows(scores, rows.targets) if groups is None and block is None else None
        calibration = Calibration(
            scores, residuals, false_alarms, seen=rows.seen, weights=weights, effective_rows=effective,
            inputs=keep_small(rows.inputs),
        )  # fmt: skip
        calibration.warn_if_infinite(rows.rows, rows.name)
        calibration.warn_if_series()
        return replace(self, calibration=calibration)

    def blocks(self, x: Any, rows: int | None = None) -> Iterator[Inputs]:
        """Cut inputs, checked and on the right device, into blocks of rows.

        Args:
            x: Inputs in any form, such as a tensor (B, ...) or a DataLoader.
            rows: The most rows of a block; by default `block_rows()`.
        """
        step, empty, loader = rows or self.block_rows(), True, isinstance(x, DataLoader)
        for source in iter_batches(x, "the inputs") if loader else [x]:
            inputs = drop_targets(source, self.target) if loader or is_mapping(source) else source
            inputs = tree_map(self.place.put, inputs)
            check_inputs(inputs, "the guard")
            check_finite(inputs, None, "the inputs", allow_nan=self.place.allow_nan)
            if self.image_spec is not None:
                self.image_spec.check(inputs, "the inputs")
            inputs = mark_shared(inputs)
            for start in range(0, rows_of(inputs), step):
                empty = False
                yield take_rows(inputs, slice(start, start + step))
        if empty:
            raise DataError("Expected at least one input, but got none.")

    def _describe(self) -> str:
        """What kind of detector this is, in a few words for `repr`."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._describe()})\n  threshold {self.threshold:.4g}: {self.calibration.describe()}"


def keep_small(inputs: Inputs) -> Inputs | None:
    """Return the inputs if they take no more than KEPT_BYTES, else None."""
    size = sum(t.numel() * t.element_size() for t in tree_leaves(inputs) if isinstance(t, Tensor))
    return inputs if size <= KEPT_BYTES else None


def find_weights(data: Data, rows: int, groups: Any, block: int | None) -> Tensor | None:
    """Return the weights of so many rows in groups or blocks, checked; None where every row counts the same."""
    if groups is None and block is None:
        return None
    if groups is not None and block is not None:
        raise ConfigError("Expected `groups` or `block`, but got both; pass the groups alone.")
    if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
        raise ConfigError("Expected `valid` in the order of its groups, but its DataLoader shuffles; pass `shuffle=False`.")
    weights = conformal.group_weights(
        conformal.consecutive_blocks(rows, checks.integer("block", block)) if groups is None else groups
    )
    if len(weights) != rows:
        raise ShapeError(f"Expected a label in `groups` for each of {rows} rows, but got {len(weights)}.")
    return None if conformal.count_groups(weights) == rows else weights


def reduce_positions(scores: Tensor, how: str | None) -> Tensor:
    """Reduce positions to one score per example, NaN left out: (B, *positions) -> (B,); infinite where no position is left.

    >>> reduce_positions(torch.tensor([[1.0, 3.0, torch.nan]]), "mean")
    tensor([2.])
    """
    if how is None or scores.ndim == 1:
        return scores
    flat = scores.flatten(1)
    missing = flat.isnan()
    result = flat.nanmean(1) if how == "mean" else flat.masked_fill(missing, -torch.inf).amax(1)
    return result.masked_fill(missing.all(1), torch.inf)


Record = TypeVar("Record", bound=Prediction)
Part = TypeVar("Part")


def concat_results(parts: list[Record]) -> Record:
    """Concatenate predictions or results of consecutive rows, field by field."""
    columns: dict[str, Tensor | None] = {}
    for f in fields(parts[0]):
        values = [getattr(part, f.name) for part in parts]
        columns[f.name] = None if values[0] is None else concat_padded(values)
    return type(parts[0])(**columns)  # pyright: ignore[reportArgumentType]


def merge_parts(parts: Iterable[Part], concat: Callable[[list[Part]], Part]) -> Part:
    """Concatenate all parts, a few dozen at a time.

    Many short ones, left between the large temporaries of later blocks, would keep the allocator from using freed memory again:
    a stream of a million rows then holds 100 MB more than one of ten thousand.
    """
    merged: list[Part] = []
    for part in parts:
        merged.append(part)
        if len(merged) == 64:
            merged = [concat(merged)]
    return merged[0] if len(merged) == 1 else concat(merged)
