"""Run a model: once with some of its weights replaced, or over a stack of weights (batched products, `vmap`, or a loop).

Threads never share the model itself: each call borrows a replica, which shares the parameters' memory and nothing else, so
that calls exchange weights and hooks without touching each other.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from offmap._torch_private import change_count, child_table, hook_tables, strict_vmap, tensor_tables, tree_leaves, tree_map
from offmap._types import Inputs, Weights
from offmap.data.batch import arguments, is_table, rows_of, take_rows
from offmap.errors import ModelError

T = TypeVar("T")

CACHE_NUMBERS = 1 << 23
"""Numbers that a cache holds unless told otherwise (32 MB in float32)."""

OutputFn: TypeAlias = Callable[[Any], Tensor]
"""From what a model returns to the tensor that matters."""

Draw: TypeAlias = Callable[[range], Weights]
"""Gives those draws of every member, {name: (M·p, ...)}."""

Plan: TypeAlias = list[tuple[str, nn.Module]]
"""Layers that batched products can run, each with the prefix of its parameters' names."""

MODEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError)
"""What a model may raise on inputs of a form that it does not know."""

OUTPUT_NUMBERS = 1 << 24
"""Numbers in the stacked outputs of one block of rows (64 MB in float32)."""

LOOP_NUMBERS = 1 << 21
"""Weights drawn at once for a model that is looped over (8 MB in float32): many draws at once are cheaper than one by one."""

CACHED_INPUTS = 1 << 22
"""Numbers of cached inputs of a last layer (16 MB in float32): a prediction and a score of the same inputs share a pass."""

TILE = 1 << 18
"""Activations in flight in batched products: few enough to stay in a core's cache."""

ELEMENTWISE = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity, nn.Dropout,
)  # fmt: skip
"""Modules that treat every number alike (dropout is the identity in evaluation mode)."""


# ----------------------------------------------------------------------------------------------------------- one call


def first_tensor(output: Any) -> Tensor:
    """Pick the default output: a tensor itself, `.logits`, or the first entry."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ModelError(
        f"Expected a model that returns a tensor, an object with `.logits` or a tuple that starts with a tensor, "
        f"but got {type(output).__name__}. Pass `output_fn=` to pick the tensor."
    )


def call(net: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output_fn: OutputFn = first_tensor) -> Tensor:
    """Call a model that this thread alone uses, with some of its weights replaced. A tuple is `*args`, a dict `**kwargs`."""
    args, kwargs = arguments(inputs)
    with swap_weights(net, weights):
        return output_fn(net(*args, **kwargs))


@contextmanager
def swap_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> Generator[None]:
    """Put other weights into the model for a while, a tied one in all of its places, whichever of its names it is given under."""
    slots: list[tuple[dict[str, Any], str, str]] = []
    given: dict[int, Tensor] = {}
    for path, module in net.named_modules():
        for table in tensor_tables(module):
            for leaf, tensor in table.items():
                name = f"{path}.{leaf}" if path else leaf
                slots.append((table, leaf, name))
                if name in weights:
                    given.setdefault(id(tensor), weights[name])
    swaps = [(t, leaf, t[leaf], weights.get(name, given[id(t[leaf])])) for t, leaf, name in slots if id(t[leaf]) in given]
    try:
        for table, leaf, _, other in swaps:
            table[leaf] = other
        yield
    finally:
        for table, leaf, original, _ in swaps:
            table[leaf] = original


def copy_model(net: nn.Module, *, share: bool = False) -> nn.Module:
    """Copy the model in evaluation mode, without gradients: what is done to the model later cannot reach the copy.

    With `share` the copy reads the model's own parameters, and only buffers and attributes are its own: no memory to speak of.
    """
    return _copy(net, share=share).eval().requires_grad_(False)


def share_model(net: nn.Module) -> nn.Module:
    """Copy a model as it is, mode and hooks included, with parameters that share the model's memory."""
    return _copy(net, share=True)


