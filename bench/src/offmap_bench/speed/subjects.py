"""What themes measure: an MLP on a synthetic table, the same work by other libraries, and untrained models of other kinds."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.data import Rows
from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap.maxwent import solve
from offmap.maxwent.config import Runtime
from offmap.posterior.predictive import Sampled, Stochastic
from offmap.random import generator
from offmap_bench.methods import deep_ensemble
from offmap_bench.nets.resnet import resnet
from offmap_bench.speed.measure import Work

FEATURES, OUTPUTS, HIDDEN = 8, 2, (100, 100, 100)
DRAWS, BATCH, STEPS = 50, 128, 500
NAMES = [f"x{i}" for i in range(FEATURES)]
STACKED = "offmap, deep ensemble"


@cache
def table() -> dict[str, tuple[Tensor, Tensor]]:
    """3,600 rows to train on, 400 to validate, 10,000 to score; the target is smooth with noise 0.1."""
    sizes = {"train": 3_600, "valid": 400, "score": 10_000}
    source = generator("benchmarks", "table")
    x = torch.randn(sum(sizes.values()), FEATURES, generator=source)
    y = x[:, 0].sin() + x[:, 1] * x[:, 2] / 2 + 0.1 * torch.randn(len(x), generator=source)
    parts = zip(x.split(list(sizes.values())), y.split(list(sizes.values())), strict=True)
    return dict(zip(sizes, parts, strict=True))


def rows(part: str) -> Rows:
    return Rows(*table()[part], BATCH, part)


def descend(net: nn.Module, steps: int, source: torch.Generator, penalty: Callable[[], Any] = lambda: 0.0) -> nn.Module:
    """Train with Adam on the Gaussian negative log-likelihood plus a penalty."""
    x, y = table()["train"]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        index = torch.randint(len(x), (BATCH,), generator=source)
        loss = Gaussian().nll(net(x[index]).unsqueeze(0), y[index]).mean() + penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


@cache
def trained_net(seed: int = 0) -> nn.Sequential:
    """An MLP 8-100-100-100-2 after 300 steps, which is enough to measure speed."""
    net = mlp(FEATURES, OUTPUTS, hidden=HIDDEN, seed=seed)
    descend(net, 300, generator("benchmarks", "order", seed))
    return net.eval()


def members() -> list[nn.Sequential]:
    return [trained_net(seed) for seed in range(5)]


def fit_guard(solver: Literal["closed-form", "refine"] = "closed-form", *, score: str = "default") -> offmap.Guard:
    data = table()
    return offmap.fit(trained_net(), data["train"], data["valid"], solver=solver, score=score, draws=DRAWS, progress=False)


_seeds = itertools.count(1)


def reseed(guard: offmap.Guard, **changes: Any) -> offmap.Guard:
    """The guard with a seed it never had, so that nothing drawn is cached."""
    return replace(guard, seed=next(_seeds), **changes)


# ------------------------------------------------------------------------------------------------ other libraries


def fits() -> dict[str, Work]:
    data = table()
    return {
        "offmap, default": lambda: offmap.fit(trained_net(), data["train"], data["valid"], draws=DRAWS, progress=False),
        "offmap, closed form": lambda: fit_guard(score="paper"),
        "offmap, default, φ alone": lambda: fit_distribution("refine"),
        "offmap, closed form, φ alone": lambda: fit_distribution("closed-form"),
        "laplace-torch": lambda: laplace(),
        "bayesian-torch": lambda: train_variational(),
        "deep ensemble": lambda: [descend(copy.deepcopy(n), STEPS, torch.Generator().manual_seed(0)) for n in members()],
        STACKED: lambda: train_stacked(),
    }


def scorers(x: Tensor) -> dict[str, Work]:
    """Variances of the predictions for these rows."""
    guard, joint = fit_guard(score="paper"), offmap.guard(train_stacked(), table()["valid"], score="paper")
    bayes, dropped, curved = variational(), dropout(), laplace()
    return {
        "offmap": lambda: reseed(guard).score(x),
        "bayesian-torch": lambda: mixture_variance(bayes(x) for _ in range(DRAWS)),
        "MC-dropout": lambda: mixture_variance(dropped(x) for _ in range(DRAWS)),
        "laplace-torch": lambda: curved.predictive_samples(x, pred_type="nn", n_samples=DRAWS).var(0),
        "deep ensemble": lambda: mixture_variance(net(x) for net in members()),
        STACKED: lambda: joint.score(x),
    }


@torch.no_grad()
def mixture_variance(passes: Iterable[Tensor]) -> Tensor:
    """The variance of a mixture of outputs with a mean and a log-variance, (B,)."""
    outputs = torch.stack(list(passes))
    return outputs[..., 0].var(0) + outputs[..., 1].exp().mean(0)


def fit_distribution(solver: Literal["closed-form", "refine"]) -> Stochastic:
    """Fit the weight distribution, and calibrate nothing."""
    config, runtime = replace(solve.CONFIGS["default"], solver=solver), Runtime(progress=False)
    return solve.fit(trained_net(), rows("train"), rows("valid"), likelihood=Gaussian(), config=config, runtime=runtime)


def train_stacked() -> Sampled:
    """Train the same ensemble in one stack, on complete batches only, as `descend` does."""
    x, y = table()["train"]
    complete = slice(len(x) // BATCH * BATCH)
    train, config = Rows(x[complete], y[complete], BATCH, "train"), deep_ensemble.Config(steps=STEPS, lr=1e-3, adam_epsilon=1e-8)
    runtime = Runtime(progress=False)
    return deep_ensemble.fit(members(), train, rows("valid"), likelihood=Gaussian(), config=config, runtime=runtime)


def maxwent(net: nn.Module | None = None) -> Any:
    """The authors' package around the trained net, its SVD basis ready; around another net without a basis."""
    from maxwent.tch import MaxWEnt, set_maxwent_model

    if net is not None:
        return MaxWEnt(set_maxwent_model(net), lambda_=10.0)
    model = MaxWEnt(set_maxwent_model(trained_net()), lambda_=10.0)
    model.fit_svd(table()["train"][0].numpy(), batch_size=BATCH)
    random = [p for p in model.network.parameters() if p.requires_grad]
    model.compile(torch.optim.Adam(random, lr=1e-3), lambda out, y: Gaussian().nll(out.unsqueeze(0), y).mean(), metrics=[])
    return model


