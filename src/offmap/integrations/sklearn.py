"""scikit-learn estimators: a regressor, a classifier and an outlier detector, each with a fitted Guard inside.

One sign, scikit-learn's: `score_samples` is higher for in-distribution rows. `guard_` has offmap's: its scores are higher for OOD
ones. Rows may have any units: nets standardise them inside, and `guard_` takes them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offmap._types import ScoreFn
from offmap.errors import ConfigError
from offmap.extras import require
from offmap.fit import fit
from offmap.guard import Guard
from offmap.integrations.tabular import InUnits, Standardize, train
from offmap.likelihoods import Categorical, Gaussian, Likelihood

require("sklearn")  # one clear line where it is missing

from sklearn.base import BaseEstimator, ClassifierMixin, OutlierMixin, RegressorMixin  # noqa: E402
from sklearn.utils import check_random_state  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

Array: TypeAlias = NDArray[Any]

LEAST = 4
"""Rows: two to train on and two to validate with."""

HELD = 20
"""Rows set aside at least: 19 are needed for a threshold with 5 % of false alarms."""

TINY = 500
"""Rows below which the closed form serves where no solver is named: few rows tell a refinement little."""

TOGETHER = 64
"""Sampled nets at once, of those made here: to measure it takes longer than small fits do, and processes would differ."""


class Guarded(BaseEstimator):
    """What the three estimators share: their parameters, the fit of a guard, and how in-distribution rows are.

    Args:
        hidden: Widths of the hidden layers of the nets trained here.
        members: How many nets; several detect better, and cost as many times more.
        steps: Gradient steps of their training; None: a hundred epochs, from 200 to 5,000 steps.
        rate: Adam's learning rate.
        batch_size: Rows per step.
        validation: Share of the rows that is set aside to stop by, and to set the threshold with; at least 20 rows, at most half.
        solver: "refine", "closed-form" or "sgd" as in `offmap.fit`; None: the closed form below 500 rows, "refine" above.
        basis: "svd" or "identity".
        score_with: What is OOD: "default", "distance", "epistemic", "paper" or a function, as in `offmap.fit`.
        draws: Sampled nets per member.
        false_alarms: Share of in-distribution rows that may be called OOD.
        net: A trained net (or a list of them) to guard instead of training some. It is called with rows as they are given here.
        random_state: Starts of the nets, split, order of rows, and draws.
    """

    guard_: Guard

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (64, 64),
        members: int = 1,
        steps: int | None = None,
        lr: float = 0.01,
        batch_size: int = 128,
        validation: float = 0.2,
        solver: Literal["refine", "closed-form", "sgd"] | None = None,
        basis: Literal["svd", "identity"] = "svd",
        score_with: str | ScoreFn = "default",
        draws: int = 50,
        false_alarms: float = 0.05,
        net: nn.Module | list[nn.Module] | None = None,
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.members = members
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.validation = validation
        self.solver: Literal["refine", "closed-form", "sgd"] | None = solver
        self.basis: Literal["svd", "identity"] = basis
        self.score_with = score_with
        self.draws = draws
        self.false_alarms = false_alarms
        self.net = net
        self.random_state = random_state

    def score_samples(self, X: Any) -> Array:
        """How in-distribution rows are, (B,): higher for inliers, the negative of the guard's score."""
        rows = self._rows(X)
        return -self.guard_.score(rows).double().cpu().numpy()

    def off_map(self, X: Any) -> Array:
        """Whether rows are more OOD than the threshold that in-distribution rows seldom pass, (B,) bool."""
        rows = self._rows(X)
        return (self.guard_.score(rows) > self.guard_.threshold).cpu().numpy()

    def __getstate__(self) -> Any:
        """Without the draws that the guard remembers: they are far larger than all the rest, and made again when needed."""
        state: dict[str, Any] = {**cast(Any, super()).__getstate__()}
        guard = state.get("guard_")
        return state if guard is None else state | {"guard_": replace(guard, predictive=replace(guard.predictive))}

    def _rows(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.tensor(validate_data(self, X, reset=False, dtype="float64"))

    def _fit(
        self, x: Tensor, y: Tensor, *, outputs: int, law: Likelihood, told: Likelihood | str | None, taught: Tensor | None = None
    ) -> None:
        """Guard the ready net, or nets trained by `law` on the targets `taught`; `told` is the guard's likelihood of `y`."""
        self._check()
        random = check_random_state(self.random_state)
        seed, order = int(random.randint(2**31 - 1)), torch.from_numpy(random.permutation(len(x)))
        cut = max(2, min(max(HELD, round(self.validation * len(x))), len(x) // 2))
        held, rest = order[:cut], order[cut:]
        nets = self.net
        if nets is None:
            lesson = y if taught is None else taught
            nets = train(
                (x[rest], lesson[rest]), (x[held], lesson[held]), outputs=outputs, likelihood=law, hidden=self.hidden,
                members=self.members, steps=self.steps, lr=self.lr, batch_size=self.batch_size, seed=seed,
            )  # fmt: skip
        made = fit(
            nets, (x[rest], y[rest]), (x[held], y[held]), likelihood=told, basis=self.basis,
            solver=self.solver or ("closed-form" if len(x) < TINY else "refine"), score=self.score_with, draws=self.draws,
            chunk_size=max(1, TOGETHER // self.members) if self.net is None else "auto", batch_size=self.batch_size, seed=seed,
            progress=False,
        )  # fmt: skip
        self.guard_ = replace(made, calibration=replace(made.calibration, false_alarms=self.false_alarms))

    def _check(self) -> None:
        for name in ("validation", "false_alarms"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"Expected `{name}` between 0 and 1, but got {getattr(self, name)!r}.")
        for name in ("members", "batch_size", *(() if self.steps is None else ("steps",))):
            value = getattr(self, name)
            if not (isinstance(value, int | np.integer) and value > 0):
                raise ConfigError(f"Expected `{name}` to be a whole number above 0, but got {value!r}.")


class OffmapRegressor(RegressorMixin, Guarded):
    """Regression by small nets that predict a mean and a variance, with a guard around them; targets may be (B,) or (B, K).

    A ready `net` gives (B, K) means or (B, 2K) means and log-variances in the targets' units.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train nets on standardised rows and targets, and guard them."""
        rows, y = validate_data(self, X, y, dtype="float64", multi_output=True, y_numeric=True, ensure_min_samples=LEAST)
        x, targets = torch.tensor(rows), torch.tensor(np.asarray(y, dtype="float64"))
        columns = targets.reshape(len(x), -1)
        scaling, count, flat = Standardize.of(columns), columns.shape[1], targets.ndim == 1
        own = InUnits(count, flat, units=scaling.unit.square(), scale=scaling.unit, shift=scaling.centre)
        told = own if self.net is None else "gaussian"
        self._fit(
            x, targets, outputs=2 * count, law=Gaussian(count, flat), told=told, taught=scaling(columns).reshape(targets.shape)
        )
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of the mixture of clipped draws, (B,) or (B, K), and its standard deviation if asked for."""
        rows = self._rows(X)
        said = self.guard_.predict(rows)
        assert said.mean is not None
        assert said.std is not None
        mean, std = said.mean.double().cpu().numpy(), said.std.double().cpu().numpy()
        return (mean, std) if return_std else mean

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class OffmapClassifier(ClassifierMixin, Guarded):
    """Classification by small nets with a guard around them.

    A ready `net` gives logits (B, C), its classes in the order of `classes_`, which is sorted; `guard_` counts them from 0.
    """

    classes_: Array

    def fit(self, X: Any, y: Any) -> Self:
        """Train nets on standardised rows, and guard them."""
        rows, y = validate_data(self, X, y, dtype="float64", ensure_min_samples=LEAST)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Expected at least two classes, but `y` holds one class only, {self.classes_[0]}.")
        told = Categorical() if self.net is None else None
        self._fit(torch.tensor(rows), torch.tensor(index), outputs=len(self.classes_), law=Categorical(), told=told)
        return self

    def predict_proba(self, X: Any) -> Array:
        """The mean probabilities of clipped draws, (B, C), in the order of `classes_`."""
        rows = self._rows(X)
        probs = self.guard_.predict(rows).probs
        assert probs is not None
        return probs.double().cpu().numpy()

    def predict(self, X: Any) -> Array:
        """The most probable class, (B,)."""
        likely = self.predict_proba(X).argmax(1)
        return self.classes_[likely]


class OffmapDetector(OutlierMixin, Guarded):
    """Outlier and novelty detection, with scikit-learn's sign: higher is more in-distribution, and outliers are −1.

    The nets learn to give back the row they are given, so that no targets are needed; the guard tells where sampled nets
    disagree, and how far rows are from training rows. All but `false_alarms` of the rows set aside are below the threshold; with
    fewer than 19 of these (38 rows in all, for 5 %) it is infinite and nothing is flagged. With a ready `net`, `y` must be the
    targets it was trained on.
    """

    offset_: float

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train nets on in-distribution rows, and guard them; `y` is only for a ready net."""
        if self.net is not None and y is None:
            raise ConfigError("Expected `y` beside a ready `net`: the targets that it was trained on.")
        x = torch.tensor(validate_data(self, X, dtype="float64", ensure_min_samples=LEAST))
        if self.net is None:
            count = x.shape[1]
            law = Gaussian(count, flat=False, noise=x.new_ones(count))
            self._fit(x, Standardize.of(x)(x), outputs=count, law=law, told="gaussian")
        else:
            self._fit(x, torch.tensor(np.asarray(y)), outputs=0, law=Gaussian(), told=None)
        self.offset_ = -self.guard_.threshold
        return self

    def decision_function(self, X: Any) -> Array:
        """`score_samples` − `offset_`, (B,): negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> Array:
        """1 for in-distribution rows, −1 for outliers."""
        return np.where(self.decision_function(X) < 0, -1, 1)
