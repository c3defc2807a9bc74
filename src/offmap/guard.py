"""Guard: a frozen Scorer over any Predictive."""

from __future__ import annotations

import copy
import logging
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from offmap import checks
from offmap._types import Data, Inputs, ScoreFn
from offmap.data import Place, Rows, concat_padded
from offmap.data.inputs import take_rows
from offmap.detector import Detector, attended, concat_results, merge_parts
from offmap.errors import ConfigError, ModelError, ShapeError
from offmap.export.onnx import ExportInfo
from offmap.likelihoods import Likelihood, Prediction, check_counted
from offmap.posterior.predictive import History, Predictive, Stochastic
from offmap.scores.combine import CombinedScore, log_uncertainty
from offmap.scores.images import plain_energy
from offmap.table import Table

logger = logging.getLogger("offmap")

OUTPUT_NUMBERS = 1 << 22
"""Stacked output numbers held at once while scoring (16 MB in float32), whatever the number of rows and draws."""

MOST_DRAWS = 1_000_000
UNBOUNDED = 1e30
"""A clip beyond it bounds nothing, and single precision cannot hold much more."""

SCORES = {"default": "score", "paper": "score", "epistemic": "epistemic", "distance": "score"}
"""Names of scores and the likelihood's method behind each, where nothing is joined to it."""

