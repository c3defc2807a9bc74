"""The chunk is measured once for a form of model, and is one that the model can run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from offmap.model import chunk as module
from offmap.model.chunk import CHUNK_NUMBERS, SECONDS, choose_chunk
from offmap.model.forward import BatchedModel, first_tensor
from offmap.model.params import copy_model
from offmap.model.select import stack_models
from offmap.posterior.construct import scaling
from zoo import ZOO, Through


@pytest.mark.parametrize("name", ZOO)
def test_the_chunk_chosen_for_a_host_is_one_that_it_can_run(name: str):
    case = ZOO[name]
    net = copy_model(case.build())
    q = scaling(net)
    chunk = choose_chunk(net, dict(q.mean.items()), case.inputs(), case.output_fn)
    assert chunk == 1 or case.vmap
    assert BatchedModel(net, case.output_fn, chunk_size=chunk).outputs(q.draw, 3, case.inputs()).shape[:3] == (3, 12, 2)


def chunk_of(name: str, rows: int = 12, members: int = 1) -> int:
    case = ZOO[name]
    at = stack_models([case.build(m) for m in range(members)])
    return choose_chunk(at.net, at.mean | at.fixed, case.inputs(rows))


def clock(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[int]:
    """Calls with so many weight sets take so long; the numbers of sets are kept."""
    sizes: list[int] = []

    def took(run: Callable[[], Tensor], clock: object) -> float:
        sizes.append(run().shape[0])
        return seconds[sizes[-1]]

    monkeypatch.setattr(module, "_seconds", took)
    monkeypatch.setattr(module, "CHOSEN", {})
    return sizes


QUICK = {1: 1e-6, 4: 1e-6, 16: 1e-6, 64: 1e-6}


@pytest.mark.parametrize(
    ("seconds", "chunk"),
    [
        ((1.0, 4.0, 16.0, 64.0), 1),  # all the same: a loop
        ((1.0, 3.5, 14.0, 56.0), 1),  # faster, but within the noise
        ((1.0, 3.2, 12.8, 51.2), 4),  # larger ones are no better
        ((1.0, 6.0, 8.0, 10.0), 64),  # a high price of the call, and nothing for a draw
        ((1.0, 1.0, 2.0, 40.0), 16),  # out of the cache
    ],
)
def test_a_larger_chunk_is_taken_only_if_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], chunk: int
):
    sizes = clock(monkeypatch, {n: s * SECONDS / 1e4 for n, s in zip((1, 4, 16, 64), seconds, strict=True)})
    assert chunk_of("tanh_mlp") == chunk
    assert sizes[:8] == 2 * [1, 4, 16, 64]


def test_members_count_in_the_time_of_a_draw(monkeypatch: pytest.MonkeyPatch):
    sizes = clock(monkeypatch, {1: 1e-6, 12: 11e-6, 48: 48e-6, 192: 192e-6})
    assert chunk_of("tanh_mlp", members=3) == 1
    assert sizes[:4] == [1, 12, 48, 192]


@pytest.mark.parametrize(("seconds", "tried", "chunk"), [({1: SECONDS}, {1}, 1), ({1: SECONDS / 8, 4: SECONDS / 4}, {1, 4}, 4)])
def test_sizes_that_would_take_too_long_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], tried: set[int], chunk: int
):
    sizes = clock(monkeypatch, seconds)
    assert chunk_of("tanh_mlp") == chunk
    assert set(sizes) == tried


def test_a_choice_is_made_once_for_a_form_of_host_and_rows(monkeypatch: pytest.MonkeyPatch):
    sizes = clock(monkeypatch, QUICK)
    assert chunk_of("tanh_mlp") == 64
    turns = len(sizes)
    assert chunk_of("tanh_mlp") == 64
    assert len(sizes) == turns
    assert chunk_of("tanh_mlp", rows=7) == 64
    assert len(sizes) > turns


def test_a_host_of_a_known_form_that_vmap_cannot_run_is_looped_over(monkeypatch: pytest.MonkeyPatch):
    clock(monkeypatch, QUICK)
    plain = Through(lambda s, x: s.b(s.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    at = stack_models(plain)
    assert choose_chunk(at.net, at.mean, torch.zeros(12, 3)) == 64
    assert chunk_of("branching") == 1  # of the same modules and shapes


def test_batched_products_choose_without_a_clock(monkeypatch: pytest.MonkeyPatch):
    sizes = clock(monkeypatch, {})
    assert chunk_of("mlp") == 64
    assert not sizes


@pytest.mark.parametrize(("output_fn", "chunk"), [(first_tensor, CHUNK_NUMBERS // 4_000_000), (lambda o: o, 4)])
def test_the_chunk_of_a_large_host_keeps_weights_within_memory(
    monkeypatch: pytest.MonkeyPatch, output_fn: Callable[[Tensor], Tensor], chunk: int
):
    clock(monkeypatch, QUICK)
    net = nn.Linear(2000, 2000, bias=False).eval()
    assert choose_chunk(net, {"weight": net.weight.detach()[None]}, torch.zeros(2, 2000), output_fn) == chunk


@pytest.mark.parametrize("name", ["mlp", "tanh_mlp"])
def test_a_host_too_large_for_any_chunk_runs_draw_after_draw(monkeypatch: pytest.MonkeyPatch, name: str):
    sizes = clock(monkeypatch, {})
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 10)
    assert chunk_of(name) == 1
    assert not sizes
