"""Guards around nets of different kinds, asked together: `mixture` joins them, `Mixture` answers.

Nets of one kind are stacked by `offmap.fit`. Others are guarded apart, and of what their guards tell

    parts        are averaged over the guards, each in standard deviations over familiar data, and joined as a guard joins them
    predictions  are those of an even mixture: the mean of probabilities, or mean and total variance
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offmap import checks, conformal
from offmap._types import Data, Inputs
from offmap.batches import Place, Rows, batches, gather, own_order
from offmap.errors import ConfigError, ShapeError
from offmap.guarding.answer import (
    Answer,
    Calibration,
    Interval,
    gathered,
    interval_around,
    joined,
    laid,
    likely_classes,
    misses,
    tell_if_infinite,
)  # fmt: skip
from offmap.guarding.calibrating import EMPTY
from offmap.guarding.familiar import join
from offmap.guarding.guard import Guard
from offmap.guarding.space import Scale
from offmap.likelihoods import Prediction

Parts = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Mixture:
    """A frozen Scorer with a threshold over several guards: methods take what a guard's take; higher scores are stranger.

    `scales` has one {part: scale} for every guard, and a last one for their mean.
    """

    guards: tuple[Guard, ...]
    scales: tuple[Mapping[str, Scale], ...]
    calibration: Calibration

    @property
    def threshold(self) -> float:
        """Scores above it are called OOD."""
        return self.calibration.threshold

    @property
    def place(self) -> Place:
        """Where inputs belong."""
        return self.guards[0].place

    def __call__(self, x: Inputs) -> Answer:
        """Prediction, score and verdict for every input."""
        return gathered((self._answer(block) for block in self.guards[0].blocks(x)), joined)

    def score(self, x: Inputs) -> Tensor:
        """How strange each input is, (B,)."""
        return gathered((self._score(block) for block in self.guards[0].blocks(x)), laid)

    def parts(self, x: Inputs) -> Parts:
        """Why inputs are strange: what the score joins, (B,) each, in standard deviations over familiar data."""
        told = (self._parts(block) for block in self.guards[0].blocks(x))
        return gathered(told, lambda several: {name: laid([each[name] for each in several]) for name in several[0]})

    def predict(self, x: Inputs) -> Prediction:
        """What an even mixture of the guards predicts, from clipped draws."""
        return gathered((self._predicted(block) for block in self.guards[0].blocks(x)), joined)

    def interval(self, x: Inputs, level: float = 0.95) -> Interval:
        """Conformal interval mean ± q·std around a regression; infinite when calibration data are too few for the level."""
        return interval_around(self.predict(x), self.calibration, level)

    def prediction_set(self, x: Inputs, level: float = 0.95) -> Tensor:
        """Classes that cannot be ruled out at this level, (B, C) bool; all of them when calibration data are too few."""
        return likely_classes(self.predict(x), self.calibration, level)

    def calibrate(self, valid: Data, false_alarms: float = 0.05) -> Mixture:
        """The same with threshold, p-values and intervals from other familiar data, on which no choice was made."""
        return calibrated(self, rows_for(self.guards, valid), checks.alarms(false_alarms), exact=True)

    def _parts(self, block: Inputs) -> Parts:
        return averaged(told(self.guards, block), self.scales)

    def _score(self, block: Inputs) -> Tensor:
        return join(self._parts(block), soft=any(g.familiar is not None and g.familiar.logits is not None for g in self.guards))

    def _predicted(self, block: Inputs) -> Prediction:
        return even([guard.predict(block) for guard in self.guards])

    def _answer(self, block: Inputs) -> Answer:
        score = self._score(block)
        p_value = conformal.p_value(self.calibration.scores, score).to(score)
        return Answer(**vars(self._predicted(block)), score=score, ood=score > self.threshold, p_value=p_value)


def mixture(guards: Sequence[Guard], valid: Data, *, false_alarms: float = 0.05) -> Mixture:
    """Ask guards of several nets together, whatever kinds of net they are around: strange is what they find strange on average.

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
    seen = gathered_parts(members, rows.inputs)
    own = [{name: Scale.of(values) for name, values in parts.items()} for parts in seen]
    mean = averaged(seen, (*own, None))
    made = Mixture(members, (*own, {name: Scale.of(values) for name, values in mean.items()}), EMPTY)
    return calibrated(made, rows, false_alarms, exact=False)


def rows_for(guards: Sequence[Guard], valid: Data) -> Rows:
    """Familiar rows as the guards take them."""
    first = guards[0]
    with own_order(first.seed):
        return gather(batches(valid, first.place, name="valid", target=first.target), least=2)


def calibrated(made: Mixture, rows: Rows, false_alarms: float, *, exact: bool) -> Mixture:
    """The mixture with threshold and intervals from these rows."""
    missed = misses(made.guards[0].likelihood, made.predict(rows.inputs), rows.targets)
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


def told(guards: Sequence[Guard], block: Inputs) -> list[Parts]:
    """What every guard joins; their scores, where they do not join the same things."""
    parts = [guard.parts(block) for guard in guards]
    if len({frozenset(each) for each in parts}) > 1:
        return [{"score": guard.score(block)} for guard in guards]
    return parts


def gathered_parts(guards: Sequence[Guard], x: Inputs) -> list[Parts]:
    """The same for any number of rows."""
    several: Iterator[list[Parts]] = (told(guards, block) for block in guards[0].blocks(x))

    def laid_out(pieces: list[list[Parts]]) -> list[Parts]:
        return [{name: laid([p[i][name] for p in pieces]) for name in pieces[0][i]} for i in range(len(guards))]

    return gathered(several, laid_out)


def averaged(parts: Sequence[Parts], scales: Sequence[Mapping[str, Scale] | None]) -> Parts:
    """The mean over guards of every part, each scaled; then scaled itself, unless the last scale is None."""
    *own, last = scales
    means: Parts = {}
    for name in parts[0]:
        each = [scale[name](values[name].double()) for scale, values in zip(own, parts, strict=True) if scale is not None]
        mean = torch.stack(each).mean(0)
        means[name] = (mean if last is None else last[name](mean)).to(parts[0][name].dtype)
    return means


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
