"""The entropy of the model's prediction."""

from torch import Tensor

from offmap.detectors.posthoc import register


@register("entropy")
def entropy(logits: Tensor) -> Tensor:
    r"""−Σ_c p_c log p_c with p = softmax(z), in nats: (B, C) -> (B,).

    >>> import torch
    >>> entropy(torch.zeros(1, 10))
    tensor([2.3026])
    """
    logs = logits.double().log_softmax(1)
    return -(logs.exp() * logs).sum(1).to(logits.dtype)
