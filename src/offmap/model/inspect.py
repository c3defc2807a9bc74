"""Check a model on a few rows before trusting it: its own randomness, its state, its devices, and what no input reaches.

Everything runs on copies that share the model's parameters and nothing else, so the model is left as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offmap._torch_private import TorchDispatchMode, hook_tables, tensor_tables, tree_leaves
from offmap._types import Inputs, Weights
from offmap.data.batch import is_table, rows_of, take_rows
from offmap.errors import ModelError
from offmap.model.capture import CaptureMode
from offmap.model.forward import (
    MODEL_ERRORS,
    OutputFn,
    call,
    check_rows,
    copy_model,
    first_tensor,
    forward,
    model_failed,
    no_fast_path,
    no_fused_attention,
    plan_layers,
    replica,
)
from offmap.random import generator

ROWS = 8
"""Rows of one check."""

UNREACHED = "no input reaches it"

REACH_ROWS = 64
"""Rows on which a parameter must stay without effect before it is called unreached: experts and branches need some luck."""


@dataclass(frozen=True)
class Findings:
    """Findings of a check of a model that do not prevent a fit; others raise."""

    unreached: tuple[str, ...] = ()  # parameters that no input reaches
    hidden: tuple[str, ...] = ()  # parameters that inputs reach and gradients do not
    changing: tuple[str, ...] = ()  # buffers and attributes that calls change without any effect on the output
    rows: tuple[int, int] | None = None  # so many rows alone gave something else than among so many

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each finding."""
        sentences = {
            "No input reaches {}: left out of the random parameters. "
            "Drop them from the model, or check `output_fn`.": self.unreached,
            "Gradients do not reach {}: random, but only solver='closed-form' can fit them.": self.hidden,
            "Calls change {}: harmless, as the outputs do not depend on it.": self.changing,
        }
        lines = [line.format(listed(names)) for line, names in sentences.items() if names]
        if self.rows:
            lines.append(
                "Outputs depend on the other rows of the batch: {} alone give other outputs than among {}. "
                "Scores depend on the batches; give normalisation layers running statistics, "
                "or keep the batches as they were in training.".format(*self.rows)
            )
        return tuple(lines)


@torch.no_grad()
def check_model(net: nn.Module, inputs: Inputs, output_fn: OutputFn = first_tensor) -> Findings:
    """Check a private model in evaluation mode; raise a ModelError for what would make every result wrong.

    Costs about seven calls on at most 8 rows, and one copy of the weights at a time.

    >>> check_model(nn.Linear(3, 1).eval(), torch.ones(4, 3)).notes
    ()
    """
    device = one_device(net)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        own = {n: p.detach() for n, p in net.named_parameters() if p.is_floating_point()}
        # some models rewrite their parameters in a call, as embeddings with `max_norm` do
        probe = Probe(net, take_rows(inputs, slice(0, ROWS)), output_fn, {n: w.clone() for n, w in own.items()})
        alone = _first_output(replace(probe, x=take_rows(inputs, slice(0, 2))), device)
        first = _first_output(probe, device)
        used, changing = _check_state(probe, first)
        rewritten = {n: w for n, w in probe.weights.items() if not same(w, own[n], exact=True)}
        probe = replace(probe, weights=own | rewritten)
        _check_recomputes(probe, used)
        hidden = probe.hidden()
        unreached = probe.without_effect(hidden, first)
        for start in range(ROWS, min(rows_of(inputs), REACH_ROWS), ROWS):
            if unreached:
                later = replace(probe, x=take_rows(inputs, slice(start, start + ROWS)))
                hidden = [name for name in later.hidden() if name in hidden]
                unreached = later.without_effect([name for name in unreached if name in hidden], later.run())
        return Findings(
            unreached=tuple(unreached),
            hidden=tuple(name for name in hidden if name not in unreached),
            changing=(*rewritten, *changing),
            rows=None if same(alone, first[:2]) else (len(alone), len(first)),
        )


