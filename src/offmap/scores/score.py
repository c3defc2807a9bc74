"""`Score`: what is OOD, as a module. The guard calls it, the guard file stores its buffers, the export traces it.

A score of your own is one file: a subclass with `fit` and `forward`, registered by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from offmap._types import Inputs, ScoreFn
from offmap.data.batch import concat_rows, flatten_inputs, rows_of, take_rows
from offmap.data.batches import Examples
from offmap.errors import ShapeError
from offmap.likelihoods import Likelihood
from offmap.model.capture import features as read_features
from offmap.model.forward import join_members
from offmap.model.inspect import count_products
from offmap.model.params import detach_params
from offmap.random import permutation
from offmap.scores.distance import FittedModule, KNNDistance

if TYPE_CHECKING:
    from offmap.guard import DrawSampler

EMPTY = torch.empty(0, device="cpu")
MANY = 32  # rows that tell whether a layer gets one vector per row, whatever the others
SCALE_ROWS = 1000  # that set the scales of terms: each takes all draws
LEAST_FRESH = 100  # validation rows; of fewer, the scales come from training rows
LAYERS = 7  # to compare in, spread over the depth, the last among them
FEW_ROWS, MOST_ROWS, NARROW, WIDE = 2048, 4096, 64, 128  # rows, and numbers per row, that layers are compared with


@dataclass(frozen=True)
class Reads:
    """What a score reads beside the inputs.

    Args:
        draws: Outputs of unclipped draws.
        base: Outputs with the trained weights.
        layers: Names of parameters, the inputs of whose layers are read, one vector per example: inputs of convolutions as mean
            and standard deviation of every channel, those of tokens as their mean.
    """

    draws: bool = True
    base: bool = False
    layers: tuple[str, ...] = ()


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
class Cut:
    """Rows of a sample of N training rows that stand in for OOD rows, cut out of what terms are fitted to.

    Args:
        kind: What kind of shift it stands for.
        name: What was cut out, in words.
        held: (N,) bool, the rows that were cut out.
        half: (N,) bool, half of the others: terms that know the rows they are fitted to by heart are fitted to these.
        labels: (N,), the classes of the rows, if they have some.
        squares: Squared distances of all rows in every space, which cuts share.
    """

    kind: str
    name: str
    held: Tensor
    half: Tensor
    labels: Tensor | None = None
    squares: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def kept(self) -> Tensor:
        """(N,) bool, the rows that were not cut out."""
        return ~self.held

    def distances(self, space: KNNDistance, x: Tensor) -> Tensor:
        """Return the squared distances (N, N) of rows x (N, D) in a space, infinite to themselves."""
        if id(space) not in self.squares:
            rows = space.scale(x).float()
            sizes = rows.square().sum(1)
            squares = torch.addmm(sizes, rows, rows.mT, alpha=-2).add_(sizes.unsqueeze(1)).clamp_min_(0)
            self.squares[id(space)] = squares.fill_diagonal_(torch.inf)
        return self.squares[id(space)]


@dataclass(frozen=True)
class ScoreData:
    """In-distribution data that a score is fitted to.

    Args:
        read_train: Samples up to 4,096 training rows, in parts of one shape each; none where no training data were passed.
        valid: Validation inputs, which the models have not been trained on.
        targets: Their targets.
        sampler: Computes features of blocks of rows.
        allow_nan: Whether numbers may be missing.
        groups: A label for every training row, by its number: sites, dates, speakers.
        false_alarms: The fraction of in-distribution rows that may be called OOD.
    """

    read_train: Callable[[], Sequence[Examples]]
    valid: Inputs
    targets: Tensor
    sampler: DrawSampler
    allow_nan: bool = False
    groups: Sequence[Any] | None = None
    false_alarms: float = 0.05

    @cached_property
    def examples(self) -> Sequence[Examples]:
        """Training rows with their targets, in parts of one shape each."""
        return self.read_train()

    @cached_property
    def train(self) -> list[Inputs]:
        """Training inputs, in parts of one shape each."""
        return [part.inputs for part in self.examples]

    @cached_property
    def labels(self) -> Tensor | None:
        """The class of every training row, (N,), where each has one."""
        targets = [part.targets for part in self.examples]
        plain = self.sampler.likelihood.classifies and all(y.ndim == 1 and not y.is_floating_point() for y in targets)
        return torch.cat(targets) if targets and plain else None

    @cached_property
    def few(self) -> Features:
        """Features of two rows, to see what forms things have."""
        rows = self.train[0] if self.train else self.valid
        return self.sampler.features(take_rows(rows, slice(0, 2)), Reads(True, base=True))

    @cached_property
    def reference(self) -> list[list[Features]]:
        """What one pass of the base models gives of the training rows: blocks of features, for every part."""
        reads = Reads(False, base=True, layers=tuple(spread_out(find_layers(self), LAYERS)))
        return [[self.sampler.features(rows, reads) for rows in self.sampler.blocks(part)] for part in self.train]

    @cached_property
    def layers(self) -> dict[str, Tensor]:
        """Inputs of some layers of the training rows, of all members side by side, {parameter: (N, D)}."""
        blocks = [features for part in self.reference for features in part]
        names = blocks[0].layer_inputs[0] if blocks and blocks[0].layer_inputs else ()
        matrices = {name: concat_rows([join_members(block.layer_inputs, name) for block in blocks]) for name in names}
        return {name: matrix for name, matrix in matrices.items() if matrix is not None}

    def take(self, part: int, rows: Tensor) -> Features:
        """Return the features of some rows of a part of the training rows, but for their draws."""
        blocks = self.reference[part]
        members = range(blocks[0].members if self.layers else 0)
        return replace(
            blocks[0],
            inputs=take_rows(self.train[part], rows),
            base_outputs=torch.cat([block.base_outputs for block in blocks], 1)[:, rows],
            layer_inputs=[{n: torch.cat([b.layer_inputs[m][n] for b in blocks])[rows] for n in self.layers} for m in members],
        )

    @cached_property
    def price(self) -> int:
        """Products of numbers that comparing one row may take in each of three spaces: a quarter of what its draws take."""
        model = self.sampler.predictive.model
        if model is None:
            return 0
        passes = count_products(model.module, take_rows(self.train[0], slice(0, 2)), model.output_fn) // 2
        return self.sampler.predictive.members * passes * (self.sampler.draws if model.last_layer is None else 1) // 12

    @cached_property
    def width(self) -> int:
        """Numbers per row that layers are compared with; an eighth of a wide layer's at least."""
        widest = max((rows.shape[1] for rows in self.layers.values()), default=0)
        return max(NARROW, min(WIDE, max(self.price // len(self.compared), widest // 8) // 16 * 16))

    @cached_property
    def compared(self) -> Tensor:
        """Numbers of the training rows that layers are compared with."""
        total = sum(map(rows_of, self.train))
        most = MOST_ROWS if self.price >= MOST_ROWS * NARROW else FEW_ROWS
        return torch.arange(total, device="cpu") if total <= most else permutation(total, "compared")[:most].sort().values

    def evaluate(self, measure: Callable[[Features], Tensor], x: Inputs, reads: Reads) -> Tensor:
        """Evaluate a function of features on all rows, (B, ...), for scores of your own."""
        return torch.cat([measure(self.sampler.features(rows, reads)) for rows in self.sampler.blocks(x)])

    @property
    def fresh(self) -> bool:
        """Whether there are enough validation rows to set scales."""
        return rows_of(self.valid) >= LEAST_FRESH or not self.train

    @property
    def has_all_features(self) -> bool:
        """Whether scales were taken from all validation rows, whose features are known then."""
        return "scale_features" in vars(self) and self.fresh and rows_of(self.valid) <= SCALE_ROWS

    @cached_property
    def scale_features(self) -> list[Features]:
        """All that scores read of the rows that set the scales: validation rows, or training rows if those are few."""
        reads = Reads(True, base=True, layers=tuple(self.layers))
        parts, start = [self.valid] if self.fresh else self.train, 0
        step = -(-sum(map(rows_of, parts)) // SCALE_ROWS)
        result: list[Features] = []
        for part in parts:
            rows = take_rows(part, slice(None, None, step))
            numbers = torch.arange(start, start + rows_of(part), step, device="cpu")
            for block in self.sampler.blocks(rows):
                features, size = self.sampler.features(block, reads), rows_of(block)
                result.append(features if self.fresh else replace(features, itself=numbers[:size]))
                numbers = numbers[size:]
            start += rows_of(part)
        return result


class Score(FittedModule, ABC):
    """Base of all scores."""

    name: ClassVar[str] = ""  # under which it is registered
    reads: Reads = Reads()  # what of `Features` it reads

    @classmethod
    @abstractmethod
    def fit(cls, data: ScoreData) -> Score:
        """Fit the score to in-distribution `data`."""

    @abstractmethod
    def forward(self, features: Features) -> Tensor:
        """Score the B rows of `features`: (B,) or (B, *positions), higher = more OOD; NaN at padding only."""

    def terms(self, features: Features) -> dict[str, Tensor]:
        """Return what the score joins for the rows of `features`, (B,) each; of a score that joins nothing, itself."""
        return {"score": self(features)}

    def compared(self, features: Features) -> list[tuple[KNNDistance, Tensor]]:
        """Return what of `features` is compared with training rows: the rows' module, and vectors (B, D)."""
        return []

    def ties(self, features: Features) -> Tensor | None:
        """Tell for which rows of `features` rounding decides, because neighbours tie, (B,) bool; None if there are none."""
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


# -------------------------------------------------------------------------------------------------------------- vectors


def find_layers(data: ScoreData) -> list[str]:
    """Name the parameters whose layers get one vector per row, whatever the rest of the batch, in order of execution.

    Layers that get the inputs themselves, as they are or moved and stretched column by column, are left out if there are others:
    inputs are compared already. So is the first convolution, which gets the image itself, whose colours tell little.
    """
    model, weights = data.sampler.predictive.model, data.sampler.predictive.mean_weights(0)
    if model is None or weights is None or not data.train:
        return []
    # one member alone has its fixed weights in the model itself
    params = detach_params(model.module)
    several = [take_rows(data.train[0], slice(0, n)) for n in (2, min(MANY, model.batch_size))]
    few, many = (read_features(model.module, params | weights, rows, model.output_fn, maps=True) for rows in several)
    vectors = flatten_inputs(several[1])
    names: list[str] = []
    copies = [name for name in few if params[name].ndim > 2][:1]
    for name, alone in few.items():
        rows = many.get(name, alone[:0])
        first = rows[: len(alone)].double()
        if first.shape == alone.shape:
            gap = (alone.double() - first).abs().amax()
            if gap <= 0.05 * first.abs().amax():  # alike up to rounding, in half precision as well
                names.append(name)
                copies += [name] if vectors is not None and is_scaled(rows, vectors) else []
    return [name for name in names if name not in copies] or names


def is_scaled(rows: Tensor, vectors: Tensor) -> bool:
    """Return whether rows are the vectors, moved and stretched column by column, but for rounding and missing values."""
    if rows.shape != vectors.shape:
        return False
    present = vectors.isfinite()
    gaps, wide = (torch.where(present, t.double() - t.double()[:1], 0.0).nan_to_num() for t in (rows, vectors))
    scale = (gaps * wide).sum(0) / wide.square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    return bool(((gaps - scale * wide).abs() <= 1e-3 * gaps.abs().amax(0)).all()) and bool((scale >= 0).all())


def spread_out(names: list[str], most: int) -> list[str]:
    """Take at most so many of them, evenly spaced, the last among them.

    >>> spread_out(["a", "b", "c", "d", "e"], 2)
    ['b', 'e']
    """
    return names if len(names) <= most else [names[(i + 1) * len(names) // most - 1] for i in range(most)]
