"""DICE (Sun & Li, 2022): only the weights that matter most for training data are kept in the head, then the energy."""

from torch import Tensor

from offmap.detectors.classifier import Head
from offmap.detectors.energy import energy
from offmap.detectors.posthoc import FitData, register
from offmap.detectors.react import percentile


def dice(features: Tensor, sparse_head: Head) -> Tensor:
    """Energy of h (M ⊙ W)ᵀ + b with a mask M of the weights: (B, D) -> (B,).

    >>> import torch
    >>> dice(torch.tensor([[1.0, 7.0]]), Head(torch.tensor([[1.0, 0.0]]), torch.zeros(1)))
    tensor([-1.])
    """
    return energy(sparse_head(features))


@register("dice", score=dice, needs="head", percent=(0, 100))
def fit(data: FitData, percent: float = 90.0) -> dict[str, object]:
    """Remove the `percent` per cent of the weights whose contribution W_cd · mean h_d to the mean logits is lowest."""
    head, contributions = data.head, data.head.weight * data.features.mean(0)
    return {"sparse_head": Head(head.weight * (contributions > percentile(contributions, percent)), head.bias)}
