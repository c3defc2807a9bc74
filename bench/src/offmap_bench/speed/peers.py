"""The same work by libraries that users have otherwise: fits of one net, and scores of 10,000 rows with 50 draws."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.data import Rows
from offmap.likelihoods import Gaussian
from offmap.maxwent import solve
from offmap.maxwent.config import Runtime
from offmap.posterior.predictive import Sampled, Stochastic
from offmap_bench.methods import deep_ensemble
from offmap_bench.speed.measure import GEMM, Record, Timing, Work, race, record, repeat
from offmap_bench.speed.subjects import BATCH, DRAWS, descend, fit_guard, reseed, table, trained_net

STEPS, MEMBERS, CALLS = 500, 5, 10
STACKED = "offmap, deep ensemble"
SCORERS = ("offmap", "bayesian-torch", "MC-dropout", "laplace-torch", "deep ensemble", STACKED)


def peers(rounds: int = 3) -> Record:
    """Fits in turns, then scores in turns."""
    calls = {name: CALLS if "ensemble" in name else 1 for name in SCORERS}  # five passes are short
    scores = {name: repeat(calls[name], work) for name, work in scorers(table()["score"][0]).items()}
    timings = {f"fit: {name}": t for name, t in _race(fits(), rounds).items()}
    timings |= {f"10,000 rows: {name}": t.times(1 / calls.get(name, CALLS)) for name, t in _race(scores, rounds).items()}
    return record("peers", rounds, timings)


def _race(works: dict[str, Work], rounds: int) -> dict[str, Timing]:
    return race(works, rounds=rounds, gemm={f"{STACKED}, {GEMM}": works[STACKED]})


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


def fit_distribution(solver: Literal["closed-form", "refine"]) -> Stochastic:
    """Fit the weight distribution, and calibrate nothing."""
    train, valid = (Rows(*table()[name], BATCH, name) for name in ("train", "valid"))
    config = replace(solve.CONFIGS["default"], solver=solver)
    return solve.fit(trained_net(), train, valid, likelihood=Gaussian(), config=config, runtime=Runtime(progress=False))


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


def members() -> list[nn.Sequential]:
    return [trained_net(seed) for seed in range(MEMBERS)]


def train_stacked() -> Sampled:
    """Train the same ensemble in one stack, on complete batches only, as `descend` does."""
    (x, y), valid = table()["train"], table()["valid"]
    complete = slice(len(x) // BATCH * BATCH)
    train, held = Rows(x[complete], y[complete], BATCH, "train"), Rows(*valid, BATCH, "valid")
    config = deep_ensemble.Config(steps=STEPS, lr=1e-3, adam_epsilon=1e-8)
    return deep_ensemble.fit(members(), train, held, likelihood=Gaussian(), config=config, runtime=Runtime(progress=False))


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

    net, rows = variational(), len(table()["train"][0])
    return descend(net, STEPS, torch.Generator().manual_seed(0), lambda: get_kl_loss(net) / rows)


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Laplace(mean_head(trained_net()), "regression", subset_of_weights="all", hessian_structure="kron")
        model.fit(DataLoader(TensorDataset(x, y[:, None]), batch_size=BATCH))
        model.optimize_prior_precision(method="marglik")
    return model
