"""`Score`: what is OOD, as a module. The guard calls it, the guard file stores its buffers, the export traces it.

A score of your own is one file: a subclass with `fit` and `forward`, registered by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from offmap._types import Inputs, ScoreFn
from offmap.data.batch import rows_of, take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group, all_gather_concat, shard_slice
from offmap.errors import ShapeError
from offmap.likelihoods import Likelihood
from offmap.scores.distance import FittedModule, KNNDistance

if TYPE_CHECKING:
    from offmap.guard import DrawSampler

EMPTY = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class Reads:
    """What a score reads beside the inputs.

    Args:
        draws: Outputs of unclipped draws.
        base: Outputs with the trained weights.
        layers: Names of parameters, the inputs of whose layers are read.
        pooled: Whether inputs of convolutions are read too, as mean and standard deviation of every channel, (B, 2C).
    """

    draws: bool = True
    base: bool = False
    layers: tuple[str, ...] = ()
    pooled: bool = False


@dataclass(frozen=True)
class Features:
    """What a score may read of B rows; tensors that it does not read are empty.

    Args:
        inputs: The inputs themselves.
        likelihood: What outputs mean.
        members: M, the number of models.
        outputs: Outputs of unclipped draws, (M·P, B, ...), member-major.
        base_outputs: Outputs with the trained weights, (M·p, B, ...), the same in all p.
        layer_inputs: Of every member with its trained weights, {parameter: (B, D)}.
        itself: Numbers (B,) of the training rows that these rows are, if they are: a row is not compared with itself.
    """

    inputs: Inputs
    likelihood: Likelihood
    members: int
    outputs: Tensor = EMPTY
    base_outputs: Tensor = EMPTY
    layer_inputs: Sequence[Mapping[str, Tensor]] = ()
    itself: Tensor | None = None


@dataclass(frozen=True)
class ScoreData:
    """In-distribution data that a score is fitted to.

    Args:
        read_train: Samples up to 4,096 training rows, in parts of one shape each; none where no training data were passed.
        valid: Validation inputs, which the models have not been trained on.
        images: Whether the models classify images, (B, channels, height, width).
        sampler: Computes features of blocks of rows.
        group: Processes, each of which evaluates some of the rows.
        allow_nan: Whether numbers may be missing.
    """

    read_train: Callable[[], Sequence[Inputs]]
    valid: Inputs
    images: bool
    sampler: DrawSampler
    group: Group = SINGLE_PROCESS
    allow_nan: bool = False

    @cached_property
    def train(self) -> Sequence[Inputs]:
        """Training rows, in parts of one shape each."""
        return self.read_train()

    def evaluate(self, measure: Callable[[Features], Tensor], x: Inputs, reads: Reads) -> Tensor:
        """Evaluate a function of features on all rows, (B, ...)."""
        mine = take_rows(x, shard_slice(self.group, rows_of(x)))
        parts = [measure(self.sampler.features(rows, reads)) for rows in self.sampler.blocks(mine)]
        return all_gather_concat(self.group, torch.cat(parts) if parts else None)


class Score(FittedModule, ABC):
    """Base of all scores."""

    name: ClassVar[str] = ""  # under which it is registered
    reads: Reads = Reads()  # what of `Features` it reads

    @classmethod
    @abstractmethod
    def fit(cls, data: ScoreData) -> Score:
        """Fit the score to in-distribution data."""

    @abstractmethod
    def forward(self, features: Features) -> Tensor:
        """Score B rows: (B,) or (B, *positions), higher = more OOD; NaN at padding only."""

    def terms(self, features: Features) -> dict[str, Tensor]:
        """Return what the score joins, (B,) each; of a score that joins nothing, itself."""
        return {"score": self(features)}

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return what is compared with training rows: the rows' module, and vectors (B, D)."""
        return []

    def ties(self, features: Features) -> Tensor | None:
        """Tell which rows' scores hang on rounding, for neighbours of theirs tie, (B,) bool; None if none can."""
        ties = [space.ties(vectors) for space, vectors in self.compared(features)]
        return torch.stack(ties).any(0) if ties else None

    def describe(self) -> str:
        """Say in a few words what is compared."""
        return "the draws' outputs alone"


SCORES: dict[str, type[Score]] = {}
"""Scores by name; `register_score` adds one."""

AnyScore = TypeVar("AnyScore", bound=Score)


def register_score(name: str) -> Callable[[type[AnyScore]], type[AnyScore]]:
    """Register a subclass of `Score` under a name, for `offmap.fit(..., score=name)` and for files."""

    def register(kind: type[AnyScore]) -> type[AnyScore]:
        kind.name = name
        SCORES[name] = kind
        return kind

    return register


class OutputScore(Score):
    """A score of the draws' outputs alone."""

    @classmethod
    def fit(cls, data: ScoreData) -> Self:
        """Nothing is fitted."""
        return cls()

    @abstractmethod
    def measure(self, likelihood: Likelihood, outputs: Tensor) -> Tensor:
        """Score stacked outputs, (M·P, B, ...) -> (B,) or (B, *positions)."""

    def forward(self, features: Features) -> Tensor:
        """Score B rows; a NaN counts as infinitely OOD, and padding by an `attention_mask` is NaN."""
        outputs = features.outputs
        scores = self.measure(features.likelihood, outputs)
        if scores.ndim == 0 or scores.shape[0] != outputs.shape[1]:
            raise ShapeError(
                f"Expected `score` to turn stacked outputs {tuple(outputs.shape)} into one number per example, "
                f"({outputs.shape[1]},), but got {tuple(scores.shape)}. Reduce the draws, axis 0, and keep axis 1."
            )
        scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf)
        # without a class axis, (B, T) may be T labels of one text
        mask = find_unpadded(features.inputs, scores) if outputs.ndim > scores.ndim + 1 else None
        return scores if mask is None else scores.masked_fill(~mask, torch.nan)


@register_score("paper")
class PaperScore(OutputScore):
    """The mixture's variance, or the entropy of its mean: the likelihood's total uncertainty."""

    def measure(self, likelihood: Likelihood, outputs: Tensor) -> Tensor:
        """Return the total uncertainty."""
        return likelihood.score(outputs)


@register_score("epistemic")
class EpistemicScore(OutputScore):
    """The variance of the means, or the mutual information: the draws' disagreement."""

    def measure(self, likelihood: Likelihood, outputs: Tensor) -> Tensor:
        """Return the disagreement."""
        return likelihood.epistemic(outputs)


class FunctionScore(OutputScore):
    """A user's function of stacked outputs."""

    def __init__(self, function: ScoreFn) -> None:
        super().__init__()
        self.function = function

    def measure(self, likelihood: Likelihood, outputs: Tensor) -> Tensor:
        """Call the function."""
        return self.function(outputs)

    def describe(self) -> str:
        """Say whose it is."""
        return "your own function of the outputs"


def find_unpadded(inputs: Inputs, scores: Tensor) -> Tensor | None:
    """Tell which positions of a map (B, T) are no padding, by the `attention_mask` (B, T) of a dict of inputs, if it has one."""
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    if mask is None or mask.ndim != 2 or scores.ndim != 2 or mask.shape[1] - scores.shape[1] not in (0, 1):
        return None
    # a map one shorter holds predictions of the next tokens: the mask's last columns belong to it
    return mask[:, mask.shape[1] - scores.shape[1] :] != 0
