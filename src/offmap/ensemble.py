"""Guards around models of different kinds, asked together: `combine` joins them, `GuardEnsemble` answers.

Models of one kind are stacked by `offmap.fit` instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap import checks
from offmap._types import IGNORED, Data, Inputs
from offmap.data import Rows, as_batches, fork_rng, load_rows
from offmap.detector import Calibration, Detector
from offmap.errors import ConfigError, DataError, ShapeError
from offmap.guard import Guard
from offmap.likelihoods import Prediction, align_targets
from offmap.scores.distance import ZScore


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GuardEnsemble(Detector):
    """A detector over several guards: scores are averaged in standard deviations, predictions are mixed evenly.

    Args:
        guards: The members, which take the same inputs.
        centre: (G,), mean score of every guard over in-distribution rows.
        unit: (G,), standard deviation of every guard's score over in-distribution rows.
    """

    guards: tuple[Guard, ...]
    centre: Tensor
    unit: Tensor

    def _describe(self) -> str:
        return f"{len(self.guards)} guards"

    def block_rows(self) -> int:
        """Return how many rows the most demanding guard takes at once."""
        return min(guard.block_rows() for guard in self.guards)

    def _score(self, features: Inputs) -> Tensor:
        scores = torch.stack([guard.score(features) for guard in self.guards], 1)
        return _standardize(scores, self.centre, self.unit)

    def _predict(self, features: Inputs) -> Prediction:
        return mix([guard.predict(features) for guard in self.guards])

    def _residuals(self, rows: Rows) -> Tensor:
        return self.guards[0].likelihood.residual(self.predict(rows.inputs), rows.targets)

    def _share_repeated(self, inputs: Inputs) -> float:
        return max(guard._share_repeated(inputs) for guard in self.guards)  # pyright: ignore[reportPrivateUsage]

    def check_targets(self, rows: Rows) -> None:
        """Raise unless the targets of these rows fit what the guards predict."""
        self.guards[0].check_targets(rows)

    def predict_at(self, rows: Rows) -> dict[str, tuple[Prediction, Tensor]]:
        """Predict labelled rows, with the NLL (n,) of the mixture at the targets."""
        prediction = self.predict(rows.inputs)
        return {"own": (prediction, mixture_nll(prediction, rows.targets))}


def combine(guards: Sequence[Guard], valid: Data, *, false_alarms: float = 0.05) -> GuardEnsemble:
    """Join guards of several models, whatever kinds of model they are around: OOD is what they find OOD on average.

    Nothing is trained, so an ensemble is not saved: save its guards, and combine them again.

    Args:
        guards: Two or more, which must take the same inputs and predict the same targets.
        valid: In-distribution rows the models have not seen, which set the scales of the scores and the threshold.
        false_alarms: Share of in-distribution rows that may be called OOD.

    >>> from offmap.fit import fit
    >>> x = torch.linspace(-1, 1, 60)[:, None]
    >>> train, valid = (x[::2], x[::2, 0]), (x[1::2], x[1::2, 0])
    >>> models = torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> guards = [fit(model, train, valid, solver="closed-form", progress=False) for model in models]
    >>> combine(guards, valid)(torch.tensor([[0.0], [50.0]])).ood
    tensor([False,  True])
    """
    members = tuple(guards) if isinstance(guards, Sequence) else ()
    if len(members) < 2 or not all(isinstance(guard, Guard) for guard in members):
        raise ConfigError("Expected two or more guards, as `offmap.fit` gives them, in a list.")
    first, places = members[0], {guard.place for guard in members}
    if len(places) > 1:
        raise ConfigError(f"Expected guards on one device and of one precision, but got {sorted(map(str, places))}. Move them "
                          "with `guard.to(device)`.")  # fmt: skip
    false_alarms = checks.fraction("false_alarms", false_alarms, example=0.05)
    with fork_rng(first.seed):
        rows = load_rows(as_batches(valid, first.place, name="valid", target=first.target), at_least=2)
    _check_alike(members, rows)
    scores = torch.stack([guard.score(rows.inputs) for guard in members], 1)
    if not bool(scores.isfinite().any(0).all()):
        raise DataError("Expected finite scores of in-distribution data, but one of the guards has none on `valid`.")
    scales = [ZScore.fit(column) for column in scores.double().T]
    centre, unit = torch.stack([scale.mean for scale in scales]), torch.stack([scale.std for scale in scales])
    unit = torch.where(unit < 1e-6 * (1 + centre.abs()), 1.0, unit)  # a constant score tells nothing apart
    residuals = first.likelihood.residual(mix([guard.predict(rows.inputs) for guard in members]), rows.targets)
    calibration = Calibration(_standardize(scores, centre, unit), residuals, false_alarms, exact=False)
    calibration.warn_if_infinite(rows.rows)
    return GuardEnsemble(
        guards=members, centre=centre, unit=unit, calibration=calibration, place=first.place, target=first.target,
        seed=first.seed, image_spec=first.image_spec,
    )  # fmt: skip


def _standardize(scores: Tensor, centre: Tensor, unit: Tensor) -> Tensor:
    """Average the scores of all guards in standard deviations, (B, G) -> (B,); NaN becomes ∞."""
    return ((scores.double() - centre) / unit).mean(1).nan_to_num(nan=torch.inf, posinf=torch.inf).to(scores)


def _check_alike(guards: Sequence[Guard], rows: Rows) -> None:
    """Refuse guards that do not predict the same things, or a number for every position."""
    forms: list[tuple[str, tuple[int, ...]]] = []
    for number, guard in enumerate(guards):
        p = guard.predict(next(guard.blocks(rows.inputs)))
        values = p.mean if p.probs is None else p.probs
        assert values is not None
        forms.append(("means" if p.probs is None else "probabilities", tuple(values.shape)))
        if values.ndim > 2:
            raise ShapeError(f"Expected one prediction per example, but guard {number} predicts {forms[-1][1]}: dense outputs "
                             "cannot be mixed.")  # fmt: skip
        if forms[-1] != forms[0]:
            raise ShapeError(f"Expected guards that predict the same, but guard 0 gives {forms[0][0]} {forms[0][1]} and guard "
                             f"{number} {forms[-1][0]} {forms[-1][1]}.")  # fmt: skip
        if guard.target != guards[0].target:
            raise ConfigError(f"Expected guards with one `target`, but got {guards[0].target!r} and {guard.target!r}.")


def mix(predictions: Sequence[Prediction]) -> Prediction:
    """Mix evenly: the mean of probabilities; or the mean of means, and the root of mean variance and variance of means."""
    if predictions[0].probs is not None:
        probs = torch.stack([p.probs for p in predictions if p.probs is not None]).mean(0)
        return Prediction(probs=probs, label=probs.argmax(1))
    means = torch.stack([p.mean for p in predictions if p.mean is not None])
    variances = torch.stack([p.std for p in predictions if p.std is not None]).square()
    return Prediction(mean=means.mean(0), std=(variances.mean(0) + means.var(0, correction=0)).sqrt())


def mixture_nll(prediction: Prediction, y: Tensor) -> Tensor:
    """Compute the NLL of a mixture at the targets, (n,), nats: of its probabilities, or of a Gaussian with its moments."""
    if prediction.probs is not None:
        y, smallest = align_targets(y, prediction.probs[:, 0].shape).long(), torch.finfo(prediction.probs.dtype).tiny
        return F.nll_loss(prediction.probs.clamp_min(smallest).log(), y, ignore_index=IGNORED, reduction="none")
    assert prediction.mean is not None
    assert prediction.std is not None
    variance, y = prediction.std.square(), align_targets(y, prediction.mean.shape).to(prediction.mean)
    each = 0.5 * ((2 * math.pi * variance).log() + (y - prediction.mean).square() / variance)
    return each.reshape(len(each), -1).sum(1)
