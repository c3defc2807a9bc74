"""ViM (Wang et al., 2022): the part of the features outside the space that training data span, as one more, virtual logit."""

import torch
from torch import Tensor

from offmap import checks
from offmap.detectors.energy import energy
from offmap.detectors.posthoc import FitData, register


def vim(features: Tensor, logits: Tensor, origin: Tensor, rest: Tensor, alpha: float) -> Tensor:
    r"""α |R (h − o)| − log Σ_c exp z_c: (B, D), (B, C), o (D,), R (r, D) -> (B,).

    >>> vim(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1), torch.zeros(2), torch.tensor([[0.0, 1.0]]), 0.5)
    tensor([2.])
    """
    residual = ((features.double() - origin) @ rest.double().mT).norm(dim=1)
    return (alpha * residual).to(logits.dtype) + energy(logits)


@register("vim", score=vim, needs="head")
def fit(data: FitData, dimensions: int | None = None) -> dict[str, object]:
    """The origin is where all logits vanish, o = −W⁺ b; R are the directions of least second moment around it. α makes the mean
    of the virtual logit that of the largest one, on the training data.
    """
    width = data.features.shape[1]
    if dimensions is None:  # the authors' numbers; for narrower features, half of them
        dimensions = 1000 if width >= 2048 else 512 if width >= 768 else width // 2
    dimensions = checks.integer("dimensions", dimensions, 0, width - 1)
    origin = -torch.linalg.pinv(data.head.weight.double()) @ data.head.bias.double()
    z = data.features.double() - origin
    _, vectors = torch.linalg.eigh(z.mT @ z / len(z))  # in rising order
    rest = vectors[:, : width - dimensions].mT
    residual = (z @ rest.mT).norm(dim=1).mean()
    alpha = float(data.logits.double().amax(1).mean() / residual.clamp_min(torch.finfo(torch.float64).tiny))
    return {"origin": origin, "rest": rest, "alpha": alpha}
