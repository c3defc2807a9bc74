"""The same work by libraries that users have otherwise: fits of one net, and scores of 10,000 rows with 50 draws."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offmap
from benchmarks import subject
from benchmarks.race import Timing, race
from benchmarks.record import Claim, Measurement, Record
from offmap.likelihoods import Gaussian

STEPS, MEMBERS = 500, 5

HOW = """One trained net of a mean and a log-variance; of the mean alone for laplace-torch, which wants one. Fits: ours by
default, {steps} gradient steps, and in closed form, clip, threshold and everything else included; the Kronecker-factored Laplace
of laplace-torch over all weights, its prior by marginal likelihood; {steps} steps of a variational net of bayesian-torch, made
from the same net; and five more nets trained plainly one after the other, {steps} steps each, as a deep ensemble takes them.
Scores are variances over {draws} draws: ours with score="paper"; bayesian-torch and dropout (a tenth, after every ReLU) by as
many passes of all rows, laplace-torch by sampled weights. Batches of {batch} rows in training, whole tables in scoring."""

Work = Callable[[], object]


def run(rounds: int = 3) -> Record:
    """Everything in turns."""
    fits = race(fitting(), rounds=rounds)
    scores = race(scoring(), rounds=rounds)
    ours, quick, joint = fits["offmap, default"].best, fits["offmap, closed form"].best, scores["offmap"].best
    others = [name for name in scores if name != "offmap"]
    return Record(
        "peers",
        "Beside other libraries",
        HOW.format(steps=STEPS, draws=subject.DRAWS, batch=subject.BATCH),
        rounds,
        [
            *(Measurement.of(f"fit: {name}", timing) for name, timing in fits.items()),
            *(Measurement.of(f"10,000 rows: {name}", timing) for name, timing in scores.items()),
        ],
        [
            *_faster("fit, by default", ours, fits, ("bayesian-torch", "deep ensemble")),
            *_faster("fit, closed form", quick, fits, ("laplace-torch", "bayesian-torch", "deep ensemble")),
            *_faster("scores", joint, scores, others),
        ],
    )


def _faster(what: str, ours: float, timings: dict[str, Timing], others: Any) -> list[Claim]:
    return [Claim(f"{what}: times faster than {name}", timings[name].best / ours, "at least", 1.0) for name in others]


def fitting() -> dict[str, Work]:
    """Whole fits around one net."""
    data = subject.table()
    train, valid = data["train"], data["valid"]
    return {
        "offmap, default": lambda: offmap.fit(subject.net(), train, valid, draws=subject.DRAWS, progress=False),
        "offmap, closed form": lambda: subject.fitted(score="paper"),
        "laplace-torch": lambda: laplace(),
        "bayesian-torch": lambda: descend(variational(), STEPS),
        "deep ensemble": lambda: [descend(copy.deepcopy(subject.net()), STEPS) for _ in range(MEMBERS)],
    }


def scoring() -> dict[str, Work]:
    """Variances of 10,000 rows."""
    x, draws = subject.table()["score"][0], subject.DRAWS
    guard, seeds = subject.fitted(score="paper"), itertools.count()
    bayes, dropped, bent = variational(), dropout(), laplace()
    return {
        "offmap": lambda: replace(guard, seed=next(seeds)).score(x),
        "bayesian-torch": lambda: spread(lambda: bayes(x), draws),
        "MC-dropout": lambda: spread(lambda: dropped(x), draws),
        "laplace-torch": lambda: bent.predictive_samples(x, pred_type="nn", n_samples=draws).var(0),
    }


@torch.no_grad()
def spread(forward: Callable[[], Tensor], draws: int) -> Tensor:
    """The mixture variance of so many passes, (B,)."""
    outputs = torch.stack([forward() for _ in range(draws)])
    return outputs[..., 0].var(0) + outputs[..., 1].exp().mean(0)


def descend(net: nn.Module, steps: int) -> nn.Module:
    """Adam on the negative log-likelihood, and on the divergence that a variational net tells of."""
    x, y = subject.table()["train"]
    divergence = _divergence(net)
    optimizer, source = torch.optim.Adam(net.parameters(), lr=1e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (subject.BATCH,), generator=source)
        loss = Gaussian().nll(net(x[rows]).unsqueeze(0), y[rows]).mean() + divergence() / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def _divergence(net: nn.Module) -> Callable[[], Any]:
    if not any(hasattr(module, "kl_loss") for module in net.modules()):
        return lambda: 0.0
    from bayesian_torch.models.dnn_to_bnn import get_kl_loss

    return lambda: get_kl_loss(net)


def variational() -> nn.Module:
    """The net as bayesian-torch makes it, with means where they were."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    net = copy.deepcopy(subject.net())
    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    dnn_to_bnn(net, {**settings, "type": "Reparameterization", "moped_enable": True, "moped_delta": 0.1})
    return net


def dropout() -> nn.Module:
    """The net with a tenth of its features dropped."""
    layers = [[layer, nn.Dropout(0.1)] if isinstance(layer, nn.ReLU) else [layer] for layer in copy.deepcopy(subject.net())]
    return nn.Sequential(*itertools.chain(*layers)).train()


def laplace() -> Any:
    """A Kronecker-factored Laplace of the mean head."""
    from laplace import Laplace

    net = copy.deepcopy(subject.net())
    last = net[-1]
    assert isinstance(last, nn.Linear)
    head = nn.Linear(last.in_features, 1)
    head.load_state_dict({"weight": last.weight[:1].detach(), "bias": last.bias[:1].detach()})
    x, y = subject.table()["train"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = Laplace(nn.Sequential(*net[:-1], head), "regression", subset_of_weights="all", hessian_structure="kron")
        fitted.fit(DataLoader(TensorDataset(x, y[:, None]), batch_size=subject.BATCH))
        fitted.optimize_prior_precision(method="marglik")
    return fitted
