"""The maximum softmax probability (Hendrycks & Gimpel, 2017): a model that is unsure of its best class is off the map."""

from torch import Tensor

from offmap.detectors.posthoc import register


@register("msp", temperature=(1e-6, 1e6))
def msp(logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""1 − max_c softmax(z / T)_c: (B, C) -> (B,).

    It is s / (1 + s) with s = Σ exp((z_c − z_max) / T) over the other classes: digits remain however sure the model is.

    >>> import torch
    >>> msp(torch.tensor([[0.0, 0.0], [0.0, 1.0986]]))
    tensor([0.5000, 0.2500])
    """
    _, others = odds(logits.double() / temperature)
    return (others / (1 + others)).to(logits.dtype)


def odds(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(z_c − z_max) in falling order, and the sum of all but the first: (B, C) -> (B, C), (B,)."""
    ordered = logits.sort(1, descending=True).values
    powers = (ordered - ordered[:, :1]).exp()
    return powers, powers[:, 1:].sum(1)
