"""Stacked outputs become uncertainty per example: how wide, how undecided, how much the draws disagree.

Every function takes a stack with the draws first and is pure: no state, no random numbers, no look at the values, so
that it also runs under `torch.func.vmap` and `torch.export`. NaN in gives NaN out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offmap import checks
from offmap.errors import DataError, ShapeError


def mixture_variance(means: Tensor, variances: Tensor) -> Tensor:
    r"""Variance of an equal mixture of P Gaussians: what the draws call noise, plus how far they lie apart.

    .. math:: u = \frac1P \sum_p \sigma_p^2 + \frac1P \sum_p (\mu_p - \bar\mu)^2

    Shapes: `means` (P, B, K), `variances` (P, B, K) -> (B, K). Two passes: a spread of 0.25 at a mean of 1e6 survives
    in float32, where the mean of squares minus the square of the mean is noise.

    >>> mixture_variance(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[0.5]], [[1.5]]]))
    tensor([[2.]])
    """
    _require_real("means", means)
    _require_real("variances", variances)
    if means.shape != variances.shape:
        raise ShapeError(
            f"Expected `means` and `variances` of one shape, but got {tuple(means.shape)} and {tuple(variances.shape)};"
            " for a noise that all draws share, pass `variance.expand_as(means)`."
        )
    if means.device != variances.device:
        raise DataError(
            f"Expected `means` and `variances` on one device, but got {means.device} and {variances.device}; pass "
            "`variances.to(means.device)`."
        )
    return epistemic_variance(means) + variances.mean(0)


def epistemic_variance(means: Tensor) -> Tensor:
    r"""Variance of the means over the draws (divided by P, not P − 1): the part that more data would remove.

    .. math:: u = \frac1P \sum_p (\mu_p - \bar\mu)^2

    Shapes: `means` (P, B, K) -> (B, K). Means that overflowed give an infinite variance, not NaN: no input can
    be further off.

    >>> epistemic_variance(torch.tensor([[[1.0]], [[3.0]]]))
    tensor([[1.]])
    """
    _require_draws("means", means, "(P, B, K)", least=2)
    # relative to one draw the numbers are small, so their mean keeps the bits that the mean of raw values loses
    shifted = means - means[:1]
    variance = (shifted - shifted.mean(0)).square().mean(0)
    overflowed = variance.isnan() & ~means.isnan().any(0)  # inf − inf
    return variance.masked_fill(overflowed, torch.inf)


def predictive_entropy(probs: Tensor) -> Tensor:
    r"""Entropy of the mean prediction, in nats: all the doubt there is, whatever its source.

    .. math:: u = -\sum_c \bar p_c \log \bar p_c, \qquad \bar p = \frac1P \sum_p p_p, \qquad 0 \log 0 = 0

    Shapes: `probs` (P, B, C, ...) -> (B, ...).

    >>> predictive_entropy(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931])
    """
    _require_draws("probs", probs, "(P, B, C, ...)", least=3)
    return torch.special.entr(probs.mean(0)).sum(1)


def expected_entropy(probs: Tensor) -> Tensor:
    r"""Mean over the draws of the entropy of each, in nats: the doubt that every draw shares.

    .. math:: u = -\frac1P \sum_p \sum_c p_{pc} \log p_{pc}

    Shapes: `probs` (P, B, C, ...) -> (B, ...).

    >>> expected_entropy(torch.tensor([[[0.5, 0.5]], [[0.0, 1.0]]]))
    tensor([0.3466])
    """
    _require_draws("probs", probs, "(P, B, C, ...)", least=3)
    return torch.special.entr(probs).sum(2).mean(0)


def mutual_information(probs: Tensor) -> Tensor:
    r"""Entropy of the mean prediction minus the mean entropy, in nats: the doubt that comes from disagreement alone.

    .. math:: u = H(\bar p) - \frac1P \sum_p H(p_p)
                = \frac1P \sum_p \sum_c p_{pc} \log\frac{p_{pc}}{\bar p_c} - p_{pc} + \bar p_c

    Shapes: `probs` (P, B, C, ...) -> (B, ...), never below zero. The right-hand side is what is computed: its terms are
    small when the draws nearly agree, whereas two entropies would drown a difference below 1e-7 in float32.

    >>> mutual_information(torch.tensor([[[0.5, 0.5]], [[0.0, 1.0]]]))
    tensor([0.2158])
    """
    _require_draws("probs", probs, "(P, B, C, ...)", least=3)
    mean = probs.mean(0)
    gap = probs - mean
    safe = torch.where(mean > 0, mean, 1)  # a class that no draw believes in adds nothing
    ratio = gap / safe  # p / p̄ − 1
    # far below the mean, p / p̄ − 1 rounds to −1 and its log1p to −∞; the plain logarithm is exact there
    near = torch.special.xlog1py(probs, ratio.clamp_min(-0.5))
    terms = torch.where(ratio > -0.5, near, torch.special.xlogy(probs, probs / safe)) - gap
    return terms.sum(2).mean(0).clamp_min(0)


def _require_draws(name: str, stack: Tensor, expected: str, *, least: int) -> None:
    if type(stack) is not Tensor or stack.layout is not torch.strided or stack.is_complex():
        checks.tensor(name, stack, meta=True)
    if not stack.is_floating_point():
        raise DataError(f"Expected `{name}` in floating-point numbers, but got {stack.dtype}; pass `{name}.float()`.")
    if stack.ndim < least or stack.shape[0] == 0:
        raise ShapeError(
            f"Expected `{name}` of shape {expected} with at least one draw, but got {tuple(stack.shape)}; "
            f"for a single prediction, pass `{name}.unsqueeze(0)`."
        )


def _require_real(name: str, value: Tensor) -> None:
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_complex():
        checks.tensor(name, value, meta=True)
