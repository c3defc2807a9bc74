"""`Guard`: a detector over a weight distribution, or over any other Predictive."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from offmap import checks
from offmap._types import Data, Inputs
from offmap.data import Rows
from offmap.data.batch import concat_padded, is_table, rows_of, take_rows
from offmap.detector import Detector, concat_results, merge_parts, reduce_positions
from offmap.errors import ConfigError, ModelError, first_line
from offmap.likelihoods import Likelihood, Prediction, check_counted
from offmap.model.capture import features as read_features
from offmap.model.forward import MODEL_ERRORS, model_failed, read_layers
from offmap.posterior.predictive import History, Predictive, Stochastic
from offmap.scores.score import EMPTY, Features, Reads, Score

if TYPE_CHECKING:
    from offmap.assessment import Assessment
    from offmap.export.onnx import ExportInfo
    from offmap.table import Table

OUTPUT_NUMBERS = 1 << 22
"""Stacked output numbers held at once while scoring (16 MB in float32), whatever the number of rows and draws."""

MOST_DRAWS = 1_000_000


@dataclass(frozen=True)
class DrawSampler:
    """Computes outputs (M·P, B, ...) and features of blocks of rows."""

    predictive: Predictive
    likelihood: Likelihood
    draws: int
    seed: int

    def block_rows(self) -> int:
        """Return how many rows have stacked outputs that stay within a fixed memory."""
        model = self.predictive.model
        numbers = (model.output_numbers if model else 1) * self.predictive.members * self.draws
        return max(1, min(8192, OUTPUT_NUMBERS // numbers))

    def blocks(self, x: Inputs) -> Iterator[Inputs]:
        """Cut rows into blocks that `features` can hold."""
        step = self.block_rows()
        return (take_rows(x, slice(start, start + step)) for start in range(0, rows_of(x), step))

    def outputs(self, rows: Inputs, clip: float | None) -> Tensor:
        """Stacked outputs of one block, (M·P, B, ...), refused if a row has more or fewer axes than at fit time."""
        stacked = self.predictive.outputs(rows, self.draws, clip=clip, seed=self.seed)
        axes = self.predictive.model.output_axes if self.predictive.model else None
        if axes is not None and stacked.ndim != axes + 2:
            raise ModelError(
                f"Expected inputs whose outputs have {axes + 1} axes, as at fit time, but these give {tuple(stacked.shape[1:])}. "
                "Check that the data have the form the model was trained on."
            )
        return stacked

    def nll(self, rows: Rows, clip: float | None) -> Tensor:
        """Return the NLL of the prediction at the targets, (n,), nats."""
        targets = rows.targets.split(self.block_rows())
        blocks = zip(self.blocks(rows.inputs), targets, strict=True)
        return torch.cat([self.likelihood.predictive_nll(self.outputs(block, clip), y) for block, y in blocks])

    def check_targets(self, rows: Rows) -> None:
        """Raise unless the targets of these rows fit the outputs."""
        base = self.predictive.outputs(take_rows(rows.inputs, slice(0, 2)), 1, clip=0.0, seed=self.seed)
        self.likelihood.check_targets(base[0], rows.targets, rows.name)
        check_counted(self.likelihood, rows.targets, rows.name)

    def features(self, rows: Inputs, reads: Reads) -> Features:
        """Compute what a score reads of one block of rows."""
        layer_inputs = self._layer_inputs(rows, reads.layers) if reads.layers else ()  # first: a last layer shares it
        outputs, base = self.outputs(rows, None) if reads.draws else EMPTY, self.outputs(rows, 0.0) if reads.base else EMPTY
        return Features(rows, self.likelihood, self.predictive.members, outputs, base, layer_inputs)

    @torch.no_grad()
    def _layer_inputs(self, rows: Inputs, layers: Sequence[str]) -> list[dict[str, Tensor]]:
        model = self.predictive.model
        assert model is not None
        members: list[dict[str, Tensor]] = []
        for member in range(self.predictive.members):
            # one member alone has its fixed weights in the model itself
            weights = self.predictive.mean_weights(member) or {}
            if model.layers and is_table(rows):
                try:
                    members.append(read_layers(model.layers, weights, rows, layers))
                except MODEL_ERRORS as error:
                    raise model_failed(model.module, rows, error) from error
                continue
            blocks = (take_rows(rows, slice(i, i + model.batch_size)) for i in range(0, rows_of(rows), model.batch_size))
            parts = [read_features(model.module, weights, block, model.output_fn, names=layers, maps=True) for block in blocks]
            members.append({n: torch.cat([p[n] for p in parts]) for n in layers if all(n in p for p in parts)})
        model.share_last_inputs(rows, members)
        return members


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Guard(Detector):
    """A detector over a weight distribution, or any other Predictive.

    Args:
        predictive: Draws outputs of the members, (M·P, B, ...).
        likelihood: Turns outputs into predictions and uncertainties.
        score_module: Scores rows, from unclipped draws and what else it reads.
        clip: Bound on |φ ⊙ z| of the draws that predict; None for no bound.
        draws: Draws of every member.
        notes: Findings about the model, shown in the summary.
        about: Plain values to keep in the file, such as names of columns.
        probe: A few made-up inputs, at which a file compares the outputs of a Predictive of the user's.
    """

    predictive: Predictive
    likelihood: Likelihood
    score_module: Score
    clip: float | None = None
    draws: int = 50
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    probe: Tensor | None = None

    @property
    def history(self) -> History:
        """How the fit went."""
        return self.predictive.history or History()

    @cached_property
    def sampler(self) -> DrawSampler:
        """Computes outputs and features of rows."""
        return DrawSampler(self.predictive, self.likelihood, self.draws, self.seed)

    def block_rows(self) -> int:
        """Return how many rows have stacked outputs that stay within a fixed memory."""
        return self.sampler.block_rows()

    def _features(self, rows: Inputs) -> Features:
        return self.sampler.features(rows, self.score_module.reads)

    def _score(self, features: Features) -> Tensor:
        return self.score_module(features).to(self.precision)

    def _predict(self, features: Features) -> Prediction:
        shared = self.clip is None and self.score_module.reads.draws
        outputs = features.outputs if shared else self.sampler.outputs(features.inputs, self.clip)
        return self.likelihood.predict(outputs)

    def _residuals(self, rows: Rows) -> Tensor:
        self.check_targets(rows)
        return self.likelihood.residual(self.predict(rows.inputs), rows.targets)

    def _share_repeated(self, inputs: Inputs) -> float:
        reads = replace(self.score_module.reads, draws=False)
        pairs = [self.score_module.compared(self.sampler.features(rows, reads))[:1] for rows in self.blocks(inputs)]
        vectors = [vectors for block in pairs for _, vectors in block]
        return pairs[0][0][0].share_copied(torch.cat(vectors)) if vectors else 0.0

    def _describe(self) -> str:
        score = self.score_module.name or "your own function"
        members = self.predictive.members
        return f"score {score}, {self.draws} draws of {members} member{'s' * (members > 1)}, clip {self.clip}"

    def check_targets(self, rows: Rows) -> None:
        """Raise unless the targets of these rows fit what the guard predicts."""
        self.sampler.check_targets(rows)

    def predict_at(self, rows: Rows) -> dict[str, tuple[Prediction, Tensor]]:
        """Predict labelled rows from clipped ("own") and unclipped draws ("wide"), each with its NLL (n,) at the targets."""
        clips = {"own": self.clip, "wide": None}
        return {n: (self.predict(rows.inputs, clip=clip), self.sampler.nll(rows, clip)) for n, clip in clips.items()}

    def terms(self, x: Inputs) -> dict[str, Tensor]:
        """Return the terms of the score, (B,) each, such as "disagreement", "inputs" and "layers".

        In standard deviations over in-distribution rows. A score without terms is its own only one, under "score".

        Args:
            x: Inputs of B rows.
        """
        parts = (self.score_module.terms(self._features(rows)) for rows in self.blocks(x))
        terms = merge_parts(parts, lambda several: {name: concat_padded([p[name] for p in several]) for name in several[0]})
        return {name: reduce_positions(values, "mean").to(self.precision) for name, values in terms.items()}

    def predict(self, x: Inputs, *, clip: float | Literal["chosen"] | None = "chosen") -> Prediction:
        """Predict every input with the mixture of clipped draws.

        Args:
            x: Inputs of B rows.
            clip: Another bound than the guard's; None predicts without a bound.
        """
        bound = self.clip if isinstance(clip, str) and clip == "chosen" else check_clip(clip)
        return merge_parts(
            (self.likelihood.predict(self.sampler.outputs(rows, bound)) for rows in self.blocks(x)), concat_results
        )

    def samples(self, x: Inputs, draws: int = 50, *, clip: float | None = None) -> Tensor:
        """Return outputs of the drawn models themselves, (M·draws, B, ...).

        Args:
            x: Inputs of B rows.
            draws: Draws of every member.
            clip: Bound on |φ ⊙ z|; None for no bound.
        """
        bound, sampler = check_clip(clip), replace(self.sampler, draws=check_draws(draws, 1))
        return concat_padded([sampler.outputs(rows, bound) for rows in self.blocks(x, sampler.block_rows())], 1)

    def summary(self) -> Table:
        """Return a table of what is random and how wide."""
        from offmap.diagnosis import summarize

        return summarize(self)

    def assess(self) -> Assessment:
        """Tell what this guard can and cannot see, from in-distribution data alone.

        The fit left out parts of the training rows in turn, and corrupted validation rows. The assessment tells how well the
        score and each of its terms detect them. The model itself has seen the parts that were left out, so real shifts may be
        easier or harder to detect.
        """
        from offmap.assessment import assess

        return assess(self)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically. It holds a digest of the models' weights, not the weights.

        Of a Predictive that `offmap.guard` took it holds the outputs at a few made-up inputs, if inputs are one tensor.
        Scores that measure distances, as the default does, store up to 4,096 training rows: share the file as those.

        Args:
            path: The file.
        """
        from offmap.io.guard_file import save

        save(self, path)

    def export(
        self,
        path: str | Path,
        example: Inputs,
        *,
        draws: int | None = None,
        calibration: Data | Inputs | None = None,
        half: bool = False,
    ) -> ExportInfo:
        """Write frozen draws, score and verdict as one graph.

        Outputs are `mean` and `std`, or `probs`; `score`, `ood` and `p_value`; `terms`, (B, T), of a score that has some;
        `threshold`. The graph takes any number of rows. offmap runs it on `example` first, and refuses it unless it gives
        the guard's numbers to 1e-4. The file holds training rows if the guard does.

        Args:
            path: The file, `.onnx` or `.pt2`.
            example: Some inputs.
            draws: How many draws to freeze. None: the guard's own, or as many as fit in 100 MB of weights, but ten at least.
                Other draws need another threshold: the guard scores its calibration rows again. It keeps these, up to 64 MB,
                until it is saved.
            calibration: In-distribution data to calibrate on instead, with targets or inputs alone. Without them, threshold and
                p-values of a guard from a file with other `draws` are approximate, with a warning.
            half: Keep weights in half precision.
        """
        from offmap.export.module import export_guard

        return export_guard(self, path, example, draws, calibration, half)

    def to(self, device: str | torch.device) -> Guard:
        """Return the same guard on another device."""
        if not isinstance(self.predictive, Stochastic):
            raise ConfigError("Expected a guard over a weight distribution; build other guards on the device where they run.")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ConfigError(f"Expected a device that torch can use here, but got {device!r}: {first_line(error)}.") from error
        if torch.device(device).type == "meta":
            raise ConfigError("Expected a device that holds numbers, but got 'meta'.")
        model = replace(self.predictive.model, module=copy.deepcopy(self.predictive.model.module).to(device))
        predictive = replace(self.predictive, model=model, q=copy.deepcopy(self.predictive.q).to(device))
        place, score_module = replace(self.place, device=torch.device(device)), copy.deepcopy(self.score_module).to(device)
        return replace(
            self, predictive=predictive, place=place, calibration=self.calibration.to(device), score_module=score_module
        )


def check_draws(draws: Any, at_least: int = 2, *, optional: bool = False) -> int:
    """Return a plain whole number within bounds, whatever library it comes from."""
    number = checks.integer("draws", draws, at_least, optional=optional)
    if number > MOST_DRAWS:
        raise ConfigError(f"Expected `draws` to be at most {MOST_DRAWS}, but got {number}.")
    return number


def check_clip(clip: Any) -> float | None:
    """Return a bound on |φ ⊙ z|, or None for no bound; one beyond 1e30 bounds nothing in single precision."""
    if clip is not None and not (isinstance(clip, int | float) and clip >= 0):
        raise ConfigError(f"Expected `clip` to be a number ≥ 0 or None, but got {clip!r}.")
    return None if clip is None else float(clip) if clip <= 1e30 else math.inf