@dataclass(frozen=True)
class Probe:
    """A model, a few rows, what of the output matters, and the weights to call it with."""

    net: nn.Module
    x: Inputs
    output_fn: OutputFn
    weights: Weights

    def fresh(self) -> nn.Module:
        """Copy the model as it is before any call."""
        return copy_model(self.net, share=True)

    def run(self, twin: nn.Module | None = None, x: Inputs | None = None) -> Tensor:
        """Return the selected output."""
        return call(twin or self.fresh(), self.weights, self.x if x is None else x, self.output_fn).detach()

    def hidden(self) -> list[str]:
        """List the parameters that the graph of the output does not lead to; nothing is differentiated, so nothing is held."""
        leaves = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        try:
            with torch.enable_grad(), no_fast_path, no_fused_attention:
                output = call(self.fresh(), leaves, self.x, self.output_fn)
        except MODEL_ERRORS:  # runs without gradients only
            return list(leaves)
        found = _leaves_of(output)
        return [name for name, leaf in leaves.items() if id(leaf) not in found]

    def without_effect(self, names: list[str], plain: Tensor) -> list[str]:
        """Those of `names` that can be changed at will without any change of the output `plain`: all at once, then by halves."""
        if not names or not any(self._moved(names, plain, size) for size in (0.3, 3.0)):
            return names
        half = len(names) // 2
        return self.without_effect(names[:half], plain) + self.without_effect(names[half:], plain) if half else []

    def _moved(self, names: list[str], plain: Tensor, size: float) -> bool:
        moved = self.weights | perturb({n: self.weights[n] for n in names}, size)
        try:
            # to the bit: a branch may be scaled down to almost nothing and still be one
            return not same(replace(self, weights=moved).run(), plain, exact=True)
        except MODEL_ERRORS:
            return True


def perturb(weights: Mapping[str, Tensor], size: float) -> Weights:
    """Add noise of `size` times their root mean square to weights, the same every time."""
    result: Weights = {}
    for name, w in weights.items():
        noise = torch.randn(w.shape, generator=generator("examine", name), dtype=torch.float32, device="cpu").to(w)
        result[name] = noise.mul_(size * (float(w.float().square().mean().sqrt()) or 1.0)).add_(w)
    return result


def _first_output(probe: Probe, device: torch.device) -> Tensor:
    """The output of one call, refused if the model cannot be called or answers from elsewhere."""
    try:
        output = probe.run()
    except MODEL_ERRORS as error:
        dtype = next(iter(probe.weights.values())).dtype
        remedy = f" Or the CPU cannot run it in {dtype}: fit a copy in float32, `net.float()`." if _half(dtype, device) else ""
        raise ModelError(f"{model_failed(probe.net, probe.x, error)}{remedy}") from error
    check_rows(probe.net, output, probe.x)
    if output.device != device:
        raise ModelError(
            f"Expected an output on the device of the parameters, {device}, but {type(probe.net).__name__} answers on "
            f"{output.device}. Keep the model on one device, or move the output back in `output_fn=`."
        )
    return output


