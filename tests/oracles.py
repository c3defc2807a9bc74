"""Slow and obvious versions of what the library does fast."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.model.forward import OutputFn, copy_model, first_tensor
from offmap.posterior.distribution import WeightDistribution


def noise_of(q: WeightDistribution, name: str, *, seed: int, stream: str, member: int, draw: int) -> Tensor:
    """z at one address, float64."""
    address = "\x1f".join([str(seed), stream, str(member), str(draw), name])
    number = int.from_bytes(hashlib.blake2b(address.encode(), digest_size=8).digest(), "little") >> 1
    return q.noise.sample(tuple(q.mean[name].shape[1:]), torch.Generator().manual_seed(number)).double()


def draw(
    q: WeightDistribution, draw: int, *, member: int = 0, seed: int = 0, stream: str = "infer", clip: float = math.inf
) -> dict[str, Tensor]:
    """w = w̄ + V·clip(φ ⊙ z, c) of one draw of one member, entry by entry in float64."""
    result: dict[str, Tensor] = {}
    for name, mean in q.mean.items():
        raw = q.raw_scale[name][member].detach().double()
        delta = raw.exp().log1p() * noise_of(q, name, seed=seed, stream=stream, member=member, draw=draw)
        delta = torch.minimum(torch.maximum(delta, torch.tensor(-clip)), torch.tensor(clip))
        if name in q.rotation:
            delta = turn(delta, q.rotation[name][member].double(), q.views[name])
        result[name] = mean[member].double() + delta
    return result


def turn(delta: Tensor, matrices: Tensor, frame: Any) -> Tensor:
    """V·δ along the fan-in axes of one weight, one output and one piece of its fan-in at a time; matrices (G, N, d, d)."""
    seen = delta.reshape(frame.view)
    result = torch.empty_like(seen)
    ends = list(itertools.accumulate(frame.blocks))
    size = matrices.shape[-1]
    for row, place in enumerate(itertools.product(*(range(seen.shape[a]) for a in frame.outs))):
        index = tuple(place[frame.outs.index(a)] if a in frame.outs else slice(None) for a in range(seen.ndim))
        order = [sorted(frame.axes).index(a) for a in frame.axes]
        fibre = seen[index].permute(order)
        flat = F.pad(fibre.reshape(-1), (0, size * matrices.shape[1] - fibre.numel()))
        block = matrices[next(g for g, end in enumerate(ends) if row < end)]
        turned = torch.cat([v @ piece for v, piece in zip(block, flat.split(size), strict=True)])
        result[index].permute(order).copy_(turned[: fibre.numel()].reshape(fibre.shape))
    return result.reshape(delta.shape)


def run(net: nn.Module, weights: Mapping[str, Tensor], inputs: Any, output_fn: OutputFn = first_tensor) -> Tensor:
    """Outputs of a copy of the model with overwritten parameters, no `functional_call`: a stack of S sets -> (S, B, ...)."""
    outputs: list[Tensor] = []
    for i in range(len(next(iter(weights.values())))):
        twin = copy_model(net)
        own = dict(twin.named_parameters()) | dict(twin.named_buffers())
        for name, stack in weights.items():
            own[name].copy_(stack[i].detach())
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
        outputs.append(output_fn(twin(*args, **kwargs)))
    return torch.stack(outputs)


def windows(x: Tensor, layer: nn.Module) -> Tensor:
    """What the kernel of a convolution sees, one place after another: (B, C, *space) -> (n, C·prod(kernel))."""
    x = F.pad(x, layer._reversed_padding_repeated_twice)
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    starts = [range(0, n - w + 1, s) for n, w, s in zip(x.shape[2:], spans, layer.stride, strict=True)]
    parts = [
        x[(..., *(slice(i, i + w, d) for i, w, d in zip(place, spans, layer.dilation, strict=True)))].flatten(1)
        for place in itertools.product(*starts)
    ]
    return torch.cat(parts)


def second_moments(net: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """E[h hᵀ] of the inputs of every Linear and (ungrouped) convolution that is called as a module, by hooks."""
    seen: dict[str, list[Tensor]] = {}
    names = {id(p): name for name, p in net.named_parameters()}
    twin = copy.deepcopy(net).eval()

    def watch(layer: nn.Module, name: str) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach()
            rows = x.flatten(0, -2) if isinstance(layer, nn.Linear) else windows(x, layer)
            seen.setdefault(name, []).append(rows.double())

        layer.register_forward_pre_hook(hook)

    for (_, original), (_, layer) in zip(net.named_modules(), twin.named_modules(), strict=True):
        plain = isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1
        if isinstance(layer, nn.Linear) or plain:
            watch(layer, names[id(original.weight)])
    with torch.no_grad():
        for x in batches:
            run_once(twin, x)
    return {name: torch.cat(rows).mT @ torch.cat(rows) / sum(map(len, rows)) for name, rows in seen.items()}


def run_once(net: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def entropy_by_sampling(q: WeightDistribution, draws: int) -> float:
    """−(1/P) Σ log N(w_p; w̄, V diag(φ²) Vᵀ) of member 0, densities of the weights as drawn, for normal noise."""
    weights = q.draw(range(draws))
    total = torch.zeros(draws, dtype=torch.float64)
    for name, stack in weights.items():
        mean, scale = q.mean[name][0].double(), q.scale()[name][0].detach().double()
        delta = stack.detach().double() - mean
        if name in q.rotation:
            delta = torch.stack([turn(d, q.rotation[name][0].double().mT, q.views[name]) for d in delta])
        each = -0.5 * (delta / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)
        total += each.flatten(1).sum(1)
    return -float(total.mean())


def entropy_by_range(q: WeightDistribution, draws: int) -> float:
    """Σ log of the estimated width of every weight of member 0, for independent uniform weights."""
    result = 0.0
    for stack in q.draw(range(draws)).values():
        flat = stack.detach().double().flatten(1)
        result += float(((flat.amax(0) - flat.amin(0)) * (draws + 1) / (draws - 1)).log().sum())
    return result


def max_risk(losses: Any, *, per_root: bool = True) -> float:
    """τ = mean + 2·std/√n (or 2·std/n), in numpy."""
    array = np.asarray(losses, dtype=np.float64)
    return float(array.mean() + 2 * array.std() / (np.sqrt(len(array)) if per_root else len(array)))


def gaussian_nll(output: Tensor, y: Tensor) -> Tensor:
    """−log N(y; mean, exp(log-variance)) of outputs (..., 2), by torch.distributions in float64."""
    output = output.double()
    return -torch.distributions.Normal(output[..., 0], (0.5 * output[..., 1]).exp()).log_prob(y.double())
