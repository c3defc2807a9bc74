"""How many draws to run at once: measured, once for a form of model."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor, nn

from offmap._torch_private import tree_leaves
from offmap._types import Inputs
from offmap.data.inputs import is_table, take_rows
from offmap.errors import ModelError
from offmap.model.forward import OutputFn, first_tensor, forward, plan_layers

CHUNK_NUMBERS = 1 << 25
"""Weights drawn at once when the chunk is chosen here (128 MB in float32)."""

CHUNKS = (4, 16, 64)
"""Numbers of draws that are tried against one after another."""

GAIN = 0.85
"""A larger chunk must take at most this share of the time of a smaller one: noise should not choose."""

SECONDS, TURNS = 0.5, 5
"""What choosing a chunk may take, and how often each size is tried at most."""

THREAD_TIME = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter
"""Other work on the machine does not count, where the system can tell (some only by hundredths of a second)."""

CHOSEN: dict[Hashable, int] = {}
"""Chunks measured in this process, by the model's form: a choice is made once, so that results repeat to the bit."""


def choose_chunk(net: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output_fn: OutputFn = first_tensor) -> int:
    """How many draws of every member, {name: (M, ...)}, to run at once: measured on these inputs, once for a form of model.

    Batched products take as many draws as stay small in memory. Other models run a few times, draw after draw and under `vmap`,
    and a larger chunk is taken if it is clearly faster; those that `vmap` cannot run are looped over. `vmap` saves what calls
    cost beside the arithmetic, so what is best for these rows may not be for many more or fewer. Chunks change outputs by
    rounding alone; where another process must repeat them to the bit, give it the chunk that was chosen here.
    """
    most = min(CHUNKS[-1], CHUNK_NUMBERS // max(1, sum(w.numel() for w in weights.values())))
    if output_fn is first_tensor and is_table(inputs) and plan_layers(net):
        return max(1, most)
    chunks = [c for c in CHUNKS if c <= most]
    if not chunks:
        return 1
    # as draws will be, in memory and with gradients: some operators mind
    pair = {n: w[:1].repeat(2, *[1] * (w.ndim - 1)).requires_grad_(w.is_floating_point()) for n, w in weights.items()}
    try:
        with torch.enable_grad():
            forward(net, pair, take_rows(inputs, slice(0, 2)), output_fn=output_fn)
    except ModelError:
        return 1
    form = _form(net, weights, inputs)
    if form not in CHOSEN:
        CHOSEN[form] = _quickest(net, weights, inputs, output_fn, chunks)
    return CHOSEN[form]


@torch.no_grad()
def _quickest(net: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output_fn: OutputFn, chunks: list[int]) -> int:
    """The chunk that takes least per draw. Sizes take turns, so that a busy machine slows all; those without time left pass."""
    where = next(iter(weights.values()))
    members, clock = where.shape[0], THREAD_TIME if where.device.type == "cpu" else time.perf_counter
    best: dict[int, float] = {}  # seconds for one weight set
    last, end = 0.0, clock() + SECONDS
    forward(net, {n: w[:1] for n, w in weights.items()}, inputs, output_fn=output_fn)  # a first call is slow
    for _ in range(TURNS):
        for draws in (1, *chunks):
            sets = 1 if draws == 1 else draws * members
            if best and clock() + sets * best.get(draws, last) > end:
                continue
            stacked = {n: w[:1] if sets == 1 else w.repeat(draws, *[1] * (w.ndim - 1)) for n, w in weights.items()}
            last = _seconds(lambda sets=stacked: forward(net, sets, inputs, output_fn=output_fn), clock) / sets
            best[draws] = min(last, best.get(draws, last))
    chunk = 1
    for draws in sorted(best):
        chunk = draws if best[draws] <= GAIN * best[chunk] else chunk
    return chunk


def _seconds(run: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    start = clock()
    float(run().flatten()[0])  # a number can be had only when the device is done
    return clock() - start


def _form(net: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs) -> Hashable:
    """What the time of a call depends on: modules, weights, buffers and inputs by type and shape, and threads."""
    given = ((str(i), t) for i, t in enumerate(tree_leaves(inputs)) if isinstance(t, Tensor))
    tensors = [*weights.items(), *net.named_buffers(), *given]
    modules = [(name, type(module)) for name, module in net.named_modules()]
    return (*modules, *((name, t.shape, t.dtype, t.device) for name, t in tensors), torch.get_num_threads())
