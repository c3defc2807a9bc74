"""Generalised entropy (Liu et al., 2023): a power of each probability, so that small ones count almost as much as large ones."""

import torch
from torch import Tensor

from offmap.detectors.msp import odds
from offmap.detectors.posthoc import register


@register("gen", gamma=(1e-6, 1), top=(1, 1e9))
def gen(logits: Tensor, gamma: float = 0.1, top: int = 100) -> Tensor:
    r"""Σ p_c^γ (1 − p_c)^γ over the `top` largest p = softmax(z): (B, C) -> (B,). Defaults are the authors'.

    1 − p_c is the sum of the others: that of the largest p would else be rounded to 0.

    >>> gen(torch.tensor([[0.0, 0.0]]), gamma=0.5)
    tensor([1.])
    """
    powers, others = odds(logits.double())
    total = 1 + others.unsqueeze(1)
    rest = torch.cat([others.unsqueeze(1), total - powers[:, 1:]], 1)
    return (powers * rest / total.square())[:, :top].pow(gamma).sum(1).to(logits.dtype)
