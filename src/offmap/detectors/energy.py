"""The energy of the logits (Liu et al., 2020): a smooth maximum, which falls where all evidence is weak."""

import torch
from torch import Tensor

from offmap.detectors.posthoc import register


@register("energy", temperature=(1e-6, 1e6))
def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""−T log Σ_c exp(z_c / T): (B, C) -> (B,).

    >>> energy(torch.tensor([[0.0, 0.0]]))
    tensor([-0.6931])
    """
    return -temperature * torch.logsumexp(logits / temperature, 1)
