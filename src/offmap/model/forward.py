"""Run a model: once with some of its weights replaced, or over a stack of weights (batched products, `vmap`, or a loop).

Threads never share the model itself: each call borrows a replica, which shares the parameters' memory and nothing else, so
that calls exchange weights and hooks without touching each other.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from threading import Lock
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from offmap._torch_private import change_count, hook_tables, strict_vmap, tensor_tables, tree_leaves, tree_map
from offmap._types import Inputs, Weights
from offmap.data.batch import arguments, is_table, rows_of, take_rows
from offmap.errors import ModelError, first_line

T = TypeVar("T")
OutputFn: TypeAlias = Callable[[Any], Tensor]  # from what a model returns to the tensor that matters
Draw: TypeAlias = Callable[[range], Weights]  # gives those draws of every member, {name: (M·p, ...)}
Plan: TypeAlias = list[tuple[str, nn.Module]]  # layers for batched products, each with the prefix of its parameters' names

# what a model may raise on inputs of a form that it does not know
MODEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError, ArithmeticError)
CACHE_NUMBERS = 1 << 23  # numbers that a cache holds unless told otherwise (32 MB in float32)
OUTPUT_NUMBERS = 1 << 24  # numbers in the stacked outputs of one block of rows (64 MB in float32)
LOOP_NUMBERS = 1 << 21  # weights drawn at once for a model that is looped over (8 MB): cheaper than one by one
TILE = 1 << 18  # activations in flight in batched products: few enough to stay in a core's cache
# modules that treat every number alike (dropout is the identity in evaluation mode)
ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity, nn.Dropout)


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


def call(model: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output_fn: OutputFn = first_tensor) -> Tensor:
    """Call a model that this thread alone uses, with some of its weights replaced. A tuple is `*args`, a dict `**kwargs`."""
    args, kwargs = arguments(inputs)
    with swap_weights(model, weights):
        return output_fn(model(*args, **kwargs))


@contextmanager
def swap_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Generator[None]:
    """Put other weights into the model for a while, a tied one in all of its places, whichever of its names it is given under."""
    slots: list[tuple[dict[str, Any], str, str]] = []
    by_id: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for table in tensor_tables(module):
            for leaf, tensor in table.items():
                name = f"{path}.{leaf}" if path else leaf
                slots.append((table, leaf, name))
                if name in weights:
                    by_id.setdefault(id(tensor), weights[name])
    swaps = [(t, leaf, t[leaf], weights.get(name, by_id[id(t[leaf])])) for t, leaf, name in slots if id(t[leaf]) in by_id]
    try:
        for table, leaf, _, other in swaps:
            table[leaf] = other
        yield
    finally:
        for table, leaf, original, _ in swaps:
            table[leaf] = original


@contextmanager
def hook_inputs(model: nn.Module, layers: Mapping[str, str], *, last: bool = False) -> Generator[dict[str, Tensor]]:
    """While active, file what modules of a replica are given at their first (or last) call: {key: path} -> {key: input}."""
    inputs: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, *, key: str) -> None:
        if args and (last or key not in inputs):
            inputs[key] = args[0]

    hooks = [model.get_submodule(path).register_forward_pre_hook(partial(keep, key=key)) for key, path in layers.items()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def model_failed(model: nn.Module, inputs: Inputs, error: Exception) -> ModelError:
    """Make the error for a model that cannot be called with these inputs at all."""
    shapes = tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__, inputs)
    remedy = "Check that the data have the form the model was trained on."
    if str(error).startswith("Guard failed"):  # of an exported program
        remedy = "Export it with a batch of any size: `torch.export.export(net, (x,), dynamic_shapes=({0: Dim.DYNAMIC},))`."
    return ModelError(f"{type(model).__name__} failed on inputs of shape {shapes}: {first_line(error)}. {remedy}")


def check_rows(model: nn.Module, output: object, inputs: Inputs) -> None:
    """Raise a ModelError unless the output is a tensor of real numbers with one row per input row."""
    if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != rows_of(inputs):
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"Expected one output row per input row, but {type(model).__name__} made {got} of {rows_of(inputs)} rows. "
            "Give the inputs a batch axis in front, or pass `output_fn=` to pick the right tensor."
        )
    if not output.is_floating_point():
        raise ModelError(
            f"Expected floating-point outputs, such as means or logits, but {type(model).__name__} returns {output.dtype}. "
            "Return what comes before `argmax` or rounding, or pass `output_fn=`, such as `torch.abs` of complex numbers."
        )


def widen(outputs: Tensor) -> Tensor:
    """Convert half-precision outputs to float32."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def copy_model(model: nn.Module, *, share: bool = False) -> nn.Module:
    """Copy the model in evaluation mode, without gradients; with `share`, the copy reads the model's own parameters."""
    return copy_module(model, share=share).eval().requires_grad_(False)


