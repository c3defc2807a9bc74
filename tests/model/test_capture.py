"""Which layer input multiplies which parameter: second moments of layer inputs, against hooks on the modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from offmap.errors import ConfigError
from offmap.model.capture import LayerInput, capture
from offmap.model.forward import no_fast_path, no_fused_attention
from offmap.model.matrix_view import MatrixView
from offmap.model.params import stack_models
from offmap.posterior import basis
from offmap.posterior.basis import Moment, Observed, second_moments
from offmap.posterior.basis import observe as observe_feed
from zoo import ZOO, Through


def moments(net: nn.Module, *batches: Any) -> dict[str, Moment]:
    held = stack_models(net)
    return second_moments(held.module, [held.weights(0)], batches)[0]


def rows(inputs: Any, start: int, stop: int) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[start:stop]
    if isinstance(inputs, dict):
        return {n: t[start:stop] for n, t in inputs.items()}
    return tuple(t[start:stop] for t in inputs)


def observe(net: nn.Module, x: Any, *, rotated: bool = True) -> Observed:
    return observe_feed(stack_models(net), lambda rows: [x], rotated=rotated)


@pytest.mark.parametrize("name", ZOO)
def test_moments_of_a_stream_are_those_of_all_at_once(name: str):
    net, x = ZOO[name].build(), ZOO[name].inputs(12)
    whole, parts = moments(net, x), moments(net, rows(x, 0, 5), rows(x, 5, 6), rows(x, 6, 12))
    assert whole.keys() == parts.keys()
    for parameter, moment in whole.items():
        assert (moment.why, moment.view) == (parts[parameter].why, parts[parameter].view)
        if moment.view is not None:
            assert moment.blocks() == parts[parameter].blocks()
            torch.testing.assert_close(parts[parameter].value(), moment.value(), rtol=1e-5, atol=1e-7)


def test_self_attention_projections_read_their_inputs():
    net, x = ZOO["attention"].build(), ZOO["attention"].inputs()
    seen = moments(net, x)
    flat = x.double().flatten(0, 1)
    torch.testing.assert_close(seen["attention.in_proj_weight"].value()[0, 0], flat.mT @ flat / len(flat))
    # with an identity in its place, attention returns what the output projection reads
    attention = copy.deepcopy(net.attention).eval()
    with torch.no_grad():
        attention.out_proj.weight.copy_(torch.eye(4))
        attention.out_proj.bias.zero_()
        flat = attention(x, x, x)[0].double().flatten(0, 1)
    torch.testing.assert_close(seen["attention.out_proj.weight"].value()[0, 0], flat.mT @ flat / len(flat), rtol=1e-5, atol=1e-7)


def test_the_fast_path_of_the_transformer_does_not_hide_its_products():
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True).eval()
    assert torch.backends.mha.get_fastpath_enabled()
    seen = moments(layer, torch.randn(5, 3, 4))
    matrices = [n for n, p in layer.named_parameters() if p.ndim == 2]
    assert sorted(n for n, m in seen.items() if m.view is not None) == sorted(matrices)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_tied_matrix_counts_the_inputs_of_both_places():
    net = ZOO["tied"].build()
    assert moments(net, ZOO["tied"].inputs(7))["0.weight"].totals[0, 3, 1].rows == 14


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
    assert moment.view is not None
    assert (moment.view.axes, moment.why) == (axes, "")
    torch.testing.assert_close(moment.value()[0, 0], x.double().mT @ x.double() / 6)


def test_linear_on_a_transposed_batch_with_frozen_weights_is_seen():
    # there `linear` becomes a bmm with the weight expanded over the batch
    net = Through(lambda s, x: s.fc(x.transpose(1, 2)).mean(1), fc=nn.Linear(3, 2))
    x = torch.randn(5, 3, 4)
    flat = x.transpose(1, 2).reshape(-1, 3).double()
    torch.testing.assert_close(moments(net, x)["fc.weight"].value()[0, 0], flat.mT @ flat / 20)


def test_a_width_one_layer_is_read_along_its_fan_in():
    seen = moments(ZOO["width_one"].build(), ZOO["width_one"].inputs())
    assert [seen[f"{i}.weight"].view.axes for i in (0, 2, 4)] == [(1,)] * 3
    assert [seen[f"{i}.weight"].value().shape[-1] for i in (0, 2, 4)] == [3, 1, 4]


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Through(lambda s, x: x @ s.w @ s.w.T, w=nn.Parameter(torch.randn(3, 4))), "read along two different axes"),
        (Through(lambda s, x: x[:, :2] @ s.w[:2], w=nn.Parameter(torch.randn(3, 4))), "read in parts of its fan-in"),
        (Through(lambda s, x: x @ s.w.flip(0), w=nn.Parameter(torch.randn(3, 4))), "no product with an input"),
    ],
    ids=["two ways", "part of the fan-in", "another order"],
)  # fmt: skip
def test_what_has_no_single_fan_in_keeps_its_own_axes_and_says_why(net: nn.Module, why: str):
    seen = observe(net, torch.randn(6, 3))
    assert seen.why["w"] == why
    assert "w" not in seen.bases


def test_of_a_product_of_two_parameters_the_first_is_the_input_of_the_second():
    net = Through(lambda s, x: x @ (s.v @ s.w), w=nn.Parameter(torch.randn(2, 4)), v=nn.Parameter(torch.randn(3, 2)))
    seen, v = moments(net, torch.randn(6, 3)), net.v.detach().double()
    torch.testing.assert_close(seen["w"].value()[0, 0], v.mT @ v / 3)
    assert "v" not in seen


def test_what_is_looked_up_has_no_basis_unless_it_takes_part_in_a_product_too():
    seen = observe(ZOO["embedding"].build(), ZOO["embedding"].inputs())
    assert list(seen.rotation().matrices) == ["head.weight"]
    assert seen.why["table.weight"] == "looked up by index: its inputs already lie along its axes"
    tied = Through(lambda s, x: F.linear(s.table(x).mean(1), s.table.weight), table=nn.Embedding(5, 3))
    assert list(observe(tied, torch.randint(5, (4, 2))).rotation().matrices) == ["table.weight"]


def test_rows_with_different_inputs_are_blocks_and_those_without_inputs_have_no_amplitude():
    net = Through(lambda s, x: torch.cat([x[:, :3] @ s.w[:2].T, x[:, 3:] @ s.w[4:].T], 1), w=nn.Parameter(torch.randn(5, 3)))
    x = torch.randn(7, 6)
    moment = moments(net, x)["w"]
    assert moment.blocks() == (2, 2, 1)
    for block, rows_of_block in ((0, x[:, :3]), (2, x[:, 3:])):
        torch.testing.assert_close(moment.value()[block, 0], rows_of_block.double().mT @ rows_of_block.double() / 7)
    assert float(moment.value()[1].abs().max()) == 0


def test_a_matrix_that_is_picked_from_a_stack_is_a_block_of_its_own():
    w, x = nn.Parameter(torch.randn(3, 2, 4), requires_grad=False), torch.randn(7, 4)
    moment = moments(Through(lambda s, x: x @ s.w[1].T, w=w), x)["w"]
    assert moment.view is not None
    assert moment.blocks() == (2, 2, 2)
    assert torch.equal(moment.view.rows(w[None])[0, 2:4], w[1])
    plain = x.double().mT @ x.double() / 7
    torch.testing.assert_close(moment.value()[:, 0], torch.stack([0 * plain, plain, 0 * plain]))


def test_a_part_that_is_read_twice_counts_both_times():
    net = Through(lambda s, x: x @ s.w.T + F.pad(2 * x @ s.w[:2].T, (0, 2)), w=nn.Parameter(torch.randn(4, 3)))
    x = torch.randn(7, 3)
    moment, plain = moments(net, x)["w"], x.double().mT @ x.double() / 7
    assert moment.blocks() == (2, 2)
    torch.testing.assert_close(moment.value()[:, 0], torch.stack([2.5 * plain, plain]))


def test_a_fan_in_above_the_limit_is_cut_into_pieces(caplog: pytest.LogCaptureFixture):
    net, x = nn.Linear(7, 2), torch.randn(9, 7)
    seen = observe_feed(stack_models(net), lambda rows: [x], rotated=True, limit=3)
    matrix = seen.bases["weight"].matrix
    assert matrix is not None
    assert matrix.shape == (1, 1, 3, 3, 3)
    assert "basis for the whole fan-in of `weight` (7) would be larger than `fan_in_limit` = 3" in caplog.text
    for piece, part in enumerate(x.double().split(3, 1)):
        v, s = matrix[0, 0, piece, : part.shape[1], : part.shape[1]].double(), seen.bases["weight"].input_rms[0, 0, 3 * piece :]
        torch.testing.assert_close(v * s[: part.shape[1]].square() @ v.mT, part.mT @ part / 9, rtol=1e-5, atol=1e-6)


def test_a_fan_in_at_the_limit_is_whole(caplog: pytest.LogCaptureFixture):
    seen = observe_feed(stack_models(nn.Linear(6, 2)), lambda rows: [torch.randn(9, 6)], rotated=True, limit=6)
    matrix = seen.bases["weight"].matrix
    assert matrix is not None
    assert matrix.shape == (1, 1, 1, 6, 6)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("outputs", "groups", "before", "size"),
    [(64, 1, 0, 2048), (64, 1, 2000, 2000), (128, 2, 2000, 2000), (640, 1, 2048, 20_000), (1, 1, 10**6, 31), (1, 20, 10**6, 16)],
)
def test_a_sample_costs_a_part_of_the_pass_beyond_the_exact_rows(
    outputs: int, groups: int, before: int, size: int, monkeypatch: pytest.MonkeyPatch
):
    """Of 20,000 rows of fan-in 10: 20,000 · outputs / groups / 640 of them, at least those that are still exact, and sixteen."""
    monkeypatch.setattr(basis, "EXACT_PRODUCTS", 0)
    layer_input = LayerInput(MatrixView((outputs, 10), (0,), (1,)), 0, outputs, groups, 20_000, lambda chosen: ())
    chosen = basis._sample_rows(layer_input, "weight", before)
    assert (20_000 if chosen is None else len(chosen)) == size


def test_beyond_the_exact_rows_a_sample_stands_for_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(basis, "EXACT_ROWS", 64)
    monkeypatch.setattr(basis, "EXACT_PRODUCTS", 0)
    torch.manual_seed(0)
    mixed = torch.randn(4, 4)
    batches = [torch.randn(200, 4) @ mixed for _ in range(60)]
    net, all_params = nn.Linear(4, 3), torch.cat(batches).double()
    moment = moments(net, *batches)["weight"]
    exact = all_params.mT @ all_params / len(all_params)
    assert moment.totals[0, 3, 1].rows == 12_000
    torch.testing.assert_close(moment.value()[0, 0], exact, rtol=0, atol=0.15 * float(exact.abs().max()))
    assert not torch.allclose(moment.value()[0, 0], exact, rtol=1e-6)
    assert torch.equal(moments(net, *batches)["weight"].value(), moment.value())


def test_up_to_the_exact_rows_all_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(basis, "EXACT_ROWS", 64)
    monkeypatch.setattr(basis, "EXACT_PRODUCTS", 0)
    x = torch.randn(65, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(4, 3).double()
    for rows, exact in ((64, True), (65, False)):
        moment = x[:rows].mT @ x[:rows] / rows
        assert torch.allclose(moments(net, x[:rows])["weight"].value()[0, 0], moment, rtol=1e-12) is exact
    whole = x[:64].mT @ x[:64] / 64
    torch.testing.assert_close(moments(net, x[:30], x[30:64])["weight"].value()[0, 0], whole)


def test_moments_are_taken_one_group_of_parameters_at_a_time(monkeypatch: pytest.MonkeyPatch):
    net, x = ZOO["mlp"].build(), ZOO["mlp"].inputs()
    whole = observe(net, x).bases
    monkeypatch.setattr("offmap.posterior.basis.MOMENT_NUMBERS", 70)
    passes: list[int] = []
    apart = observe_feed(stack_models(net), lambda rows: passes.append(rows) or [x], rotated=True).bases
    assert len(passes) == 1 + 3  # the plan, then (8·8), (8·8) and (3·3) numbers
    assert apart.keys() == whole.keys()
    for name, found in whole.items():
        assert torch.equal(apart[name].input_rms, found.input_rms)


def test_biases_are_filed_with_the_matrix_that_they_follow():
    for name, expected in (
        ("mlp", {"0.weight": "0.bias", "2.weight": None, "4.weight": "4.bias"}),
        ("conv1d", {"0.weight": "0.bias", "2.weight": None, "5.weight": "5.bias"}),
    ):
        bases = observe(ZOO[name].build(), ZOO[name].inputs(), rotated=False).bases
        assert {n: b.bias for n, b in bases.items()} == expected


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_are_part_of_the_layer_input_of_a_kernel(mode: str):
    net = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1, padding_mode=mode), nn.Flatten())
    x = torch.randn(4, 1, 5)
    padded = F.pad(x, (1, 1), mode=mode).unfold(2, 3, 1).reshape(-1, 3).double()
    torch.testing.assert_close(moments(net, x)["0.weight"].value()[0, 0], padded.mT @ padded / len(padded))


@pytest.mark.parametrize("switch", [no_fast_path, no_fused_attention])
def test_attention_switches_are_put_back_even_after_an_error(switch: Any):
    def switches() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return (
            torch.backends.mha.get_fastpath_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )  # fmt: skip

    def fail() -> None:
        with switch:
            assert switches() != before
            raise KeyError

    before = switches()
    with pytest.raises(KeyError):
        fail()
    assert switches() == before


class Sideways(nn.Module):
    """A Linear with inputs which are not contiguous, so that torch adds its bias apart."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2))


