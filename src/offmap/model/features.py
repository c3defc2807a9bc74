"""What a model makes of an example on the way to its output: the rows that meet its matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from offmap._types import Inputs
from offmap.data.inputs import rows_of, take_rows
from offmap.model.capture import CaptureMode, ParamUse, open_attention
from offmap.model.forward import MODEL_ERRORS, OutputFn, call, first_tensor, model_failed


def features(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    x: Inputs,
    output_fn: OutputFn = first_tensor,
    *,
    names: Collection[str] | None = None,
    maps: bool = False,
) -> dict[str, Tensor]:
    """{parameter: (B, D)}, in order of execution: what each matrix meets that meets one row per example, at its first use.

    Layers that meet every position of an example, as convolutions do, are left out: their rows are not examples. With `maps`,
    convolutions are not: of what they meet, (B, C, *space), mean and standard deviation of every channel stand for the example.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> {name: tuple(h.shape) for name, h in features(net, dict(net.named_parameters()), torch.ones(4, 2)).items()}
    {'0.weight': (4, 2), '2.weight': (4, 3)}
    """
    if rows_of(x) == 1:  # in company: of one row, some operators make a vector, and whatever meets one row looks like it
        found = features(net, weights, take_rows(x, [0, 0]), output_fn, names=names, maps=maps)
        return {name: met[:1] for name, met in found.items()}
    batch, found = rows_of(x), dict[str, Tensor]()

    def visit(read: ParamUse) -> None:
        met = read.meeting
        if met is None or read.name in found or (names is not None and read.name not in names):
            return
        if maps and met.map is not None and len(met.map) == batch:
            found[read.name] = pooled(met.map)
        elif met.count == batch and met.groups == 1:
            found[read.name] = torch.cat([block[0] for block in met.rows(None)])

    # in inference mode products are not taken apart, and nobody sees what they read
    with torch.inference_mode(False), torch.no_grad(), open_attention(), CaptureMode(weights, visit):
        try:
            call(net, weights, x, output_fn)
        except MODEL_ERRORS as error:
            raise model_failed(net, x, error) from error
    return found


def pooled(x: Tensor) -> Tensor:
    """Mean and standard deviation of every channel over its places, (B, C, *space) -> (B, 2C).

    >>> pooled(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]]))
    tensor([[2., 5., 1., 0.]])
    """
    flat = x.flatten(2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return torch.cat([flat.mean(2), flat.std(2, correction=0)], 1)
