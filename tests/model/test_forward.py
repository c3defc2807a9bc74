"""A model over a stack of weights: all at once, in chunks, one after another."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oracles
from offmap.data.batch import mark_shared, rows_of, shared, take_rows
from offmap.errors import ModelError
from offmap.model import forward as module
from offmap.model.forward import OUTPUT_NUMBERS, BatchedModel, call, copy_model, first_tensor, forward, swap_weights
from offmap.posterior.distribution import scaling
from zoo import ZOO, Through


@given(
    draws=st.integers(1, 9),
    chunk=st.integers(1, 12),
    batch=st.integers(1, 14),
    rows=st.integers(1, 12),
    members=st.integers(1, 3),
    name=st.sampled_from(["mlp", "tanh_mlp", "buffers"]),
)
@settings(max_examples=60)
def test_stacked_outputs_are_member_major_for_any_chunk_and_batch(
    draws: int, chunk: int, batch: int, rows: int, members: int, name: str
):
    case = ZOO[name]
    nets = [copy_model(case.build(m)) for m in range(members)]
    q = scaling(nets, initial_scale=0.1)
    x = case.inputs(rows)
    fast = BatchedModel(nets[0], chunk_size=chunk, batch_size=batch).outputs(q.draw, draws, x, members=members)
    slow = oracles.run(nets[0], q.draw(range(draws)), x)
    assert fast.shape == (members * draws, rows, 2)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


def test_large_tables_are_tiled_without_seams():
    net = copy_model(ZOO["mlp"].build())
    q = scaling(net, initial_scale=0.1)
    x = torch.randn(20_000, 3)
    fast = BatchedModel(net, chunk_size=7).outputs(q.draw, 9, x)
    torch.testing.assert_close(fast, oracles.run(net, q.draw(range(9)), x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stacked", "rows"), [(1, 1 << 16), (50, 1 << 16), (OUTPUT_NUMBERS // 100, 100), (10**9, 1)])
def test_blocks_cover_every_row_once_and_are_as_long_as_memory_allows(stacked: int, rows: int):
    x = torch.arange(70_000)
    blocks = list(BatchedModel(nn.Identity()).blocks(x, stacked))
    assert blocks[0] == slice(0, rows)
    assert all(a.stop == b.start and b.stop - b.start == rows for a, b in pairwise(blocks))
    assert blocks[-1].start < len(x) <= blocks[-1].stop


@pytest.mark.parametrize(
    ("chunk", "members", "spans"), [(1, 1, [3, 3, 1]), (1, 2, [1] * 7), (1, 4, [1] * 7), (4, 1, [4, 3]), (4, 2, [4, 3])]
)
def test_looped_draws_are_made_together_within_a_fixed_memory(
    monkeypatch: pytest.MonkeyPatch, chunk: int, members: int, spans: list[int]
):
    case, made = ZOO["tanh_mlp"], []
    nets = [copy_model(case.build(m)) for m in range(members)]
    q = scaling(nets, initial_scale=0.1)
    monkeypatch.setattr(module, "LOOP_NUMBERS", 3 * q.dimension)

    def draw(span: range) -> dict[str, Tensor]:
        made.append(len(span))
        return q.draw(span)

    outputs = BatchedModel(nets[0], chunk_size=chunk, batch_size=5).outputs(draw, 7, case.inputs(), members=members)
    assert made == spans
    torch.testing.assert_close(outputs, oracles.run(nets[0], q.draw(range(7)), case.inputs()))


def test_nothing_to_run_is_refused():
    net = ZOO["mlp"].build().eval()
    for draws, rows in ((0, 3), (3, 0)):
        with pytest.raises(ModelError, match="Expected at least one draw and one row, but got none"):
            BatchedModel(net).outputs(scaling(net).draw, draws, torch.zeros(rows, 3))


@pytest.mark.parametrize("name", [n for n, c in ZOO.items() if not c.vmap])
def test_a_model_that_vmap_cannot_run_is_refused_with_the_remedy(name: str):
    case = ZOO[name]
    net = copy_model(case.build())
    weights = scaling(net).draw(range(3))
    with pytest.raises(ModelError, match=r"`vmap` cannot run \w+ \(.*\). Pass `chunk_size=1` to loop over draws."):
        forward(net, weights, case.inputs(), output_fn=case.output_fn)
    assert forward(net, weights, case.inputs(), loop=True, output_fn=case.output_fn).shape[:3] == (3, 12, 2)
    alone = {n: w[:1] for n, w in weights.items()}  # one set takes no `vmap`
    assert forward(net, alone, case.inputs(), output_fn=case.output_fn).shape[:3] == (1, 12, 2)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("name", ["mlp", "tanh_mlp"])
def test_a_model_that_cannot_take_the_inputs_is_refused_with_their_shape(name: str, loop: bool):
    net = copy_model(ZOO[name].build())
    with pytest.raises(
        ModelError, match=rf"{type(net).__name__} failed on inputs of shape \(5, 4\): .*Check that the data have the"
    ):
        forward(net, scaling(net).draw(range(3)), torch.zeros(5, 4), loop=loop)


def test_a_model_without_one_output_per_row_is_refused():
    net = Through(lambda s, x: s.fc(x).mean(0), fc=nn.Linear(3, 2)).eval()
    with pytest.raises(ModelError, match=r"Expected one output row per input row, but Through made \(2,\) of 5 rows"):
        BatchedModel(net).outputs(scaling(net).draw, 2, torch.zeros(5, 3))


@pytest.mark.parametrize("given", ["0.weight", "2.weight"])
def test_a_tied_weight_is_replaced_in_all_its_places_and_given_back(given: str):
    net = copy_model(ZOO["tied"].build())
    own, other = net[0].weight, torch.randn(3, 3)
    with suppress(KeyError), swap_weights(net, {given: other}):
        assert net[0].weight is other
        assert net[2].weight is other
        raise KeyError
    assert net[0].weight is own
    assert net[2].weight is own


def test_the_first_tensor_is_taken_by_default():
    x = torch.ones(2)
    for output in (x, (x, 3), [x, x], SimpleNamespace(logits=x)):
        assert first_tensor(output) is x
    with pytest.raises(ModelError, match="Expected a model that returns a tensor, .* but got dict. Pass `output_fn=` to pick"):
        first_tensor({"logits": x})


def test_select_is_applied_by_loop_and_vmap_alike():
    def output_fn(output: dict[str, Tensor]) -> Tensor:
        return output["b"]

    net = Through(lambda s, x: {"a": s.a(x), "b": s.b(x)}, a=nn.Linear(3, 2), b=nn.Linear(3, 2)).eval()
    weights = scaling(net, initial_scale=0.1).draw(range(3))
    x = torch.randn(4, 3)
    expected = torch.stack([torch.func.functional_call(net, {n: w[i] for n, w in weights.items()}, (x,))["b"] for i in range(3)])
    for loop in (True, False):
        torch.testing.assert_close(forward(net, weights, x, output_fn=output_fn, loop=loop), expected)


def test_select_is_applied_to_plain_stacks_too():
    net = nn.Linear(3, 2).eval()
    weights = scaling(net).draw(range(3))
    x = torch.randn(4, 3)
    torch.testing.assert_close(forward(net, weights, x, output_fn=lambda o: 2 * o), 2 * forward(net, weights, x))


def test_tuples_are_arguments_and_dicts_keywords():
    net = Through(lambda s, a, b: s.fc(a - 2 * b), fc=nn.Linear(3, 2))
    a, b = torch.randn(2, 4, 3)
    weights = {n: p.detach() for n, p in net.named_parameters()}
    expected = net(a, b)
    torch.testing.assert_close(call(net, weights, (a, b)), expected)
    torch.testing.assert_close(call(net, weights, {"b": b, "a": a}), expected)


def test_rows_are_taken_of_every_tensor_with_a_batch_axis():
    inputs = {"x": torch.arange(5), "deep": (torch.arange(10).reshape(5, 2),), "scale": torch.tensor(3.0), "flag": True}
    taken = take_rows(inputs, slice(1, 3))
    assert rows_of(inputs) == 5
    assert taken["x"].tolist() == [1, 2]
    assert taken["deep"][0].tolist() == [[2, 3], [4, 5]]
    assert (float(taken["scale"]), taken["flag"]) == (3.0, True)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("name", ["attention", "transformer"])
def test_two_draws_of_attention_differ_in_evaluation_mode_without_gradients(name: str, loop: bool):
    # the known trap: the fused path never calls sub-modules, so replaced layers are silently deterministic
    case = ZOO[name]
    net = copy_model(case.build())
    for parameter in dict(net.named_parameters()):
        weights = scaling(net, params=parameter, initial_scale=0.5).draw(range(2))
        with torch.no_grad():
            outputs = forward(net, weights, case.inputs(), loop=loop)
        if parameter != "layer.self_attn.in_proj_bias":
            assert float((outputs[0] - outputs[1]).abs().max()) > 1e-4, parameter


def test_attention_runs_under_vmap_without_a_warning_and_leaves_the_fast_path_on():
    case = ZOO["transformer"]
    net = copy_model(case.build())
    forward(net, scaling(net).draw(range(3)), case.inputs())
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", ["tanh_mlp", "transformer"])
def test_threads_do_not_see_each_others_weights_and_leave_torchs_switches_alone(name: str, chunk: int):
    # `functional_call` exchanges the model's own parameters while it runs
    case = ZOO[name]
    net = copy_model(case.build())
    model, q, x = BatchedModel(net, chunk_size=chunk, batch_size=4), scaling(net, initial_scale=0.3), case.inputs(12)
    expected = [model.outputs(lambda span, seed=seed: q.draw(span, seed=seed), 4, x) for seed in range(4)]
    switches = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()

    def work(seed: int) -> bool:
        runs = [model.outputs(lambda span: q.draw(span, seed=seed), 4, x) for _ in range(5)]
        return all(torch.allclose(run, expected[seed], rtol=1e-4, atol=1e-5) for run in runs)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()) == switches


# --------------------------------------------------------------------------------------------------------------- shared


class Masked(nn.Module):
    """Attention over (B, T, 4) under a mask (T, T) that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.layer(x, src_mask=mask).mean(1))


