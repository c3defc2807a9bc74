"""GradNorm (Huang et al., 2021): how far a uniform prediction would move the last matrix; in-distribution inputs move it more."""

from torch import Tensor

from offmap.detectors.posthoc import register


@register("gradnorm")
def gradnorm(features: Tensor, logits: Tensor) -> Tensor:
    r"""−|∂/∂W KL(uniform ‖ softmax(h Wᵀ + b))|₁ = −|h|₁ · |softmax(z) − 1/C|₁: (B, D), (B, C) -> (B,).

    The gradient is an outer product, so its norm is the product of the norms of its two factors.

    >>> import torch
    >>> gradnorm(torch.tensor([[1.0, -2.0]]), torch.tensor([[50.0, 0.0]]))
    tensor([-3.])
    """
    gap = logits.softmax(1) - 1 / logits.shape[1]
    return -features.abs().sum(1) * gap.abs().sum(1)
