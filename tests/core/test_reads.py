"""Which input meets which parameter: second moments of what every matrix reads, against hooks on the modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hosts import ZOO, Through
from offmap.core import reads
from offmap.core.basis import Moment, second_moments
from offmap.core.construct import centre, observe
from offmap.core.forward import call
from offmap.core.reads import patches, slow_attention
from oracles import second_moments as slow_moments

UNROTATED = {"autoencoder": ["code.weight"], "grouped": ["0.weight", "2.weight"]}
"""Matrices that a module reads, but along no single set of axes."""


def moments(net: nn.Module, *batches: Any) -> dict[str, Moment]:
    held = centre(net)
    return second_moments(held.net, [held.weights(0)], batches, lambda n, w, x: call(n, w, x))[0]


def rows(inputs: Any, start: int, stop: int) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[start:stop]
    if isinstance(inputs, dict):
        return {n: t[start:stop] for n, t in inputs.items()}
    return tuple(t[start:stop] for t in inputs)


@pytest.mark.parametrize("name", ZOO)
def test_second_moments_equal_those_of_hooks_on_every_linear_and_convolution(name: str):
    net, x = ZOO[name].build(), ZOO[name].inputs()
    slow = {n: m for n, m in slow_moments(net, [x]).items() if n not in UNROTATED.get(name, [])}
    fast = moments(net, x)
    assert slow
    for parameter, moment in slow.items():
        torch.testing.assert_close(fast[parameter].value(), moment, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ZOO)
def test_moments_of_a_stream_are_those_of_all_at_once(name: str):
    net, x = ZOO[name].build(), ZOO[name].inputs(12)
    whole, parts = moments(net, x), moments(net, rows(x, 0, 5), rows(x, 5, 6), rows(x, 6, 12))
    assert whole.keys() == parts.keys()
    for parameter, moment in whole.items():
        assert (moment.why, moment.axes) == (parts[parameter].why, parts[parameter].axes)
        if moment.total is not None:
            assert moment.rows == parts[parameter].rows
            torch.testing.assert_close(parts[parameter].value(), moment.value(), rtol=1e-5, atol=1e-7)


def test_self_attention_projections_read_their_inputs():
    net, x = ZOO["attention"].build(), ZOO["attention"].inputs()
    seen = moments(net, x)
    flat = x.double().flatten(0, 1)
    torch.testing.assert_close(seen["attention.in_proj_weight"].value(), flat.mT @ flat / len(flat))
    # with an identity in its place, attention returns what the output projection reads
    attention = copy.deepcopy(net.attention).eval()
    with torch.no_grad():
        attention.out_proj.weight.copy_(torch.eye(4))
        attention.out_proj.bias.zero_()
        flat = attention(x, x, x)[0].double().flatten(0, 1)
    torch.testing.assert_close(seen["attention.out_proj.weight"].value(), flat.mT @ flat / len(flat), rtol=1e-5, atol=1e-7)


def test_the_fast_path_of_the_transformer_does_not_hide_its_products():
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True).eval()
    assert torch.backends.mha.get_fastpath_enabled()
    seen = moments(layer, torch.randn(5, 3, 4))
    matrices = [n for n, p in layer.named_parameters() if p.ndim == 2]
    assert sorted(n for n, m in seen.items() if m.total is not None) == sorted(matrices)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_tied_matrix_counts_the_inputs_of_both_places():
    net = ZOO["tied"].build()
    assert moments(net, ZOO["tied"].inputs(7))["0.weight"].rows == 14


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", x, self.w)


@pytest.mark.parametrize(
    ("net", "axes"),
    [
        (Through(lambda s, x: x @ s.w.T, w=nn.Parameter(torch.randn(2, 3))), (1,)),
        (Through(lambda s, x: x @ s.w, w=nn.Parameter(torch.randn(3, 2))), (0,)),
        (Through(lambda s, x: (s.w @ x.T).T, w=nn.Parameter(torch.randn(2, 3))), (1,)),
        (Through(lambda s, x: (s.w.T @ x.T).T, w=nn.Parameter(torch.randn(3, 2))), (0,)),
        (Through(lambda s, x: torch.addmm(s.b, x, s.w), w=nn.Parameter(torch.randn(3, 2)), b=nn.Parameter(torch.randn(2))), (0,)),
        (Through(lambda s, x: F.linear(x[:, None].expand(-1, 4, -1), s.w)[:, 0], w=nn.Parameter(torch.randn(2, 3))), (1,)),
        (Through(lambda s, x: torch.bmm(x[None], s.w[None])[0], w=nn.Parameter(torch.randn(3, 2))), (0,)),
        (Einsum(), (1,)),
        (Through(lambda s, x: x @ s.w, w=nn.Parameter(torch.randn(3, 1))), (0,)),
        (Through(lambda s, x: x @ s.w.T, w=nn.Parameter(torch.randn(1, 3))), (1,)),
    ],
    ids=["x@W.T", "x@W", "W@x.T", "W.T@x.T", "addmm", "expanded", "bmm", "einsum", "one column", "one row"],
)  # fmt: skip
def test_every_way_to_write_a_product_is_one_read_of_the_same_rows(net: nn.Module, axes: tuple[int, ...]):
    x = torch.randn(6, 3)
    moment = moments(net, x)["w"]
    assert (moment.axes, moment.why) == (axes, "")
    torch.testing.assert_close(moment.value(), x.double().mT @ x.double() / 6)


def test_linear_on_a_transposed_batch_with_frozen_weights_is_seen():
    # there `linear` becomes a bmm with the weight expanded over the batch
    net = Through(lambda s, x: s.fc(x.transpose(1, 2)).mean(1), fc=nn.Linear(3, 2))
    x = torch.randn(5, 3, 4)
    flat = x.transpose(1, 2).reshape(-1, 3).double()
    torch.testing.assert_close(moments(net, x)["fc.weight"].value(), flat.mT @ flat / 20)


def test_a_width_one_layer_is_read_along_its_fan_in():
    seen = moments(ZOO["width_one"].build(), ZOO["width_one"].inputs())
    assert [seen[f"{i}.weight"].axes for i in (0, 2, 4)] == [(1,)] * 3
    assert [len(seen[f"{i}.weight"].value()) for i in (0, 2, 4)] == [3, 1, 4]


@pytest.mark.parametrize(
    ("name", "parameter", "why"),
    [
        ("autoencoder", "code.weight", "read in two ways"),
        ("grouped", "0.weight", "grouped convolution"),
        ("grouped", "2.weight", "transposed convolution"),
        ("cross_attention", "attention.in_proj_weight", "read in parts"),
    ],
)
def test_what_has_no_single_fan_in_keeps_its_own_axes_and_says_why(name: str, parameter: str, why: str):
    net, x = ZOO[name].build(), ZOO[name].inputs()
    assert moments(net, x)[parameter].why == why
    assert parameter not in observe(centre(net), [x], rotated=True)


def test_what_no_product_reads_has_no_basis():
    bases = observe(centre(ZOO["embedding"].build()), [ZOO["embedding"].inputs()], rotated=True)
    assert list(bases) == ["head.weight"]


def test_biases_are_filed_with_the_matrix_that_they_follow():
    for name, expected in (
        ("mlp", {"0.weight": "0.bias", "2.weight": None, "4.weight": "4.bias"}),
        ("conv1d", {"0.weight": "0.bias", "2.weight": None, "5.weight": "5.bias"}),
    ):
        bases = observe(centre(ZOO[name].build()), [ZOO[name].inputs()], rotated=False)
        assert {n: b.bias for n, b in bases.items()} == expected


@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    flipped=st.booleans(),
)
def test_patches_are_unfold(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], flipped: bool
):
    x = torch.randn(2, 3, 5, 6)
    x = x.to(memory_format=torch.channels_last) if flipped else x
    ours = torch.cat(list(patches(x, kernel, list(stride), list(padding), list(dilation))))
    theirs = F.unfold(x, kernel, dilation, padding, stride).mT.reshape(-1, 3 * kernel[0] * kernel[1])
    assert torch.equal(ours, theirs)


def test_patches_come_in_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(6, 2, 5)
    whole = torch.cat(list(patches(x, (3,), [1], [0], [1])))
    monkeypatch.setattr(reads, "BLOCK", 40)
    blocks = list(patches(x, (3,), [1], [0], [1]))
    assert len(blocks) == 3  # two examples of 3 places × 6 numbers fit into 40
    assert max(b.numel() for b in blocks) <= 40
    assert torch.equal(torch.cat(blocks), whole)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_are_part_of_what_a_kernel_meets(mode: str):
    net = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1, padding_mode=mode), nn.Flatten())
    x = torch.randn(4, 1, 5)
    padded = F.pad(x, (1, 1), mode=mode).unfold(2, 3, 1).reshape(-1, 3).double()
    torch.testing.assert_close(moments(net, x)["0.weight"].value(), padded.mT @ padded / len(padded))


def test_attention_switches_are_put_back_even_after_an_error():
    def switches() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return (
            torch.backends.mha.get_fastpath_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )  # fmt: skip

    def fail() -> None:
        with slow_attention():
            assert not torch.backends.mha.get_fastpath_enabled()
            raise KeyError

    before = switches()
    with pytest.raises(KeyError):
        fail()
    assert switches() == before
