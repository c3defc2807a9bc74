"""The maximum logit (Hendrycks et al., 2022): unlike a softmax, logits still tell how much evidence there is."""

from torch import Tensor

from offmap.detectors.posthoc import register


@register("mls")
def mls(logits: Tensor) -> Tensor:
    """−max_c z_c: (B, C) -> (B,).

    >>> import torch
    >>> mls(torch.tensor([[1.0, 3.0]]))
    tensor([-3.])
    """
    return -logits.amax(1)
