"""The rule: which likelihood fits a model's outputs and the targets, and whether targets fit it at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offmap._types import IGNORED
from offmap.errors import ConfigError, DataError, ShapeError, nearest
from offmap.likelihoods.classes import Bernoulli, Categorical
from offmap.likelihoods.gaussian import Gaussian
from offmap.likelihoods.protocol import Likelihood


def infer(output: Tensor, y: Tensor, name: str | None = None) -> Likelihood:
    """The likelihood for one batch of model outputs (B, ...) and targets: by name, or by the rule of the types and shapes.

    Float targets are regressed. Whole ones are classes, or yes and no where the class axis has size 1. The class axis is the one
    that the targets lack: 1, or the last; where both would do, as for (B, 5, 5) and (B, 5), it is 1. Pass
    `Categorical(axis=-1)` to say otherwise, and "bernoulli" for targets of the outputs' own shape, such as several labels.

    >>> infer(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))
    Categorical(axis=1)
    >>> infer(torch.zeros(4, 7, 3), torch.zeros(4, 7, dtype=torch.int64))
    Categorical(axis=-1)
    """
    if name is not None and name not in RULES:
        raise ConfigError(f"Expected `likelihood` to be {nearest(name, RULES)} or an object with nll, predictive and score, "
                          f"but got {name!r}.")  # fmt: skip
    if name is None:
        single = output.ndim == 1 or (output.ndim == 2 and output.shape[1] == 1)
        # targets of the outputs' own shape may be one-hot: several labels are yes and no only where the user says so
        single = single or (output.ndim > y.ndim and _bernoulli(output, y) is not None)
        name = "gaussian" if y.is_floating_point() else "bernoulli" if single else "categorical"
    law = RULES[name](output, y) if y.shape[0] == output.shape[0] else None
    if law is None:
        raise _misfit(name, output, y)
    return law


def _gaussian(output: Tensor, y: Tensor) -> Gaussian | None:
    columns = output.unsqueeze(-1) if output.ndim == 1 else output
    for axis in (1, -1):
        width, places = columns.shape[axis], _without(columns, axis)
        for flat in (True, False):
            targets = 1 if flat else y.shape[axis] if y.ndim > 1 else 0
            if (y.shape if flat else _without(y, axis)) == places and targets and width in (targets, 2 * targets):
                return Gaussian(targets, flat, None if width == 2 * targets else output.new_ones(targets), axis=axis)
    return None


def _categorical(output: Tensor, y: Tensor) -> Categorical | None:
    if y.is_floating_point() or output.ndim < 2:
        return None
    return next((Categorical(axis) for axis in (1, -1) if y.shape == _without(output, axis)), None)


def _bernoulli(output: Tensor, y: Tensor) -> Bernoulli | None:
    if max(output.ndim, y.ndim) <= 2 and output.numel() == output.shape[0] and y.numel() == y.shape[0]:
        return Bernoulli()
    forms = [output.shape, *(_without(output, axis) for axis in (1, -1) if output.ndim > 2 and output.shape[axis] == 1)]
    return Bernoulli(y.ndim - 1) if y.ndim > 1 and y.shape in forms else None


def _without(tensor: Tensor, axis: int) -> torch.Size:
    """The shape of a batch without one of its axes."""
    axis %= max(1, tensor.ndim)
    return torch.Size((*tensor.shape[:axis], *tensor.shape[axis + 1 :]))


RULES: dict[str, Callable[[Tensor, Tensor], Likelihood | None]] = {
    "gaussian": _gaussian, "categorical": _categorical, "bernoulli": _bernoulli,
}  # fmt: skip
NAMES = tuple(RULES)

_FORMS = {
    "gaussian": "targets (B,) or (B, K) with outputs (B, K) of means or (B, 2K) of means and log-variances, positions behind",
    "categorical": "integer targets (B, ...) with outputs (B, C, ...) of logits, or (B, ..., C)",
    "bernoulli": "targets (B,) or (B, 1) of 0 and 1 with outputs (B,) or (B, 1) of logits, or both (B, *positions)",
}


def _misfit(name: str, output: Tensor, y: Tensor) -> ShapeError:
    return ShapeError(
        f"Expected {_FORMS[name]} for the {name} likelihood, but got targets {tuple(y.shape)} ({y.dtype}) and outputs "
        f"{tuple(output.shape)}. Reshape the targets, pass `output_fn=`, or name another `likelihood=` of {list(NAMES)}."
    )


def check_targets(likelihood: Likelihood, output: Tensor, y: Tensor, where: str) -> None:
    """Raise unless targets (n, ...) fit a model's outputs (b, ...): a ShapeError for their form, a DataError for their classes.

    How many positions there are may vary from batch to batch, so it is not compared here.
    """
    for name, (law, fits) in FITS.items():
        if isinstance(likelihood, law) and not fits(likelihood, output, y):
            raise _misfit(name, output, y)
    if isinstance(likelihood, Categorical | Bernoulli):
        _check_classes(y, output.shape[likelihood.axis] if isinstance(likelihood, Categorical) else 2, where)


def _fits_gaussian(law: Gaussian, output: Tensor, y: Tensor) -> bool:
    if output.ndim <= 2:
        return y.ndim <= 2 and y[0].numel() == law.targets and output[0].numel() == law.width
    form = y.ndim == output.ndim - 1 if law.flat else y.ndim == output.ndim and y.shape[law.axis] == law.targets
    return form and output.shape[law.axis] == law.width


def _fits_categorical(law: Categorical, output: Tensor, y: Tensor) -> bool:
    return not y.is_floating_point() and output.ndim >= 2 and y.ndim == output.ndim - 1


def _fits_bernoulli(law: Bernoulli, output: Tensor, y: Tensor) -> bool:
    if law.positions == 0:
        return max(output.ndim, y.ndim) <= 2 and output.numel() == output.shape[0] and y.numel() == y.shape[0]
    extra = output.ndim - y.ndim
    return y.ndim == law.positions + 1 and (extra == 0 or (extra == 1 and 1 in (output.shape[1], output.shape[-1])))


FITS: dict[str, tuple[type, Callable[[Any, Tensor, Tensor], bool]]] = {
    "gaussian": (Gaussian, _fits_gaussian),
    "categorical": (Categorical, _fits_categorical),
    "bernoulli": (Bernoulli, _fits_bernoulli),
}


def _check_classes(y: Tensor, classes: int, where: str) -> None:
    """Raise a DataError unless the targets that count are classes."""
    y = y[y != IGNORED]
    if y.numel() == 0:  # one batch of several, perhaps
        return
    low, high = float(y.min()), float(y.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"Expected targets from 0 to {classes - 1} for {classes} classes, but `{where}` holds values from {low:g} to "
            f"{high:g}. Relabel the targets, or use a model with more outputs."
        )
    if bool((y != y.long()).any()):
        raise DataError(f"Expected whole numbers as classes, but `{where}` holds fractions. Round them, or fit a regression.")


def check_counted(y: Tensor, where: str) -> None:
    """Raise a DataError where every class target is −100."""
    if bool((y == IGNORED).all()):
        raise DataError(f"Expected at least one target that counts, but all of `{where}` are {IGNORED}. Label some of them.")


def resolve(likelihood: str | Likelihood | None, outputs: Tensor, y: Tensor) -> Likelihood:
    """The likelihood for plain outputs (M, n, ...) and targets of validation data; a Gaussian learns its noise from them."""
    if likelihood is not None and not isinstance(likelihood, str):
        if not isinstance(likelihood, Likelihood) or isinstance(likelihood, type):
            raise ConfigError(f"Expected `likelihood` to be one of {list(NAMES)} or an object with nll, predictive and score, "
                              f"but got {type(likelihood).__name__}.")  # fmt: skip
        _check_own(likelihood, outputs, y)
        return likelihood
    law = infer(outputs[0], y, likelihood)
    check_targets(law, outputs[0], y, "valid")
    if not isinstance(law, Gaussian):
        check_counted(y, "valid")
        return law
    columns = law.columns(y).to(outputs)
    residuals = columns - law.moments(outputs)[0].mean(0).flatten(0, -2)
    spread = columns.var(0, correction=0)
    # an interpolating model leaves no residual; a variance of zero would make every NLL infinite
    eps = 1e-6 * torch.where(spread > 0, spread, torch.ones_like(spread))
    noise = None if law.noise is None else torch.maximum(residuals.square().mean(0), eps)
    return replace(law, noise=noise, units=torch.where(spread > 0, spread, torch.ones_like(spread)))


def _check_own(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> None:
    """Ask a user's object once for everything that is needed of it later."""
    check_targets(likelihood, outputs[0], y, "valid")
    each = likelihood.nll(outputs, y)
    if each.shape != outputs.shape[:2]:
        raise ShapeError(
            f"Expected `likelihood.nll` to give one number per draw and example, {tuple(outputs.shape[:2])}, but got "
            f"{tuple(each.shape)}. Sum it over all other axes."
        )
    said = likelihood.predictive(outputs.repeat_interleave(2, 0))  # a spread over one draw alone may be undefined
    if (said.mean is None or said.std is None) and (said.probs is None or said.label is None):
        raise ConfigError(
            "Expected `likelihood.predictive` to give a mean and a std, or probs and a label, but it gives neither."
        )
