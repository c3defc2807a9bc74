"""Laplace's approximation around trained nets, by laplace-torch: a Gaussian as wide as the loss is flat.

laplace-torch finds the curvature, the prior and the posterior, and draws from it. Here its draws become a Predictive: as weights
of the model itself ("sampled"), or of the model linearised at its trained weights w̄ ("linear", its authors' advice), as

    f(x) + J(x)·(w − w̄)

by one Jacobian-vector product per draw, so that one draw is one function of all rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offmap._types import Inputs, Weights
from offmap.checks import require
from offmap.data import load_rows
from offmap.data.batch import rows_of, take_rows
from offmap.errors import ConfigError, ShapeError
from offmap.likelihoods import Categorical, Gaussian
from offmap.model.forward import BatchedModel, LRUCache, OutputFn, copy_model
from offmap.model.params import ParamSelection, StackedModel, at, stack_models
from offmap.random import generator
from offmap_bench.methods.competitor import Competitor, Nets, one_by_one
from offmap_bench.methods.stack import Problem

LAWS: dict[type, str] = {Gaussian: "regression", Categorical: "classification"}
"""laplace-torch's words for the likelihoods that it knows."""


@dataclass(frozen=True)
class Config:
    """`params` says which weights are random, as for MaxWEnt: None all, "6.*" the layer of that name."""

    structure: Literal["kron", "diag", "full"] = "kron"
    kind: Literal["linear", "sampled"] = "linear"
    params: ParamSelection = None
    prior_precision: float | None = None  # None: that of highest marginal likelihood, found with the noise of a regression
    batch_size: int = 200


@dataclass(frozen=True)
class Approximated:
    """A Predictive: models whose weights are w̄ + δ with δ from `draw(span, seed)`, {name: (M·p, ...)}. There is nothing to clip.

    `means` are how many outputs of a row are random: a Gaussian's log-variances stay the model's own, for its Laplace
    approximation knows of one noise for all rows. None: all.
    """

    model: BatchedModel
    weights: Weights
    draw: Draw
    linear: bool = True
    means: int | None = None
    chosen: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    history: None = None

    @property
    def members(self) -> int:
        """M."""
        return next(iter(self.weights.values())).shape[0]

    def mean_weights(self, member: int = 0) -> Weights:
        """The weights of one model as it was trained."""
        return at(self.weights, member)

    def outputs(self, x: Inputs, draws: int, *, clip: float | None = None, seed: int = 0) -> Tensor:
        """(M·P, B, ...), member-major."""
        if self.linear:
            random = self._linearise_outputs(x, draws, seed)
        else:
            random = self.model.outputs(lambda span: self._draw_weights(span, seed), draws, x, members=self.members)
        if self.means is None:
            return random
        base = self.model.outputs(lambda span: self.weights, 1, x, members=self.members).repeat_interleave(draws, 0)
        return torch.cat([random[..., : self.means], base[..., self.means :]], -1)

    def _repeat_and_draw(self, span: range, seed: int) -> tuple[Weights, Weights]:
        """All weights, w̄ of each draw, and δ of the random ones."""
        return {name: w.repeat_interleave(len(span), 0) for name, w in self.weights.items()}, self.draw(span, seed)

    def _draw_weights(self, span: range, seed: int) -> Weights:
        weights, delta = self._repeat_and_draw(span, seed)
        return weights | {name: weights[name] + d for name, d in delta.items()}

    @torch.enable_grad()  # no gradient is asked for, but tiles are written in place without
    def _linearise_outputs(self, x: Inputs, draws: int, seed: int) -> Tensor:
        step, parts = max(1, self.model.chunk_size), list[Tensor]()
        for span in (range(i, min(i + step, draws)) for i in range(0, draws, step)):
            weights, delta = self._repeat_and_draw(span, seed)
            point, rows = {name: weights[name] for name in delta}, list[Tensor]()
            for start in range(0, rows_of(x), self.model.batch_size):
                taken = take_rows(x, slice(start, start + self.model.batch_size))

                def run(moved: Weights, fixed: Weights = weights, taken: Inputs = taken) -> Tensor:
                    return self.model(fixed | moved, taken)

                both = torch.func.jvp(run, (point,), (delta,))  # f and J·δ
                rows.append((both[0] + both[1]).detach())
            parts.append(torch.cat(rows, 1).unflatten(0, (self.members, len(span))))
        return torch.cat(parts, 1).flatten(0, 1)


