"""z is a function of its address and of nothing else."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offmap.errors import ConfigError
from offmap.posterior.noise import NOISES, Noise, Normal, Rademacher, Uniform, as_noise, draw_noise
from offmap.random import generator, permutation

GOLDEN = {
    "normal": [0.01390, -1.77138, -1.00354, 0.30098, -0.24448, 0.99447, 0.02364, 0.56212, 1.56970, -0.96315, 0.40100, 0.04931],
    "rademacher": [
        -1.0,
        -1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        -1.0,
        -1.0,
        1.0,
        -1.0,
    ],
    "uniform": [1.19133, 0.66170, 0.19643, -0.29497, 0.12487, -0.21665, -1.19368, 0.80396, -1.35077, 0.26849, 0.48583, -1.40385],
}
"""Draws 0 and 3 of two members of a weight of 2 numbers and of a bias of 1; a change would break every saved guard's numbers."""


def noise(shape: tuple[int, ...] = (4, 3), draw: int = 0, **changes: object) -> torch.Tensor:
    """z of one draw of member 0 of a parameter called "w"."""
    address = {"seed": 0, "stream": "infer", "noise": Uniform()} | changes
    name = str(address.pop("name", "w"))
    return draw_noise({name: torch.zeros(1, *shape)}, [draw], **address)[name][0, 0]


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_numbers(kind: str):
    # made in another process, with another seed of Python's own hash
    like = {"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2, 1)}
    z = draw_noise(like, [0, 3], seed=7, stream="infer", noise=NOISES[kind])
    assert [round(v, 5) for n in like for v in z[n].flatten().tolist()] == GOLDEN[kind]


@pytest.mark.parametrize(
    "changes", [{"draw": 1}, {"seed": 1}, {"stream": "fit"}, {"stream": "valid"}, {"name": "v"}, {"name": "w.w"}], ids=str
)
def test_every_part_of_the_address_matters(changes: dict[str, object]):
    assert not torch.equal(noise(), noise(**changes))


def test_all_streams_members_draws_and_names_have_numbers_of_their_own():
    like = {f"{i}.weight": torch.zeros(3, 4) for i in range(3)}
    z = [
        draw_noise(like, range(3), seed=seed, stream=stream, noise=Normal())[name][member, draw]
        for seed in (0, 1)
        for stream in ("fit", "valid", "infer")
        for name in like
        for member, draw in itertools.product(range(3), repeat=2)
    ]
    assert len(torch.unique(torch.stack(z), dim=0)) == 2 * 3 * 3 * 9


@given(order=st.permutations(range(6)), chunk=st.integers(1, 6), members=st.integers(1, 3), kind=st.sampled_from(sorted(NOISES)))
def test_numbers_depend_on_neither_chunk_nor_order_nor_other_members(order: list[int], chunk: int, members: int, kind: str):
    def draw(index: list[int], names: str, members: int) -> dict[str, torch.Tensor]:
        like = {n: torch.zeros(members, 2, 3) for n in names}
        return draw_noise(like, index, seed=3, stream="valid", noise=NOISES[kind])

    together = draw(list(range(6)), "ab", 3)["b"]
    for start in range(0, 6, chunk):
        index = order[start : start + chunk]
        assert torch.equal(draw(index, "b", members)["b"], together[:members, index])


@pytest.mark.parametrize("kind", sorted(NOISES))
def test_noise_has_zero_mean_and_unit_variance(kind: str):
    z = NOISES[kind].sample((200_000,), generator("moments", kind)).double()
    assert abs(float(z.mean())) < 5 / math.sqrt(200_000)
    assert abs(float(z.var()) - 1) < 5 * math.sqrt(2 / 200_000)


def test_laws_have_their_supports():
    assert 1.73 < float(noise((10_000,)).abs().max()) <= math.sqrt(3)
    assert noise((1000,), noise=Rademacher()).unique().tolist() == [-1.0, 1.0]
    assert 0.99 < float(noise((10_000,), noise=Uniform(1.0)).abs().max()) <= 1.0


def test_numbers_do_not_depend_on_the_default_dtype_or_device():
    before = torch.get_default_dtype()
    plain = {kind: noise(noise=NOISES[kind]) for kind in NOISES}
    order = permutation(7, "a")
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            like = torch.zeros(1, 4, 3, device="cpu", dtype=torch.float32)
            for kind, law in NOISES.items():
                assert torch.equal(draw_noise({"w": like}, [0], seed=0, stream="infer", noise=law)["w"][0, 0], plain[kind])
            assert torch.equal(permutation(7, "a"), order)
    finally:
        torch.set_default_dtype(before)


def test_float64_noise_is_the_float32_noise():
    double = draw_noise({"w": torch.zeros(1, 4, 3).double()}, [0], seed=0, stream="infer", noise=Uniform())["w"]
    assert double.dtype == torch.float64
    assert torch.equal(double[0, 0].float(), noise())


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    noise()
    permutation(10, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_entropy_of_each_law():
    assert Uniform().entropy() == pytest.approx(math.log(2 * math.sqrt(3)))
    assert Normal().entropy() == pytest.approx(0.5 * math.log(2 * math.pi * math.e))
    assert Rademacher().entropy() is None
    assert Rademacher().truncated_entropy(torch.ones(2)) is None


def test_unknown_noise_is_refused_and_the_nearest_named():
    with pytest.raises(ConfigError, match=r"Expected `noise` to be one of \['normal', .*\(did you mean 'normal'\?\), but got"):
        as_noise("gausnormal")
    with pytest.raises(ConfigError, match="Expected `noise` to be a name or an `offmap.posterior.noise.Noise`, but got 3"):
        as_noise(3)  # pyright: ignore[reportArgumentType]


def test_a_noise_of_the_users_own_is_drawn_from():
    class Constant(Noise):
        def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
            return torch.full(shape, 0.5)

        def variance(self) -> float:
            return 0.25

    assert isinstance(Constant(), Noise)
    assert noise(noise=as_noise(Constant())).unique().tolist() == [0.5]


@given(n=st.integers(0, 30), seed=st.integers(0, 5))
def test_permutation_is_a_shuffle_of_its_address(n: int, seed: int):
    order = permutation(n, seed, "order", 0)
    assert sorted(order.tolist()) == list(range(n))
    assert torch.equal(order, permutation(n, seed, "order", 0))
    if n > 15:
        assert not torch.equal(order, permutation(n, seed, "order", 1))
