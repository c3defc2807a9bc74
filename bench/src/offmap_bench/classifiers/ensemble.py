"""A deep ensemble (Lakshminarayanan et al., 2017): nets from different starts, and the entropy of their mean prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offmap.data import Place
from offmap.likelihoods import Prediction
from offmap.likelihoods.classification import predictive_entropy
from offmap_bench.classifiers.training import Learned


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Members that were trained alone."""

    members: Sequence[Learned]

    @property
    def place(self) -> Place:
        """Where images belong."""
        return self.members[0].place

    def score(self, x: Tensor) -> Tensor:
        """The entropy of the mean prediction, (B,)."""
        return predictive_entropy(self._probs(x))

    def predict(self, x: Tensor) -> Prediction:
        """The mean prediction."""
        probs = self._probs(x).mean(0)
        return Prediction(probs=probs, label=probs.argmax(1))

    def _probs(self, x: Tensor) -> Tensor:
        parts = [member.predict(x).probs for member in self.members]
        return torch.stack([probs for probs in parts if probs is not None])
