"""ODIN (Liang et al., 2018): a small step of the input towards more confidence helps in-distribution inputs more than OOD."""

import torch
from torch import Tensor

from offmap._types import Inputs
from offmap.detectors.classifier import Classifier
from offmap.detectors.msp import msp
from offmap.detectors.posthoc import FitData, register
from offmap.errors import DataError


def odin(classifier: Classifier, inputs: Inputs, temperature: float = 1000.0, step: float = 0.0014) -> Tensor:
    r"""1 − max_c softmax(f(x′)/T)_c at x′ = x + step · sign ∇_x max_c log softmax(f(x)/T)_c: (B, ...) -> (B,).

    It takes three passes of the model beside the one that gives the prediction.
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise DataError(
            f"Expected inputs that are one tensor of floating-point numbers for 'odin', which moves them, but got "
            f"{inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__}. Take another method."
        )
    parts: list[Tensor] = []
    for batch in classifier.batches(inputs):
        with torch.inference_mode(False), torch.enable_grad():
            x = batch.clone().requires_grad_(True)
            best = (classifier.logits(x) / temperature).log_softmax(1).amax(1)
            (slope,) = torch.autograd.grad(best.sum(), x)
        with torch.no_grad():
            parts.append(msp(classifier.logits(x.detach() + step * slope.sign()), temperature))
    return torch.cat(parts)


@register("odin", score=odin, temperature=(1e-6, 1e6), noise=(0, 1))
def fit(data: FitData, temperature: float = 1000.0, noise: float = 0.0014) -> dict[str, object]:
    """The step is `noise` times the range of the training inputs: the authors' number for pixels from 0 to 1."""
    return {"temperature": temperature, "step": noise * data.image_spec.span}
