"""Which likelihood fits a model's outputs and the targets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offmap._types import IGNORED
from offmap.errors import ConfigError, DataError, ShapeError, nearest
from offmap.likelihoods.bernoulli import Bernoulli
from offmap.likelihoods.categorical import Categorical
from offmap.likelihoods.gaussian import Gaussian
from offmap.likelihoods.protocol import Likelihood, misfit

LIKELIHOODS: dict[str, type[Likelihood]] = {"gaussian": Gaussian, "categorical": Categorical, "bernoulli": Bernoulli}
"""Likelihoods by name, for `fit(likelihood=)` and for guard files. Add your own: `LIKELIHOODS["poisson"] = Poisson`."""


def infer(output: Tensor, y: Tensor, name: str | None = None) -> Likelihood:
    """Return the likelihood for one batch: by name, or by the rule of types and shapes.

    Float targets are regressed. Whole ones are classes, or yes and no where the class axis has size 1. The class axis is the one
    that the targets lack: 1, or the last; where both would do, as for (B, 5, 5) and (B, 5), it is 1. Pass
    `Categorical(axis=-1)` to say otherwise, and "bernoulli" for targets of the outputs' own shape, such as several labels.

    Args:
        output: Outputs of the model, (B, ...).
        y: Targets of the same rows.
        name: A key of `LIKELIHOODS`, or None for the rule.

    >>> import torch
    >>> infer(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))
    Categorical(axis=1)
    >>> infer(torch.zeros(4, 7, 3), torch.zeros(4, 7, dtype=torch.int64))
    Categorical(axis=-1)
    """
    if name is not None and name not in LIKELIHOODS:
        raise ConfigError(f"Expected `likelihood` to be {nearest(name, LIKELIHOODS)} or an object of a subclass of "
                          f"`offmap.Likelihood`, but got {name!r}.")  # fmt: skip
    if name is None:
        single = output.ndim == 1 or (output.ndim == 2 and output.shape[1] == 1)
        # targets of the outputs' own shape may be one-hot: several labels are yes and no only where the user says so
        single = single or (output.ndim > y.ndim and Bernoulli.infer(output, y) is not None)
        name = "gaussian" if y.is_floating_point() else "bernoulli" if single else "categorical"
    likelihood = LIKELIHOODS[name].infer(output, y) if y.shape[0] == output.shape[0] else None
    if likelihood is None:
        raise misfit(LIKELIHOODS[name], output, y)
    return likelihood


def resolve(likelihood: str | Likelihood | None, outputs: Tensor, y: Tensor) -> Likelihood:
    """Return the likelihood that `fit` uses, its noise estimated on validation data unless it is the user's own object.

    Args:
        likelihood: A name, an object, or None for the rule.
        outputs: Outputs of the base models on validation data, (M, n, ...).
        y: Validation targets, (n, ...).
    """
    if likelihood is not None and not isinstance(likelihood, str):
        if not isinstance(likelihood, Likelihood):
            got = f"the class {likelihood.__name__}" if isinstance(likelihood, type) else type(likelihood).__name__
            raise ConfigError(f"Expected `likelihood` to be one of {list(LIKELIHOODS)} or an object of a subclass of "
                              f"`offmap.Likelihood`, but got {got}.")  # fmt: skip
        check_likelihood(likelihood, outputs, y)
        return likelihood
    chosen = infer(outputs[0], y, likelihood)
    chosen.check_targets(outputs[0], y, "valid")
    check_counted(chosen, y, "valid")
    return chosen.fit_noise(outputs, y)


def check_likelihood(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> None:
    """Raise unless a user's likelihood answers with the right shapes."""
    likelihood.check_targets(outputs[0], y, "valid")
    losses = likelihood.nll(outputs, y)
    if losses.shape != outputs.shape[:2]:
        raise ShapeError(
            f"Expected `likelihood.nll` to give one number per draw and example, {tuple(outputs.shape[:2])}, but got "
            f"{tuple(losses.shape)}. Sum it over all other axes."
        )
    prediction: Any = likelihood.predict(outputs.repeat_interleave(2, 0))  # a spread over one draw alone may be undefined
    if (prediction.mean is None or prediction.std is None) and (prediction.probs is None or prediction.label is None):
        raise ConfigError("Expected `likelihood.predict` to give a mean and a std, or probs and a label, but it gives neither.")


def check_counted(likelihood: Likelihood, y: Tensor, name: str) -> None:
    """Raise a DataError where every class target is −100."""
    if likelihood.classifies and bool((y == IGNORED).all()):
        raise DataError(f"Expected at least one target that counts, but all of `{name}` are {IGNORED}. Label some of them.")