def copy_module(model: nn.Module, *, share: bool) -> nn.Module:
    """Copy the model as it is; with `share`, the copy reads the model's own parameters."""
    # weight norm and friends leave non-leaf tensors behind, which deepcopy refuses; hand it detached ones
    leftovers = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in leftovers}
    for p in model.parameters():
        if share or p.is_inference():  # which deepcopy would keep from gradients for good
            memo[id(p)] = nn.Parameter(p.detach() if share else p.detach().clone(), requires_grad=False)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"Expected a model that `copy.deepcopy` can copy, but {type(model).__name__} raised: {error}. "
            "Detach what the module keeps from its last call, or give it a `__deepcopy__`."
        ) from error


_IDLE: WeakKeyDictionary[nn.Module, tuple[Hashable, list[nn.Module]]] = WeakKeyDictionary()


@contextmanager
def replica(model: nn.Module) -> Generator[nn.Module]:
    """Lend a copy of a model, mode and hooks included, that no other thread has; copies serve again until the model changes."""
    modules = [(m.training, *map(tuple, hook_tables(m))) for m in model.modules()]
    state = (*modules, *(p.data_ptr() for p in model.parameters()), version_key(model.buffers()))
    entry = _IDLE.get(model)
    if entry is None or entry[0] != state:
        entry = _IDLE[model] = state, []
    try:
        twin = entry[1].pop()
    except IndexError:
        twin = copy_module(model, share=True)
    yield twin
    entry[1].append(twin)  # not after an error, which may have left anything in it


class _Switch:
    """Turn a process-wide switch of torch for as long as any thread is inside; its lock is held only to turn it."""

    def __init__(self, turn: Callable[[], AbstractContextManager[Any]]) -> None:
        self._turn, self._lock, self._inside = turn, Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._turned = self._turn()
                self._turned.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._turned.__exit__(None, None, None)


def _turn_fast_path_off() -> ExitStack:
    stack = ExitStack()
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    return stack


# the fast path of attention computes a whole layer where nobody sees its inputs
no_fast_path: _Switch = _Switch(_turn_fast_path_off)
# `vmap` can neither batch nor differentiate fused attention
no_fused_attention: _Switch = _Switch(lambda: sdpa_kernel(SDPBackend.MATH))


def content_key(inputs: Any) -> bytes:
    """Digest dtypes, shapes and bytes: equal inputs have equal keys wherever they lie, and an in-place change is another key."""
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
    """Return numbers that change when one of these tensors, which the caller keeps alive, is written to or replaced."""
    return tuple(number for t in tensors for number in (t.data_ptr(), 0 if t.is_inference() else change_count(t)))


class LRUCache:
    """Keep the latest values by key, at most `numbers` tensor elements in all; threads may share it."""

    def __init__(self, numbers: int = CACHE_NUMBERS) -> None:
        self.numbers: int = numbers
        self.held: int = 0
        self._values: dict[Hashable, tuple[Any, int]] = {}  # the latest last
        self._lock = Lock()  # for the bookkeeping alone: two threads may make the same value at once

    def get(self, key: Hashable) -> Any | None:
        """Return the value under `key`, None if it is not there."""
        with self._lock:
            if (entry := self._values.pop(key, None)) is None:
                return None
            self._values[key] = entry
            return entry[0]

    def put(self, key: Hashable, value: T) -> T:
        """Keep a value unless it is too large for the cache, and return it."""
        size = sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        with self._lock:
            if key not in self._values and size <= self.numbers:
                self._values[key] = value, size
                self.held += size
                while self.held > self.numbers:
                    self.held -= self._values.pop(next(iter(self._values)))[1]
        return value

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[LRUCache], tuple[int]]:
        return LRUCache, (self.numbers,)  # copies start empty


