"""The options of MaxWEnt, each documented and bounded where it is declared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor, nn

from offmap import checks
from offmap._types import Inputs
from offmap.checks import option, validate
from offmap.data.batch import take_rows
from offmap.distributed.group import SINGLE_PROCESS, Group
from offmap.errors import ConfigError, nearest
from offmap.maxwent.risk import RiskFn, as_risk
from offmap.maxwent.train import Growth, as_growth
from offmap.model.forward import MODEL_ERRORS, BatchedModel, OutputFn, call, check_rows, first_tensor, model_failed
from offmap.model.inspect import choose_chunk
from offmap.model.params import ParamSelection, at
from offmap.posterior.noise import Noise, Uniform, as_noise
from offmap.posterior.parameterization import WeightLaw, as_law
from offmap.progress import Status

if TYPE_CHECKING:
    from offmap.maxwent.checkpoint import Checkpoint


@dataclass(frozen=True)
class Config:
    """Options of a fit; `PAPER` and `REFERENCE` hold those of the paper and of its authors' code.

    >>> Config(steps=100).lr
    0.02
    """

    basis: Literal["svd", "identity"] = option(
        "svd", 'Directions in which weights are random: "svd" of the layer inputs, or their own.'
    )
    solver: Literal["refine", "closed-form", "sgd"] = option(
        "refine",
        'How φ is found: "closed-form" has no gradient steps, "refine" starts from it, "sgd" is the paper\'s algorithm 1.',
    )
    params: ParamSelection = option(
        None, 'Which parameters are random: "all" (the default), "matrices", "last-layer", patterns of names, or a function.'
    )
    noise: str | Noise = option("uniform", "The distribution of z, by name or as an object.", check=as_noise)
    parameterization: str | WeightLaw | None = option(
        None,
        'Another law than w̄ + V(φ ⊙ z): "low-rank" (whose noise is normal), "subspace", "flow", an object with options such as '
        "`LowRank(rank=8)`, or your own ω(z, φ).",
        check=as_law,
    )
    entropy_weight: float | Sequence[float] = option(
        30.0, "λ on the mean of g(φ²): 10/d on the paper's sum. Of several, the one of highest entropy below τ is kept.", above=0
    )
    regularizer: str | Growth = option(
        "abs", 'The growing function g of φ² that stands for the entropy: "abs", "log", or your own.', check=as_growth
    )
    steps: int = option(500, "Gradient steps.", above=0)
    lr: float = option(0.02, "Adam's learning rate while φ is refined.", above=0)
    draws_per_step: int = option(1, "Draws of the weights per gradient step.", above=0)
    adam_epsilon: float = option(1e-8, "Adam's ε.", above=0)
    initial_raw_scale: float | None = option(
        None, 'Solver "sgd": softplus⁻¹(φ) at the start; None: −5 for "identity", −10 for "svd".'
    )
    init_fraction: float = option(0.1, 'Solver "refine": the fraction of the closed form\'s φ to start from.', above=0)
    fan_in_limit: int = option(4096, 'Basis "svd": one basis up to this fan-in, several smaller ones above it.', above=0)
    eps: float | Sequence[float] = option(
        (1e-4, 1e-3), "Smallest amplitude of layer inputs, as a fraction of the largest. Of several, the best is kept.", above=0
    )
    risk: str | RiskFn = option(
        "nll", 'The validation risk: "nll", "expected-nll", "averaged-nll", "zero-one", or your own function.', check=as_risk
    )
    max_risk: float | None = option(None, "τ, the largest validation risk; None: the base model's plus twice its standard error.")
    tolerance: Literal["paper", "reference", "smoothed"] = option(
        "paper",
        'Twice the standard error: 2·std/√n ("paper"), 2·std/n ("reference"), or with one more row at chance ("smoothed").',
    )
    clip_loss: bool = option(True, "Bound the loss of every validation row by what chance would pay for the worst one.")
    check_every: int = option(50, "Steps between two checks of the validation risk.", above=0)
    patience: int | None = option(4, "Stop when every member has been above τ for so many checks; None: never.", above=0)
    rescale: bool = option(True, "At the end, multiply φ by what the risk still allows.")
    risk_draws: int = option(50, "Draws per member for the validation risk.", above=0)

    def __post_init__(self) -> None:
        validate(self)
        if self.parameterization is not None:
            as_law(self.parameterization).check(self.solver, as_noise(self.noise))


PAPER = Config(
    solver="sgd", entropy_weight=10.0, steps=50_000, lr=1e-3, eps=1e-4, clip_loss=False, check_every=100,
    patience=None, rescale=False,
)  # fmt: skip
REFERENCE = replace(PAPER, noise=Uniform(1.0), adam_epsilon=1e-7, risk="averaged-nll", tolerance="reference")
CONFIGS = {"default": Config(), "paper": PAPER, "reference": REFERENCE}


@dataclass(frozen=True)
class Runtime:
    """How a method runs its models; nothing here changes what it computes."""

    output_fn: OutputFn = first_tensor  # picks the tensor that matters of what a model returns
    chunk_size: int | Literal["auto"] = "auto"  # draws that run at once; 1: a loop over them; "auto": the rule of `choose_chunk`
    batch_size: int = 128  # rows that run at once
    progress: bool | None = None  # whether to show a progress bar; None: on a terminal
    status: Status = field(default_factory=Status)  # what is being done, printed every ten seconds
    group: Group = SINGLE_PROCESS  # the processes that fit together
    sharded: bool = False  # whether each of them has training rows of its own
    checkpoint: Checkpoint | None = None  # where parts of the fit are kept

    def __post_init__(self) -> None:
        if self.chunk_size != "auto" and (not isinstance(self.chunk_size, int) or self.chunk_size < 1):
            raise ConfigError(f"Expected `chunk_size` to be 'auto' or a whole number ≥ 1, but got {self.chunk_size!r}.")
        checks.integer("batch_size", self.batch_size, 1)

    def model(self, module: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs) -> BatchedModel:
        """Make the batched model: its output is measured on two rows; `weights` are stacked, {name: (M, ...)}."""
        few = take_rows(inputs, slice(0, 2))
        try:
            row = call(module, at(weights, 0), few, self.output_fn)
        except MODEL_ERRORS as error:
            raise model_failed(module, few, error) from error
        check_rows(module, row, few)
        chunk = self.chunk_size
        if chunk == "auto":
            chunk = choose_chunk(module, weights, take_rows(inputs, slice(0, self.batch_size)), self.output_fn)
        return BatchedModel(module, self.output_fn, chunk, self.batch_size, max(1, row[0].numel()), row.ndim - 1)


AnyConfig = TypeVar("AnyConfig")


def override(config: AnyConfig, options: Mapping[str, Any], *, also: Iterable[str] = ()) -> AnyConfig:
    """A configuration with some fields changed; an unknown field is refused and the nearest one, or one of `also`, named."""
    valid = [f.name for f in fields(config)]  # pyright: ignore[reportArgumentType]
    for name in options:
        if name not in valid:
            raise ConfigError(f"Expected options to be {nearest(name, {*valid, *also})}, but got {name!r}.")
    return replace(config, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