def maxwent_steps(epochs: int) -> tuple[int, Work]:
    """The gradient steps of so many epochs of the authors' package, and a contestant that takes them."""
    model, (x, y) = maxwent(), table()["train"]
    steps = epochs * -(-len(x) // BATCH)
    return steps, lambda: model.fit(x.numpy(), y.numpy(), epochs=epochs, batch_size=BATCH, verbose=0)


def variational() -> nn.Module:
    """The net as bayesian-torch converts it, with means at its weights."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    net = copy.deepcopy(trained_net())
    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    dnn_to_bnn(net, {**settings, "type": "Reparameterization", "moped_enable": True, "moped_delta": 0.1})
    return net


def train_variational() -> nn.Module:
    from bayesian_torch.models.dnn_to_bnn import get_kl_loss

    net, count = variational(), len(table()["train"][0])
    return descend(net, STEPS, torch.Generator().manual_seed(0), lambda: get_kl_loss(net) / count)


def dropout() -> nn.Module:
    """The net with a tenth of its features dropped."""
    layers = [[layer, nn.Dropout(0.1)] if isinstance(layer, nn.ReLU) else [layer] for layer in copy.deepcopy(trained_net())]
    return nn.Sequential(*itertools.chain(*layers)).train()


def mean_head(net: nn.Module) -> nn.Sequential:
    """The model without its log-variance: all layers, and the row of the last that gives the mean."""
    *body, last = copy.deepcopy(net).children()
    assert isinstance(last, nn.Linear)
    head = nn.Linear(last.in_features, 1)
    head.load_state_dict({"weight": last.weight[:1].detach(), "bias": last.bias[:1].detach()})
    return nn.Sequential(*body, head)


def laplace() -> Any:
    """A Kronecker-factored Laplace of the mean head, its prior by marginal likelihood."""
    from laplace import Laplace

    x, y = table()["train"]
    with warnings.catch_warnings(action="ignore"):
        model = Laplace(mean_head(trained_net()), "regression", subset_of_weights="all", hessian_structure="kron")
        model.fit(DataLoader(TensorDataset(x, y[:, None]), batch_size=BATCH))
        model.optimize_prior_precision(method="marglik")
    return model


# ------------------------------------------------------------------------------------------------ other models


class Encoder(nn.Module):
    """A Transformer encoder over vectors of 16 numbers, averaged and classified."""

    def __init__(self, size: int, *, heads: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(size, heads, dim_feedforward=4 * size, batch_first=True)
        self.embed = nn.Linear(16, size)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).mean(1))


def conv1d(inputs: int, *widths: int) -> nn.Sequential:
    """Convolutions of width three with GroupNorm and ReLU, averaged and classified."""
    layers: list[nn.Module] = []
    for before, after in zip((inputs, *widths), widths, strict=False):
        layers += [nn.Conv1d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


@dataclass(frozen=True)
class Subject:
    """A model (`make`), the shape of one row of its inputs, and so many `rows` that a pass takes a second or so."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int

    def net(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval().requires_grad_(False)

    def inputs(self, rows: int) -> Tensor:
        return torch.randn(rows, *self.shape, generator=generator("benchmarks", self.name))


MLP = Subject("MLP 8-100-100-100-2", lambda: mlp(8, 2), (8,), 10_240)
CONV1D = Subject("Conv1d 8-32-64, 64 places", lambda: conv1d(8, 32, 64), (8, 64), 2_048)
SMALL_CONV1D = Subject("Conv1d 4-8-8, 16 places", lambda: conv1d(4, 8, 8), (4, 16), 10_240)
RESNET = Subject("ResNet-20, 32 × 32 images", lambda: resnet(10), (3, 32, 32), 1_024)
TRANSFORMER = Subject("Transformer, 2 layers of 128, 32 tokens", lambda: Encoder(128, heads=4, layers=2), (32, 16), 1_024)


@torch.no_grad()
def run_passes(net: nn.Module, x: Tensor, batch: int, times: int = 1) -> None:
    for _ in range(times):
        for part in x.split(batch):
            net(part)
