"""One module that answers as a guard does: prediction from clipped draws, score from unclipped ones, verdict by a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offmap._types import Inputs, ScoreFn
from offmap.deploy.draws import Draws
from offmap.deploy.near import Layers, Near, Scaled
from offmap.likelihoods import Prediction


class Joined(nn.Module):
    """The default score, and "distance": the mean of disagreement (if there is one), inputs and layers, (B,)."""

    def __init__(
        self,
        uncertainty: ScoreFn | None,
        scale: Scaled,
        vectors: Callable[[Inputs], Tensor | None],
        inputs: Near | None,
        layers: Layers | None,
        hidden: list[Near],
    ) -> None:
        super().__init__()
        self.uncertainty, self.vectors = uncertainty, vectors
        self.scale, self.inputs, self.layers, self.hidden = scale, inputs, layers, nn.ModuleList(hidden)

    def forward(self, inputs: Inputs, outputs: Tensor) -> Tensor:
        """Inputs of B rows and unclipped outputs (S, B, ...) -> (B,)."""
        parts: list[Tensor] = []
        if self.uncertainty is not None:
            parts.append(self.scale(self.uncertainty(outputs)))
        if self.inputs is not None:
            vectors = self.vectors(inputs)
            assert vectors is not None
            parts.append(self.inputs(vectors))
        if self.layers is not None:
            met = self.layers(inputs)
            each = [near(met[name]) for near, name in zip(self.hidden, self.layers.names, strict=True)]
            parts.append(torch.stack(each).mean(0))
        return torch.stack(parts).mean(0).nan_to_num(nan=torch.inf, posinf=torch.inf)

    def undecided(self, inputs: Inputs) -> Tensor | None:
        """Rows whose score hangs on rounding, (B,), if there may be any."""
        found = [self.inputs.undecided(vectors)] if self.inputs and (vectors := self.vectors(inputs)) is not None else []
        met = self.layers(inputs) if self.layers else {}
        found += [near.undecided(each) for near, each in zip(self.hidden, met.values(), strict=True)]
        return torch.stack(found).any(0) if found else None


class Measured(nn.Module):
    """A score of the outputs alone, (B,)."""

    def __init__(self, measure: Callable[[Inputs, Tensor], Tensor]) -> None:
        super().__init__()
        self.measure = measure

    def forward(self, inputs: Inputs, outputs: Tensor) -> Tensor:
        """Inputs of B rows and unclipped outputs (S, B, ...) -> (B,)."""
        return self.measure(inputs, outputs)


class Answering(nn.Module):
    """Tensors of the inputs, in order -> {"mean", "std" or "probs", "score", "ood"}.

    `judging` None: the score reads the draws that predict. What is no tensor in the inputs stays
    what it is in `example`.
    """

    def __init__(
        self,
        example: Inputs,
        predicting: Draws,
        predict: Callable[[Tensor], Prediction],
        judging: Draws | None,
        judge: nn.Module,
        threshold: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        leaves, self.form = tree_flatten(example)
        self.leaves: list[Any] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        self.predicting, self.predict, self.judging, self.judge = predicting, predict, judging, judge
        self.threshold, self.dtype = threshold, dtype

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """B rows of every output by name."""
        given = iter(tensors)
        leaves = [next(given) if tensor else leaf for leaf, tensor in zip(self.leaves, self.tensors, strict=True)]
        inputs = tree_unflatten(leaves, self.form)
        clipped = self.predicting(inputs)
        prediction = self.predict(clipped)
        outputs = clipped if self.judging is None else self.judging(inputs)
        score = self.judge(inputs, outputs).to(self.dtype)
        names = ("mean", "std", "probs")
        told = {name: value for name in names if (value := getattr(prediction, name)) is not None}
        return {**told, "score": score, "ood": score > self.threshold}
