"""One module that answers as a guard does: prediction from clipped draws, score from unclipped ones, verdict by a constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offmap._torch_private import tree_flatten, tree_unflatten
from offmap._types import Inputs, ScoreFn
from offmap.export.distilled import Distilled, Plain
from offmap.export.draws import Draws
from offmap.export.near import Layers, Near, Scaled
from offmap.export.passes import Passed, Passes
from offmap.likelihoods import Prediction


@dataclass(frozen=True)
class Told:
    """A part of the score that outputs tell, (S, B, ...) -> (B,), on its scale."""

    measure: ScoreFn
    scale: Scaled


class Joined(nn.Module):
    """The default score, and "distance": disagreement (if asked), inputs and layers, joined by their mean, (B,).

    Of pictures there is the `energy` of the plain members too, the last layer is a part of its own, and the soft maximum joins.
    """

    def __init__(
        self,
        disagreement: Told | None,
        energy: Told | None,
        vectors: Callable[[Inputs], Tensor | None],
        inputs: Near | None,
        layers: Layers | None,
        hidden: list[Near],
    ) -> None:
        super().__init__()
        self.disagreement, self.energy, self.vectors = disagreement, energy, vectors
        self.inputs, self.layers, self.hidden = inputs, layers, nn.ModuleList(hidden)

    def forward(self, inputs: Inputs, outputs: Tensor, passed: Passed | None) -> Tensor:
        """Inputs of B rows and unclipped outputs (S, B, ...) -> (B,)."""
        parts: list[Tensor] = []
        if self.disagreement is not None:
            parts.append(self.disagreement.scale(self.disagreement.measure(outputs)))
        pictures = self.layers is not None and self.layers.pictures
        if self.energy is not None and passed is not None:
            parts.append(self.energy.scale(self.energy.measure(torch.stack(passed.outputs))))
        each = [near(rows) for near, rows in self._compared(inputs, passed)]
        parts += [each.pop(0)] if self.inputs is not None else []
        parts += [each.pop()] if pictures else []
        parts += [torch.stack(each).mean(0)] if each else []
        stacked = torch.stack(parts)
        whole = stacked.logsumexp(0) - math.log(len(parts)) if pictures else stacked.mean(0)
        return whole.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def undecided(self, inputs: Inputs, passed: Passed | None) -> Tensor:
        """Rows whose score hangs on rounding, (B,)."""
        return torch.stack([near.undecided(rows) for near, rows in self._compared(inputs, passed)]).any(0)

    def _compared(self, inputs: Inputs, passed: Passed | None) -> list[tuple[Near, Tensor]]:
        """Where rows are compared, and the rows there: inputs, then layers."""
        found: list[tuple[Any, Tensor]] = []
        if self.inputs is not None:
            vectors = self.vectors(inputs)
            assert vectors is not None
            found.append((self.inputs, vectors))
        if self.layers is not None and passed is not None:
            found += zip(self.hidden, self.layers(passed), strict=True)
        return found


class Measured(nn.Module):
    """A score of the outputs alone, (B,)."""

    def __init__(self, measure: Callable[[Inputs, Tensor], Tensor]) -> None:
        super().__init__()
        self.measure = measure

    def forward(self, inputs: Inputs, outputs: Tensor, passed: Passed | None) -> Tensor:
        """Inputs of B rows and unclipped outputs (S, B, ...) -> (B,)."""
        return self.measure(inputs, outputs)


class Answering(nn.Module):
    """Tensors of the inputs, in order -> {"mean", "std" or "probs", "score", "ood"}.

    `judging` None: the score reads the draws that predict. `passes` None: nobody asks the plain members. What is no tensor in the
    inputs stays what it is in `example`.
    """

    def __init__(
        self,
        example: Inputs,
        passes: Passes | None,
        predicting: Draws | Plain,
        predict: Callable[[Tensor], Prediction],
        judging: Draws | None,
        judge: Joined | Measured | Distilled,
        threshold: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        leaves, self.form = tree_flatten(example)
        self.leaves: list[Any] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        self.passes, self.predicting, self.predict, self.judging, self.judge = passes, predicting, predict, judging, judge
        self.threshold, self.dtype = threshold, dtype

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """B rows of every output by name."""
        given = iter(tensors)
        leaves = [next(given) if tensor else leaf for leaf, tensor in zip(self.leaves, self.tensors, strict=True)]
        inputs = tree_unflatten(leaves, self.form)
        passed = None if self.passes is None else self.passes(inputs)
        clipped = self.predicting(inputs, passed)
        prediction = self.predict(clipped)
        outputs = clipped if self.judging is None else self.judging(inputs, passed)
        score = self.judge(inputs, outputs, passed).to(self.dtype)
        names = ("mean", "std", "probs")
        told = {name: value for name in names if (value := getattr(prediction, name)) is not None}
        return {**told, "score": score, "ood": score > self.threshold}

    def undecided(self, inputs: Inputs) -> Tensor | None:
        """Rows whose score hangs on rounding, (B,), if there may be any."""
        if not isinstance(self.judge, Joined):
            return None
        return self.judge.undecided(inputs, None if self.passes is None else self.passes(inputs))
