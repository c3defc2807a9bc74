"""Guards around nets of different kinds, asked together: `combine` joins them, `GuardEnsemble` answers.

Nets of one kind are stacked by `offmap.fit`. Others are guarded apart, and of what their guards tell

    scores       are averaged, each in standard deviations over in-distribution data
    predictions  are those of an even mixture: the mean of probabilities, or mean and total variance
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap import checks, conformal
from offmap._types import IGNORED, Data, Inputs
from offmap.calibration import EMPTY
from offmap.data import Place, Rows, batches, gather, own_order
from offmap.detector import (  # fmt: skip
    Calibration,
    Interval,
    Result,
    concat_padded,
    gathered,
    interval_around,
    joined,
    likely_classes,
    tell_if_infinite,
)
from offmap.errors import ConfigError, DataError, ShapeError
from offmap.guard import Guard
from offmap.likelihoods import Prediction, align_targets
from offmap.scores.neighbours import Scale


@dataclass(frozen=True, eq=False)
class GuardEnsemble:
    """A frozen Scorer with a threshold over several guards: methods take what a guard's take; higher scores are more OOD.

    `centre` and `spread` (G,) are mean and standard deviation of each guard's score over in-distribution data.
    """

    guards: tuple[Guard, ...]
    centre: Tensor
    spread: Tensor
    calibration: Calibration

    @property
    def threshold(self) -> float:
        """Scores above it are called OOD."""
        return self.calibration.threshold

    @property
    def place(self) -> Place:
        """Where inputs belong."""
        return self.guards[0].place

    def __call__(self, x: Inputs) -> Result:
        """Prediction, score and verdict for every input."""
        return gathered((self._answer(block) for block in self.guards[0].blocks(x)), joined)

    def score(self, x: Inputs) -> Tensor:
        """How OOD each input is, (B,)."""
        return gathered((self._score(block) for block in self.guards[0].blocks(x)), concat_padded)

    def predict(self, x: Inputs) -> Prediction:
        """What an even mixture of the guards predicts, from clipped draws."""
        return gathered((self._predicted(block) for block in self.guards[0].blocks(x)), joined)

    def interval(self, x: Inputs, level: float = 0.95) -> Interval:
        """Conformal interval mean ± q·std around a regression; infinite when calibration data are too few for the level."""
        return interval_around(self.predict(x), self.calibration, level)

    def prediction_set(self, x: Inputs, level: float = 0.95) -> Tensor:
        """Classes that cannot be ruled out at this level, (B, C) bool; all of them when calibration data are too few."""
        return likely_classes(self.predict(x), self.calibration, level)

    def calibrate(self, valid: Data, false_alarms: float = 0.05) -> GuardEnsemble:
        """The same with threshold, p-values and intervals from other in-distribution data, on which no choice was made."""
        return calibrated(self, rows_for(self.guards, valid), checks.alarms(false_alarms), exact=True)

    def _score(self, block: Inputs) -> Tensor:
        each = scored(self.guards, block)
        return ((each.double() - self.centre) / self.spread).mean(1).nan_to_num(nan=torch.inf, posinf=torch.inf).to(each)

    def _predicted(self, block: Inputs) -> Prediction:
        return even([guard.predict(block) for guard in self.guards])

    def _answer(self, block: Inputs) -> Result:
        score = self._score(block)
        p_value = conformal.p_value(self.calibration.scores, score).to(score)
        return Result(**vars(self._predicted(block)), score=score, ood=score > self.threshold, p_value=p_value)


def combine(guards: Sequence[Guard], valid: Data, *, false_alarms: float = 0.05) -> GuardEnsemble:
    """Ask guards of several nets together, whatever kinds of net they are around: OOD is what they find OOD on
    average.

    All must take the same inputs and predict the same targets. Scales and threshold come from `valid`. Nothing is trained, so a
    mixture is not saved: save its guards, and join them again.
    """
    members = tuple(guards) if isinstance(guards, Sequence) else ()
    if len(members) < 2 or not all(isinstance(guard, Guard) for guard in members):
        raise ConfigError("Expected two or more guards, as `offmap.fit` gives them, in a list.")
    places = {guard.place for guard in members}
    if len(places) > 1:
        raise ConfigError(f"Expected guards on one device and of one precision, but got {sorted(map(str, places))}. Move them "
                          "with `guard.to(device)`.")  # fmt: skip
    false_alarms = checks.alarms(false_alarms)
    rows = rows_for(members, valid)
    check_alike(members, rows)
    known = gathered((scored(members, block) for block in members[0].blocks(rows.inputs)), concat_padded).double()
    if not bool(known.isfinite().any(0).all()):
        raise DataError("Expected finite scores of in-distribution data, but one of the guards has none on `valid`.")
    scales = [Scale.of(column) for column in known.T]
    centre, spread = (torch.stack([getattr(scale, name) for scale in scales]) for name in ("centre", "spread"))
    spread = torch.where(spread < 1e-6 * (1 + centre.abs()), 1.0, spread)  # it tells in-distribution data nothing apart
    made = GuardEnsemble(members, centre, spread, EMPTY)
    return calibrated(made, rows, false_alarms, exact=False)


def rows_for(guards: Sequence[Guard], valid: Data) -> Rows:
    """In-distribution rows as the guards take them."""
    first = guards[0]
    with own_order(first.seed):
        return gather(batches(valid, first.place, name="valid", target=first.target), least=2)


def calibrated(made: GuardEnsemble, rows: Rows, false_alarms: float, *, exact: bool) -> GuardEnsemble:
    """The mixture with threshold and intervals from these rows."""
    missed = made.guards[0].likelihood.residual(made.predict(rows.inputs), rows.targets)
    found = replace(made, calibration=Calibration(made.score(rows.inputs), missed, false_alarms, exact))
    tell_if_infinite(found.threshold, rows.rows, false_alarms)
    return found


def check_alike(guards: Sequence[Guard], rows: Rows) -> None:
    """Refuse guards that do not predict the same things: one number for every position is not looked at here."""
    forms = [form(guard.predict(next(guard.blocks(rows.inputs)))) for guard in guards]
    for number, (guard, found) in enumerate(zip(guards, forms, strict=True)):
        if len(found[1]) > 2:
            raise ShapeError(f"Expected one prediction per example, but guard {number} predicts {found[1]}: dense outputs cannot "
                             "be mixed.")  # fmt: skip
        if found != forms[0]:
            raise ShapeError(f"Expected guards that predict the same, but guard 0 gives {forms[0][0]} {forms[0][1]} and guard "
                             f"{number} {found[0]} {found[1]}.")  # fmt: skip
        if guard.target != guards[0].target:
            raise ConfigError(f"Expected guards with one `target`, but got {guards[0].target!r} and {guard.target!r}.")


def form(prediction: Prediction) -> tuple[str, tuple[int, ...]]:
    """What is predicted, in a word, and in which shape."""
    values = prediction.mean if prediction.probs is None else prediction.probs
    assert values is not None
    return ("means" if prediction.probs is None else "probabilities"), tuple(values.shape)


def scored(guards: Sequence[Guard], block: Inputs) -> Tensor:
    """The score of every guard, (B, G)."""
    return torch.stack([guard.score(block) for guard in guards], 1)


def even(predictions: Sequence[Prediction]) -> Prediction:
    """An even mixture: the mean of probabilities; or the mean of means, and the root of mean variance and variance of means.

    >>> two = even([Prediction(torch.tensor([mean]), torch.tensor([3.0])) for mean in (0.0, 8.0)])
    >>> two.mean, two.std
    (tensor([4.]), tensor([5.]))
    """
    if predictions[0].probs is not None:
        probs = torch.stack([p.probs for p in predictions if p.probs is not None]).mean(0)
        return Prediction(probs=probs, label=probs.argmax(1))
    means = torch.stack([p.mean for p in predictions if p.mean is not None])
    variances = torch.stack([p.std for p in predictions if p.std is not None]).square()
    return Prediction(mean=means.mean(0), std=(variances.mean(0) + means.var(0, correction=0)).sqrt())


def even_nll(prediction: Prediction, y: Tensor) -> Tensor:
    """NLL of what a mixture predicts at the targets, (n,), nats: of its probabilities, or of a Gaussian with its moments.

    >>> even_nll(Prediction(probs=torch.tensor([[0.25, 0.75]])), torch.tensor([0]))
    tensor([1.3863])
    """
    if prediction.probs is not None:
        y, smallest = align_targets(y, prediction.probs[:, 0].shape).long(), torch.finfo(prediction.probs.dtype).tiny
        return F.nll_loss(prediction.probs.clamp_min(smallest).log(), y, ignore_index=IGNORED, reduction="none")
    assert prediction.mean is not None
    assert prediction.std is not None
    variance, y = prediction.std.square(), align_targets(y, prediction.mean.shape).to(prediction.mean)
    each = 0.5 * ((2 * math.pi * variance).log() + (y - prediction.mean).square() / variance)
    return each.reshape(len(each), -1).sum(1)
