"""What ranks saw apart is what one sees alone: moments, counts, reasons and bases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.model.capture import TWICE
from offmap.model.matrix_view import MatrixView
from offmap.model.params import stack_models
from offmap.posterior.basis import Moment, Observed, Total, build_bases, observe, reduce_moments
from threads import Thread, in_ranks
from zoo import Through

CPU = torch.device("cpu")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)).double()


def table() -> nn.Module:
    torch.manual_seed(1)
    return Through(lambda s, x: s.out(s.table(x).mean(1)), table=nn.Embedding(9, 3), out=nn.Linear(3, 2)).double()


def twice() -> nn.Module:
    torch.manual_seed(2)
    return Through(lambda s, x: F.linear(F.linear(x, s.a.weight), s.a.weight.mT), a=nn.Linear(3, 3, bias=False)).double()


BATCHES: dict[Callable[[], nn.Module], list[Tensor]] = {
    mlp: [normal(i, n, 4) for i, n in enumerate((7, 3, 5, 9, 4))],
    table: [torch.tensor([[0, 1], [2, 1]]), torch.tensor([[5, 5]]), torch.tensor([[1, 0]]), torch.tensor([[8, 2]])],
    twice: [normal(i, 4, 3) for i in range(3)],
}


def observe_in(group: Thread | None, net: nn.Module, data: list[Tensor], *, rotated: bool) -> Observed:
    if group is None:
        return observe(stack_models(net), lambda rows: data, rotated=rotated)
    own = data[group.rank :: group.size]
    return observe(stack_models(net), lambda rows: data, rotated=rotated, group=group, shard=lambda rows: own)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("make", BATCHES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_see_together_what_one_sees_alone(make: Callable[[], nn.Module], size: int, rotated: bool):
    net, data = make(), BATCHES[make]
    alone = observe_in(None, net, data, rotated=rotated)
    for seen in in_ranks(size, lambda group: observe_in(group, net, data, rotated=rotated)):
        assert seen.why == alone.why
        assert list(seen.bases) == list(alone.bases)
        for name, basis in alone.bases.items():
            other = seen.bases[name]
            assert (other.view, other.bias) == (basis.view, basis.bias)
            torch.testing.assert_close(other.input_rms, basis.input_rms)
            torch.testing.assert_close(other.output_rms, basis.output_rms)
            assert (other.matrix is None) == (basis.matrix is None)
            if basis.matrix is not None and other.matrix is not None:
                torch.testing.assert_close(other.matrix, basis.matrix)


ROWS, COLUMNS = MatrixView((2, 2), (0,), (1,)), MatrixView((2, 2), (1,), (0,))


def reduce_sum(*own: Moment | None) -> Moment:
    """The moment of a parameter that all ranks end with."""

    def reduce_pool(group: Thread) -> Moment:
        mine = own[group.rank]
        found = {} if mine is None else {"w": mine}
        reduce_moments([found], group, CPU)
        return found["w"]

    first, *others = in_ranks(len(own), reduce_pool)
    for other in others:
        assert (other.view, other.bias, other.why, other.final) == (first.view, first.bias, first.why, first.final)
    return first


def total(value: float, rows: int) -> Total:
    return Total(torch.full((1, 1, 2, 2), value, dtype=torch.float64), rows)


def test_a_rank_without_inputs_adds_nothing():
    merged = reduce_sum(None, Moment(7, ROWS, "b", {(0, 2, 1): total(3.0, 4)}))
    assert (merged.limit, merged.view, merged.bias, merged.why, merged.final) == (7, ROWS, "b", "", False)
    assert merged.totals[0, 2, 1].rows == 4
    assert merged.totals[0, 2, 1].products.tolist() == [[[[3.0, 3.0], [3.0, 3.0]]]]


def test_parts_that_only_some_ranks_use_are_kept_and_rows_are_added():
    merged = reduce_sum(
        Moment(view=ROWS, totals={(0, 1, 1): total(1.0, 2), (0, 2, 1): total(2.0, 3)}),
        Moment(view=ROWS, totals={(0, 2, 1): total(5.0, 4)}),
    )
    assert {key: (t.rows, float(t.products[0, 0, 0, 0])) for key, t in merged.totals.items()} == {
        (0, 1, 1): (2, 1.0), (0, 2, 1): (7, 7.0),
    }  # fmt: skip


def test_what_two_ranks_use_along_other_axes_cannot_be_rotated():
    merged = reduce_sum(
        Moment(view=ROWS, totals={(0, 2, 1): total(1.0, 1)}), Moment(view=COLUMNS, totals={(0, 2, 1): total(1.0, 1)})
    )
    assert (merged.view, merged.why, merged.final, merged.totals) == (None, TWICE, True, {})


def test_what_is_final_on_one_rank_is_final_with_its_reason():
    merged = reduce_sum(Moment(view=ROWS, totals={(0, 2, 1): total(1.0, 1)}), Moment(why="in parts", final=True))
    assert (merged.view, merged.why, merged.final, merged.totals) == (None, "in parts", True, {})


def test_without_inputs_the_first_reason_that_was_given_stays():
    merged = reduce_sum(Moment(), Moment(why="looked up"), Moment(why="other"))
    assert (merged.view, merged.why, merged.final, merged.counts) == (None, "looked up", False, None)


def test_counts_of_other_lengths_are_added_row_by_row():
    merged = reduce_sum(Moment(counts=torch.tensor([1, 0, 2])), Moment(), Moment(counts=torch.tensor([4, 1, 1, 5, 6])), None)
    assert merged.counts is not None
    assert merged.counts.tolist() == [5, 1, 3, 5, 6]


@pytest.mark.parametrize("size", [2, 3])
def test_every_basis_is_made_by_one_rank(size: int, monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    monkeypatch.setattr(
        "offmap.posterior.basis.build_bases",
        lambda moments, mean, **options: made.extend(mean) or build_bases(moments, mean, **options),
    )
    net, data = mlp(), BATCHES[mlp]
    in_ranks(size, lambda group: observe_in(group, net, data, rotated=True))
    assert sorted(made) == sorted(name for name, _ in net.named_parameters())
