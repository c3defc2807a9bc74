"""Deep nearest neighbours (Sun et al., 2022): the distance to the k-th nearest training row, in features of length one."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap import checks
from offmap.detectors.posthoc import FitData, register
from offmap.scores.distance import find_nearest

logger = logging.getLogger("offmap")


def knn(features: Tensor, rows: Tensor, k: int = 50) -> Tensor:
    r"""|h/|h| − (k-th nearest of the rows)|, rows of length one: (B, D), (n, D) -> (B,).

    >>> knn(torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), 2)
    tensor([1.4142])
    """
    distances, _ = find_nearest(rows, F.normalize(features, dim=1), k=k)
    return distances.amax(1).to(features.dtype)


@register("knn", score=knn)
def fit(data: FitData, k: int = 50) -> dict[str, object]:
    """Keep the training features, at length one."""
    checks.integer("k", k, 1, len(data.features) - 1)  # fewer than the training rows, of which an input may be one
    fewest = int(torch.bincount(data.labels, minlength=data.classes).min())
    if k > fewest:
        logger.warning(
            "The k-th nearest row with k = %d is of another class for some inputs, however in-distribution: the smallest class "
            "has %d training rows. Pass more of them, or a smaller `k=`.", k, fewest,
        )  # fmt: skip
    return {"rows": F.normalize(data.features, dim=1), "k": k}