def test_a_bias_that_is_added_apart_belongs_to_its_product():
    net, x = Sideways(), torch.randn(6, 3, 4)
    assert not x.transpose(1, 2).is_contiguous()
    assert moments(net, x)["linear.weight"].bias == "linear.bias"


@pytest.mark.parametrize("name", ["lstm", "lstm_deep", "gru", "memory"])
def test_biases_are_found_alike_in_single_and_double_precision(name: str):
    net, x = ZOO[name].build(), ZOO[name].inputs(6)
    double = tree_map(lambda t: t.double(), x)
    single, double = moments(net.float(), x), moments(net.double(), double)
    assert {n: m.bias for n, m in single.items()} == {n: m.bias for n, m in double.items()}
    assert all(m.bias is not None for m in single.values())


def test_what_is_added_later_is_no_bias_of_an_earlier_product():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).tanh() + self.shift

    assert moments(Shifted(), torch.randn(6, 3))["weight"].bias is None


def test_what_is_added_to_a_lookup_is_no_bias():
    shift = nn.Parameter(torch.randn(3))
    tied = Through(lambda s, x: F.linear((s.table(x) + s.shift).mean(1), s.table.weight), table=nn.Embedding(5, 3), shift=shift)
    assert moments(tied, torch.randint(5, (4, 2)))["table.weight"].bias is None


def test_the_name_of_no_parameter_is_refused_with_the_nearest_one():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"name of a parameter, .*did you mean '0.weight'\?\), but got '0.wieght'"):
        capture(net, {}, torch.ones(2, 3), ["2.weight", "0.wieght"])
