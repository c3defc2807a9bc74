"""ODIN (Liang et al., 2018): a small step of the input towards more confidence helps in-distribution inputs more than OOD ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offmap._types import Inputs
from offmap.data.inputs import take_rows
from offmap.detectors.known import FitData, number
from offmap.detectors.msp import msp
from offmap.detectors.penultimate import Classifier, Seen
from offmap.errors import DataError


def odin(classifier: Classifier, x: Inputs, temperature: float = 1000.0, step: float = 0.0014) -> Tensor:
    r"""1 − max_c softmax(f(x′)/T)_c at x′ = x + step · sign ∇_x max_c log softmax(f(x)/T)_c: (B, ...) -> (B,)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError(
            f"Expected inputs that are one tensor of floating-point numbers for 'odin', which moves them, but got "
            f"{x.dtype if isinstance(x, Tensor) else type(x).__name__}. Take another method."
        )
    parts: list[Tensor] = []
    for rows in classifier.blocks(x):
        with torch.inference_mode(False), torch.enable_grad():
            near = take_rows(x, rows).clone().requires_grad_(True)
            best = (classifier.logits(near) / temperature).log_softmax(1).amax(1)
            (slope,) = torch.autograd.grad(best.sum(), near)
        with torch.no_grad():
            parts.append(msp(classifier.logits(near.detach() + step * slope.sign()), temperature))
    return torch.cat(parts)


@dataclass(frozen=True)
class ODIN:
    """The rule; it needs the net itself, and three passes."""

    classifier: Classifier
    temperature: float
    step: float

    def __call__(self, seen: Seen) -> Tensor:
        """Scores, (B,)."""
        return odin(self.classifier, seen.inputs, self.temperature, self.step)


def fit(known: FitData, *, temperature: float = 1000.0, noise: float = 0.0014) -> ODIN:
    """The step is `noise` times the range of the training inputs: the authors' number for pixels from 0 to 1."""
    number("temperature", temperature, 1e-6, 1e6)
    number("noise", noise, 0, 1)
    return ODIN(known.classifier, temperature, noise * known.span)