def forward(
    model: nn.Module, weights: Weights, inputs: Inputs, *, output_fn: OutputFn = first_tensor, loop: bool = False
) -> Tensor:
    """Run every weight set of a stack under `vmap`, or in a loop: {name: (S, ...)}, inputs of B rows -> (S, B, ...)."""
    size = next(iter(weights.values())).shape[0]

    def run(sets: range) -> list[Tensor]:
        try:
            with replica(model) as twin:
                return [call(twin, {n: w[i] for n, w in weights.items()}, inputs, output_fn) for i in sets]
        except MODEL_ERRORS as error:
            raise model_failed(model, inputs, error) from error

    if loop or size == 1:
        return torch.stack(run(range(size)))
    # plain strides, whatever the model's layout: convolutions under `vmap` mind others, even for axes of size one
    contiguous = {n: w.reshape(-1).view(w.shape) for n, w in weights.items()}
    try:
        with replica(model) as twin, no_fast_path, no_fused_attention, strict_vmap():
            return vmap(lambda w: call(twin, w, inputs, output_fn))(contiguous)
    except MODEL_ERRORS as error:
        run(range(1))  # which raises if the inputs are at fault
        raise ModelError(
            f"`vmap` cannot run {type(model).__name__} ({first_line(error)}). Pass `chunk_size=1` to loop over draws."
        ) from error


def plan_layers(model: nn.Module) -> Plan | None:
    """List the layers by name if the model is nothing but nested Sequentials of Linear and elementwise modules, else None."""
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):  # tied
        return None
    layers: Plan = []
    for path, module in model.named_modules(remove_duplicate=False):
        simple = (type(module) is nn.Linear or type(module) in ELEMENTWISE) and not module.training
        container = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if any(hook_tables(module)) or not (simple or container):
            return None
        if simple:
            layers.append((f"{path}." if path else "", module))
    return layers


