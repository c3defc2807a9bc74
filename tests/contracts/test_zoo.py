"""What holds for every model × basis × way to run it."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
from offmap.errors import ModelError
from offmap.model.forward import BatchedModel, copy_model, forward
from offmap.posterior.distribution import WeightDistribution, scaling, svd
from offmap.posterior.noise import draw_noise
from offmap.posterior.predictive import Stochastic
from zoo import Case
from zoo.ways import BASES, BATCHED, LOOPED, WAYS

DRAWS, SCALE = 6, 0.05


@cache
def private(case: Case) -> nn.Module:
    return copy_model(case.build())


def fresh(case: Case, basis: str, members: int = 1) -> WeightDistribution:
    nets = [case.build(m) for m in range(members)]
    return svd(nets, [case.inputs()], initial_scale=SCALE) if basis == "svd" else scaling(nets, initial_scale=SCALE)


@cache
def distribution(case: Case, basis: str, members: int = 1) -> WeightDistribution:
    """One that all tests look at and none writes to."""
    return fresh(case, basis, members).requires_grad_(False)


def model(case: Case, *, loop: bool, **options: Any) -> BatchedModel:
    return BatchedModel(private(case), **{"chunk_size": 1 if loop else 4, "output_fn": case.output_fn, **options})


def rows(inputs: Any, part: slice) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[part]
    return {n: t[part] for n, t in inputs.items()} if isinstance(inputs, dict) else tuple(t[part] for t in inputs)


@WAYS
def test_outputs_are_those_of_the_host_with_the_drawn_weights(case: Case, basis: str, loop: bool):
    q = distribution(case, basis, members=2)
    fast = model(case, loop=loop).outputs(q.draw, DRAWS, case.inputs(), members=2)
    assert fast.dtype == torch.promote_types(case.dtype, torch.float32)
    slow = oracles.run(case.build(), q.draw(range(DRAWS)), case.inputs(), case.output_fn)
    case.assert_close(fast, slow.to(fast))


@BASES
def test_draws_are_the_equation_written_out(case: Case, basis: str):
    q = distribution(case, basis, members=2)
    for clip in (math.inf, 0.5 * SCALE):
        drawn = q.draw([3, 1], seed=2, clip=clip)
        for position, (member, draw) in enumerate([(0, 3), (0, 1), (1, 3), (1, 1)]):
            for name, weight in oracles.draw(q, draw, member=member, seed=2, clip=clip).items():
                assert drawn[name].dtype == case.dtype
                case.assert_close(drawn[name][position].double(), weight, rtol=1e-5, atol=1e-6)


@BASES
def test_clip_zero_gives_the_models_weights_to_the_bit_and_infinity_is_no_clip(case: Case, basis: str):
    q = distribution(case, basis)
    still, free, endless = (q.draw(range(2), clip=c) for c in (0, None, math.inf))
    for name, parameter in case.build().named_parameters():
        assert torch.equal(still[name], torch.stack([parameter, parameter]))
        assert torch.equal(free[name], endless[name])


@WAYS
def test_clip_zero_gives_the_models_outputs(case: Case, basis: str, loop: bool):
    made = Stochastic(model(case, loop=loop), distribution(case, basis))
    outputs = made.outputs(case.inputs(), 3, clip=0.0, seed=0)
    plain = case.output_fn(oracles.run_once(case.build().eval(), case.inputs())).detach()
    case.assert_close(outputs, plain.expand(3, *plain.shape).to(outputs), rtol=1e-5, atol=1e-6)


@BASES
def test_drawn_weights_are_bit_identical_for_any_chunk_and_order(case: Case, basis: str):
    q = distribution(case, basis, members=2)
    together = {n: w.unflatten(0, (2, DRAWS)) for n, w in q.draw(range(DRAWS)).items()}
    for index in ([0], [5], [4, 2], [5, 4, 3, 2, 1, 0]):
        for name, w in q.draw(index).items():
            assert torch.equal(w.unflatten(0, (2, len(index))), together[name][:, index]), name


@WAYS
def test_outputs_and_scores_agree_for_any_batch_and_chunk(case: Case, basis: str, loop: bool):
    q, x = distribution(case, basis), case.inputs()
    whole = model(case, loop=loop, batch_size=100).outputs(q.draw, DRAWS, x)
    spread = float(whole.std())
    for batch, chunk in ((1, 4), (5, 5), (12, DRAWS)):
        parts = model(case, loop=loop, batch_size=batch, **({} if loop else {"chunk_size": chunk})).outputs(q.draw, DRAWS, x)
        case.assert_close(parts, whole, atol=1e-5 * spread)
        case.assert_close(case.likelihood.score(parts), case.likelihood.score(whole), atol=1e-7)
    alone = model(case, loop=loop).outputs(q.draw, DRAWS, rows(x, slice(3, 4)))
    case.assert_close(alone, whole[:, 3:4], atol=1e-5 * spread)


@WAYS
def test_two_draws_differ_in_every_weight_and_in_the_outputs(case: Case, basis: str, loop: bool):
    q = distribution(case, basis)
    drawn = q.draw(range(2))
    assert all(not torch.equal(w[0], w[1]) for w in drawn.values())
    with torch.no_grad():
        outputs = forward(private(case), drawn, case.inputs(), loop=loop, output_fn=case.output_fn)
    assert float((outputs[0] - outputs[1]).abs().max()) > 1e-4


@BASES
def test_parameters_of_one_shape_members_and_streams_get_different_noise(case: Case, basis: str):
    q = distribution(case, basis, members=2)
    seen: dict[torch.Size, list[Tensor]] = {}
    for stream in ("fit", "valid", "infer"):
        for name in q.mean:
            z = draw_noise({name: q.mean[name]}, [0, 1], seed=0, stream=stream, noise=q.noise)[name].flatten(0, 1)
            seen.setdefault(z.shape[1:], []).extend(z)
    for shape, draws in seen.items():
        if shape.numel() > 1:
            assert len(torch.unique(torch.stack(draws).flatten(1), dim=0)) == len(draws)


@WAYS
def test_the_gradient_reaches_every_scale(case: Case, basis: str, loop: bool):
    q = fresh(case, basis, members=2)
    outputs = forward(private(case), q.draw(range(3), stream="fit"), case.inputs(), loop=loop, output_fn=case.output_fn)
    outputs.square().sum().backward()
    for name, raw in q.raw_scale.items():
        assert raw.grad is not None, name
        assert bool(raw.grad.isfinite().all()), name
        for member in range(2):
            assert float(raw.grad[member].abs().max()) > 0, name


@BATCHED
def test_vmap_and_loop_have_one_gradient(case: Case, basis: str):
    gradients: list[dict[str, Tensor]] = []
    for loop in (True, False):
        q = fresh(case, basis)
        forward(private(case), q.draw(range(3)), case.inputs(), loop=loop, output_fn=case.output_fn).square().sum().backward()
        gradients.append({n: raw.grad for n, raw in q.raw_scale.items()})
    for name, slow in gradients[0].items():
        case.assert_close(gradients[1][name], slow, rtol=1e-3, atol=1e-4 * float(slow.abs().max()))


@LOOPED
def test_models_for_the_loop_are_those_that_vmap_refuses_or_is_slow_at(case: Case):
    drawn = distribution(case, "identity").draw(range(2))
    with torch.no_grad(), pytest.raises((ModelError, UserWarning), match="Pass `chunk_size=1`|There is a performance drop"):
        forward(private(case), drawn, case.inputs(), output_fn=case.output_fn)


@BASES
def test_rotations_are_orthogonal_and_leave_the_entropy_alone(case: Case, basis: str):
    q = distribution(case, basis, members=2)
    assert set(q.rotation) == (set(case.rotated()) if basis == "svd" else set())
    for matrix in q.rotation.values():
        eye = torch.eye(matrix.shape[-1], dtype=torch.promote_types(case.dtype, torch.float32)).expand_as(matrix)
        torch.testing.assert_close(matrix.mT @ matrix, eye, rtol=0, atol=1e-5)
    torch.testing.assert_close(q.entropy(), distribution(case, "identity", members=2).entropy())


@BASES
def test_a_state_dict_brings_the_draws_back_to_the_bit(case: Case, basis: str):
    q = fresh(case, basis)
    q.set_scale({n: s * (1 + torch.rand_like(s)) for n, s in q.scale().items()})
    other = copy.deepcopy(q)
    other.set_scale({n: 2 * s for n, s in q.scale().items()})
    other.load_state_dict(q.state_dict())
    ours, theirs = q.draw(range(2)), other.draw(range(2))
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
