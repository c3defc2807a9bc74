"""scikit-learn estimators: a regressor, a classifier and an outlier detector, each with a fitted Guard inside.

The sign is scikit-learn's: `score_samples` is higher for in-distribution rows, while the scores of `guard_` are higher for OOD
rows. Rows may have any units: the nets standardise them inside.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offmap import checks
from offmap._types import ScoreFn
from offmap.checks import option, require
from offmap.data import as_batches
from offmap.data.batch import check_unmasked
from offmap.data.batches import sample_rows
from offmap.errors import ConfigError, DataError
from offmap.fit import REFERENCE_ROWS, fit
from offmap.guard import Guard
from offmap.integrations.nets import QUIET_SECONDS, Standardize, train_mlps
from offmap.likelihoods import Categorical, Gaussian, Likelihood, ScaledGaussian
from offmap.random import generator
from offmap.scores.distance import find_nearest

require("sklearn", "sklearn")  # one clear line where it is missing

from sklearn.base import BaseEstimator, ClassifierMixin, OutlierMixin, RegressorMixin  # noqa: E402
from sklearn.utils import check_random_state  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import (  # noqa: E402
    _check_sample_weight,  # pyright: ignore[reportPrivateUsage]
    check_is_fitted,
    validate_data,
)

Array: TypeAlias = NDArray[Any]

MIN_ROWS = 4  # two to train on and two to validate with
LARGEST = 1e150  # of the numbers to fit: squares of larger ones overflow
DENSE_NUMBERS = 50_000_000  # that a sparse matrix may have when it is made dense: 400 MB
CENTRAL_SHARE = 0.85  # of the training rows: what outliers are told by
GROSS = 6.0  # robust standard deviations of the logarithm of a distance, from which on a row is a gross outlier


def check_hidden(hidden: Any) -> tuple[int, ...]:
    """Return widths, or a single one, as a tuple."""
    several = hidden if isinstance(hidden, Sequence | np.ndarray) and not isinstance(hidden, str) else [hidden]
    return tuple(checks.integer("hidden", width, above=0) for width in several)


def check_contamination(value: Any) -> None:
    """Raise unless it is "auto" or a share."""
    share = isinstance(value, numbers.Real) and 0 < float(value) <= 0.5
    if not share and not (isinstance(value, str) and value == "auto"):
        raise ConfigError(f"Expected `contamination` to be 'auto' or a share above 0 and at most 0.5, but got {value!r}.")


def check_size(name: str, values: Array) -> None:
    """Raise if a number is too large to compute with, as some marks of missing values are."""
    large = (np.abs(values) > LARGEST).reshape(len(values), -1).any(1)
    if large.any():
        raise DataError(
            f"Expected numbers up to {LARGEST:g} in `{name}`, but row {int(large.argmax())} has a larger one. Does it mark a "
            "missing value? Impute it, or pass NaN with `allow_nan=True`; else rescale the column."
        )


@dataclass(kw_only=True, eq=False, repr=False)
class Guarded(BaseEstimator):
    """Share parameters, the fit of a guard and its scores among the three estimators."""

    hidden: int | Sequence[int] = option((64, 64), "Widths of the hidden layers of the nets trained here.", check=check_hidden)
    members: int = option(1, "How many nets; several detect better, and cost as many times more.", above=0)
    steps: int | None = option(
        None, "Gradient steps of their training; None: a hundred epochs, 200 to 5,000 steps (detector: 500).", above=0
    )
    lr: float = option(0.01, "Adam's learning rate.", above=0)
    batch_size: int = option(128, "Rows per step.", above=0)
    validation: float = option(
        0.2, "Share of the rows held out for early stopping and for the threshold; at least 20 rows, at most half.",
        check=partial(checks.fraction, "validation", example=0.2),
    )  # fmt: skip
    solver: Literal["refine", "closed-form", "sgd"] | None = option(
        None, 'As in `offmap.fit`; None: the closed form below 500 rows and in the detector, else "refine".'
    )
    basis: Literal["svd", "identity"] = option("svd", "As in `offmap.fit`.")
    allow_nan: bool = option(
        False, "Whether rows may have missing values (NaN): the nets trained here get the mean instead, and a mark."
    )
    score_with: str | ScoreFn = option("default", "As `score` in `offmap.fit`; scikit-learn has a method `score` already.")
    draws: int = option(50, "Sampled nets per member.")
    false_alarms: float = option(
        0.05, "Share of in-distribution rows that may be flagged.", check=partial(checks.fraction, "false_alarms", example=0.05)
    )
    model: nn.Module | list[nn.Module] | None = option(
        None,
        "A trained model (or a list of them) to guard instead of training some. It gets rows without preprocessing; some "
        "of those passed to `fit` calibrate, so for intervals that hold they must be new to it.",
    )
    progress: bool | None = option(None, "Whether to show progress; None: of fits that take more than two seconds.")
    random_state: Any = option(None, "Seed of initial weights, split, order of rows, and draws.")
    guard_: Guard = field(init=False)
    nets_: list[nn.Module] = field(init=False)

    def score_samples(self, X: Any) -> Array:
        """Return the negative of the guard's score of rows `X`, (B,): higher for in-distribution rows."""
        return -_numpy(self._score(self._rows(X)))

    @property
    def offset_(self) -> float:
        """The negative of the guard's threshold: rows whose `score_samples` is below are OOD."""
        return -self.guard_.threshold

    def off_map(self, X: Any) -> Array:
        """Return whether rows `X` score above the guard's threshold, (B,) bool; `predict(X, return_ood=True)` in a Pipeline."""
        return (self._score(self._rows(X)) > self.guard_.threshold).cpu().numpy()

    def _with_ood(self, X: Any, result: Any, return_ood: bool) -> Any:
        """Return the result, with the verdicts behind it if asked."""
        if not return_ood:
            return result
        return (*result, self.off_map(X)) if isinstance(result, tuple) else (result, self.off_map(X))

    def _score(self, x: Tensor) -> Tensor:
        return self.guard_.score(x)

    def _rows(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._validate(X, reset=False)

    def _validate(self, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        """Return rows as a dense tensor, and targets if these are to be checked."""
        check_unmasked(X)
        options["ensure_all_finite"] = "allow-nan" if self.allow_nan is True else True
        checked: Any = validate_data(self, X, y, dtype="float64", accept_sparse="csr", **options)
        rows, y = checked if isinstance(checked, tuple) else (checked, None)
        if not isinstance(rows, np.ndarray):
            count, width = rows.shape
            if count * width > DENSE_NUMBERS:
                raise DataError(
                    f"Expected at most {DENSE_NUMBERS:,} numbers in a sparse matrix, but got {count:,} rows of {width:,}. "
                    "Pass fewer rows, or fewer columns (`OneHotEncoder(min_frequency=...)`, `TruncatedSVD`)."
                )
            rows = rows.toarray()
        if options.get("reset", True):
            check_size("X", rows)
        return torch.tensor(rows) if y is None else (torch.tensor(rows), y)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse, tags.input_tags.allow_nan = True, self.allow_nan is True
        return tags

    def _fit(
        self, x: Tensor, y: Tensor, sample_weight: Any, *, outputs: int, training: Likelihood,
        likelihood: Likelihood | str | None, scaled: Tensor | None = None, leave_out: Tensor | None = None,
        false_alarms: float | None = None, fast: bool = False, **about: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Guard the model, or nets that learn `scaled` targets with the likelihood `training`; the guard has `likelihood`.

        Return the numbers of the rows held out and of those trained on; rows to `leave_out` (n,), and of weight 0, are neither.
        `fast`: take few steps, the closed form, and 500 held-out rows for the width.
        """
        checks.validate(self)
        random = check_random_state(self.random_state)
        seed, order = int(random.randint(2**31 - 1)), torch.from_numpy(random.permutation(len(x)))
        weights = None
        if sample_weight is not None:
            weights = torch.tensor(_check_sample_weight(sample_weight, x.numpy(), dtype=np.float64, ensure_non_negative=True))
            leave_out = weights == 0 if leave_out is None else leave_out | (weights == 0)
        if leave_out is not None:
            order = order[~leave_out[order]]
        if len(order) < MIN_ROWS:
            raise DataError(f"Expected at least {MIN_ROWS} inlier rows with a weight above 0, but got {len(order)}.")
        # 19 rows are needed for a threshold with 5 % of false alarms
        cut = max(2, min(max(20, round(self.validation * len(order))), len(order) // 2))
        held, rest = order[:cut], order[cut:]
        nets, targets, start = self.model, y if scaled is None else scaled, time.monotonic()
        if nets is None:
            steps = self.steps or min(max(200, 100 * -(-len(rest) // self.batch_size)), 500 if fast else 5000)
            nets = train_mlps(
                (x[rest], targets[rest]), (x[held], targets[held]), outputs=outputs, likelihood=training,
                hidden=check_hidden(self.hidden), members=self.members, steps=steps, lr=self.lr, batch_size=self.batch_size,
                seed=seed, row_weights=None if weights is None else (weights[rest], weights[held]),
                progress=self.progress, allow_nan=self.allow_nan,
            )  # fmt: skip
        solver = self.solver or ("closed-form" if fast or len(order) < 500 else "refine")  # few rows are too few to refine with
        valid, calibration = held[:500] if fast else held, None
        if weights is not None:  # width and clip are for rows as they count; the threshold is for rows as they come
            draw = torch.multinomial(weights[valid], len(valid), replacement=True, generator=generator(seed, "weights"))
            valid, calibration = valid[draw], (x[held], y[held])
        guard = fit(
            nets, (x[rest], y[rest]), (x[valid], y[valid]), calibration=calibration, likelihood=likelihood, basis=self.basis,
            solver=solver, score=self.score_with, draws=self.draws, false_alarms=false_alarms or self.false_alarms,
            batch_size=self.batch_size, seed=seed, allow_nan=self.allow_nan,
            progress=False if self.progress is None and time.monotonic() - start < QUIET_SECONDS else self.progress,
        )  # fmt: skip
        guard = replace(guard, calibration=replace(guard.calibration, exact=False))
        names = getattr(self, "feature_names_in_", None)
        about = {**({} if names is None else {"inputs": [str(name) for name in names]}), **about}
        self.guard_, self.nets_ = replace(guard, about=about), list(nets) if isinstance(nets, list | tuple) else [nets]
        return held, rest


def _numpy(values: Tensor | None) -> Array:
    assert values is not None
    return values.double().cpu().numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class OffmapRegressor(RegressorMixin, Guarded):
    """Regress with small nets that predict a mean and a variance, and a guard around them; targets may be (B,) or (B, K).

    A ready `model` gives (B, K) means or (B, 2K) means and log-variances in the targets' units.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train nets on standardised rows and targets, and guard them.

        Args:
            X: Rows (B, D): an array, a data frame of numbers, or a sparse matrix.
            y: Targets, (B,) or (B, K).
            sample_weight: Weights (B,) of the rows in the nets' training and in the width of the guard; a row of weight 0 is left
                out. Distances and threshold count every other row once.
        """
        x, y = self._validate(X, y, multi_output=True, y_numeric=True, ensure_min_samples=MIN_ROWS)
        targets = torch.tensor(np.asarray(y, dtype="float64"))
        check_size("y", targets.numpy())
        columns = targets.reshape(len(x), -1)
        scaling, count, flat = Standardize(columns), columns.shape[1], targets.ndim == 1
        in_units = ScaledGaussian(count, flat, units=scaling.std.square(), scale=scaling.std, shift=scaling.mean)
        self._fit(
            x, targets, sample_weight, outputs=2 * count, training=Gaussian(count, flat),
            scaled=scaling(columns).reshape(targets.shape), likelihood=in_units if self.model is None else "gaussian",
        )  # fmt: skip
        return self

    def predict(self, X: Any, return_std: bool = False, return_ood: bool = False) -> Any:
        """Return the mean of the mixture of clipped draws, (B,) or (B, K), and what else is asked for.

        Args:
            X: Rows (B, D).
            return_std: Return (mean, standard deviation).
            return_ood: Return whether each row is OOD, (B,) bool, last.
        """
        rows = self._rows(X)
        prediction = self.guard_.predict(rows)
        mean = _numpy(prediction.mean)
        return self._with_ood(X, (mean, _numpy(prediction.std)) if return_std else mean, return_ood)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class OffmapClassifier(ClassifierMixin, Guarded):
    """Classify with small nets and a guard around them.

    A ready `model` gives logits (B, C), its classes in the order of `classes_`, which is sorted; `guard_` counts them from 0.
    """

    classes_: Array = field(init=False)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train nets on standardised rows, and guard them.

        Args:
            X: Rows (B, D): an array, a data frame of numbers, or a sparse matrix.
            y: Classes (B,), numbers or words.
            sample_weight: Weights (B,) of the rows in the nets' training and in the width of the guard; a row of weight 0 is left
                out. Distances and threshold count every other row once.
        """
        x, y = self._validate(X, y, ensure_min_samples=MIN_ROWS)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Expected at least two classes, but `y` holds one class only, {self.classes_[0]}.")
        likelihood = Categorical() if self.model is None else None
        self._fit(
            x, torch.tensor(index), sample_weight, outputs=len(self.classes_), training=Categorical(), likelihood=likelihood,
            classes=[str(c) for c in self.classes_],
        )  # fmt: skip
        probs = self.guard_.predict(x[:1]).probs
        if probs is None or probs.shape[1] != len(self.classes_):
            got = "none" if probs is None else probs.shape[1]
            raise ConfigError(f"Expected a `model` with logits of the {len(self.classes_)} classes in `y`, but it has {got}.")
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the mean probabilities of clipped draws for rows `X`, (B, C), in the order of `classes_`."""
        rows = self._rows(X)
        return _numpy(self.guard_.predict(rows).probs)

    def predict(self, X: Any, return_ood: bool = False) -> Any:
        """Return the most probable class, (B,).

        Args:
            X: Rows (B, D).
            return_ood: Return (classes, whether each row is OOD), the second (B,) bool.
        """
        likely = self.predict_proba(X).argmax(1)
        return self._with_ood(X, self.classes_[likely], return_ood)


@dataclass(kw_only=True, eq=False, repr=False)
class OffmapDetector(OutlierMixin, Guarded):
    """Detect outliers, with scikit-learn's sign: scores are higher for in-distribution rows, and outliers are −1.

    The nets learn to reproduce their inputs, so that no targets are needed; the guard's score combines the disagreement of
    sampled nets with the distance to training rows, where a training row is not compared with itself. Gross outliers among the
    training rows are left out of all that. All but `false_alarms` of the held-out rows are below the threshold; with fewer than
    19 of these (38 rows in all, for 5 %) it is infinite and nothing is flagged. With a ready `model`, `y` must be its training
    targets.
    """

    contamination: float | Literal["auto"] = option(
        "auto", 'Share of outliers among the training rows, (0, 0.5]: so many of them are flagged, in place of `false_alarms`. '
        '"auto": gross ones are found, and the threshold is set on the others.', check=check_contamination,
    )  # fmt: skip

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Train nets on in-distribution rows, and guard them.

        Args:
            X: Rows (B, D): an array, a data frame of numbers, or a sparse matrix.
            y: The targets of a ready `model`; else ignored.
            sample_weight: Weights (B,) of the rows in the nets' training and in the width of the guard; a row of weight 0 is left
                out. Distances and threshold count every other row once.
        """
        if self.model is not None and y is None:
            raise ConfigError("Expected `y` beside a ready `model`: the targets that it was trained on.")
        x = self._validate(X, ensure_min_samples=MIN_ROWS)
        checks.validate(self)
        share = None if self.contamination == "auto" else float(self.contamination)
        outliers = find_outliers(x, share)
        # nets that reproduce their inputs gain nothing by more steps; a threshold for the given share is set below
        options: dict[str, Any] = {"leave_out": outliers, "fast": True, "false_alarms": None if share is None else 0.5}
        if self.model is None:
            scaled = Standardize(x[~outliers], allow_nan=self.allow_nan)(x)
            count = scaled.shape[1]
            training = Gaussian(count, flat=False, noise=x.new_ones(count))
            held, rest = self._fit(x, scaled, sample_weight, outputs=count, training=training, likelihood="gaussian", **options)
        else:
            targets = torch.tensor(np.asarray(y))
            held, rest = self._fit(x, targets, sample_weight, outputs=0, training=Gaussian(), likelihood=None, **options)
        guard = self.guard_
        train = as_batches((x[rest], rest), guard.place, name="train")
        self._reference = {key: number for number, key in enumerate(_keys(sample_rows(train, REFERENCE_ROWS, guard.seed)[0]))}
        calibration = guard.calibration
        if share is None:
            calibration = replace(calibration, scores=self._score(x[held]))
        else:  # as many as a percentile of the scores of all training rows flags
            flagged = math.ceil(share * (len(x) - 1))
            calibration = replace(calibration, scores=self._score(x), seen=True, false_alarms=(flagged + 1) / (len(x) + 1))
        self.guard_ = replace(guard, calibration=calibration)
        return self

    def _score(self, x: Tensor) -> Tensor:
        """Score rows, (B,); those that the guard holds are not compared with themselves."""
        guard = self.guard_
        numbers = torch.tensor([self._reference.get(key, -1) for key in _keys(guard.place.put(x))])
        known, scores = numbers >= 0, x.new_empty(len(x), dtype=guard.precision)
        if not bool(known.all()):
            scores[~known] = guard.score(x[~known]).cpu()
        blocks, start = [], 0
        for rows in guard.blocks(x[known]) if bool(known.any()) else []:
            features = guard.sampler.features(rows, guard.score_module.reads)
            itself = numbers[known][start : start + len(features.inputs)]
            blocks.append(guard.score_module(replace(features, itself=itself)).to(scores))
            start += len(itself)
        if blocks:
            scores[known] = torch.cat(blocks)
        return scores

    def decision_function(self, X: Any) -> Array:
        """Return `score_samples(X)` − `offset_`, (B,): negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any, return_ood: bool = False) -> Any:
        """Return 1 for in-distribution rows, −1 for outliers.

        Args:
            X: Rows (B, D).
            return_ood: Return (predictions, whether each row is OOD), the second (B,) bool.
        """
        inside = np.where(self.decision_function(X) < 0, -1, 1)
        return (inside, inside < 0) if return_ood else inside


def _keys(rows: Any) -> list[bytes]:
    """Return a digest of every row."""
    return [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows.detach().cpu().contiguous().numpy()]


def find_outliers(x: Tensor, share: float | None) -> Tensor:
    """Tell which rows (n, D) are gross outliers, (n,) bool; so many as `share` says, if it is known.

    Columns have robust units, the range between their quartiles; a missing value is the median. The rows that are nearest to
    others are kept first. Then all are compared with those, and kept too, unless the logarithm of their distance is GROSS robust
    standard deviations above its median, and twice the median distance at least; and so on until nothing changes (as in BACON:
    Billor, Hadi & Velleman 2000). A few outliers next to each other so do not hide each other.
    """
    x = torch.where(x.isnan(), x.nanmedian(0).values.nan_to_num(0.0), x)
    low, middle, high = (torch.from_numpy(q) for q in np.quantile(x.numpy(), [0.25, 0.5, 0.75], axis=0))
    unit = torch.where(high > low, (high - low) / 1.349, x.amax(0) - x.amin(0))
    rows = (x - middle) / torch.where(unit > 0, unit, 1.0)
    central = CENTRAL_SHARE if share is None else min(CENTRAL_SHARE, 1 - share)
    everything = torch.ones(len(x), dtype=torch.bool)
    distances = compare_with(rows, everything)
    kept = distances <= distances.sort().values[math.ceil(central * len(x)) - 1]
    while True:
        distances = compare_with(rows, kept)
        if share is not None:
            return distances.argsort(descending=True).argsort() < round(share * len(x))
        middle, high = np.quantile(distances, [0.5, 0.75])
        if middle == 0:  # copies of each other: there is no scale
            return ~everything
        further = kept | (distances <= middle * max(2.0, (high / middle) ** (GROSS / 0.674)))
        if torch.equal(kept, further):
            return ~kept
        kept = further


def compare_with(rows: Tensor, kept: Tensor) -> Tensor:
    """Return the mean distance of rows (n, D) to the nearest of those kept (n,), but themselves, or of a sample of them, (n,)."""
    chosen = kept.nonzero().flatten()
    if len(chosen) > REFERENCE_ROWS:
        chosen = chosen[torch.randperm(len(chosen), generator=generator(0, "outliers"))[:REFERENCE_ROWS]]
    others = torch.ones_like(kept).index_fill(0, chosen, False).nonzero().flatten()
    distances = rows.new_empty(len(rows))
    distances[chosen] = find_nearest(rows[chosen], rows[chosen], itself=torch.arange(len(chosen)))[0].mean(1)
    distances[others] = find_nearest(rows[chosen], rows[others])[0].mean(1)
    return distances
