"""What scores are compared with: some rows of the training data, where they lie, and how much the draws disagree there.

Disagreement and distance see different things, so the default score joins them. Every part is a logarithm, counted in standard
deviations over in-distribution rows, each compared with the others only (leave-one-out):

    disagreement   log u(x), the mean over members
    inputs         log ratio(x) of `offmap.scores.distance`, in the inputs
    layers         the same in what hidden matrices of all members meet, side by side; the mean over them

Their mean is the score. Nothing is tuned, and in-distribution data are all it needs.

Image classifiers are told otherwise (`scores/images.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offmap._types import Inputs, Weights
from offmap.data.inputs import rows_of, take_rows
from offmap.errors import ModelError, ShapeError
from offmap.likelihoods import Likelihood
from offmap.posterior.predictive import Predictive
from offmap.scores.features import blocks, flat, hidden, layers_of, spread_out, whole
from offmap.scores.neighbours import LEAST, KNNDistance, Scale

ROWS = 4096
"""In-distribution rows to compare distances with: with more of them, nearer ones are found, at some cost in memory and time."""

JUDGED = 1000
"""Of these, how many tell the scale of the disagreement: each takes all draws."""

LAYERS = 3
"""Hidden layers to compare in, spread over the depth, the last among them."""


@dataclass(frozen=True)
class CombinedScore:
    """In-distribution rows in the inputs (None: they are no vectors) and in some layers, and the scale of log u on them.

    `layers` are names of matrices, in the order of `hidden`. For images there is the scale of the energy in `logits` as well.
    """

    inputs: KNNDistance | None
    hidden: tuple[KNNDistance, ...]
    layers: tuple[str, ...]
    disagreement: Scale
    logits: Scale | None = None

    @property
    def words(self) -> list[str]:
        """What is looked at beside disagreement, in words."""
        named = [f"layers ({', '.join(self.layers)})"] if self.layers else []
        return [*(["logits"] if self.logits else []), *(["inputs"] if self.inputs else []), *named]

    @property
    def count(self) -> int:
        """How many training rows there are to compare with."""
        return max(len(space.rows) for space in (self.inputs, *self.hidden) if space is not None)

    def terms(
        self, predictive: Predictive, x: Inputs, log_uncertainty: Tensor, energy: Tensor | None = None
    ) -> dict[str, Tensor]:
        """All parts of the default score, (B,) each, from log u (B,) and, for images, the energy (B,)."""
        told = {"disagreement": self.disagreement(log_uncertainty)}
        if self.logits is not None and energy is not None:
            told["logits"] = self.logits(energy)
        return told | self.distances(predictive, x)

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """One score of some parts, (B,)."""
        return join(parts, soft=self.logits is not None)

    @torch.no_grad()
    def distances(self, predictive: Predictive, x: Inputs) -> dict[str, Tensor]:
        """How OOD examples are in the inputs and in the layers, (B,) each; one or the other if there is but one."""
        # room for all results first: short ones, left between the temporaries of later blocks, would scatter free memory
        pictures = self.logits is not None
        there = {"inputs": self.inputs, "last layer": pictures, "layers": len(self.hidden) > pictures}
        parts = [name for name, compared in there.items() if compared]
        found = {part: self.disagreement.centre.new_empty(rows_of(x)) for part in parts}
        start = 0
        for block in blocks(predictive, x):
            stop = start + rows_of(block)
            for part, values in self._distances(predictive, block).items():
                found[part][start:stop] = values
            start = stop
        return found

    def _distances(self, predictive: Predictive, x: Inputs) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        if self.inputs is not None:
            vectors, width = flat(x), self.inputs.rows.shape[1]
            if vectors is None or vectors.shape[1] != width:
                raise ShapeError(
                    f"Expected {width} numbers per input, as at fit time, but got "
                    f"{'another form' if vectors is None else vectors.shape[1]}. Bring inputs to one size, or fit with "
                    "score='epistemic', which compares no inputs."
                )
            parts["inputs"] = self.inputs(vectors)
        if self.hidden:
            met = layers_of(predictive, x, self.layers, pictures=self.logits is not None)
            for name in self.layers:
                if name not in met:
                    raise ModelError(
                        f"Expected `{name}` to meet one row per example, as at fit time, but on these inputs it does not. "
                        "Check their form, or fit with score='epistemic', which compares no layers."
                    )
            told = [s(met[n]) for s, n in zip(self.hidden, self.layers, strict=True)]
            if self.logits is not None:
                parts["last layer"] = told.pop()
            if told:
                parts["layers"] = torch.stack(told).mean(0)
        return parts

    def to(self, device: str | torch.device) -> CombinedScore:
        """The same on another device."""
        return CombinedScore.from_state(self.layers, {name: tensor.to(device) for name, tensor in self.state().items()})

    def state(self) -> Weights:
        """Every tensor by name."""
        spaces = [("inputs", self.inputs)] if self.inputs is not None else []
        spaces += [(f"hidden.{i}", space) for i, space in enumerate(self.hidden)]
        tensors = {f"{name}.{field}": tensor for name, space in spaces for field, tensor in space.state().items()}
        scales = {"disagreement": self.disagreement, "logits": self.logits}
        return tensors | {name: scale.state() for name, scale in scales.items() if scale is not None}

    @staticmethod
    def from_state(layers: Sequence[str], tensors: Mapping[str, Tensor]) -> CombinedScore:
        """What `state` and the layers' names tell."""

        def space(name: str) -> KNNDistance:
            return KNNDistance.from_state({n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")})

        return CombinedScore(
            inputs=space("inputs") if "inputs.rows" in tensors else None,
            hidden=tuple(space(f"hidden.{i}") for i in range(len(layers))),
            layers=tuple(layers),
            disagreement=Scale(*tensors["disagreement"].unbind()),
            logits=Scale(*tensors["logits"].unbind()) if "logits" in tensors else None,
        )


def join(parts: Mapping[str, Tensor], *, soft: bool) -> Tensor:
    """The mean of all parts, or their soft maximum, log mean exp; what is infinitely OOD in one is so altogether.

    >>> parts = {"disagreement": torch.tensor([1.0, 0.0]), "inputs": torch.tensor([3.0, torch.inf])}
    >>> join(parts, soft=False), join(parts, soft=True)
    (tensor([2., inf]), tensor([2.4338, inf]))
    """
    stacked = torch.stack(list(parts.values()))
    whole = stacked.logsumexp(0) - math.log(len(stacked)) if soft else stacked.mean(0)
    return whole.nan_to_num(nan=torch.inf, posinf=torch.inf)


def fit_combined(
    predictive: Predictive, rows: Sequence[Inputs], log_uncertainty: Callable[[Inputs], Tensor]
) -> CombinedScore | None:
    """Where these rows lie and how uncertain the draws are there; None if there are no vectors to compare, or too few.

    `rows` are in parts, one for every shape. Positions have no neighbours here.
    """
    if sum(map(rows_of, rows)) < LEAST:
        return None
    apart = -(-sum(map(rows_of, rows)) // JUDGED)
    uncertain = [log_uncertainty(take_rows(part, slice(None, None, apart))) for part in rows]
    if any(values.ndim > 1 for values in uncertain):
        return None
    vectors = whole([flat(part) for part in rows])
    inputs = None if vectors is None else KNNDistance.of(vectors, standardized=True)
    spaces = {name: KNNDistance.of(met, standardized=False) for name, met in hidden(predictive, rows, vectors).items()}
    kept = {name: space for name, space in spaces.items() if space is not None}
    layers = spread_out(list(kept), LAYERS)
    if inputs is None and not layers:
        return None
    return CombinedScore(inputs, tuple(kept[n] for n in layers), tuple(layers), Scale.of(torch.cat(uncertain)))


def log_uncertainty(likelihood: Likelihood, outputs: Tensor, members: int) -> Tensor:
    """Log u in float64, (M·P, B, ...) -> (B,): the mean over members of the logarithm of each one's own disagreement.

    The logarithm first: of members as wide as the data allow, one may be wider than all others by orders of magnitude. Members
    that are not random disagree only with each other.
    """
    draws = outputs.shape[0] // members
    parts = outputs.unflatten(0, (members, draws)) if draws > 1 else outputs.unsqueeze(0)
    each = torch.stack([likelihood.epistemic(part) for part in parts]).double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return each.clamp_min(1e-30).log().mean(0)