COMPARING = ("default", "distance")
"""Scores that compare with in-distribution rows."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Guard(Detector):
    """A detector over a weight distribution, or any other Predictive.

    Args:
        predictive: Draws outputs of the members, (M·P, B, ...).
        likelihood: Turns outputs into predictions and uncertainties.
        clip: Bound on |φ ⊙ z| of the draws that predict; None for no bound.
        score_with: Name of the score, or a function of stacked outputs.
        draws: Draws of every member.
        notes: Findings about the model, shown in the summary.
        about: Plain values to keep in the file, such as names of columns.
    """

    predictive: Predictive
    likelihood: Likelihood
    clip: float | None = None
    score_with: str | ScoreFn = "default"
    draws: int = 50
    notes: tuple[str, ...] = ()
    familiar: CombinedScore | None = None  # what the scores "default" and "distance" compare with
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def history(self) -> History:
        """How the fit went."""
        return self.predictive.history or History()

    def _describe(self) -> str:
        name = self.score_with if isinstance(self.score_with, str) else "your own function"
        return f"score {name}, {self.draws} draws of {self.predictive.members} member(s), clip {self.clip}"

    def block_rows(self, draws: int | None = None) -> int:
        """So many that their stacked outputs stay within a fixed memory."""
        model = self.predictive.model
        numbers = (model.output_numbers if model else 1) * self.predictive.members * (draws or self.draws)
        return max(1, OUTPUT_NUMBERS // numbers)

    def _score(self, features: Inputs) -> Tensor:
        return self.score_map(features)

    def _predict(self, features: Inputs) -> Prediction:
        return self.likelihood.predict(self.outputs(features, self.clip))

    def _residuals(self, rows: Rows) -> Tensor:
        self.check_targets(rows)
        return self.likelihood.residual(self.predict(rows.inputs), rows.targets)

    def check_targets(self, rows: Rows) -> None:
        """Raise unless the targets of these rows fit what the guard predicts."""
        base = self.predictive.outputs(take_rows(rows.inputs, slice(0, 2)), 1, clip=0.0, seed=self.seed)
        self.likelihood.check_targets(base[0], rows.targets, rows.name)
        check_counted(self.likelihood, rows.targets, rows.name)

    def predict_at(self, rows: Rows) -> dict[str, tuple[Prediction, Tensor]]:
        """Predict labelled rows from clipped ("own") and unclipped draws ("wide"), each with its NLL (n,) at the targets."""
        from offmap.calibration import nll

        clips = {"own": self.clip, "wide": None}
        return {name: (self.predict(rows.inputs, clip=clip), nll(self, rows, clip=clip)) for name, clip in clips.items()}

    def terms(self, x: Inputs) -> dict[str, Tensor]:
        """Why inputs are OOD: what the score joins, (B,) each, such as "disagreement", "inputs" and "layers", in standard
        deviations over in-distribution rows. Of a score that joins nothing it is the score itself, under "score".
        """
        familiar = self.familiar if self.score_with in COMPARING else None
        if familiar is None:
            return {"score": self.score(x)}
        told = (self._terms(familiar, block) for block in self.blocks(x))
        found = merge_parts(told, lambda several: {name: concat_padded([each[name] for each in several]) for name in several[0]})
        return {name: values.to(self.precision) for name, values in found.items()}

    def predict(self, x: Inputs, *, clip: float | Literal["chosen"] | None = "chosen") -> Prediction:
        """The mixture's prediction from clipped draws; `clip=None` predicts with the wide distribution."""
        bound = self.clip if isinstance(clip, str) and clip == "chosen" else checked_clip(clip)
        return merge_parts((self.likelihood.predict(self.outputs(block, bound)) for block in self.blocks(x)), concat_results)

    def samples(self, x: Inputs, draws: int = 50, *, clip: float | None = None) -> Tensor:
        """Outputs of the sampled nets themselves, (M·draws, B, ...)."""
        draws = checks.integer("draws", draws, 1)
        if draws > MOST_DRAWS:
            raise ConfigError(f"Expected `draws` to be at most {MOST_DRAWS}, but got {draws}.")
        bound = checked_clip(clip)
        return concat_padded([self.outputs(block, bound, draws) for block in self.blocks(x, self.block_rows(draws))], 1)

    def summary(self) -> Table:
        """What is random and how wide, in a table."""
        from offmap.summary import summarize

        return summarize(self)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically. The models' weights stay with the user; a digest of them goes along.

        With the scores "default" and "distance" the file holds up to 4,096 training rows: share it as you would share those.
        """
        from offmap.io.guard_file import save

        save(self, path)

    def export(
        self, path: str | Path, example: Inputs, *, draws: int | None = None, calibration: Data | None = None, half: bool = False
    ) -> ExportInfo:
        """Write frozen draws, score and verdict as one graph, `.onnx` or `.pt2`: inputs -> `mean` and `std`, or `probs`; `score`;
        `ood`; any number of rows. It is run on the `example` first, and refused unless it gives the guard's numbers to 1e-4.

        `draws` None takes all where a few products run them (plain stacks of layers, a last layer that alone is random), else ten
        at most. Other draws than the guard's need another threshold: from `calibration` data, or moved with the example's scores,
        which is logged. `half` keeps weights in half precision. The file holds training rows if the guard does.
        """
        from offmap.export.guard_graph import export_guard

        return export_guard(self, path, example, draws, calibration, half)

    def to(self, device: str | torch.device) -> Guard:
        """The same guard on another device."""
        if not isinstance(self.predictive, Stochastic):
            raise ConfigError("Expected a guard over a weight distribution; build other guards where they are to run.")
        place = Place(torch.device(device), self.place.dtype)
        model, q = self.predictive.model, self.predictive.q
        moved = replace(
            self.predictive,
            model=replace(model, net=copy.deepcopy(model.net).to(device)),
            q=copy.deepcopy(q).to(device),
        )
        calibration = self.calibration.to(device)
        familiar = self.familiar and self.familiar.to(device)
        return replace(self, predictive=moved, place=place, calibration=calibration, familiar=familiar)

    def scores(self, outputs: Tensor) -> Tensor:
        """From stacked outputs to scores, (P, B, ...) -> (B,) or (B, *positions); a NaN counts as infinitely OOD."""
        scores = measure(self.likelihood, self.score_with)(outputs)
        if scores.ndim == 0 or scores.shape[0] != outputs.shape[1]:
            raise ShapeError(
                f"Expected `score` to turn stacked outputs {tuple(outputs.shape)} into one number per example, "
                f"({outputs.shape[1]},), but got {tuple(scores.shape)}. Reduce the draws, axis 0, and keep axis 1."
            )
        return scores.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def score_map(self, block: Inputs) -> Tensor:
        """Scores of one block, (B,) or (B, *positions), NaN where its `attention_mask` tells of padding."""
        if self.familiar is not None and self.score_with in COMPARING:
            return self.familiar.join(self._terms(self.familiar, block)).to(self.precision)
        outputs = self.outputs(block, None)
        scores = self.scores(outputs)
        # without a class axis, (B, T) may be T labels of one text
        kept = attended(block, scores) if outputs.ndim > scores.ndim + 1 else None
        return scores if kept is None else scores.masked_fill(~kept, torch.nan)

    def _terms(self, familiar: CombinedScore, block: Inputs) -> dict[str, Tensor]:
        if self.score_with == "distance":
            return familiar.distances(self.predictive, block)
        uncertain = log_uncertainty(self.likelihood, self.outputs(block, None), self.predictive.members)
        energy = self.energy(block) if familiar.logits is not None else None
        return familiar.terms(self.predictive, block, uncertain, energy)

    def energy(self, block: Inputs) -> Tensor:
        """The energy of the plain members' logits, (B,): low for images whose classes are seen clearly."""
        logits = self.likelihood.logits(self.outputs(block, 0.0))  # pyright: ignore[reportAttributeAccessIssue]
        return plain_energy(logits, self.predictive.members)

    def outputs(self, block: Inputs, clip: float | None, draws: int | None = None) -> Tensor:
        """Stacked outputs of one block, (M·P, B, ...), refused if a row has more or fewer axes than at fit time."""
        stacked = self.predictive.outputs(block, draws or self.draws, clip=clip, seed=self.seed)
        axes = self.predictive.model and self.predictive.model.output_axes
        if axes is not None and stacked.ndim != axes + 2:
            raise ModelError(
                f"Expected inputs whose outputs have {axes + 1} axes, as at fit time, but these give {tuple(stacked.shape[1:])}. "
                "Check that the data have the form the model was trained on."
            )
        return stacked


def measure(likelihood: Likelihood, score: str | ScoreFn) -> ScoreFn:
    """The function behind a score: the user's own, or the likelihood's method."""
    if callable(score):
        return score
    return likelihood.epistemic if score == "epistemic" else likelihood.score


def checked_draws(draws: Any, also: str = "") -> int:
    """A plain whole number of at least 2, whatever library it comes from; `also` names what else is taken."""
    try:
        whole = operator.index(draws)
    except TypeError:
        whole = 0
    if whole < 2:
        raise ConfigError(f"Expected `draws` to be a whole number ≥ 2{also}, but got {draws!r}.")
    if whole > MOST_DRAWS:
        raise ConfigError(f"Expected `draws` to be at most {MOST_DRAWS}, but got {whole}.")
    return whole


def checked_clip(clip: Any) -> float | None:
    """A bound on |φ ⊙ z|, or None for no bound."""
    if clip is not None and not (isinstance(clip, int | float) and clip >= 0):
        raise ConfigError(f"Expected `clip` to be a number ≥ 0 or None, but got {clip!r}.")
    return None if clip is None else float(clip) if clip <= UNBOUNDED else math.inf
