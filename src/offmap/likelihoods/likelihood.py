"""The contract of a likelihood, what all likelihoods do with targets and positions, and which of them fits a model's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from offmap._types import IGNORED
from offmap.errors import ConfigError, DataError, ShapeError, nearest
from offmap.random import generator


def describe_tensors(record: object) -> str:
    """Return the name of a record and its tensors: short ones with their numbers, others with their shapes."""
    tensors = {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}
    texts = {name: " ".join(str(t).split()) if t.numel() <= 12 else f"tensor of {tuple(t.shape)}" for name, t in tensors.items()}
    return f"{type(record).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"


@dataclass(frozen=True, repr=False)
class Prediction:
    """The prediction of the mixture over draws; fields that do not apply are None.

    Attributes:
        mean: Predicted mean of a regression, in the targets' units and shape: (B,), (B, K), or dense.
        std: Total standard deviation, in the shape of `mean`.
        probs: Class probabilities (B, C, *positions), wherever the model has its class axis.
        label: The most probable class (B, *positions).
    """

    mean: Tensor | None = None
    std: Tensor | None = None
    probs: Tensor | None = None
    label: Tensor | None = None

    def __repr__(self) -> str:
        return describe_tensors(self)


class Likelihood(ABC):
    """What a model's output says about a target. Subclass it to add one; `LIKELIHOODS` registers it by name.

    `outputs` are stacked, (P, B, ...), the draws first; the `output` of one model and targets `y` are (B, ...). Only the four
    abstract methods must be written. A registered dataclass of numbers and tensors can be saved and loaded without further code.
    """

    expects: ClassVar[str] = "targets and outputs of the shapes that it compares"
    """The shapes that fit, for error messages."""
    classifies: ClassVar[bool] = False
    """Whether targets are class numbers, of which −100 is ignored."""

    @abstractmethod
    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return −log p(y | output) in nats, averaged over positions: (P, B, ...), (B, ...) -> (P, B).

        Args:
            outputs: Stacked outputs, the draws first, (P, B, ...).
            y: Targets, (B, ...).
        """

    @abstractmethod
    def predict(self, outputs: Tensor) -> Prediction:
        """Return the prediction of the mixture over the draws of `outputs`, (P, B, ...)."""

    @abstractmethod
    def score(self, outputs: Tensor) -> Tensor:
        """Return the total uncertainty of `outputs`, (P, B, ...) -> (B,) or (B, *positions): higher is more OOD."""

    @abstractmethod
    def epistemic(self, outputs: Tensor) -> Tensor:
        """Return the disagreement between the draws of `outputs`, at least 0, (P, B, ...) -> (B,) or (B, *positions)."""

    def predictive_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the NLL of the prediction as it is reported, here −log (1/P) Σ_p p(y | w_p): (P, B, ...), (B, ...) -> (B,)."""
        return math.log(outputs.shape[0]) - (-self.nll(outputs, y)).logsumexp(0)

    def averaged_nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the NLL of the averaged outputs (means and log-variances, or probabilities): (P, B, ...), (B, ...) -> (B,)."""
        return self.predictive_nll(outputs, y)

    def baseline_nll(self, y: Tensor) -> Tensor | None:
        """Return what the best prediction without inputs pays for every target, in nats; None where that is not known."""
        return None

    def point(self, outputs: Tensor) -> Tensor:
        """Return what every draw predicts without its noise: means of a regression, logits of a classification."""
        return outputs

    def logits(self, outputs: Tensor) -> Tensor | None:
        """Return class logits (P, B, C, *positions), or None for a regression."""
        return None

    def residual(self, prediction: Prediction, y: Tensor) -> Tensor:
        """Return |y − mean|/std or 1 − p(y) of a `prediction`, (n,) or (n, K), where a target is; at one random position."""
        if prediction.mean is not None and prediction.std is not None:
            values = (align_targets(y, prediction.mean.shape).to(prediction.mean) - prediction.mean).abs() / prediction.std
            return sample_position(values, torch.ones_like(values, dtype=torch.bool)) if values.ndim > 2 else values
        assert prediction.probs is not None
        y = align_targets(y, prediction.probs[:, 0].shape).long()
        counted = y != IGNORED
        chosen = prediction.probs.gather(1, y.masked_fill(~counted, 0).unsqueeze(1)).squeeze(1)
        return sample_position(1 - chosen, counted)

    @classmethod
    def infer(cls, output: Tensor, y: Tensor) -> Likelihood | None:
        """Return the likelihood of this kind for one batch of model outputs (B, ...) and targets; None if they do not fit."""
        likelihood = cls()
        return likelihood if likelihood.fits(output, y) else None

    def fit_noise(self, outputs: Tensor, y: Tensor) -> Self:
        """Return this likelihood with what is estimated on validation data, outputs (M, n, ...) of the base models."""
        return self

    def fits(self, output: Tensor, y: Tensor) -> bool:
        """Return whether targets (n, ...) have the form that outputs (b, ...) ask for; numbers of positions may differ."""
        return True

    def check_targets(self, output: Tensor, y: Tensor, name: str) -> None:
        """Raise a ShapeError or a DataError, which call the targets `name`, unless they (n, ...) fit outputs (b, ...)."""
        if not self.fits(output, y):
            raise misfit(type(self), output, y)

    def doubt_targets(self, y: Tensor) -> str:
        """Return a sentence with a remedy where targets look as if another likelihood were meant, else nothing."""
        return ""

    def doubt_outputs(self, outputs: Tensor, y: Tensor) -> str:
        """Return a sentence with a remedy where outputs (M, n, ...) look unlike what this likelihood reads, else nothing."""
        return ""

    def state(self) -> dict[str, Any]:
        """Return the fields as plain numbers and tensors, for a file."""
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the likelihood that has this `state`; a ValueError if there is none."""
        return cls(**state)


LIKELIHOODS: dict[str, type[Likelihood]] = {}
"""Likelihoods by name, for `fit(likelihood=)` and for guard files. Add your own: `LIKELIHOODS["poisson"] = Poisson`."""


def misfit(kind: type[Likelihood], output: Tensor, y: Tensor) -> ShapeError:
    """Return the error for targets that do not fit the outputs."""
    name = next((name for name, registered in LIKELIHOODS.items() if issubclass(kind, registered)), kind.__name__)
    return ShapeError(
        f"Expected {kind.expects} for the {name} likelihood, but got targets {tuple(y.shape)} ({y.dtype}) and "
        f"outputs {tuple(output.shape)}. Reshape the targets, pass `output_fn=`, or name another `likelihood=` of "
        f"{list(LIKELIHOODS)}."
    )


def infer(output: Tensor, y: Tensor, name: str | None = None) -> Likelihood:
    """Return the likelihood for one batch of outputs (B, ...) and targets: by name, or by the rule of types and shapes.

    Float targets are regressed. Whole ones are classes, or yes and no where the class axis has size 1. The class axis is the one
    that the targets lack: 1, or the last; where both would do, as for (B, 5, 5) and (B, 5), it is 1. Pass
    `Categorical(axis=-1)` to say otherwise, and "bernoulli" for targets of the outputs' own shape, such as several labels.

    >>> infer(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))
    Categorical(axis=1)
    >>> infer(torch.zeros(4, 7, 3), torch.zeros(4, 7, dtype=torch.int64))
    Categorical(axis=-1)
    """
    if name is None and y.is_floating_point():
        name = "gaussian"
    elif name is None:
        single = output.ndim == 1 or (output.ndim == 2 and output.shape[1] == 1)
        # targets of the outputs' own shape may be one-hot: several labels are yes and no only where the user says so
        binary = single or (output.ndim > y.ndim and LIKELIHOODS["bernoulli"].infer(output, y) is not None)
        name = "bernoulli" if binary else "categorical"
    elif name not in LIKELIHOODS:
        raise ConfigError(f"Expected `likelihood` as {nearest(name, LIKELIHOODS)} or an `offmap.Likelihood`, but got {name!r}.")
    likelihood = LIKELIHOODS[name].infer(output, y) if y.shape[0] == output.shape[0] else None
    if likelihood is None:
        raise misfit(LIKELIHOODS[name], output, y)
    return likelihood


def resolve(likelihood: str | Likelihood | None, outputs: Tensor, y: Tensor) -> Likelihood:
    """Return the likelihood that `fit` uses: the user's own object, or one by name or rule whose noise is estimated.

    Outputs of the base models on validation data are (M, n, ...), their targets (n, ...).
    """
    if likelihood is None or isinstance(likelihood, str):
        chosen = infer(outputs[0], y, likelihood)
        chosen.check_targets(outputs[0], y, "valid")
        check_counted(chosen, y, "valid")
        return chosen.fit_noise(outputs, y)
    if not isinstance(likelihood, Likelihood):
        got = f"the class {likelihood.__name__}" if isinstance(likelihood, type) else type(likelihood).__name__
        raise ConfigError(f"Expected `likelihood` to be one of {list(LIKELIHOODS)} or an `offmap.Likelihood`, but got {got}.")
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
    return likelihood


def check_counted(likelihood: Likelihood, y: Tensor, name: str) -> None:
    """Raise a DataError where every class target is −100."""
    if likelihood.classifies and bool((y == IGNORED).all()):
        raise DataError(f"Expected at least one target that counts, but all of `{name}` are {IGNORED}. Label some of them.")


def drop_axis(shape: torch.Size, axis: int) -> torch.Size:
    """Return the shape of a batch without one of its axes."""
    axis %= max(1, len(shape))
    return torch.Size((*shape[:axis], *shape[axis + 1 :]))


def align_targets(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return targets in the shape of what is predicted, (B, *positions); only axes of size 1 may differ."""
    if y.numel() != math.prod(shape):
        raise ShapeError(
            f"Expected one target per prediction, {tuple(shape)}, but got targets {tuple(y.shape)}. "
            "Check that inputs and targets are cut or padded to the same length."
        )
    return y.reshape(tuple(shape))


def mean_over_positions(values: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the positions that count, 0 if none does: (..., B, *positions), (B, *positions) -> (..., B)."""
    counted = (y != IGNORED).unsqueeze(-1).flatten(1)
    rows = values.unsqueeze(-1).flatten(values.ndim - y.ndim + 1)
    return torch.where(counted, rows, 0).sum(-1) / counted.sum(-1).clamp_min(1)


def sample_position(values: Tensor, counted: Tensor) -> Tensor:
    """Return the value at one random position of those that count, for every row that has some: (n, *positions) -> (m,).

    Positions of one row are alike, rows are exchangeable: one of each keeps conformal coverage exact for a random position.
    """
    if values.ndim == 1:
        return values[counted]
    flat, counted = values.flatten(1), counted.flatten(1)
    share = torch.rand(len(flat), generator=generator("position"), dtype=torch.float64, device="cpu").to(flat.device)
    rank = (share * counted.sum(1)).long() + 1
    position = (counted & (counted.cumsum(1) == rank.unsqueeze(1))).to(torch.int8).argmax(1)
    return flat.gather(1, position.unsqueeze(1)).squeeze(1)[counted.any(1)]