def _copy(net: nn.Module, *, share: bool) -> nn.Module:
    # weight norm and friends leave non-leaf tensors behind, which deepcopy refuses; hand it detached ones
    leftovers = [t for m in net.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in leftovers}
    for p in net.parameters():
        if share or p.is_inference():  # which deepcopy would keep from gradients for good
            memo[id(p)] = nn.Parameter(p.detach() if share else p.detach().clone(), requires_grad=False)
    try:
        return copy.deepcopy(net, memo)
    except Exception as error:
        raise ModelError(
            f"Expected a model that `copy.deepcopy` can copy, but {type(net).__name__} raised: {error}. "
            "Detach what the module keeps from its last call, or give it a `__deepcopy__`."
        ) from error


_IDLE: WeakKeyDictionary[nn.Module, tuple[Hashable, list[nn.Module]]] = WeakKeyDictionary()


@contextmanager
def replica(net: nn.Module) -> Generator[nn.Module]:
    """Lend a copy of `net` that no other thread has. Copies serve again until `net` changes: there is one per concurrent call."""
    state = _state_key(net)
    entry = _IDLE.get(net)
    if entry is None or entry[0] != state:
        entry = _IDLE[net] = state, []
    try:
        twin = entry[1].pop()
    except IndexError:
        twin = share_model(net)
    yield twin
    entry[1].append(twin)  # not after an error, which may have left anything in it


def _state_key(net: nn.Module) -> Hashable:
    """What a copy of `net` depends on: modes, hooks and buffers, and which memory its parameters have."""
    modules = [(m.training, *map(tuple, hook_tables(m))) for m in net.modules()]
    return (*modules, *(p.data_ptr() for p in net.parameters()), version_key(net.buffers()))


class _Switch:
    """Turn a process-wide switch of torch for as long as any thread is inside; its lock is held only to turn it."""

    def __init__(self, turn: Callable[[], AbstractContextManager[Any]]) -> None:
        self.turn, self.lock, self.inside = turn, Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.turned = self.turn()
                self.turned.__enter__()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.turned.__exit__(None, None, None)


@contextmanager
def _fast_path_off() -> Generator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


no_fast_path = _Switch(_fast_path_off)
"""While active, attention layers call their sub-modules; their fast path computes a whole layer where nobody sees its inputs."""

no_fused_attention = _Switch(lambda: sdpa_kernel(SDPBackend.MATH))
"""While active, attention is a few products: `vmap` can neither batch nor differentiate fused kernels."""


def model_failed(net: nn.Module, inputs: Inputs, error: Exception) -> ModelError:
    """Make the error for a model that cannot be called with these inputs at all."""
    shapes = tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__, inputs)
    return ModelError(
        f"{type(net).__name__} failed on inputs of shape {shapes}: {_first_line(error)}. "
        "Check that the data have the form the model was trained on."
    )


def check_rows(net: nn.Module, output: object, inputs: Inputs) -> None:
    """Raise a ModelError unless the output is a tensor with one row per input row."""
    if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != rows_of(inputs):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"Expected one output row per input row, but {type(net).__name__} made {got} of {rows_of(inputs)} rows. "
            "Give the inputs a batch axis in front, or pass `output_fn=` to pick the right tensor."
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


# -------------------------------------------------------------------------------------------------------------- cache


def content_key(inputs: Any) -> bytes:
    """Digest what `inputs` hold: equal inputs have equal keys, wherever they lie in memory.

    >>> x = torch.zeros(2)
    >>> content_key(x) == content_key(x.clone()), content_key(x) == content_key(x.double())
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(inputs):
        if not isinstance(leaf, Tensor):
            digest.update(repr(leaf).encode())
            continue
        content = leaf.detach().cpu().contiguous()
        digest.update(f"{content.dtype}{tuple(content.shape)}".encode())
        digest.update(content.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def version_key(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return numbers that change whenever someone writes to one of these tensors, or puts another in its place."""
    return tuple(number for t in tensors for number in (t.data_ptr(), 0 if t.is_inference() else change_count(t)))


