"""The chunk is a rule of sizes, and one that the model can run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from offmap.model import inspect as module
from offmap.model.forward import BatchedModel, copy_model, first_tensor
from offmap.model.inspect import CHUNK_NUMBERS, choose_chunk
from offmap.model.params import stack_models
from offmap.posterior.distribution import scaling
from zoo import ZOO, Through


@pytest.mark.parametrize("name", ZOO)
def test_choose_chunk_gives_one_that_the_model_can_run(name: str):
    case = ZOO[name]
    net = copy_model(case.build())
    q = scaling(net)
    chunk = choose_chunk(net, dict(q.mean.items()), case.inputs(), case.output_fn)
    assert chunk == choose_chunk(net, dict(q.mean.items()), case.inputs(), case.output_fn)
    assert (chunk > 1) == case.vmap
    assert BatchedModel(net, case.output_fn, chunk_size=chunk).outputs(q.draw, 3, case.inputs()).shape[:3] == (3, 12, 2)


def chunk_of(name: str, rows: int = 12, members: int = 1) -> int:
    case = ZOO[name]
    stacked = stack_models([case.build(m) for m in range(members)])
    return choose_chunk(stacked.module, stacked.mean | stacked.fixed, case.inputs(rows))


def wide(width: int) -> nn.Module:
    return Through(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(3, width), b=nn.Linear(width, 2))


@pytest.mark.parametrize(
    ("rows", "width", "members", "chunk"),
    [
        (16, 64, 1, 64),  # never more than this
        (128, 128, 1, 64),  # 2¹⁴ numbers in the widest result
        (128, 512, 1, 16),  # 2¹⁶: all draws of a chunk have 2²⁰
        (128, 513, 1, 1),  # wider: a loop
        (128, 128, 4, 16),  # members count as draws do
        (128, 512, 16, 2),
    ],
)
def test_choose_chunk_keeps_the_widest_result_within_a_cache(rows: int, width: int, members: int, chunk: int):
    stacked = stack_models([wide(width) for _ in range(members)])
    assert choose_chunk(stacked.module, stacked.mean | stacked.fixed, torch.zeros(rows, 3)) == chunk


def test_choose_chunk_loops_over_attention_earlier_which_runs_fused_in_a_loop():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()
    stacked = stack_models([layer])
    weights = stacked.mean | stacked.fixed
    assert choose_chunk(stacked.module, weights, torch.zeros(56, 6, 32)) > 1  # 56 · 6 · 96 queries, keys and values < 2¹⁵
    assert choose_chunk(stacked.module, weights, torch.zeros(57, 6, 32)) == 1


def test_choose_chunk_agrees_between_processes():
    code = "from zoo import ZOO; from test_choose_chunk import chunk_of; print([chunk_of(n) for n in sorted(ZOO)[:12]])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert run.stdout.strip() == str([chunk_of(name) for name in sorted(ZOO)[:12]])


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in (os.path.dirname(__file__), *sys.path) if p)}


def test_a_model_that_vmap_cannot_run_is_looped_over():
    assert chunk_of("branching") == 1
    assert chunk_of("tanh_mlp") == 64  # of the same modules and shapes


def test_batched_products_take_as_many_draws_as_fit():
    assert chunk_of("mlp") == 64
    assert chunk_of("mlp", rows=100_000) == 64  # they cut rows themselves


@pytest.mark.parametrize(("output_fn", "chunk"), [(first_tensor, CHUNK_NUMBERS // 4_000_000), (lambda o: o, 1)])
def test_the_chunk_of_a_large_model_keeps_weights_within_memory(output_fn: Callable[[Tensor], Tensor], chunk: int):
    net = nn.Linear(2000, 2000, bias=False).eval()
    assert choose_chunk(net, {"weight": net.weight.detach()[None]}, torch.zeros(2, 2000), output_fn) == chunk


@pytest.mark.parametrize("name", ["mlp", "tanh_mlp"])
def test_a_model_too_large_for_any_chunk_runs_draw_after_draw(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 10)
    assert chunk_of(name) == 1
