"""The same work by libraries that users have otherwise: fits of one net, and scores of 10,000 rows with 50 draws."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offmap
from offmap.data import Rows
from offmap.likelihoods import Gaussian
from offmap.maxwent import solve as maxwent
from offmap.posterior.predictive import Sampled, Stochastic
from offmap.posterior.protocol import Runtime
from offmap_bench.methods import deep_ensemble
from offmap_bench.speed import limit, subject
from offmap_bench.speed.race import Timing, race, repeated
from offmap_bench.speed.record import Claim, Measurement, Record

STEPS, MEMBERS = 500, 5
STACKED = "offmap, deep ensemble"
CALLS = 10
"""In a turn of an ensemble's five passes, which are short."""

HOW = """One trained net of a mean and a log-variance; of the mean alone for laplace-torch, which wants one. Fits: ours by
default, {steps} gradient steps, and in closed form, everything included; the Kronecker-factored Laplace of laplace-torch over all
weights, its prior by marginal likelihood; {steps} steps of a variational net of bayesian-torch, made from the same net; and five
nets trained plainly one after the other, {steps} steps each, as a deep ensemble takes them. Ours of those is the same ensemble,
stacked: the same steps of the same Adam, and a look at 400 validation rows after every hundred. Whole fits of ours also choose
the clip by nine looks at the validation rows with fifty nets each, find a threshold and, by default, the neighbours of every
training row; the peers give a distribution and no more. *φ alone* is that part of ours: the basis, and φ at the largest risk
allowed.
Scores are variances over {draws} draws: ours with score="paper"; bayesian-torch and dropout (a tenth, after every ReLU) by as
many passes of all rows, laplace-torch by sampled weights, the deep ensemble by one pass of each of its nets, and ours of it by
a guard around the stack. Batches of {batch} rows in training, whole tables in scoring."""

Work = Callable[[], object]


def run(rounds: int = 3) -> Record:
    """Everything in turns."""
    calls = scoring(subject.table()["score"][0])
    works = fitting(), {name: repeated(CALLS, call) if "ensemble" in name else call for name, call in calls.items()}
    fits, scores = (race({**each, "gemm": limit.product()}, rounds=rounds) for each in works)
    least = [limit.least(t.pop("gemm"), limit.flops(each[STACKED])) for t, each in zip((fits, scores), works, strict=True)]
    return Record(
        "peers",
        "Beside other libraries",
        HOW.format(steps=STEPS, draws=subject.DRAWS, batch=subject.BATCH),
        rounds,
        [
            *(Measurement.of(f"fit: {name}", timing) for name, timing in fits.items()),
            Measurement.of(f"fit: {STACKED}, {limit.NAME}", least[0]),
            *(Measurement.of(f"10,000 rows: {name}", t, per=CALLS if "ensemble" in name else 1) for name, t in scores.items()),
            Measurement.of(f"10,000 rows: {STACKED}, {limit.NAME}", least[1], per=CALLS),
        ],
        [
            *_faster("fit, by default", "offmap, default", fits, ("bayesian-torch", "deep ensemble")),
            *_faster("fit, closed form", "offmap, closed form", fits, ("laplace-torch", "bayesian-torch", "deep ensemble")),
            *_faster("φ alone, by default", "offmap, default, φ alone", fits, ("bayesian-torch", "deep ensemble")),
            *_faster(
                "φ alone, closed form", "offmap, closed form, φ alone", fits, ("laplace-torch", "bayesian-torch", "deep ensemble")
            ),
            *_faster("ensemble training", STACKED, fits, ("deep ensemble",)),
            *_faster("scores", "offmap", scores, ("bayesian-torch", "MC-dropout", "laplace-torch")),
            *_faster("scores of an ensemble", STACKED, scores, ("deep ensemble",)),
        ],
    )


def _faster(what: str, ours: str, timings: dict[str, Timing], others: Sequence[str]) -> list[Claim]:
    times = {name: timings[name].best / timings[ours].best for name in others}
    return [Claim(f"{what}: times faster than {name}", value, "at least", 1.0) for name, value in times.items()]


def fitting() -> dict[str, Work]:
    """Whole fits around one net."""
    data = subject.table()
    train, valid = data["train"], data["valid"]
    return {
        "offmap, default": lambda: offmap.fit(subject.net(), train, valid, draws=subject.DRAWS, progress=False),
        "offmap, closed form": lambda: subject.fitted(score="paper"),
        "offmap, default, φ alone": lambda: distribution("refine"),
        "offmap, closed form, φ alone": lambda: distribution("closed-form"),
        "laplace-torch": lambda: laplace(),
        "bayesian-torch": lambda: descend(variational(), STEPS),
        "deep ensemble": lambda: [descend(copy.deepcopy(net), STEPS) for net in nets()],
        STACKED: lambda: stacked(),
    }


def distribution(solver: Literal["closed-form", "refine"]) -> Stochastic:
    """What a fit learns, before anything is calibrated."""
    train, valid = (Rows(*subject.table()[name], subject.BATCH, name) for name in ("train", "valid"))
    config = replace(maxwent.CONFIGS["default"], solver=solver)
    return maxwent.fit(subject.net(), train, valid, likelihood=Gaussian(), config=config, runtime=Runtime(progress=False))


def scoring(x: Tensor) -> dict[str, Work]:
    """Variances of these rows."""
    draws, seeds = subject.DRAWS, itertools.count()
    guard, joint = subject.fitted(score="paper"), offmap.guard(stacked(), subject.table()["valid"], score="paper")
    bayes, dropped, bent = variational(), dropout(), laplace()
    return {
        "offmap": lambda: replace(guard, seed=next(seeds)).score(x),
        "bayesian-torch": lambda: spread(bayes(x) for _ in range(draws)),
        "MC-dropout": lambda: spread(dropped(x) for _ in range(draws)),
        "laplace-torch": lambda: bent.predictive_samples(x, pred_type="nn", n_samples=draws).var(0),
        "deep ensemble": lambda: spread(net(x) for net in nets()),
        STACKED: lambda: joint.score(x),
    }


@torch.no_grad()
def spread(passes: Iterable[Tensor]) -> Tensor:
    """The mixture variance of outputs of a mean and a log-variance, (B,)."""
    outputs = torch.stack(list(passes))
    return outputs[..., 0].var(0) + outputs[..., 1].exp().mean(0)


def nets() -> list[nn.Sequential]:
    """The members of the deep ensemble, as they start."""
    return [subject.net(seed) for seed in range(MEMBERS)]


def stacked() -> Sampled:
    """The same ensemble as the library trains it; whole batches only, as in `descend`."""
    (x, y), valid = subject.table()["train"], subject.table()["valid"]
    whole = slice(len(x) // subject.BATCH * subject.BATCH)
    rows, held = Rows(x[whole], y[whole], subject.BATCH, "train"), Rows(*valid, subject.BATCH, "valid")
    config = deep_ensemble.Config(steps=STEPS, lr=1e-3, adam_epsilon=1e-8)
    return deep_ensemble.fit(nets(), rows, held, likelihood=Gaussian(), config=config, runtime=Runtime(progress=False))


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