def test_a_shared_tensor_is_never_cut_and_is_an_ordinary_tensor_otherwise():
    x, mask = torch.randn(5, 3), torch.randn(5, 5)
    marked = shared(mask)
    for rows in (slice(0, 2), torch.tensor([4, 0])):
        taken = take_rows({"mask": marked, "x": x}, rows)  # also when it comes first
        assert torch.equal(taken["x"], x[rows])
        assert taken["mask"] is marked
    assert rows_of((torch.zeros(7, 2), marked)) == 7
    assert rows_of((shared(torch.zeros(3, 3)), x)) == 5
    assert type(marked * 2) is type(marked.clone()) is Tensor
    assert type(mask) is Tensor  # the user's own is as it was
    assert marked.data_ptr() == mask.data_ptr()
    for again in (copy.deepcopy(marked), pickle.loads(pickle.dumps(marked))):  # as from a worker of a DataLoader
        assert take_rows((x, again), slice(0, 2))[1].shape == (5, 5)


def test_what_is_shared_is_learned_where_all_rows_are_seen():
    x, mask = torch.randn(12, 4, 3), torch.randn(4, 4)
    marked = mark_shared((x, mask))
    block = take_rows(marked, slice(0, 4))  # four rows of four words: a (4, 4) might be per row
    assert [tuple(t.shape) for t in take_rows(block, slice(0, 2))] == [(2, 4, 3), (4, 4)]
    unmarked = take_rows((x, mask), slice(0, 4))
    assert [tuple(t.shape) for t in take_rows(unmarked, slice(0, 2))] == [(2, 4, 3), (2, 4)]  # what the mark is for


@pytest.mark.parametrize("batch_size", [3, 6, 12])
def test_a_mask_as_long_as_a_batch_gives_the_same_outputs(batch_size: int):
    torch.manual_seed(0)
    net = copy_model(Masked().eval())
    x, mask = torch.randn(12, 6, 4), nn.Transformer.generate_square_subsequent_mask(6)
    q = scaling(net, initial_scale=0.1)
    outputs = BatchedModel(net, chunk_size=2, batch_size=batch_size).outputs(lambda span: q.draw(span), 4, mark_shared((x, mask)))
    drawn = q.draw(range(4))
    slow = torch.stack([call(net, {n: w[p] for n, w in drawn.items()}, (x, mask)) for p in range(4)])
    torch.testing.assert_close(outputs, slow, rtol=1e-4, atol=1e-5)
