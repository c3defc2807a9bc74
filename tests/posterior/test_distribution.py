"""w = w̄ + V·clip(φ ⊙ z, c), φ = softplus(u), and its entropy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
from offmap.errors import ConfigError
from offmap.posterior import distribution
from offmap.posterior.basis import Rotation
from offmap.posterior.distribution import WeightDistribution, inverse_softplus, scaling, svd
from offmap.posterior.noise import NOISES, Normal, Stream, Uniform, draw_noise
from offmap.posterior.parameterization import Parameterization
from zoo import ZOO


def uneven(q: WeightDistribution, seed: int = 0) -> WeightDistribution:
    """The same distribution, fixed, with another φ for every weight, log-uniform in [0.01, 1]."""
    generator = torch.Generator().manual_seed(seed)
    q.set_scale({n: 10 ** (-2 * torch.rand(s.shape, generator=generator)) for n, s in q.scale().items()})
    return q.requires_grad_(False)


def small(basis: str = "svd", *, members: int = 2, noise: str = "uniform", model: str = "conv1d") -> WeightDistribution:
    nets = [ZOO[model].build(m) for m in range(members)]
    q = svd(nets, [ZOO[model].inputs()], noise=noise) if basis == "svd" else scaling(nets, noise=noise)
    return uneven(q)


@pytest.mark.parametrize("noise", sorted(NOISES))
@pytest.mark.parametrize("basis", ["svd", "identity"])
@pytest.mark.parametrize("clip", [None, math.inf, 0.3, 0.05, 0.0])
def test_draws_are_the_equation_written_out(basis: str, noise: str, clip: float | None):
    q = small(basis, noise=noise)
    drawn = q.draw([4, 0], seed=5, stream="valid", clip=clip)
    for position, (member, draw) in enumerate([(0, 4), (0, 0), (1, 4), (1, 0)]):  # member-major
        slow = oracles.draw(q, draw, member=member, seed=5, stream="valid", clip=math.inf if clip is None else clip)
        for name, weight in slow.items():
            torch.testing.assert_close(drawn[name][position].double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_clip_zero_gives_the_models_weights_to_the_bit_and_clip_infinity_is_no_clip(basis: str):
    nets = [ZOO["conv1d"].build(m) for m in range(2)]
    q = small(basis)
    still, free, endless = (q.draw(range(3), clip=c) for c in (0, None, math.inf))
    for name, parameter in nets[0].named_parameters():
        assert all(torch.equal(still[name][i], parameter) for i in range(3))
        assert torch.equal(still[name][3], nets[1].get_parameter(name))
        assert torch.equal(free[name], endless[name])


@given(clip=st.floats(1e-4, 2.0))
@settings(max_examples=20)
def test_clip_bounds_the_noise_in_the_basis_on_both_sides(clip: float):
    q = small(members=1)
    for name, stack in q.draw(range(20), clip=clip).items():
        delta = (stack - q.mean[name]).detach().double()
        if name in q.rotation:
            back = q.rotation[name][0].double().mT
            delta = torch.stack([oracles.turn(d, back, q.views[name]) for d in delta])
        assert float(delta.abs().max()) <= clip + 1e-6
        if clip < 0.01:
            assert float(delta.max()) > 0.9 * clip
            assert float(delta.min()) < -0.9 * clip


@pytest.mark.parametrize("clip", [-0.1, -math.inf, math.nan])
def test_an_impossible_clip_is_refused(clip: float):
    with pytest.raises(ConfigError, match=f"Expected `clip` to be a number ≥ 0 or None, but got {clip}"):
        small().draw([0], clip=clip)


@pytest.mark.parametrize("basis", ["svd", "identity"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_drawn_weights_are_bit_identical_for_any_chunk_and_order(basis: str, clip: float | None):
    q = small(basis)
    together = {n: w.unflatten(0, (2, 12)) for n, w in q.draw(range(12), clip=clip).items()}
    for order in ([*range(12)], [*range(11, -1, -1)], [3, 0, 7, 7, 11]):
        for chunk in (1, 2, 5, 12):
            for start in range(0, len(order), chunk):
                index = order[start : start + chunk]
                for name, w in q.draw(index, clip=clip).items():
                    assert torch.equal(w.unflatten(0, (2, len(index))), together[name][:, index])


def test_a_member_draws_the_same_alone_and_beside_others():
    # member 0 has the same address in both; a basis comes from its own activations
    both, alone = small(members=2), small(members=1)
    both.set_scale({n: torch.full_like(s, 0.1) for n, s in both.scale().items()})
    alone.set_scale({n: torch.full_like(s, 0.1) for n, s in alone.scale().items()})
    together = both.draw(range(3))
    assert all(torch.equal(w, together[n][:3]) for n, w in alone.draw(range(3)).items())


@pytest.mark.parametrize("limit", [0, 1 << 23])
def test_cached_noise_is_never_mistaken_for_other_noise(limit: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distribution, "CACHE_NUMBERS", limit)
    q = small()
    asked = [((0, 1), 0, "infer"), ((0, 1), 1, "infer"), ((0, 1), 0, "infer"), ((0, 1), 0, "valid"), ((1, 0), 0, "valid"),
             ((0,), 0, "valid"), ((0, 1), 0, "fit"), ((0, 1), 0, "valid")]  # fmt: skip
    for index, seed, stream in asked:
        ours, fresh = q.draw(index, seed=seed, stream=stream), small().draw(index, seed=seed, stream=stream)
        assert all(torch.equal(ours[n], fresh[n]) for n in ours)


def test_members_layers_of_one_shape_and_streams_get_different_noise():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    q = scaling([net, net], initial_scale=1.0)
    drawn = [
        w - q.mean[n][0] for stream in ("fit", "valid", "infer") for n, w in q.draw([0, 1], stream=stream).items() if w.ndim == 3
    ]
    assert len(torch.unique(torch.cat(drawn).flatten(1).detach(), dim=0)) == 3 * 2 * 4


def test_gradient_in_the_scale_is_the_noise_times_the_slope_of_softplus():
    q = uneven(scaling(nn.Linear(3, 2).double()))
    q.raw_scale.requires_grad_(True)
    drawn = q.draw([5], stream="fit")
    sum(w.sum() for w in drawn.values()).backward()
    for name, raw in q.raw_scale.items():
        z = oracles.noise_of(q, name, seed=0, stream="fit", member=0, draw=5)
        torch.testing.assert_close(raw.grad[0], z * raw[0].detach().sigmoid())


@given(st.floats(1e-11, 1e4), st.sampled_from([torch.float32, torch.float64]))
def test_inverse_softplus_undoes_softplus(scale: float, dtype: torch.dtype):
    value = torch.tensor(scale, dtype=dtype)
    torch.testing.assert_close(F.softplus(inverse_softplus(value)), value, rtol=1e-5, atol=0)


def test_a_scale_of_zero_is_floored_not_infinite():
    q = scaling(nn.Linear(3, 2))
    q.set_scale({n: torch.zeros_like(s) for n, s in q.scale().items()})
    for scale in q.scale().values():
        torch.testing.assert_close(scale, torch.full_like(scale, 1e-12), rtol=1e-4, atol=0)
    assert bool(q.entropy().isfinite().all())


def test_what_is_set_is_what_is_read():
    q = small()
    wanted = {n: torch.rand_like(s) + 1e-3 for n, s in q.scale().items()}
    q.set_scale(wanted)
    for name, scale in q.scale().items():
        torch.testing.assert_close(scale, wanted[name], rtol=1e-5, atol=0)


def test_half_precision_models_draw_half_precision_weights_from_float32_scales():
    q = uneven(svd(nn.Linear(3, 2).bfloat16(), [torch.randn(8, 3).bfloat16()]))
    assert {w.dtype for w in q.draw(range(2)).values()} == {torch.bfloat16}
    assert {s.dtype for s in q.scale().values()} == {torch.float32}


def test_dimension_counts_random_weights_of_one_member():
    assert scaling([ZOO["mlp"].build(m) for m in range(3)], params="*.bias").dimension == 8 + 2


# --------------------------------------------------------------------------------------------------------------- entropy


@pytest.mark.parametrize(("noise", "unit"), [("normal", math.log(2 * math.pi * math.e) / 2), ("uniform", math.log(12) / 2)])
@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_entropy_is_the_sum_of_log_scales_plus_that_of_the_noise(basis: str, noise: str, unit: float):
    q = small(basis, noise=noise)
    for member in range(2):
        logs = sum(float(s[member].double().log().sum()) for s in q.scale().values())
        assert float(q.entropy()[member]) == pytest.approx(logs + q.dimension * unit, rel=1e-5)
        assert float(q.mean_log_square()[member]) == pytest.approx(2 * logs / q.dimension, rel=1e-5)


@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_entropy_of_normal_weights_agrees_with_monte_carlo(basis: str):
    q = small(basis, noise="normal", members=1)
    # log-densities of d independent normals scatter by √(d/2)
    scatter = math.sqrt(q.dimension / 2 / 400)
    assert oracles.entropy_by_sampling(q, 400) == pytest.approx(float(q.entropy()), abs=4 * scatter)


def test_entropy_of_uniform_weights_agrees_with_the_range_of_draws():
    q = uneven(scaling(nn.Linear(3, 2)))
    assert oracles.entropy_by_range(q, 2000) == pytest.approx(float(q.entropy()), abs=8 * 4 / 2000)


def test_entropy_of_a_narrower_uniform_law_counts_its_width():
    mean = {"w": torch.zeros(1, 5)}
    wide, narrow = (WeightDistribution(mean, noise=Uniform(h), initial_scale=0.5).requires_grad_(False) for h in (2.0, 1.0))
    assert float(wide.entropy() - narrow.entropy()) == pytest.approx(5 * math.log(2))


def test_rademacher_noise_has_no_entropy_but_the_papers_figure():
    q = small(noise="rademacher")
    assert bool(q.mean_log_square().isfinite().all())
    with pytest.raises(ConfigError, match="Rademacher noise has no density, so its weight entropy is not defined; use 'uniform'"):
        q.entropy()


def test_a_rotation_does_not_change_the_entropy():
    mean = {"w": torch.randn(1, 2, 3)}
    v = torch.linalg.qr(torch.randn(1, 3, 3))[0]
    scale = {"w": torch.rand(1, 2, 3)}
    plain = WeightDistribution(mean, initial_scale=scale)
    turned = WeightDistribution(mean, initial_scale=scale, rotation=Rotation({"w": v}, {"w": (1,)}))
    assert torch.equal(plain.entropy(), turned.entropy())


def test_entropy_of_a_mixture_lies_between_the_mean_and_the_mean_plus_log_m():
    q = small(members=2)
    low, high = q.mixture_entropy_bounds()
    assert float(low) == pytest.approx(float(q.entropy().mean()))
    assert float(high - low) == pytest.approx(math.log(2), rel=1e-3)
    # two equal members: the mixture is one of them; two far apart: the upper bound, by sampling its density
    for distance, expected in ((0.0, 0.0), (100.0, math.log(2))):
        mean = {"w": torch.tensor([[0.0, 0.0], [distance, 0.0]])}
        q = WeightDistribution(mean, noise=Normal(), initial_scale=0.5).requires_grad_(False)
        w = q.draw(range(2000))["w"].detach()
        each = torch.stack([torch.distributions.Normal(m, 0.5).log_prob(w).sum(1) for m in mean["w"]])
        mixture = -float((each.logsumexp(0) - math.log(2)).mean())
        assert mixture - float(q.entropy().mean()) == pytest.approx(expected, abs=0.1)


# ------------------------------------------------------------------------------------------------------- a user's own ω


def by_hand() -> Parameterization:
    """Scaling with normal noise, written by a user."""

    def log_density(weights: dict[str, Tensor], mean: dict[str, Tensor], scale: dict[str, Tensor]) -> Tensor:
        each = [torch.distributions.Normal(mean[n], scale[n]).log_prob(w).flatten(2).sum(2) for n, w in weights.items()]
        return torch.stack(each).sum(0)

    return Parameterization(lambda mean, scale, z: {n: mean[n] + scale[n] * z[n] for n in mean}, log_density)


def pair() -> tuple[WeightDistribution, WeightDistribution]:
    nets = [ZOO["mlp"].build(m).double() for m in range(2)]
    mean = {n: torch.stack([net.get_parameter(n).detach() for net in nets]) for n, _ in nets[0].named_parameters()}
    ours = uneven(WeightDistribution(mean, noise=Normal()))
    return ours, uneven(WeightDistribution(mean, noise=Normal(), parameterization=by_hand()))


@pytest.mark.parametrize("clip", [None, 0.1, 0.0])
def test_a_users_own_scaling_draws_like_ours(clip: float | None):
    ours, theirs = pair()
    expected, drawn = ours.draw(range(3), clip=clip), theirs.draw(range(3), clip=clip)
    for name, w in expected.items():
        torch.testing.assert_close(drawn[name], w)


def test_sampled_entropy_of_a_users_own_scaling_agrees_with_the_exact_one():
    ours, theirs = pair()
    sampled = theirs.entropy(draws=500)
    torch.testing.assert_close(sampled, ours.entropy(), rtol=0, atol=4 * math.sqrt(ours.dimension / 2 / 500))


def test_the_gradient_of_sampled_entropy_is_the_exact_one():
    # −log q(w(φ)) = Σ log φ + terms without φ, so every sample has the same gradient
    ours, theirs = pair()
    for q in (ours, theirs):
        q.raw_scale.requires_grad_(True)
    ours.entropy().sum().backward()
    theirs.sampled_entropy(range(1), seed=0, stream="fit").sum().backward()
    for name, raw in ours.raw_scale.items():
        torch.testing.assert_close(theirs.raw_scale[name].grad, raw.grad)


# ----------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_a_state_dict_brings_a_distribution_back_to_the_bit(basis: str):
    q = small(basis)
    other = svd([ZOO["conv1d"].build(m) for m in (5, 6)], [ZOO["conv1d"].inputs()]) if basis == "svd" else scaling(
        [ZOO["conv1d"].build(m) for m in (5, 6)]
    )  # fmt: skip
    other.load_state_dict(q.state_dict())
    ours, theirs = q.draw(range(3), seed=2), other.draw(range(3), seed=2)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_every_member_is_widened_by_its_own_factor():
    q = small(members=2)
    before = {n: s.detach().clone() for n, s in q.scale().items()}
    factor = torch.tensor([2.0, 0.5], dtype=torch.float64)
    tried = q.draw(range(3), factor=factor)
    q.scale_by(factor)
    for name, scale in q.scale().items():
        torch.testing.assert_close(scale, torch.stack([2 * before[name][0], 0.5 * before[name][1]]))
        torch.testing.assert_close(q.draw(range(3))[name], tried[name], rtol=1e-5, atol=1e-7)


def test_a_scale_that_is_given_is_not_written():
    q = WeightDistribution({"w": torch.zeros(2, 3)})
    given = {"w": torch.ones(2, 3)}
    wide = q.draw(range(2), scale=given, factor=torch.tensor([2.0, 3.0]))["w"]
    assert torch.equal(given["w"], torch.ones(2, 3))
    assert torch.equal(wide, q.draw(range(2), scale={"w": torch.tensor([[2.0], [3.0]]).expand(2, 3)})["w"])


@pytest.mark.parametrize("trainable", [True, False])
def test_a_mean_that_is_trained_is_a_copy(trainable: bool):
    given = torch.zeros(1, 3)
    q = WeightDistribution({"w": given}, trainable_mean=trainable)
    assert (q.mean["w"].data_ptr() == given.data_ptr()) is not trainable


@pytest.mark.parametrize("basis", ["svd", "identity"])
def test_stretched_draws_are_those_of_a_wider_scale(basis: str):
    q, factor = small(basis).requires_grad_(True), torch.tensor([2.0, 0.5])
    rescale_draws, drawn = q.rescale_draws(q.draw(range(3)), range(3), factor, [0, 1]), q.draw(range(3), factor=factor)
    assert rescale_draws.keys() == drawn.keys()
    for name, w in rescale_draws.items():
        torch.testing.assert_close(w, drawn[name].detach(), rtol=1e-5, atol=1e-6)
        assert drawn[name].requires_grad
        assert not w.requires_grad  # they are tried, not trained
    second = q.rescale_draws(q.draw(range(3)), range(1, 3), factor[1:], [1])
    assert second.keys() == drawn.keys()
    for name, w in second.items():
        torch.testing.assert_close(w, rescale_draws[name][4:])


@pytest.mark.parametrize(("limit", "stream", "made"), [(None, "infer", 1), (36, "infer", 1), (35, "infer", 2), (None, "fit", 2)])
def test_noise_is_made_once_where_it_is_small_and_asked_for_again(
    limit: int | None, stream: Stream, made: int, monkeypatch: pytest.MonkeyPatch
):
    """Two members of six weights, three draws: 36 numbers."""
    q, asked = WeightDistribution({"w": torch.zeros(2, 3, 2)}).requires_grad_(False), list[str]()

    def count_draws(like: dict[str, Tensor], *args: Any, **options: Any) -> dict[str, Tensor]:
        asked.extend(like)
        return draw_noise(like, *args, **options)

    monkeypatch.setattr(distribution, "draw_noise", count_draws)
    if limit is not None:
        monkeypatch.setattr(distribution, "CACHE_NUMBERS", limit)
    first, second = (q.draw(range(3), stream=stream)["w"] for _ in range(2))
    assert torch.equal(first, second)
    assert len(asked) == made


@pytest.mark.parametrize("name", ["mlp", "grouped", "attention", "tied", "bfloat16"])
@pytest.mark.parametrize("clip", [None, 0.05, math.inf])
@pytest.mark.parametrize("factor", [None, torch.tensor([0.5, 2.0])])
@pytest.mark.parametrize("limit", [0, 1 << 23])
def test_draws_in_place_are_those_of_the_equation_to_the_bit(
    name: str, clip: float | None, factor: Tensor | None, limit: int, monkeypatch: pytest.MonkeyPatch
):
    case = ZOO[name] if name in ZOO else ZOO["mlp"]
    nets = [case.build(m) for m in range(2)]
    inputs = case.inputs()
    if name == "bfloat16":
        nets, inputs = [net.bfloat16() for net in nets], inputs.bfloat16()
    q = svd(nets, [inputs], initial_scale=0.1)
    monkeypatch.setattr(distribution, "CACHE_NUMBERS", limit)
    with torch.no_grad():
        fast = q.draw(range(2, 5), clip=clip, factor=factor)
        monkeypatch.setattr(distribution, "_needs_gradient", lambda *tensors: True)
        equation = q.draw(range(2, 5), clip=clip, factor=factor)
    assert fast.keys() == equation.keys()
    assert all(torch.equal(fast[n], equation[n]) and fast[n].dtype == equation[n].dtype for n in fast)
