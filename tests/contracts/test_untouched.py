"""A fit of any model leaves it, its inputs and torch's own state as they were, bit for bit; and repeats."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import offmap
from offmap.data import Rows
from offmap.maxwent import solve as maxwent
from offmap.maxwent.config import Config, Runtime
from offmap.maxwent.risk import Validation
from offmap.posterior.predictive import Stochastic
from zoo import Case
from zoo.ways import MODELS, WAYS

FINE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
"""What scales and scores are kept in, by the dtype of the model."""


def all_params(net: nn.Module) -> dict[str, Any]:
    """All there is to a model."""
    return {
        "parameters": {n: p.detach().clone() for n, p in net.named_parameters(remove_duplicate=False)},
        "buffers": {n: b.clone() for n, b in net.named_buffers(remove_duplicate=False)},
        "objects": {n: id(p) for n, p in net.named_parameters(remove_duplicate=False)},
        "modules": {n: id(m) for n, m in net.named_modules(remove_duplicate=False)},
        "gradients": {n: (p.requires_grad, p.grad is None) for n, p in net.named_parameters()},
        "modes": {n: m.training for n, m in net.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in net.named_modules()},
        "names": {n: sorted(vars(m)) for n, m in net.named_modules()},
    }


def surroundings() -> dict[str, Any]:
    """Torch's own state."""
    return {
        "random": torch.get_rng_state(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


def same(before: Any, after: Any) -> bool:
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(same(v, after[k]) for k, v in before.items())
    if isinstance(before, Tensor):
        return before.dtype == after.dtype and torch.equal(before, after)
    return bool(before == after)


@WAYS
def test_a_fit_leaves_everything_as_it_was(case: Case, basis: str, loop: bool):
    nets = [case.build(m) for m in range(2)]
    train, valid = case.data(8), case.data(6)
    torch.manual_seed(3)
    before = [all_params(net) for net in nets], surroundings(), [t.clone() for t in tree_leaves((train, valid))]
    guard = offmap.fit(
        nets, train, valid, basis=basis, output_fn=case.output_fn, chunk_size=1 if loop else 3, draws=2, risk_draws=2, steps=3,
        check_every=2, progress=False,
    )  # fmt: skip
    result = guard(rows := case.inputs(5))
    after = [all_params(net) for net in nets], surroundings(), tree_leaves((train, valid))
    for net_before, net_after in zip(before[0], after[0], strict=True):
        for what, value in net_before.items():
            assert same(value, net_after[what]), what
    for what, value in before[1].items():
        assert same(value, after[1][what]), what
    assert all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(rows), tree_leaves(case.inputs(5)), strict=True))
    # and it is a fit
    assert result.score.dtype == FINE[case.dtype]
    assert bool(result.score.isfinite().all())
    made = guard.predictive
    assert isinstance(made, Stochastic)
    validation = Validation(made.model, guard.likelihood, Rows(*valid, 4, "valid"), draws=2)
    validation = validation.clip_losses(made.q)
    assert bool((validation.evaluate(made.q).risk <= torch.tensor(guard.history.max_risk)).all())
    for name, scale in made.q.scale().items():
        assert scale.dtype == FINE[case.dtype]
        assert bool(((scale > 0) & scale.isfinite()).all()), name


@MODELS
def test_a_fit_repeats_to_the_bit(case: Case):
    nets = [case.build(m) for m in range(2)]
    first, again = (
        maxwent.fit(
            nets, Rows(*case.data(8), 4, "train"), Rows(*case.data(6), 4, "valid"), likelihood=case.likelihood,
            config=Config(steps=3, risk_draws=2), runtime=Runtime(output_fn=case.output_fn, progress=False),
        )
        for _ in range(2)
    )  # fmt: skip
    for name, scale in first.q.scale().items():
        assert torch.equal(again.q.scale()[name], scale), name


@MODELS
def test_what_is_done_to_the_host_later_does_not_reach_the_fit(case: Case):
    net = case.build()
    made = maxwent.fit(
        net, Rows(*case.data(8), 4, "train"), Rows(*case.data(6), 4, "valid"), likelihood=case.likelihood,
        config=Config(solver="closed-form", risk_draws=2), runtime=Runtime(output_fn=case.output_fn, progress=False),
    )  # fmt: skip
    before = made.outputs(case.inputs(5), 2, clip=None, seed=0)
    with torch.no_grad():
        for t in (*net.parameters(), *net.buffers()):
            t.zero_()
    net.train()
    assert torch.equal(made.outputs(case.inputs(5), 2, clip=None, seed=0), before)
    assert torch.equal(copy.deepcopy(made).outputs(case.inputs(5), 2, clip=None, seed=0), before)