@dataclass(frozen=True)
class Draw:
    """Draws of every member's posterior by laplace-torch, each from the generator of its address, relative to w̄; cached."""

    posteriors: Sequence[Any]
    shapes: dict[str, torch.Size]
    _cache: LRUCache = field(default_factory=LRUCache, init=False, repr=False, compare=False)

    def __call__(self, span: range, seed: int) -> Weights:
        """{name: (M·p, ...)}."""
        keys = [(seed, member, number) for member in range(len(self.posteriors)) for number in span]
        cached = [(key, self._cache.get(key)) for key in keys]
        flat = torch.stack([self._cache.put(key, self._draw(*key)) if z is None else z for key, z in cached])
        parts = flat.split([math.prod(shape) for shape in self.shapes.values()], 1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    @torch.no_grad()
    def _draw(self, seed: int, member: int, number: int) -> Tensor:
        posterior = self.posteriors[member]
        return posterior.sample(1, generator=generator(seed, "infer", member, number, "laplace"))[0] - posterior.mean


class Means(nn.Module):
    """A model as laplace-torch wants it: (B, K), without log-variances, in units (K,) in which all outputs have one noise."""

    def __init__(self, net: nn.Module, output_fn: OutputFn, means: int | None, units: Tensor | float = 1.0) -> None:
        super().__init__()
        self.net, self.output_fn, self.means, self.units = net, output_fn, means, units

    def forward(self, x: Tensor) -> Tensor:
        """The first columns of the model's output."""
        output = self.output_fn(self.net(x))
        return (output.unsqueeze(1) if output.ndim == 1 else output[:, : self.means]) / self.units


def _fit(nets: Nets, problem: Problem, config: Config) -> Approximated:
    likelihood, runtime = problem.likelihood, problem.runtime
    if type(likelihood) not in LAWS:
        words = " or ".join(law.__name__ for law in LAWS)
        raise ConfigError(f"Expected a likelihood that laplace-torch knows, {words}, but got {type(likelihood).__name__}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own use of torch and numpy
        # no extra may name these: they ask for torchvision, and with it for another torch
        needed = "laplace-torch curvlinops-for-pytorch backpack-for-pytorch"
        library = require("laplace", "laplace", package="offmap-bench", no_deps=needed)
    rows, around = load_rows(problem.train), stack_models(nets, config.params)
    model = runtime.model(around.module, around.mean | around.fixed, problem.valid.inputs)
    if not isinstance(rows.inputs, Tensor) or model.output_axes not in (0, 1):
        raise ShapeError("Expected inputs that are one tensor and one row of outputs for each: laplace-torch knows no others.")
    targets, means, noise, units = rows.targets, None, None, 1.0
    if isinstance(likelihood, Gaussian):
        targets, noise = likelihood.columns(targets), likelihood.noise
        if noise is None:  # every row has its own: laplace-torch finds one for all
            means = likelihood.targets
        else:
            noise, units = float(noise.mean().sqrt()), (noise / noise.mean()).sqrt().to(targets)
    loader = DataLoader(TensorDataset(rows.inputs, targets / units if noise else targets), batch_size=config.batch_size)
    law = LAWS[type(likelihood)]
    posteriors = [
        find_posterior(library, Means(member_model(around, m), runtime.output_fn, means, units), loader, law, config, noise)
        for m in range(around.members)
    ]
    names = [n.removeprefix("net.") for n, p in posteriors[0].model.named_parameters() if p.requires_grad]
    chosen = {key: [float(getattr(p, key)) for p in posteriors] for key in ("prior_precision", "sigma_noise")}
    draw = Draw(posteriors, {name: around.mean[name].shape[1:] for name in names})
    return Approximated(model, around.mean | around.fixed, draw, config.kind == "linear", means, chosen)


def member_model(around: StackedModel, member: int) -> nn.Module:
    """One member as a module of its own, in which the random weights want gradients."""
    net = copy_model(around.module)
    net.load_state_dict(around.weights(member), strict=False)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in around.mean)
    return net


@torch.enable_grad()
def find_posterior(
    library: Any, model: Means, loader: DataLoader[Any], law: str, config: Config, noise: float | None = None
) -> Any:
    """laplace-torch's posterior around one member, with its prior, and the noise of a regression: the likelihood's, if it has
    one, else that of highest evidence, or with a given prior that of the training residuals.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = library.Laplace(model, law, subset_of_weights="all", hessian_structure=config.structure)
        posterior.fit(loader)
        if noise is not None:
            posterior.sigma_noise = noise
        find_noise = law == "regression" and noise is None
        if config.prior_precision is None:
            by_evidence(posterior, noisy=find_noise)
        else:
            posterior.prior_precision = float(config.prior_precision)
            if find_noise:
                x, y = loader.dataset.tensors  # pyright: ignore[reportAttributeAccessIssue]
                with torch.no_grad():
                    posterior.sigma_noise = (model(x) - y).square().mean().sqrt()
    return posterior


@torch.no_grad()
def by_evidence(posterior: Any, *, noisy: bool) -> None:
    """Prior precision, and noise, of highest log marginal likelihood: a grid in powers of ten, repeated around its best point.

    No gradients: laplace-torch 0.3 gives none of the Kronecker log-determinant in the noise.
    """
    best, sides = (0.0, -1.0)[: 1 + noisy], (4.0, 2.0)[: 1 + noisy]  # middle and half side of the grid

    def evidence(powers: tuple[float, ...]) -> float:
        value = float(posterior.log_marginal_likelihood(*(posterior.mean.new_tensor([10.0**power]) for power in powers)))
        return value if math.isfinite(value) else -math.inf

    for _ in range(4):  # each grid has 9 points a side, at a quarter of the distance of the one before
        axes = [[middle + side * step / 4 for step in range(-4, 5)] for middle, side in zip(best, sides, strict=True)]
        best = max(product(*axes), key=evidence)
        sides = tuple(side / 4 for side in sides)
    evidence(best)  # laplace-torch keeps what it was asked last


laplace = Competitor(Config, one_by_one(_fit))
"""Find the curvature of every member on the training data, and the prior of highest evidence, without training or drawing."""
