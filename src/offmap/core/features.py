"""What a host makes of an example on the way to its output: the rows that meet its matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.core.forward import HOST_ERRORS, Select, call, first_tensor, host_failed
from offmap.core.inputs import rows_of, take_rows
from offmap.core.reads import Read, ReadWatcher, open_attention


def features(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    x: Inputs,
    select: Select = first_tensor,
    *,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """{parameter: (B, D)}, in order of execution: what each matrix meets that meets one row per example, at its first use.

    Layers that meet every position of an example, as convolutions do, are left out: their rows are not examples.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> {name: tuple(h.shape) for name, h in features(net, dict(net.named_parameters()), torch.ones(4, 2)).items()}
    {'0.weight': (4, 2), '2.weight': (4, 3)}
    """
    if rows_of(x) == 1:  # in company: of one row, some operators make a vector, and whatever meets one row looks like it
        found = features(net, weights, take_rows(x, [0, 0]), select, names=names)
        return {name: met[:1] for name, met in found.items()}
    batch, found = rows_of(x), dict[str, Tensor]()

    def visit(read: Read) -> None:
        met = read.meeting
        if met is None or met.count != batch or met.groups != 1 or read.name in found:
            return
        if names is None or read.name in names:
            found[read.name] = torch.cat([block[0] for block in met.rows(None)])

    # in inference mode products are not taken apart, and nobody sees what they read
    with torch.inference_mode(False), torch.no_grad(), open_attention(), ReadWatcher(weights, visit):
        try:
            call(net, weights, x, select)
        except HOST_ERRORS as error:
            raise host_failed(net, x, error) from error
    return found
