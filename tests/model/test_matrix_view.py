"""Matrix views: any layout becomes a matrix and comes back; noise is turned block by block, piece by piece."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from offmap.model.matrix_view import MatrixView, in_pieces, rotate

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(shape=SHAPES, stack=st.integers(1, 3), data=st.data())
def test_a_parameter_becomes_a_matrix_and_comes_back(shape: tuple[int, ...], stack: int, data: st.DataObject):
    order = data.draw(st.permutations(range(len(shape))))
    cut = data.draw(st.integers(0, len(shape)))
    view = MatrixView(shape, tuple(order[:cut]), tuple(order[cut:]))
    weight = torch.randn(stack, *shape)
    rows = view.rows(weight)
    assert rows.shape == (stack, view.outputs, view.fan_in)
    assert torch.equal(view.back(rows, torch.Size(shape)), weight)


VIEWS = {
    "linear": (MatrixView((3, 4), (0,), (1,), (3,)), 1),
    "input first": (MatrixView((4, 3), (1,), (0,), (3,)), 1),
    "convolution": (MatrixView((3, 2, 2), (0,), (1, 2), (3,)), 1),
    "groups": (MatrixView((6, 2, 2), (0,), (1, 2), (2, 2, 2)), 1),
    "unequal blocks": (MatrixView((6, 4), (0,), (1,), (1, 2, 3)), 1),
    "heads": (MatrixView((2, 4, 3), (0, 2), (1,), (3, 3)), 1),
    "pieces": (MatrixView((3, 7), (0,), (1,), (3,)), 3),
    "blocks of pieces": (MatrixView((4, 7), (0,), (1,), (2, 2)), 2),
    "unequal blocks of pieces": (MatrixView((4, 5), (0,), (1,), (1, 3)), 2),
    "transposed, grouped": (MatrixView((2, 2, 3, 2), (0, 2), (1, 3), (3, 3)), 1),
}


def bases(view: MatrixView, pieces: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Two members' random rotations; what fills the last piece up stays where it is."""
    width = -(-view.fan_in // pieces)
    v = torch.eye(width, dtype=dtype).repeat(2, len(view.blocks), pieces, 1, 1)
    for piece in range(pieces):
        size = min(width, view.fan_in - piece * width)
        v[:, :, piece, :size, :size] = torch.linalg.qr(torch.randn(2, len(view.blocks), size, size, dtype=dtype))[0]
    return v


@pytest.mark.parametrize("name", VIEWS)
def test_rotation_is_a_product_with_v_along_every_fibre_and_keeps_lengths(name: str):
    view, pieces = VIEWS[name]
    delta, v = torch.randn(2, 3, *view.view, dtype=torch.float64), bases(view, pieces)
    turned = rotate(delta, v, view)
    for m, p in itertools.product(range(2), range(3)):
        torch.testing.assert_close(turned[m, p], oracles.turn(delta[m, p], v[m], view))
    torch.testing.assert_close(turned.square().sum(), delta.square().sum())
    torch.testing.assert_close(rotate(turned, v.mT, view), delta)


@pytest.mark.parametrize("name", VIEWS)
def test_per_row_repeats_the_values_of_a_block_for_each_of_its_rows(name: str):
    view, _ = VIEWS[name]
    values = torch.arange(len(view.blocks)).view(1, -1, 1)
    expected = [block for block, size in enumerate(view.blocks) for _ in range(size)]
    assert view.per_row(values).flatten().tolist() == expected


@pytest.mark.parametrize("fan_in", [1, 5, 9, 64])
@pytest.mark.parametrize("out", [1, 2, 3, 7])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rotated_draw_does_not_depend_on_the_draws_beside_it(
    fan_in: int, out: int, groups: int, dtype: torch.dtype, by_rows: bool
):
    # one product for many draws would: matrix libraries round differently for every number of rows, and place in memory
    view = MatrixView((groups * out, fan_in), (0,), (1,), (out,) * groups)
    delta, v = torch.randn(2, 20, *view.view, dtype=dtype), bases(view, 1, dtype)
    v = v.contiguous() if by_rows else v.mT.contiguous().mT
    together = rotate(delta, v, view)
    for chunk in (1, 2, 3, 7):
        parts = [rotate(delta[:, i : i + chunk], v, view) for i in range(0, 20, chunk)]
        assert torch.equal(torch.cat(parts, 1), together)


def test_pieces_are_filled_up_with_zeros():
    assert in_pieces(torch.arange(1.0, 6.0), 3).tolist() == [[1, 2], [3, 4], [5, 0]]