class LRUCache:
    """Keep the latest values by key, at most `numbers` tensor elements in all; threads may share it.

    >>> cache = LRUCache(numbers=4)
    >>> cache.put("a", torch.zeros(3)), cache.get("a"), cache.get("b")
    (tensor([0., 0., 0.]), tensor([0., 0., 0.]), None)
    """

    def __init__(self, numbers: int = CACHE_NUMBERS) -> None:
        self.numbers = numbers
        self.held = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()  # for the bookkeeping alone: two threads may make the same value at once

    def get(self, key: Hashable) -> Any | None:
        """Return the value under `key`, None if it is not there."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: T) -> T:
        """Keep a value unless it is too large for the cache, and return it."""
        size = sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        with self._lock:
            if key not in self._values and size <= self.numbers:
                self._values[key] = value, size
                self.held += size
                while self.held > self.numbers:
                    self.held -= self._values.popitem(last=False)[1][1]
        return value

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[LRUCache], tuple[int]]:
        return LRUCache, (self.numbers,)  # copies start empty


# ------------------------------------------------------------------------------------------------- a stack of weights


def forward(
    net: nn.Module,
    weights: Weights,
    inputs: Inputs,
    *,
    output_fn: OutputFn = first_tensor,
    loop: bool = False,
) -> Tensor:
    """Run every weight set of a stack: {name: (S, ...)}, inputs of B rows -> (S, B, ...).

    Args:
        net: The model; it is not touched.
        weights: S weight sets by name; parameters that are missing are the model's.
        inputs: A tensor, a tuple or a dict of them.
        output_fn: Picks the tensor that matters of what the model returns.
        loop: Run the sets one after another instead of under `vmap`.
    """
    size = next(iter(weights.values())).shape[0]
    if loop or size == 1:
        try:
            with replica(net) as twin:
                return torch.stack([call(twin, {n: w[i] for n, w in weights.items()}, inputs, output_fn) for i in range(size)])
        except MODEL_ERRORS as error:
            raise model_failed(net, inputs, error) from error
    # plain strides, whatever the model's layout: convolutions under `vmap` mind others, even for axes of size one
    contiguous = {n: w.reshape(-1).view(w.shape) for n, w in weights.items()}
    try:
        with replica(net) as twin, no_fast_path, no_fused_attention, strict_vmap():
            return vmap(lambda w: call(twin, w, inputs, output_fn))(contiguous)
    except MODEL_ERRORS as error:
        try:
            with replica(net) as twin:
                call(twin, {n: w[0] for n, w in weights.items()}, inputs, output_fn)
        except Exception as other:
            raise model_failed(net, inputs, other) from other
        raise ModelError(
            f"`vmap` cannot run {type(net).__name__} ({_first_line(error)}). Pass `chunk_size=1` to loop over draws."
        ) from error


def plan_layers(net: nn.Module, prefix: str = "") -> Plan | None:
    """List the layers by name if the model is nothing but nested Sequentials of Linear and elementwise modules, else None."""
    tied = not prefix and len(list(net.parameters())) < len(list(net.named_parameters(remove_duplicate=False)))
    if any(hook_tables(net)) or tied:
        return None
    if isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward:
        parts = [plan_layers(child, f"{prefix}{name}.") for name, child in child_table(net).items()]
        return None if any(p is None for p in parts) else [layer for p in parts if p for layer in p]
    simple = type(net) is nn.Linear or type(net) in ELEMENTWISE
    return [(prefix, net)] if simple and not net.training else None


def run_layers(layers: Plan, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Run a plain stack of layers as batched products: {name: (S, ...)}, (B, D) -> (S, B, K).

    `vmap` gives the same numbers; here the bias rides in the product and activations work in place, which for small models is
    most of the time. Without gradients, weight sets and rows are cut into tiles.
    """
    size = next(iter(weights.values())).shape[0]
    if torch.is_grad_enabled():
        return _run_tile(layers, weights, x, size)
    linear = [layer for _, layer in layers if isinstance(layer, nn.Linear)]
    widest = max(layer.out_features for layer in linear)
    sets = min(size, max(5, TILE // (widest * max(1, x.shape[0]))))
    rows = max(32, TILE // (widest * sets))
    result = x.new_empty(size, x.shape[0], linear[-1].out_features)
    for i in range(0, size, sets):
        part = {name: w[i : i + sets] for name, w in weights.items()}
        for row in range(0, x.shape[0], rows):
            result[i : i + sets, row : row + rows] = _run_tile(layers, part, x[row : row + rows], min(sets, size - i))
    return result


def _run_tile(layers: Plan, weights: Mapping[str, Tensor], x: Tensor, size: int) -> Tensor:
    h, writable = x.expand(size, *x.shape), False  # until the first product, h is the user's memory
    for prefix, layer in layers:
        if isinstance(layer, nn.Linear):
            weight, bias = weights.get(f"{prefix}weight", layer.weight), weights.get(f"{prefix}bias", layer.bias)
            matrix = weight.expand(size, *weight.shape[-2:]).mT  # one weight for every set where it is not random
            h = torch.bmm(h, matrix) if bias is None else torch.baddbmm(bias.expand(size, bias.shape[-1]).unsqueeze(1), h, matrix)
            writable = not torch.is_grad_enabled()
        elif isinstance(layer, nn.ReLU):
            h = h.relu_() if writable else h.relu()
        else:
            h = layer(h)
    return h


@dataclass(frozen=True)
class BatchedModel:
    """A model and how to run it over draws of its weights, in chunks of draws and of rows.

    Args:
        module: A private model in evaluation mode.
        output_fn: Picks the tensor that matters of what the model returns.
        chunk_size: Draws that run at once; 1 is a loop over them.
        batch_size: Rows that run at once, where the model is not a plain stack of layers.
        output_numbers: Numbers in one output row.
        output_axes: Axes of one output row, if known.
        last_layer: Name of the `nn.Linear` that gives the output, where its parameters alone are random: all before it runs once.
    """

    module: nn.Module
    output_fn: OutputFn = first_tensor
    chunk_size: int = 16
    batch_size: int = 128
    output_numbers: int = 1
    output_axes: int | None = None
    last_layer: str | None = None
    _inputs: LRUCache = field(default_factory=lambda: LRUCache(CACHED_INPUTS), init=False, repr=False, compare=False)

    def __call__(self, weights: Weights, inputs: Inputs) -> Tensor:
        """Run a stack of weights, {name: (S, ...)} -> (S, B, ...), in float32 at least; gradients flow."""
        if not self.layers or not is_table(inputs):
            return widen(forward(self.module, weights, inputs, output_fn=self.output_fn, loop=self.chunk_size == 1))
        try:
            return widen(run_layers(self.layers, weights, inputs))
        except MODEL_ERRORS as error:
            raise model_failed(self.module, inputs, error) from error

    @cached_property
    def layers(self) -> Plan | None:
        """Layers that batched products can run, if the model is a plain stack of them."""
        return plan_layers(self.module) if self.output_fn is first_tensor else None

    def blocks(self, inputs: Inputs, stacked: int) -> Iterator[slice]:
        """Cut the rows so short that `stacked` outputs of one slice stay within a fixed memory."""
        step = max(1, min(1 << 16, OUTPUT_NUMBERS // max(1, stacked * self.output_numbers)))
        return (slice(i, i + step) for i in range(0, rows_of(inputs), step))

    @torch.no_grad()
    def outputs(self, draw: Draw, draws: int, inputs: Inputs, *, members: int = 1) -> Tensor:
        """Run `draws` draws of every member, member-major: (M·P, B, ...). Weights exist one chunk at a time."""
        size = rows_of(inputs)
        if draws < 1 or size < 1:
            raise ModelError("Expected at least one draw and one row, but got none.")
        if self.last_layer is not None:
            return self._last_layer_outputs(self.last_layer, draw, draws, inputs, members)
        step = size if self.layers and is_table(inputs) else self.batch_size
        chunk = self.chunk_size
        if chunk == 1:
            chunk = max(1, LOOP_NUMBERS // (members * max(1, sum(p.numel() for p in self.module.parameters()))))
        result: Tensor | None = None
        for start in range(0, draws, chunk):
            span = range(start, min(start + chunk, draws))
            weights = draw(span)
            for row in range(0, size, step):
                taken = take_rows(inputs, slice(row, row + step))
                block = self(weights, taken)
                check_rows(self.module, block[0], taken)
                if block.shape[1] == size and len(span) == draws:
                    return block
                if result is None:
                    result = block.new_empty((members, draws, size, *block.shape[2:]))
                result[:, start : span.stop, row : row + step] = block.unflatten(0, (members, len(span)))
            del weights  # gone before the next ones are drawn
        assert result is not None
        return result.flatten(0, 1)

    def _last_layer_outputs(self, layer: str, draw: Draw, draws: int, inputs: Inputs, members: int) -> Tensor:
        """Run draws that differ in the last layer alone: one pass per member, then one product per member."""
        first = draw(range(1))
        key = content_key(inputs)
        layer_inputs = self._inputs.get(key) or self._inputs.put(key, self._read_last_layer(layer, first, inputs, members))
        check_rows(self.module, layer_inputs[0], inputs)
        chunk = max(1, LOOP_NUMBERS // sum(w.numel() for w in first.values()))
        parts: list[Tensor] = []
        for start in range(0, draws, chunk):
            weights = draw(range(start, min(start + chunk, draws)))
            parts.append(widen(apply_last_layer(layer, layer_inputs, weights)).unflatten(0, (members, -1)))
        return torch.cat(parts, 1).flatten(0, 1)

    def _read_last_layer(self, layer: str, weights: Weights, inputs: Inputs, members: int) -> tuple[Tensor, ...]:
        """What the last layer is given in every member, (B, D) each."""
        blocks = [take_rows(inputs, slice(i, i + self.batch_size)) for i in range(0, rows_of(inputs), self.batch_size)]
        try:
            with replica(self.module) as twin:
                return tuple(
                    torch.cat(
                        [
                            read_module_input(twin, layer, {n: w[m] for n, w in weights.items()}, block, self.output_fn)[0]
                            for block in blocks
                        ]
                    )
                    for m in range(members)
                )
        except MODEL_ERRORS as error:
            raise model_failed(self.module, inputs, error) from error


def widen(outputs: Tensor) -> Tensor:
    """Convert half-precision outputs to float32."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


@torch.no_grad()
def read_module_input(
    net: nn.Module, layer: str, weights: Mapping[str, Tensor], x: Inputs, output_fn: OutputFn
) -> tuple[Tensor, Tensor]:
    """Call a model that this thread alone uses; return what a module of it is given, at its last call, and the model's output."""
    inputs: list[Tensor] = []
    handle = net.get_submodule(layer).register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        output = call(net, weights, x, output_fn)
    finally:
        handle.remove()
    return inputs[-1], output


def apply_last_layer(layer: str, inputs: tuple[Tensor, ...], weights: Mapping[str, Tensor]) -> Tensor:
    """Apply drawn last layers, {name: (M·p, ...)}, to what each member gives them, M × (B, D) -> (M·p, B, C)."""
    prefix = f"{layer}." if layer else ""
    stacked = {n: w.unflatten(0, (len(inputs), -1)) for n, w in weights.items() if n in (f"{prefix}weight", f"{prefix}bias")}
    outputs: list[Tensor] = []
    for member, h in enumerate(inputs):
        w = stacked[f"{prefix}weight"][member]  # (p, C, D)
        bias = stacked[f"{prefix}bias"][member].flatten() if f"{prefix}bias" in stacked else None
        outputs.append(F.linear(h, w.flatten(0, 1), bias).unflatten(1, w.shape[:2]).transpose(0, 1))
    return torch.cat(outputs)
