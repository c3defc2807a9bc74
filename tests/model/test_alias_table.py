"""Where a view lies in a parameter: its axes, repeats and the part that it sees; or that it is no plain cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offmap.model.matrix_view import AliasTable, ParamView

W = torch.arange(24.0).reshape(4, 6)

PLAIN: dict[str, tuple[Callable[[Tensor], Tensor], ParamView]] = {
    "itself": (lambda w: w, ParamView("w", ((0,), (1,)), (1, 1))),
    "transposed": (lambda w: w.mT, ParamView("w", ((1,), (0,)), (1, 1))),
    "with an axis more": (lambda w: w[None], ParamView("w", ((), (0,), (1,)), (1, 1, 1))),
    "repeated": (lambda w: w.expand(3, 4, 6), ParamView("w", ((), (0,), (1,)), (3, 1, 1))),
    "repeated inside": (lambda w: w[:, None].expand(4, 5, 6), ParamView("w", ((0,), (), (1,)), (1, 5, 1))),
    "flat": (lambda w: w.flatten(), ParamView("w", ((0, 1),), (1,))),
    "some rows": (lambda w: w[1:3], ParamView("w", ((0,), (1,)), (1, 1), (0, 1, 3))),
    "the first rows": (lambda w: w[:3], ParamView("w", ((0,), (1,)), (1, 1), (0, 0, 3))),
    "some columns": (lambda w: w[:, 2:5], ParamView("w", ((0,), (1,)), (1, 1), (1, 2, 5))),
    "one row": (lambda w: w[2], ParamView("w", ((1,),), (1,), (0, 2, 3))),
    "one column": (lambda w: w[:, 5], ParamView("w", ((0,),), (1,), (1, 5, 6))),
    "some rows, flat": (lambda w: w[1:3].flatten(), ParamView("w", ((0, 1),), (1,), (0, 1, 3))),
}

NOT_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "a part of both axes": lambda w: w[1:3, 2:5],
    "every second row": lambda w: w[::2],
    "every second column": lambda w: w[:, ::2],
    "the diagonal": lambda w: w.diagonal(),
    "an axis cut in two": lambda w: w.view(2, 2, 6),
    "an axis that comes twice": lambda w: w.as_strided((3, 2), (6, 6)),
    "a row and a half": lambda w: w.flatten()[:9],
    "a row that begins in another": lambda w: w.as_strided((1, 6), (6, 1), 1),
}


@pytest.mark.parametrize("how", PLAIN)
def test_a_plain_view_is_located(how: str):
    view, place = PLAIN[how]
    aliases = AliasTable({"other": torch.zeros(3), "w": W})
    assert aliases.owner(view(W)) == "w"
    assert aliases.locate(view(W)) == place


@pytest.mark.parametrize("how", NOT_PLAIN)
def test_what_is_no_plain_cut_is_owned_but_not_located(how: str):
    aliases = AliasTable({"w": W})
    assert aliases.owner(NOT_PLAIN[how](W)) == "w"
    assert aliases.locate(NOT_PLAIN[how](W)) is None


def test_complete_is_the_parameter_itself_axis_by_axis():
    complete = {how: place.complete for how, (_, place) in PLAIN.items()}
    assert [how for how, it_is in complete.items() if it_is] == ["itself"]
    column = torch.zeros(5, 1)
    place = AliasTable({"w": column}).locate(column)
    assert place == ParamView("w", ((0,), ()), (1, 1))
    assert place.complete


def test_nobody_owns_other_tensors_nothing_and_no_numbers():
    aliases = AliasTable({"w": W})
    assert aliases.owner(None) is None
    assert aliases.owner(W[:0]) is None
    assert aliases.owner(torch.zeros(4, 6)) is None
    assert aliases.locate(torch.zeros(4, 6)) is None


def test_parameters_that_share_a_storage_are_distinguished():
    both = torch.arange(10.0)
    aliases = AliasTable({"a": both[:4], "b": both[4:]})
    assert [aliases.owner(both[i:]) for i in (0, 3, 4, 9)] == ["a", "a", "b", "b"]


def follow_copy(view: Callable[[Tensor], Tensor]) -> tuple[AliasTable, Tensor]:
    """A copy of a view, which stands for it."""
    aliases, copy = AliasTable({"w": W}), view(W).clone(memory_format=torch.contiguous_format)
    place = aliases.locate(view(W))
    assert place is not None
    aliases.add(copy, place)
    return aliases, copy


@pytest.mark.parametrize("how", PLAIN)
def test_a_copy_stands_where_its_source_does(how: str):
    aliases, copy = follow_copy(PLAIN[how][0])
    assert aliases.locate(copy) == PLAIN[how][1]


def test_views_of_copies_are_located_in_the_parameter():
    aliases, copy = follow_copy(lambda w: w.mT)
    assert aliases.locate(copy[2:5]) == ParamView("w", ((1,), (0,)), (1, 1), (1, 2, 5))
    aliases, copy = follow_copy(lambda w: w.expand(3, 4, 6))
    assert aliases.locate(copy.flatten(0, 1)) == ParamView("w", ((0,), (1,)), (3, 1))
    assert aliases.locate(copy[:, 1:3]) == ParamView("w", ((), (0,), (1,)), (3, 1, 1), (0, 1, 3))
    aliases, copy = follow_copy(lambda w: w[1:3])
    assert aliases.locate(copy.mT) == ParamView("w", ((1,), (0,)), (1, 1), (0, 1, 3))


@pytest.mark.parametrize(
    ("view", "again"),
    [
        (lambda w: w[1:3], lambda c: c[:1]),  # a part of a part
        (lambda w: w.flatten(), lambda c: c[6:12]),  # of two axes in one
        (lambda w: w.expand(3, 4, 6), lambda c: c[:2]),  # of repeats
        (lambda w: w[:, None].expand(4, 5, 6), lambda c: c.flatten(0, 1)),  # rows that are repeated one by one
    ],
)
def test_other_views_of_copies_have_no_place(view: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor]):
    aliases, copy = follow_copy(view)
    assert aliases.owner(again(copy)) == "w"
    assert aliases.locate(again(copy)) is None


def test_some_of_the_rows_of_repeats_one_after_another_have_no_place():
    aliases, copy = follow_copy(lambda w: w.expand(3, 4, 6))
    flat = copy.flatten(0, 1).clone()
    place = aliases.locate(copy.flatten(0, 1))
    assert place is not None
    aliases.add(flat, place)
    assert aliases.locate(flat) == place
    assert aliases.locate(flat[:2]) is None
