"""Deep nearest neighbours (Sun et al., 2022): the distance to the k-th nearest training row, in features of length one."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap.detectors.base import FitData, register
from offmap.errors import ConfigError
from offmap.scores.distance import nearest

logger = logging.getLogger("offmap")


def knn(features: Tensor, rows: Tensor, k: int = 50) -> Tensor:
    r"""|h/|h| − (k-th nearest of the rows)|, rows of length one: (B, D), (n, D) -> (B,).

    >>> knn(torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), 2)
    tensor([1.4142])
    """
    distances, _ = nearest(rows, F.normalize(features, dim=1), k=k)
    return distances.amax(1).to(features.dtype)


@register("knn", score=knn)
def fit(data: FitData, k: int = 50) -> dict[str, Any]:
    """Keep the training features, at length one."""
    rows = len(data.features)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k < rows:
        raise ConfigError(
            f"Expected `k` to be a whole number from 1 to {rows - 1}, one less than the training rows, but got {k!r}."
        )
    fewest = int(torch.bincount(data.labels, minlength=data.classes).min())
    if k > fewest:
        logger.warning(
            "The k-th nearest row with k = %d is of another class for some inputs, however in-distribution: the smallest class has %d "
            "training rows. Pass more of them, or a smaller `k=`.", k, fewest,
        )  # fmt: skip
    return {"rows": F.normalize(data.features, dim=1), "k": k}
