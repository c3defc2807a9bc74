"""scikit-learn estimators: a regressor, a classifier and an outlier detector, each with a fitted Guard inside.

The sign is scikit-learn's: `score_samples` is higher for in-distribution rows, while the scores of `guard_` are higher for OOD
rows. Rows may have any units: the nets standardise them inside.
"""

from __future__ import annotations

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
from offmap.checks import option
from offmap.errors import ConfigError
from offmap.extras import require
from offmap.fit import fit
from offmap.guard import Guard
from offmap.integrations.nets import ScaledGaussian, Standardize, train_mlps
from offmap.likelihoods import Categorical, Gaussian, Likelihood

require("sklearn", "sklearn")  # one clear line where it is missing

from sklearn.base import BaseEstimator, ClassifierMixin, OutlierMixin, RegressorMixin  # noqa: E402
from sklearn.utils import check_random_state  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

Array: TypeAlias = NDArray[Any]

MIN_ROWS = 4  # two to train on and two to validate with


@dataclass(kw_only=True, eq=False, repr=False)
class Guarded(BaseEstimator):
    """Share parameters, the fit of a guard and its scores among the three estimators."""

    hidden: Sequence[int] = option((64, 64), "Widths of the hidden layers of the nets trained here.")
    members: int = option(1, "How many nets; several detect better, and cost as many times more.", above=0)
    steps: int | None = option(None, "Gradient steps of their training; None: a hundred epochs, 200 to 5,000 steps.", above=0)
    lr: float = option(0.01, "Adam's learning rate.", above=0)
    batch_size: int = option(128, "Rows per step.", above=0)
    validation: float = option(
        0.2, "Share of the rows held out for early stopping and for the threshold; at least 20 rows, at most half.",
        check=partial(checks.fraction, "validation", example=0.2),
    )  # fmt: skip
    solver: Literal["refine", "closed-form", "sgd"] | None = option(
        None, 'As in `offmap.fit`; None: the closed form below 500 rows, "refine" above.'
    )
    basis: Literal["svd", "identity"] = option("svd", "As in `offmap.fit`.")
    score_with: str | ScoreFn = option("default", "As `score` in `offmap.fit`; scikit-learn has a method `score` already.")
    draws: int = option(50, "Sampled nets per member.")
    false_alarms: float = option(
        0.05, "Share of in-distribution rows that may be flagged.", check=partial(checks.fraction, "false_alarms", example=0.05)
    )
    model: nn.Module | list[nn.Module] | None = option(
        None, "A trained model (or a list of them) to guard instead of training some. It gets rows without preprocessing."
    )
    random_state: Any = option(None, "Seed of initial weights, split, order of rows, and draws.")
    guard_: Guard = field(init=False)

    def score_samples(self, X: Any) -> Array:
        """Return the negative of the guard's score, (B,): higher for in-distribution rows."""
        rows = self._rows(X)
        return -_numpy(self.guard_.score(rows))

    def off_map(self, X: Any) -> Array:
        """Return whether the guard's score is above its threshold, (B,) bool."""
        rows = self._rows(X)
        return (self.guard_.score(rows) > self.guard_.threshold).cpu().numpy()

    def _rows(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.tensor(validate_data(self, X, reset=False, dtype="float64"))

    def _fit(
        self, x: Tensor, y: Tensor, *, outputs: int, training: Likelihood, likelihood: Likelihood | str | None,
        scaled: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Guard the model, or nets that learn `scaled` targets with the likelihood `training`; the guard has `likelihood`."""
        checks.validate(self)
        random = check_random_state(self.random_state)
        seed, order = int(random.randint(2**31 - 1)), torch.from_numpy(random.permutation(len(x)))
        # 19 rows are needed for a threshold with 5 % of false alarms
        cut = max(2, min(max(20, round(self.validation * len(x))), len(x) // 2))
        held, rest = order[:cut], order[cut:]
        nets, targets = self.model, y if scaled is None else scaled
        if nets is None:
            nets = train_mlps(
                (x[rest], targets[rest]), (x[held], targets[held]), outputs=outputs, likelihood=training, hidden=self.hidden,
                members=self.members, steps=self.steps, lr=self.lr, batch_size=self.batch_size, seed=seed,
            )  # fmt: skip
        solver = self.solver or ("closed-form" if len(x) < 500 else "refine")  # few rows are too little to refine with
        guard = fit(
            nets, (x[rest], y[rest]), (x[held], y[held]), likelihood=likelihood, basis=self.basis, solver=solver,
            score=self.score_with, draws=self.draws, batch_size=self.batch_size, seed=seed, progress=False,
        )  # fmt: skip
        self.guard_ = replace(guard, calibration=replace(guard.calibration, false_alarms=self.false_alarms))


def _numpy(values: Tensor | None) -> Array:
    assert values is not None
    return values.double().cpu().numpy()


class OffmapRegressor(RegressorMixin, Guarded):
    """Regress with small nets that predict a mean and a variance, and a guard around them; targets may be (B,) or (B, K).

    A ready `model` gives (B, K) means or (B, 2K) means and log-variances in the targets' units.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train nets on standardised rows and targets, and guard them."""
        rows, y = validate_data(self, X, y, dtype="float64", multi_output=True, y_numeric=True, ensure_min_samples=MIN_ROWS)
        x, targets = torch.tensor(rows), torch.tensor(np.asarray(y, dtype="float64"))
        columns = targets.reshape(len(x), -1)
        scaling, count, flat = Standardize(columns), columns.shape[1], targets.ndim == 1
        in_units = ScaledGaussian(count, flat, units=scaling.std.square(), scale=scaling.std, shift=scaling.mean)
        self._fit(
            x, targets, outputs=2 * count, training=Gaussian(count, flat), scaled=scaling(columns).reshape(targets.shape),
            likelihood=in_units if self.model is None else "gaussian",
        )  # fmt: skip
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of the mixture of clipped draws, (B,) or (B, K), and its standard deviation if `return_std`."""
        rows = self._rows(X)
        prediction = self.guard_.predict(rows)
        return (_numpy(prediction.mean), _numpy(prediction.std)) if return_std else _numpy(prediction.mean)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class OffmapClassifier(ClassifierMixin, Guarded):
    """Classify with small nets and a guard around them.

    A ready `model` gives logits (B, C), its classes in the order of `classes_`, which is sorted; `guard_` counts them from 0.
    """

    classes_: Array

    def fit(self, X: Any, y: Any) -> Self:
        """Train nets on standardised rows, and guard them."""
        rows, y = validate_data(self, X, y, dtype="float64", ensure_min_samples=MIN_ROWS)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Expected at least two classes, but `y` holds one class only, {self.classes_[0]}.")
        likelihood = Categorical() if self.model is None else None
        x, targets = torch.tensor(rows), torch.tensor(index)
        self._fit(x, targets, outputs=len(self.classes_), training=Categorical(), likelihood=likelihood)
        return self

    def predict_proba(self, X: Any) -> Array:
        """Return the mean probabilities of clipped draws, (B, C), in the order of `classes_`."""
        rows = self._rows(X)
        return _numpy(self.guard_.predict(rows).probs)

    def predict(self, X: Any) -> Array:
        """Return the most probable class, (B,)."""
        likely = self.predict_proba(X).argmax(1)
        return self.classes_[likely]


class OffmapDetector(OutlierMixin, Guarded):
    """Detect outliers, with scikit-learn's sign: scores are higher for in-distribution rows, and outliers are −1.

    The nets learn to reproduce their inputs, so that no targets are needed; the guard's score combines the disagreement of
    sampled nets with the distance to training rows. All but `false_alarms` of the held-out rows are below the threshold; with
    fewer than 19 of these (38 rows in all, for 5 %) it is infinite and nothing is flagged. With a ready `model`, `y` must be its
    training targets.
    """

    offset_: float

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train nets on in-distribution rows, and guard them; `y` is only for a ready model."""
        if self.model is not None and y is None:
            raise ConfigError("Expected `y` beside a ready `model`: the targets that it was trained on.")
        x = torch.tensor(validate_data(self, X, dtype="float64", ensure_min_samples=MIN_ROWS))
        if self.model is None:
            count = x.shape[1]
            training = Gaussian(count, flat=False, noise=x.new_ones(count))
            self._fit(x, Standardize(x)(x), outputs=count, training=training, likelihood="gaussian")
        else:
            self._fit(x, torch.tensor(np.asarray(y)), outputs=0, training=Gaussian(), likelihood=None)
        self.offset_ = -self.guard_.threshold
        return self

    def decision_function(self, X: Any) -> Array:
        """Return `score_samples` − `offset_`, (B,): negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> Array:
        """Return 1 for in-distribution rows, −1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)
