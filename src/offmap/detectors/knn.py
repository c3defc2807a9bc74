"""Deep nearest neighbours (Sun et al., 2022): the distance to the k-th nearest training row, in features of length one."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from offmap import checks
from offmap.detectors.posthoc import FitData, register
from offmap.scores.distance import find_nearest

logger: logging.Logger = logging.getLogger("offmap")


def knn(features: Tensor, rows: Tensor, k: int) -> Tensor:
    r"""|h/|h| − (k-th nearest of the rows)|, rows of length one: (B, D), (n, D) -> (B,).

    >>> knn(torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), 2)
    tensor([1.4142])
    """
    distances, _ = find_nearest(rows, F.normalize(features, dim=1), k=k)
    return distances.amax(1).to(features.dtype)


@register("knn", score=knn)
def fit(data: FitData, k: int | None = None) -> dict[str, object]:
    """Keep the training features, at length one. `k` by default is 1 % of the rows of the smallest class, from 1 to 50: the
    paper's 50 on CIFAR-10 with its 5,000 rows per class.
    """
    counts = torch.bincount(data.labels)
    fewest = int(counts[counts > 0].min())
    if k is None:
        k = min(max(fewest // 100, 1), 50)
    checks.integer("k", k, 1, len(data.features) - 1)  # fewer than the training rows, of which an input may be one
    if k > fewest:
        logger.warning(
            "With k = %d, the k-th nearest row of some in-distribution inputs is of another class: the smallest class has %d "
            "training rows. Pass more of them, or leave `k` out.", k, fewest,
        )  # fmt: skip
    return {"rows": F.normalize(data.features, dim=1), "k": k}
