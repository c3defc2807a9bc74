"""Laws of weights beside the diagonal one: their draws, written out, and their entropies against slow versions."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from offmap.errors import ConfigError
from offmap.model.matrix_view import rotate
from offmap.posterior.distribution import WeightDistribution, sum_per_member, svd
from offmap.posterior.noise import Normal, Rademacher, Uniform, as_noise, draw_noise
from offmap.posterior.parameterization import COORDINATES, Flow, LowRank, Subspace, WeightLaw, as_law, expand, orthonormal
from zoo import ZOO

LAWS: dict[str, WeightLaw] = {
    "low-rank": LowRank(rank=3), "subspace": Subspace(dimensions=5, steps=20), "flow": Flow(dimensions=5, layers=3, hidden=4),
}  # fmt: skip


def walk(mean: dict[str, Tensor], steps: int, lr: float, every: int) -> dict[str, Tensor]:
    """Made-up gradient steps."""
    return draw_noise(mean, range(steps // every), seed=7, stream="init", noise=Normal())


def make_distribution(name: str, *, members: int = 2, noise: str = "normal", uneven: bool = True) -> WeightDistribution:
    """A distribution in double precision around nets of one convolution and more, with uneven φ and state."""
    nets = [ZOO["conv1d"].build(m).double() for m in range(members)]
    plain = svd(nets, [ZOO["conv1d"].inputs().double()])
    law, mean = LAWS[name], {n: m.clone() for n, m in plain.mean.items()}
    directions = law.directions(mean, partial(walk, mean), 3) if law.spans else None
    q = WeightDistribution(mean, noise=as_noise(noise), parameterization=law, directions=directions, initial_scale=0.1)
    if law.rotated:
        q.rotation, q.views = plain.rotation, plain.views
    if uneven:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in q.trained().values():
                tensor += 0.5 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return q


# ----------------------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("clip", [None, 0.05])
def test_low_rank_draws_are_the_equation_written_out(clip: float | None):
    q = make_distribution("low-rank")
    drawn, noise = q.draw([4, 0], seed=5, stream="valid", clip=clip), partial(draw_noise, seed=5, stream="valid", noise=Normal())
    for position, (member, draw) in enumerate([(0, 4), (0, 0), (1, 4), (1, 0)]):
        for name, mean in q.mean.items():
            phi, a = q.scale()[name][member], q.state[name][member]
            z = noise({name: q.mean[name]}, [draw])[name][member, 0]
            eps = noise({f"{name}/rank": q.state[name].flatten(2)[:, :, 0]}, [draw])[f"{name}/rank"][member, 0]
            delta = phi * (z + torch.einsum("r,r...->...", eps, a))
            delta = delta if clip is None else delta.clamp(-clip, clip)
            if name in q.rotation:
                delta = rotate(delta[None, None], q.rotation[name][member][None], q.views[name])[0, 0]
            torch.testing.assert_close(drawn[name][position], mean[member] + delta)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", ["subspace", "flow"])
def test_draws_along_directions_are_the_equation_written_out(name: str, clip: float | None):
    q = make_distribution(name)
    drawn, z = q.draw([4, 0], seed=5, clip=clip), draw_noise(q.raw_scale, [4, 0], seed=5, stream="infer", noise=Normal())
    y = q.scale()[COORDINATES][:, None] * (transform(q, z[COORDINATES]) if name == "flow" else z[COORDINATES])
    y = y if clip is None else y.clamp(-clip, clip)
    for name, mean in q.mean.items():
        delta = torch.einsum("mpk,mk...->mp...", y, q.directions[name])
        torch.testing.assert_close(drawn[name], (mean[:, None] + delta).flatten(0, 1))


def transform(q: WeightDistribution, z: Tensor) -> Tensor:
    """RealNVP, coordinate by coordinate."""
    law, result = q.parameterization, torch.empty_like(z)
    assert isinstance(law, Flow)
    for member in range(z.shape[0]):
        for draw in range(z.shape[1]):
            x = z[member, draw]
            for layer in range(law.layers):
                w, b, v, c = (q.state[f"{layer}.{part}"][member] for part in ("in", "in_bias", "out", "out_bias"))
                a, moved = x[:2], x[2:]
                s, t = (torch.tanh(a @ w + b) @ v + c).split(3)
                x = torch.cat([moved * torch.exp(torch.tanh(s)) + t, a])
            result[member, draw] = x
    return result


@pytest.mark.parametrize("name", LAWS)
def test_a_draw_is_the_same_to_the_bit_whatever_others_are_asked(name: str):
    q = make_distribution(name).requires_grad_(False)
    many, one = q.draw(range(6), seed=2), q.draw([3], seed=2)
    for n in q.mean:
        assert torch.equal(many[n].unflatten(0, (2, 6))[:, 3], one[n])
        assert not torch.equal(many[n][0], many[n][1])
        assert not torch.equal(many[n][3] - q.mean[n][0], many[n][9] - q.mean[n][1])
    assert not any(torch.equal(many[n], q.draw(range(6), seed=3)[n]) for n in q.mean)


@pytest.mark.parametrize("name", LAWS)
def test_gradients_do_not_change_draws_and_reach_every_number(name: str):
    q = make_distribution(name, uneven=False)
    with torch.no_grad():
        plain = q.draw(range(3))
    drawn = q.draw(range(3))
    for n, w in drawn.items():
        torch.testing.assert_close(w, plain[n])
    target = sum_per_member({n: (w - 1).square() for n, w in drawn.items()}).sum()
    (target - q.sampled_entropy(range(3), seed=0, stream="fit").sum()).backward()
    for part, tensor in q.trained().items():
        assert tensor.grad is not None, part
        assert bool((tensor.grad != 0).all()), part


@pytest.mark.parametrize("name", LAWS)
def test_clips_bound_coordinates_and_zero_gives_the_model_to_the_bit(name: str):
    q = make_distribution(name).requires_grad_(False)
    q.scale_by(20.0)
    free, endless, none, clipped = (q.draw(range(4), clip=c) for c in (None, math.inf, 0.0, 0.3))
    for n, mean in q.mean.items():
        assert torch.equal(free[n], endless[n])
        assert torch.equal(none[n], mean.repeat_interleave(4, 0))
    deltas = {n: (clipped[n].unflatten(0, (2, 4)) - mean[:, None]) for n, mean in q.mean.items()}
    if name == "low-rank":
        coordinates = [rotate(d, q.rotation[n].mT, q.views[n]) if n in q.rotation else d for n, d in deltas.items()]
    else:
        coordinates = [torch.stack([torch.einsum("mp...,mk...->mpk", d, q.directions[n]) for n, d in deltas.items()]).sum(0)]
    assert max(float(c.abs().max()) for c in coordinates) == pytest.approx(0.3)


@pytest.mark.parametrize("name", LAWS)
def test_a_factor_widens_draws_in_proportion(name: str):
    q, factor = make_distribution(name).requires_grad_(False), torch.tensor([0.5, 3.0], dtype=torch.float64)
    expected = q.rescale_draws(q.draw(range(4)), range(1, 3), factor, [0, 1])
    before, tried = q.mean_log_square(), q.draw([1, 2], factor=factor)
    q.scale_by(factor)
    for n, w in q.draw([1, 2]).items():
        torch.testing.assert_close(w, expected[n])
        torch.testing.assert_close(w, tried[n])
    torch.testing.assert_close(q.mean_log_square() - before, 2 * factor.log())


# -------------------------------------------------------------------------------------------------------------- entropies


def test_low_rank_entropy_is_that_of_the_dense_gaussian():
    q = make_distribution("low-rank")
    for member, entropy in enumerate(q.entropy()):
        expected = torch.zeros((), dtype=torch.float64)
        for name, phi in q.scale().items():
            d, u = phi[member].flatten(), phi[member].flatten() * q.state[name][member].flatten(1)
            covariance = torch.diag(d.square()) + u.mT @ u
            expected += 0.5 * torch.linalg.slogdet(2 * math.pi * math.e * covariance)[1]
        torch.testing.assert_close(entropy, expected)


def test_low_rank_draws_have_the_covariance_of_the_entropy():
    q = make_distribution("low-rank", members=1).requires_grad_(False)
    name, draws = "0.bias", 20_000
    delta = q.draw(range(draws))[name] - q.mean[name]
    d, u = q.scale()[name].flatten(), q.scale()[name].flatten() * q.state[name][0].flatten(1)
    expected = torch.diag(d.square()) + u.mT @ u
    torch.testing.assert_close(delta.mT @ delta / draws, expected, rtol=0.1, atol=0.05 * float(expected.max()))


@pytest.mark.parametrize("noise", ["normal", "uniform"])
def test_subspace_entropy_is_that_of_independent_coordinates(noise: str):
    q = make_distribution("subspace", noise=noise)
    phi, root = q.scale()[COORDINATES], math.sqrt(3.0)
    law = torch.distributions.Normal(0.0, phi) if noise == "normal" else torch.distributions.Uniform(-root * phi, root * phi)
    torch.testing.assert_close(q.entropy(), law.entropy().sum(1))
    torch.testing.assert_close(q.clipped_entropy(None).continuous.double(), q.entropy(), rtol=1e-5, atol=1e-5)


def test_flow_entropy_follows_from_the_jacobian_of_autograd():
    q = make_distribution("flow", noise="uniform")
    law, z = q.parameterization, draw_noise(q.raw_scale, range(7), seed=1, stream="valid", noise=Uniform())[COORDINATES]
    assert isinstance(law, Flow)
    for member in range(2):
        state = {n: t[member : member + 1] for n, t in q.state.items()}
        phi, logs = q.scale()[COORDINATES][member], []
        forward = partial(lambda x, phi, state: phi * law.transform(x.view(1, 1, -1), state)[0].flatten(), phi=phi, state=state)
        for draw in z[member]:
            jacobian = torch.autograd.functional.jacobian(forward, draw)
            logs.append(torch.linalg.slogdet(jacobian)[1])
        expected = torch.stack(logs).mean() + 5 * math.log(2 * math.sqrt(3))
        torch.testing.assert_close(q.sampled_entropy(range(7), seed=1, stream="valid")[member], expected)
    torch.testing.assert_close(q.entropy(draws=7), q.mean_log_square() * 5 / 2 + 5 * Uniform().entropy(), rtol=0.2, atol=0.5)


# ------------------------------------------------------------------------------------------------------------- directions


@pytest.mark.parametrize("name", ["subspace", "flow"])
def test_directions_are_orthonormal_over_all_parameters_of_a_member(name: str):
    rows = torch.cat([s.flatten(2) for s in make_distribution(name).directions.values()], 2)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(5, dtype=rows.dtype).expand(2, 5, 5))
    assert not torch.allclose(rows[0], rows[1])


def test_subspace_directions_hold_what_the_steps_moved_most():
    mean = {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(2, 4, 2, dtype=torch.float64)}
    steps = walk(mean, 6, 0.1, 1)
    found = Subspace(dimensions=2, steps=6).directions(mean, lambda *_: steps, 0)
    for member in range(2):
        rows = torch.cat([s[member].flatten(1) for s in steps.values()], 1)
        values, vectors = torch.linalg.eigh(rows.mT @ rows)
        basis = torch.cat([s[member].flatten(1) for s in found.values()], 1)
        torch.testing.assert_close(basis.mT @ basis, vectors[:, -2:] @ vectors[:, -2:].mT)
        torch.testing.assert_close((rows @ basis.mT).square().sum(), values[-2:].sum())


def test_there_are_no_more_directions_than_weights():
    mean = {"w": torch.zeros(2, 3)}
    assert Flow(dimensions=8).directions(mean, partial(walk, mean), 0)["w"].shape == (2, 3, 3)
    assert orthonormal({"w": torch.ones(1, 2, 3).half()}, lambda rows: rows)["w"].dtype == torch.float32


def test_expanded_coordinates_of_one_draw_do_not_depend_on_others():
    y, s = torch.randn(2, 9, 40), {"w": torch.randn(2, 40, 30, 7)}
    many = expand(y, s)["w"]
    assert all(torch.equal(many[:, p], expand(y[:, [p]], s)["w"][:, 0]) for p in range(9))


# ---------------------------------------------------------------------------------------------------------------- options


def test_another_law_can_be_copied_and_restarted():
    q = make_distribution("flow").requires_grad_(False)
    other = copy.deepcopy(q)
    assert all(torch.equal(w, other.draw([1])[n]) for n, w in q.draw([1]).items())
    q.restart(0.1)
    assert all(torch.equal(t, make_distribution("flow", uneven=False).trained()[n]) for n, t in q.trained().items())


def test_options_are_refused():
    with pytest.raises(ConfigError, match="Expected `rank` to be a whole number from 1 to 1024, but got 0"):
        LowRank(rank=0)
    with pytest.raises(ConfigError, match="Expected `lr` to be a number above 0, but got -1"):
        Subspace(lr=-1)
    with pytest.raises(ConfigError, match="Expected `layers` to be a whole number from 0 to 64, but got 2.5"):
        Flow(layers=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ConfigError, match=r"Expected `parameterization` to be .*'low-rank'.* or an object such as `LowRank\(rank=8\)`"
    ):
        as_law("lowrank")
    flow = make_distribution("flow")
    flow.noise = Rademacher()
    with pytest.raises(ConfigError, match="Rademacher noise has no density, so its weight entropy is not defined"):
        flow.entropy()