def run_layers(layers: Plan, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Run a plain stack of layers as batched products, in tiles without gradients: {name: (S, ...)}, (B, D) -> (S, B, K)."""
    gradients, result, cuts = torch.is_grad_enabled(), None, [(slice(None), slice(None))]
    if not gradients:
        size, rows = next(iter(weights.values())).shape[0], x.shape[0]
        linear = [layer for _, layer in layers if isinstance(layer, nn.Linear)]
        widest = max(layer.out_features for layer in linear)
        sets = min(size, max(5, TILE // (widest * max(1, rows))))
        tile = max(32, TILE // (widest * sets))
        cuts = [(slice(i, i + sets), slice(row, row + tile)) for i in range(0, size, sets) for row in range(0, rows, tile)]
        result = x.new_empty(size, rows, linear[-1].out_features) if len(cuts) > 1 else None
    for cut in cuts:
        h, part = (x, weights) if result is None else (x[cut[1]], {name: w[cut[0]] for name, w in weights.items()})
        size, writable = next(iter(part.values())).shape[0], False  # until the first product, h is the user's memory
        h = h.expand(size, *h.shape)
        for prefix, layer in layers:
            if isinstance(layer, nn.Linear):
                weight, bias = part.get(f"{prefix}weight", layer.weight), part.get(f"{prefix}bias", layer.bias)
                matrix = weight.expand(size, *weight.shape[-2:]).mT  # one weight for every set where it is not random
                bias = bias if bias is None else bias.expand(size, bias.shape[-1]).unsqueeze(1)
                h = torch.bmm(h, matrix) if bias is None else torch.baddbmm(bias, h, matrix)
                writable = not gradients
            elif isinstance(layer, nn.ReLU):
                h = h.relu_() if writable else h.relu()
            else:
                h = layer(h)
        if result is None:
            return h
        result[cut] = h
    assert result is not None
    return result


def read_layers(layers: Plan, weights: Mapping[str, Tensor], x: Tensor, names: Collection[str]) -> dict[str, Tensor]:
    """Run a plain stack of layers with one set of weights; return the inputs of those whose weights have these names."""
    inputs: dict[str, Tensor] = {}
    for prefix, layer in layers:
        if not isinstance(layer, nn.Linear):
            x = layer(x)
            continue
        name = f"{prefix}weight"
        if name in names:
            inputs[name] = x
        if len(inputs) == len(names):
            break
        x = torch.nn.functional.linear(x, weights.get(name, layer.weight), weights.get(f"{prefix}bias", layer.bias))
    return inputs


def join_members(layer_inputs: Sequence[Mapping[str, Tensor]], name: str) -> Tensor | None:
    """Put the inputs of one layer of all members side by side, (B, D); None if one has none."""
    parts = [inputs[name] for inputs in layer_inputs if name in inputs]
    if len(parts) < len(layer_inputs) or not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "cat": lambda parts: parts[0] if len(parts) == 1 else torch.cat(parts, -1),
    "sum": lambda parts: torch.stack(parts).sum(0),
    "mean": lambda parts: torch.stack(parts).mean(0),
}


@dataclass(frozen=True)
class LastLayer:
    """The `nn.Linear`s that give the output, by path: one alone, or several whose outputs are joined (`JOINS`)."""

    paths: tuple[str, ...]
    join: str = "cat"

    def hooks(self) -> dict[str, str]:
        """Return the layers for `hook_inputs`."""
        return {path: path for path in self.paths}

    def read(self, hooked: Mapping[str, Tensor]) -> Tensor:
        """Return what the layers were given, side by side: (B, D), D all of their inputs."""
        return JOINS["cat"]([hooked[path] for path in self.paths])

    def apply(self, inputs: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        """Apply drawn layers, {name: (M·p, ...)}, to what each member gives them, M × (B, D) -> (M·p, B, C)."""
        names = [f"{path}." if path else "" for path in self.paths]
        widths = [weights[f"{name}weight"].shape[-1] for name in names]
        parts = zip(names, zip(*(h.split(widths, -1) for h in inputs), strict=True), strict=True)
        return JOINS[self.join]([_apply_linear(h, weights[f"{name}weight"], weights.get(f"{name}bias")) for name, h in parts])


def _apply_linear(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """M × (B, D), weights (M·p, C, D) -> (M·p, B, C): one product per member."""
    members = len(inputs)
    matrices = weight.unflatten(0, (members, -1))
    biases = [None] * members if bias is None else bias.unflatten(0, (members, -1)).flatten(1)
    products = [F.linear(h, w.flatten(0, 1), b) for h, w, b in zip(inputs, matrices, biases, strict=True)]  # (B, p·C)
    return torch.cat([product.unflatten(1, matrices.shape[1:3]).transpose(0, 1) for product in products])


@torch.no_grad()
def find_last_layer(
    model: nn.Module, random: Collection[str], weights: Weights, x: Inputs, output_fn: OutputFn = first_tensor
) -> LastLayer | None:
    """Find the `nn.Linear`s whose own parameters are `random` if, as trials of other weights show, they give the output."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in random)
    modules = {path: model.get_submodule(path) for path in paths}
    own = {f"{path}.{n}".lstrip(".") for path, module in modules.items() for n, _ in module.named_parameters()}
    matrices = {f"{path}.weight".lstrip(".") for path in paths}  # which pruned and normed layers do not have
    if any(type(module) is not nn.Linear for module in modules.values()) or not matrices <= own == set(random):
        return None
    few, other = take_rows(x, slice(0, 4)), {n: weights.get(n, model.get_parameter(n)).flip(0) + 0.5 for n in random}
    layers = [LastLayer(tuple(paths), join) for join in (JOINS if len(paths) > 1 else ("cat",))]
    for trial in (other, {n: -w for n, w in other.items()}):  # what comes after the layer may leave one sign alone
        try:
            with replica(model) as twin, hook_inputs(twin, layers[0].hooks(), last=True) as hooked:
                call(twin, weights, few, output_fn)
                inputs = dict(hooked)
                output = call(twin, weights | trial, few, output_fn)
        except MODEL_ERRORS:
            return None
        if len(inputs) < len(paths) or any(h.ndim != 2 for h in inputs.values()):
            return None
        draws = {n: w.unsqueeze(0) for n, w in trial.items()}
        layers = [layer for layer in layers if _gives(layer, inputs, draws, output)]
        if not layers:
            return None
    return layers[0]


def _gives(layer: LastLayer, inputs: Mapping[str, Tensor], draws: Weights, output: Tensor) -> bool:
    """Tell whether the layers give this output of the whole model."""
    try:
        expected = layer.apply([layer.read(inputs)], draws)[0]
    except RuntimeError:  # of outputs that cannot be added
        return False
    near = 1e-3 * float(output.abs().max())
    return expected.shape == output.shape and torch.allclose(expected, output, rtol=1e-2, atol=near)


@dataclass(frozen=True)
class BatchedModel:
    """A model and how to run it over draws of its weights, in chunks of draws and of rows."""

    module: nn.Module  # a private model in evaluation mode
    output_fn: OutputFn = first_tensor
    chunk_size: int = 16  # draws that run at once; 1 is a loop over them
    batch_size: int = 128  # rows that run at once, where the model is not a plain stack of layers
    output_numbers: int = 1  # in one output row
    output_axes: int | None = None  # of one output row, if known
    last_layer: LastLayer | None = None  # what gives the output, where it alone is random: all before it runs once
    # inputs of the last layer, 16 MB in float32: a prediction and a score of the same inputs share a pass
    _inputs: LRUCache = field(default_factory=lambda: LRUCache(1 << 22), init=False, repr=False, compare=False)

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

    def share_last_inputs(self, inputs: Inputs, layer_inputs: Sequence[Mapping[str, Tensor]]) -> None:
        """Keep what every member gives a single random last layer, {parameter: (B, D)}, for draws of the same inputs."""
        if self.last_layer is not None and len(self.last_layer.paths) == 1:
            name = f"{self.last_layer.paths[0]}.weight".lstrip(".")
            if all(name in given for given in layer_inputs):
                self._inputs.put(content_key(inputs), tuple(given[name] for given in layer_inputs))

    def _last_layer_outputs(self, layer: LastLayer, draw: Draw, draws: int, inputs: Inputs, members: int) -> Tensor:
        """Run draws that differ in the last layer alone: one pass per member, then one product per member."""
        first, key = draw(range(1)), content_key(inputs)
        layer_inputs = self._inputs.get(key)
        if layer_inputs is None:
            parts: list[Tensor] = []
            try:
                with replica(self.module) as twin, hook_inputs(twin, layer.hooks(), last=True) as hooked:
                    for m, row in product(range(members), range(0, rows_of(inputs), self.batch_size)):
                        block = take_rows(inputs, slice(row, row + self.batch_size))
                        call(twin, {n: w[m] for n, w in first.items()}, block, self.output_fn)
                        parts.append(layer.read(hooked))
            except MODEL_ERRORS as error:
                raise model_failed(self.module, inputs, error) from error
            layer_inputs = self._inputs.put(key, torch.cat(parts).chunk(members))
        check_rows(self.module, layer_inputs[0], inputs)
        chunk = max(1, LOOP_NUMBERS // sum(w.numel() for w in first.values()))
        spans = (range(start, min(start + chunk, draws)) for start in range(0, draws, chunk))
        parts = [widen(layer.apply(layer_inputs, draw(span))).unflatten(0, (members, -1)) for span in spans]
        return torch.cat(parts, 1).flatten(0, 1)