def _half(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and device.type == "cpu"


def _check_state(probe: Probe, first: Tensor) -> tuple[nn.Module, list[str]]:
    """Refuse randomness and memory that show in the output; give a model that was called, and what calls change without that."""
    used = probe.fresh()
    probe.run(used, _other_rows(probe.x))
    between = copy_model(used, share=True)
    again = probe.run(used)
    if not same(again, first, exact=True):
        _refuse(probe, used, first, again)
    return used, changed(between, used)


def _check_recomputes(probe: Probe, used: nn.Module) -> None:
    """Refuse a model that, once called, answers to new weights as if they were the old ones."""
    moved = replace(probe, weights=perturb(probe.weights, 0.3))
    try:
        fresh = moved.run()
    except MODEL_ERRORS:  # it does not take any weights
        return
    if not same(moved.run(used), fresh):
        raise ModelError(
            f"Expected a model that computes anew from its weights, but {type(probe.net).__name__} keeps what it made of them in "
            f"{listed(changed(probe.net, used))}. Keep such results in training mode only, or clear them in every call."
        )


def _refuse(probe: Probe, used: nn.Module, first: Tensor, again: Tensor) -> None:
    """Raise for a model whose second answer to the same rows is another one, and say whose fault it is."""
    sources, memory = random_operators(probe), changed(probe.net, used)
    if same(again, first) and not sources:
        return  # an unlucky order of summation
    if not memory or not same(probe.run(), first, exact=True):
        raise ModelError(
            f"Expected the same output for the same inputs, but {type(probe.net).__name__} draws its own randomness: "
            f"{', '.join(sources) or 'not with an operator of torch'}. Switch it off in evaluation mode, for example with "
            "`F.dropout(x, training=self.training)`."
        )
    raise ModelError(
        f"Expected outputs that do not depend on earlier calls, but {type(probe.net).__name__} remembers them in "
        f"{listed(memory)}. Update such state in training mode only, `if self.training:`."
    )


def _other_rows(x: Inputs) -> Inputs:
    """As many rows of other contents: each of the first half twice."""
    return take_rows(x, [row // 2 for row in range(rows_of(x))])


class _RandomOperators(TorchDispatchMode):
    """While active, call `saw` with every operator that draws from a random generator."""

    def __init__(self, saw: Callable[[str], None]) -> None:
        super().__init__()
        self.saw = saw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.saw(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def random_operators(probe: Probe) -> list[str]:
    """List every random operator of one call, with the innermost module in which it ran."""
    twin = probe.fresh()
    inside: list[str] = []
    for path, module in twin.named_modules():
        name = f"`{path}` ({type(module).__name__})" if path else "the model itself"
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True)
    seen: dict[str, None] = {}
    with no_fast_path, no_fused_attention, _RandomOperators(lambda operator: seen.setdefault(f"`{operator}` in {inside[-1]}")):
        probe.run(twin)
    return list(seen)


def _leaves_of(output: Tensor) -> set[int]:
    """Identities of the leaves that the graph of `output` leads to."""
    stack: list[Any] = [output.grad_fn]
    seen: set[Any] = {None}
    found = {id(output)}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            stack.extend(parent for parent, _ in node.next_functions)
    return found


def one_device(net: nn.Module) -> torch.device:
    """The device on which all parameters and buffers live; raise a ModelError that names those elsewhere."""
    places = {n: t.device for n, t in (*net.named_parameters(), *net.named_buffers())}
    first, *others = dict.fromkeys(places.values())
    if others:
        said = "; ".join(f"{listed(n for n, at in places.items() if at == device)} on {device}" for device in (first, *others))
        raise ModelError(f"Expected a model on one device, but it has {said}. Move it, for example with `net.to('{first}')`.")
    if first.type == "meta":
        raise ModelError(
            f"Expected a model that holds numbers, but {type(net).__name__} is on the meta device. Load its weights."
        )
    return first


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names for a sentence, the first few of many.

    >>> listed(["a", "b", "c"], most=2)
    '`a`, `b` and 1 more'
    """
    each = [f"`{name}`" for name in names]
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")


# ---------------------------------------------------------------------------------------------------------- chunks

CHUNK_NUMBERS, MOST_DRAWS = 1 << 25, 64
"""Weights that exist at once in a chunk chosen here (128 MB in float32), and its draws."""

WIDE, CHUNK_ACTIVATIONS = 1 << 16, 1 << 20
"""A loop is as fast as `vmap` once the widest result of an operator (activations, and views of weights) has more numbers than
WIDE: the arithmetic then takes longer than the calls. Below, a chunk keeps that result, for all of its weight sets, within
CHUNK_ACTIVATIONS (a core's cache)."""


@torch.no_grad()
def choose_chunk(net: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output_fn: OutputFn = first_tensor) -> int:
    """Choose how many draws of every member, {name: (M, ...)}, run at once. Sizes alone decide, so that all processes agree:

    1. never more than MOST_DRAWS draws or CHUNK_NUMBERS weights;
    2. plain stacks of layers on a table run in batched products: as many as that;
    3. models that `vmap` cannot run, and those whose widest result for `inputs` has more than WIDE numbers, are looped over: 1;
    4. others run under `vmap`, the widest result of a chunk within CHUNK_ACTIVATIONS numbers.
    """
    most = min(MOST_DRAWS, CHUNK_NUMBERS // max(1, sum(w.numel() for w in weights.values())))
    if output_fn is first_tensor and is_table(inputs) and plan_layers(net):
        return max(1, most)
    if most < 4:
        return 1
    # as draws will be, in memory and with gradients: some operators mind
    pair = {n: w[:1].repeat(2, *[1] * (w.ndim - 1)).requires_grad_(w.is_floating_point()) for n, w in weights.items()}
    try:
        with torch.enable_grad():
            forward(net, pair, take_rows(inputs, slice(0, 2)), output_fn=output_fn)
    except ModelError:
        return 1
    with replica(net) as twin, no_fast_path, no_fused_attention, CaptureMode({}, lambda use: None) as mode:
        call(twin, {n: w[0] for n, w in weights.items()}, inputs, output_fn)
    first = next(iter(weights.values()))
    scale = 1 if first.device.type == "cpu" else 16  # elsewhere a call costs more, beside the arithmetic
    if mode.widest > scale * WIDE:
        return 1
    return max(2, min(most, scale * CHUNK_ACTIVATIONS // max(1, mode.widest * first.shape[0])))


# ------------------------------------------------------------------------------------------ state beside parameters


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far another order of summation can move an output, as a share of the largest one."""

TORCH_ATTRIBUTES = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""Attributes of modules that are no state of the user's."""

ABSENT: Any = ...
"""An attribute that was not there."""


def same(a: Tensor, b: Tensor, *, exact: bool = False) -> bool:
    """Equal up to what another order of summation can do, or to the bit; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or exact:
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    tolerance = TOLERANCE[a.dtype]
    size = b.abs().nan_to_num(0.0, 0.0, 0.0).max() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(size), equal_nan=True)


def _state(net: nn.Module) -> dict[str, list[Any]]:
    """Tensors and plain numbers in every buffer and attribute of every module, by dotted name."""
    found: dict[str, list[Any]] = {}
    for path, module in net.named_modules():
        kept = {name: value for name, value in vars(module).items() if name not in TORCH_ATTRIBUTES}
        for name, value in (tensor_tables(module)[1] | kept).items():
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor | bool | int | float | str | None)]
            found[f"{path}.{name}".lstrip(".")] = leaves
    return found


def changed(before: nn.Module, after: nn.Module) -> list[str]:
    """Names of buffers and attributes that differ between two copies of one model."""
    old, new = _state(before), _state(after)

    def equal(a: Any, b: Any) -> bool:
        return same(a, b, exact=True) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b

    def alike(name: str) -> bool:
        a, b = old.get(name, []), new.get(name, [])
        return len(a) == len(b) and all(map(equal, a, b))

    return [name for name in old | new if not alike(name)]


@dataclass(frozen=True)
class RestoreState:
    """A forward hook that puts buffers and attributes back as they were: (path of the module, name, value)."""

    kept: tuple[tuple[str, str, Any], ...]

    def __call__(self, net: nn.Module, *_: Any) -> None:
        """Put copies back, so that the next call cannot reach the originals."""
        for path, name, value in self.kept:
            store = _store(net.get_submodule(path), name)
            if value is ABSENT:
                store.pop(name, None)
            else:
                store[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)


def restore_state(net: nn.Module, names: Iterable[str]) -> None:
    """Make a private model forget what its calls leave under these names.

    Under `vmap` they would be tensors that are dead afterwards, which nothing can copy; and they would keep memory.
    """
    places = [(path, name) for path, _, name in (name.rpartition(".") for name in names)]
    kept = ((path, name, _store(net.get_submodule(path), name).get(name, ABSENT)) for path, name in places)
    hook = RestoreState(tuple((path, name, copy.deepcopy(value)) for path, name, value in kept))
    if hook.kept:
        net.register_forward_hook(hook, always_call=True)


def attributes(net: nn.Module) -> list[str]:
    """Tensors that are neither parameters nor buffers; hooks make some of them anew in every call, as pruning does."""
    found = ((path, *pair) for path, module in net.named_modules() for pair in vars(module).items())
    return [f"{path}.{name}".lstrip(".") for path, name, value in found if isinstance(value, Tensor)]


def forgotten(net: nn.Module) -> list[str]:
    """The names that a private model was made to forget."""
    hooks = [hook for hook in hook_tables(net)[1].values() if isinstance(hook, RestoreState)]
    return [f"{path}.{name}".lstrip(".") for hook in hooks for path, name, _ in hook.kept]


def _store(module: nn.Module, name: str) -> dict[str, Any]:
    buffers = tensor_tables(module)[1]
    return buffers if name in buffers else vars(module)
