"""The maximum logit (Hendrycks et al., 2022): unlike a softmax, logits still tell how much evidence there is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offmap.detectors.known import FitData
from offmap.detectors.penultimate import Seen


def mls(logits: Tensor) -> Tensor:
    """−max_c z_c: (B, C) -> (B,).

    >>> import torch
    >>> mls(torch.tensor([[1.0, 3.0]]))
    tensor([-3.])
    """
    return -logits.amax(1)


@dataclass(frozen=True)
class MLS:
    """The rule."""

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return mls(seen.logits)


def fit(known: FitData) -> MLS:
    """Nothing to learn."""
    return MLS()
