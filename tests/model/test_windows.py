"""Windows of a convolution against unfold, and of a transposed one against its own linear map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from offmap.model import capture
from offmap.model.capture import LayerInput, convolution_input

PAIR = {
    "kernel": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "stride": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "padding": st.tuples(st.integers(0, 2), st.integers(0, 2)),
    "dilation": st.tuples(st.integers(1, 2), st.integers(1, 2)),
}
Two = tuple[int, int]


def rows(inputs: LayerInput, chosen: Tensor | None = None) -> Tensor:
    """All blocks in one, (groups, n, D)."""
    return torch.cat(list(inputs.rows(chosen)), 1)


@given(**PAIR, flipped=st.booleans())
def test_windows_are_unfold(kernel: Two, stride: Two, padding: Two, dilation: Two, flipped: bool):
    x = torch.randn(2, 3, 5, 6)
    x = x.to(memory_format=torch.channels_last) if flipped else x
    places = tuple(F.conv2d(x, torch.zeros(1, 3, *kernel), None, stride, padding, dilation).shape[2:])
    ours = rows(convolution_input((1, 3, *kernel), x, places, stride, padding, dilation, False, 1))[0]
    theirs = F.unfold(x, kernel, dilation, padding, stride).mT.reshape(-1, 3 * kernel[0] * kernel[1])
    assert torch.equal(ours, theirs)


@given(**PAIR, groups=st.sampled_from([1, 2]), extra=st.integers(0, 1))
def test_transposed_windows_times_the_kernel_are_the_transposed_convolution(
    kernel: Two, stride: Two, padding: Two, dilation: Two, groups: int, extra: int
):
    assume(extra < max(*stride, *dilation) and extra < min(max(s, d) for s, d in zip(stride, dilation, strict=True)))
    sides = zip((4, 3), kernel, stride, padding, dilation, strict=True)
    assume(all((n - 1) * s + d * (k - 1) + extra + 1 > 2 * p for n, k, s, p, d in sides))
    x, w = torch.randn(2, 4, 4, 3, dtype=torch.float64), torch.randn(4, 3, *kernel, dtype=torch.float64)
    y = F.conv_transpose2d(x, w, None, stride, padding, extra, groups, dilation)
    inputs = rows(convolution_input((4, 3, *kernel), x, y.shape[2:], stride, padding, dilation, True, groups))
    matrices = w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)  # (g, out/g, in/g·taps)
    ours = (inputs @ matrices.mT).unflatten(1, (2, *y.shape[2:]))  # (g, B, *places, out/g)
    torch.testing.assert_close(ours.permute(1, 0, 4, 2, 3).flatten(1, 2), y)


def test_chosen_windows_are_those_of_that_number_and_groups_see_their_own_channels():
    inputs = convolution_input((2, 2, 2), torch.randn(3, 4, 5), (4,), (1,), (0,), (1,), False, 2)
    assert rows(inputs).shape == (2, 12, 4)
    chosen = torch.tensor([11, 0, 5, 5])
    assert torch.equal(rows(inputs, chosen), rows(inputs)[:, chosen])


def test_windows_come_in_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    inputs = convolution_input((1, 2, 3), torch.randn(6, 2, 5), (3,), (1,), (0,), (1,), False, 1)
    everything = rows(inputs)
    monkeypatch.setattr(capture, "BLOCK", 40)
    blocks = list(inputs.rows(None))
    assert len(blocks) == 3  # six windows of 6 numbers fit into 40
    assert max(b.numel() for b in blocks) <= 40
    assert torch.equal(torch.cat(blocks, 1), everything)
