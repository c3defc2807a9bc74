"""Windows of a convolution against unfold, and of a transposed one against its own linear map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from offmap.model import matrix_view as windows
from offmap.model.matrix_view import Windows

PAIR = {
    "kernel": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "stride": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "padding": st.tuples(st.integers(0, 2), st.integers(0, 2)),
    "dilation": st.tuples(st.integers(1, 2), st.integers(1, 2)),
}
Two = tuple[int, int]


@given(**PAIR, flipped=st.booleans())
def test_windows_are_unfold(kernel: Two, stride: Two, padding: Two, dilation: Two, flipped: bool):
    x = torch.randn(2, 3, 5, 6)
    x = x.to(memory_format=torch.channels_last) if flipped else x
    places = tuple(F.conv2d(x, torch.zeros(1, 3, *kernel), None, stride, padding, dilation).shape[2:])
    ours = torch.cat(list(Windows(x, kernel, places, stride, padding, dilation).rows(1)), 1)[0]
    theirs = F.unfold(x, kernel, dilation, padding, stride).mT.reshape(-1, 3 * kernel[0] * kernel[1])
    assert torch.equal(ours, theirs)


@given(**PAIR, groups=st.sampled_from([1, 2]), extra=st.integers(0, 1))
def test_transposed_windows_times_the_kernel_are_the_transposed_convolution(
    kernel: Two, stride: Two, padding: Two, dilation: Two, groups: int, extra: int
):
    assume(extra < max(*stride, *dilation) and extra < min(max(s, d) for s, d in zip(stride, dilation, strict=True)))
    assume(all(d * (k - 1) >= p for d, k, p in zip(dilation, kernel, padding, strict=True)))
    x, w = torch.randn(2, 4, 4, 3, dtype=torch.float64), torch.randn(4, 3, *kernel, dtype=torch.float64)
    y = F.conv_transpose2d(x, w, None, stride, padding, extra, groups, dilation)
    met = torch.cat(list(Windows(x, kernel, tuple(y.shape[2:]), stride, padding, dilation, transposed=True).rows(groups)), 1)
    matrices = w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)  # (g, out/g, in/g·taps)
    ours = (met @ matrices.mT).unflatten(1, (2, *y.shape[2:]))  # (g, B, *places, out/g)
    torch.testing.assert_close(ours.permute(1, 0, 4, 2, 3).flatten(1, 2), y)


def test_chosen_windows_are_those_of_that_number_and_groups_see_their_own_channels():
    met = Windows(torch.randn(3, 4, 5), (2,), (4,), (1,), (0,), (1,))
    whole = torch.cat(list(met.rows(2)), 1)
    assert whole.shape == (2, 12, 4)
    chosen = torch.tensor([11, 0, 5, 5])
    assert torch.equal(torch.cat(list(met.rows(2, chosen)), 1), whole[:, chosen])


def test_windows_come_in_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    met = Windows(torch.randn(6, 2, 5), (3,), (3,), (1,), (0,), (1,))
    whole = torch.cat(list(met.rows(1)), 1)
    monkeypatch.setattr(windows, "BLOCK", 40)
    blocks = list(met.rows(1))
    assert len(blocks) == 3  # six windows of 6 numbers fit into 40
    assert max(b.numel() for b in blocks) <= 40
    assert torch.equal(torch.cat(blocks, 1), whole)
