"""Mixed and other precision: autocast, half and double models, from end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import offmap
from offmap.model.params import stack_models
from offmap.posterior.basis import Moment, second_moments
from offmap.posterior.distribution import svd
from zoo import ZOO, Case

NAMES = (
    "linear", "mlp", "layernorm", "bilinear", "tied", "repeated", "conv1d", "conv2d", "depthwise", "transposed2d", "batchnorm",
    "groupnorm", "unet", "attention", "cross_attention", "attention_sizes", "transformer", "decoder_layer", "embedding",
    "tied_embedding", "gru", "bare", "einsum", "heads_einsum", "weight_norm", "spectral_norm", "keywords",
)  # fmt: skip
some_models = pytest.mark.parametrize("case", [ZOO[name] for name in NAMES], ids=NAMES)
OPTIONS: dict[str, Any] = {"solver": "closed-form", "draws": 4, "risk_draws": 4, "progress": False}


def build_mixed() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def fit(case: Case, net: torch.nn.Module, dtype: torch.dtype = torch.float32) -> tuple[offmap.Guard, offmap.Result]:
    data, valid, x = tree_map(
        lambda t: t.to(dtype) if t.is_floating_point() else t, (case.data(10), case.data(8), case.inputs(5))
    )
    guard = offmap.fit(net, data, valid, output_fn=case.output_fn, chunk_size=3 if case.vmap else 1, **OPTIONS)
    return guard, guard(x)


@some_models
def test_a_fit_and_its_scores_work_under_autocast_in_float32(case: Case):
    with build_mixed():
        guard, result = fit(case, case.build())
    assert result.score.dtype == torch.float32
    assert bool(result.score.isfinite().all())
    assert float(result.score.std()) > 0
    scales = guard.predictive.q.scale()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(s.dtype == torch.float32 and bool((s > 0).all()) for s in scales.values())


def moments(case: Case) -> dict[str, Moment]:
    held = stack_models(case.build())
    return second_moments(held.module, [held.weights(0)], [case.inputs()], case.output_fn)[0]


@some_models
def test_autocast_hides_no_matrix(case: Case):
    with build_mixed():
        q, cast = svd(case.build(), [case.inputs()]), moments(case)
    assert {name: v.shape[1] for name, v in q.rotation.items()} == case.rotated()
    assert all(v.dtype == torch.float32 for v in q.rotation.values())
    plain = moments(case)
    for name in case.rotated():
        value = plain[name].value()
        torch.testing.assert_close(cast[name].value(), value, rtol=0.1, atol=0.05 * float(value.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@some_models
def test_models_of_other_precision_fit_and_score(case: Case, dtype: torch.dtype):
    net = case.build().to(dtype)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    guard, result = fit(case, net, dtype)
    fine = torch.promote_types(dtype, torch.float32)
    q = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    assert result.score.dtype == fine
    assert bool(result.score.isfinite().all())
    assert {name: v.shape[1] for name, v in q.rotation.items()} == case.rotated()
    assert all(v.dtype == fine for v in (*q.rotation.values(), *q.scale().values()))
    assert all(w.dtype == dtype for w in q.draw([0]).values())
    assert all(p.dtype == dtype and torch.equal(p, before[n]) for n, p in net.named_parameters())
