"""Transformers with torch's fast path on and off: the noise reaches them, and all ways give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offmap
from offmap.model.forward import copy_model, forward
from offmap.posterior.distribution import svd
from oracle_moments import slow_path
from zoo import ZOO, Case
from zoo.case import Through
from zoo.sequences import with_mask

NAMES = ("attention", "attention_mask", "transformer", "norm_first", "encoder", "decoder_layer", "tokenized")


def build_nested() -> nn.Module:
    """An encoder as torch makes it by default: behind a mask it packs the rows into a nested tensor."""

    def forward(s: Any, x: Tensor, hidden: Tensor) -> Tensor:
        return s.head(s.body(x, src_key_padding_mask=hidden).masked_fill(hidden.unsqueeze(-1), 0).sum(1))

    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, batch_first=True)
    return Through(forward, body=nn.TransformerEncoder(layer, 2), head=nn.Linear(4, 2))


NESTED = Case("nested_tensors", build_nested, (3, 4), wrap=with_mask)
some_models = pytest.mark.parametrize("case", [*(ZOO[name] for name in NAMES), NESTED], ids=lambda c: c.name)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of torch's fused layers, whenever one runs."""
    seen: list[str] = []

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return real(*args, **kwargs)

        return run

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.setattr(torch, name, watch(name, getattr(torch, name)))
    return seen


@some_models
def test_draws_give_the_same_on_the_fast_path_off_it_and_under_vmap(case: Case):
    q, net, x = (
        svd(case.build(), [case.inputs()], initial_scale=0.1).requires_grad_(False),
        copy_model(case.build()),
        case.inputs(),
    )
    drawn = q.draw(range(4))
    with torch.no_grad():
        fast, batched = forward(net, drawn, x, loop=True), forward(net, drawn, x)
        with slow_path():
            slow = forward(net, drawn, x, loop=True)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batched, slow, rtol=1e-4, atol=1e-5)
    assert float((fast[0] - fast[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("chunk", [1, 3])
@some_models
def test_fits_see_every_matrix_of_a_host_on_its_fast_path(case: Case, chunk: int):
    guard = offmap.fit(
        case.build(), case.data(10), case.data(8), solver="closed-form", chunk_size=chunk, draws=4, risk_draws=4, progress=False
    )
    q = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    assert set(q.rotation) == set(case.rotated())
    samples = guard.samples(case.inputs(5), draws=3)
    assert float((samples[0] - samples[1]).abs().max()) > 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_models_do_take_the_fast_path(calls: list[str]):
    for name in ("attention", "transformer", "encoder"):
        net, before = copy_model(ZOO[name].build()), len(calls)
        x = ZOO[name].inputs()
        with torch.no_grad():
            net(*x) if isinstance(x, tuple) else net(x)
        assert len(calls) > before, name
