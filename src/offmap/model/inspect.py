"""Check a model on a few rows before trusting it: its own randomness, its state, its devices, and what no input reaches.

Everything runs on copies that share the model's parameters and nothing else, so the model is left as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from offmap._torch_private import TORCH_ATTRIBUTES, TorchDispatchMode, hook_tables, tensor_tables, tree_leaves
from offmap._types import Inputs, Weights
from offmap.data.batch import is_table, rows_of, take_rows
from offmap.errors import ModelError
from offmap.model.capture import CaptureMode, ParamUse
from offmap.model.forward import (
    MODEL_ERRORS,
    OutputFn,
    call,
    check_rows,
    content_key,
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

ROWS = 8  # of one check
UNREACHED = "no input reaches it"
# how far another order of summation can move an output, as a share of the largest one
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# a chunk has at most so many weights (128 MB in float32), and draws
CHUNK_NUMBERS, MOST_DRAWS = 1 << 25, 64
# A loop is as fast as `vmap` once the widest result of an operator (activations, and views of weights) has more numbers than
# WIDE: the arithmetic then takes longer than the calls. Below, a chunk keeps that result within a core's cache.
WIDE, CHUNK_ACTIVATIONS = 1 << 16, 1 << 20
ABSENT: Any = ...  # what stands for an attribute that was not there


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
        lines = [line.format(join_names(names)) for line, names in sentences.items() if names]
        if self.rows:
            lines.append(
                "Outputs depend on the other rows of the batch: {} alone give other outputs than among {}. "
                "Scores depend on the batches; give normalisation layers running statistics, "
                "or keep the batches as they were in training.".format(*self.rows)
            )
        return tuple(lines)


def join_names(names: Iterable[str], most: int = 4) -> str:
    """Names for a sentence, the first few of many: "`a`, `b` and 1 more"."""
    each = [f"`{name}`" for name in names]
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")


@torch.no_grad()
def check_model(model: nn.Module, inputs: Inputs, output_fn: OutputFn = first_tensor) -> Findings:
    """Check a private model by about seven calls on at most 8 rows; raise a ModelError for what makes every result wrong."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        params = {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point()}
        # some models rewrite their parameters in a call, as embeddings with `max_norm` do
        probe = Probe(model, take_rows(inputs, slice(0, ROWS)), output_fn, {n: w.clone() for n, w in params.items()})
        alone = _first_output(replace(probe, x=take_rows(inputs, slice(0, 2))), device)
        first = _first_output(probe, device)
        called = copy_model(model, share=True)
        probe.run(called, take_rows(probe.x, [row // 2 for row in range(rows_of(probe.x))]))  # other rows, as many
        between = copy_model(called, share=True)
        again = probe.run(called)
        if not same(again, first, exact=True):
            _refuse_state(probe, called, first, again)
        changing = find_changes(between, called)
        rewritten = {n: w for n, w in probe.weights.items() if not same(w, params[n], exact=True)}
        probe = replace(probe, weights=params | rewritten)
        _check_recomputes(probe, called)
        hidden = probe.find_hidden()
        unreached = [name for name in hidden if not probe.matters(name, first)]
        # experts and branches need some luck: on 64 rows a parameter must stay without effect to be called unreached
        for start in range(ROWS, min(rows_of(inputs), 64), ROWS):
            if unreached:
                later = replace(probe, x=take_rows(inputs, slice(start, start + ROWS)))
                hidden = [name for name in later.find_hidden() if name in hidden]
                output = later.run()
                unreached = [name for name in unreached if name in hidden and not later.matters(name, output)]
        return Findings(
            unreached=tuple(unreached),
            hidden=tuple(name for name in hidden if name not in unreached),
            changing=(*rewritten, *changing),
            rows=None if same(alone, first[:2]) else (len(alone), len(first)),
        )


@dataclass(frozen=True)
class Probe:
    """What a check calls a model with."""

    model: nn.Module
    x: Inputs
    output_fn: OutputFn
    weights: Weights

    def run(self, twin: nn.Module | None = None, x: Inputs | None = None) -> Tensor:
        """Return the selected output of a copy that was never called, or of `twin`."""
        twin = copy_model(self.model, share=True) if twin is None else twin
        return call(twin, self.weights, self.x if x is None else x, self.output_fn).detach()

    def find_hidden(self) -> list[str]:
        """List the parameters that gradients do not reach."""
        leaves = {n: w.detach().requires_grad_() for n, w in self.weights.items()}
        try:
            with torch.enable_grad(), no_fast_path, no_fused_attention:
                output = call(copy_model(self.model, share=True), leaves, self.x, self.output_fn)
                grads = torch.autograd.grad(output, [*leaves.values()], torch.zeros_like(output), allow_unused=True)
        except MODEL_ERRORS:  # runs without gradients only
            return list(leaves)
        return [name for name, grad in zip(leaves, grads, strict=True) if grad is None]

    def matters(self, name: str, output: Tensor) -> bool:
        """Tell whether changes of a parameter change the output, to the bit: a branch may be scaled down to almost nothing."""
        moves = (perturb({name: self.weights[name]}, size) for size in (0.3, 3.0))
        try:
            return any(not same(replace(self, weights=self.weights | move).run(), output, exact=True) for move in moves)
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
        half = dtype in (torch.float16, torch.bfloat16) and device.type == "cpu"
        remedy = f" Or the CPU cannot run it in {dtype}: fit a copy in float32, `net.float()`." if half else ""
        raise ModelError(f"{model_failed(probe.model, probe.x, error)}{remedy}") from error
    check_rows(probe.model, output, probe.x)
    if output.device != device:
        raise ModelError(
            f"Expected an output on the device of the parameters, {device}, but {type(probe.model).__name__} returns it on "
            f"{output.device}. Keep the model on one device, or move the output back in `output_fn=`."
        )
    return output


def _refuse_state(probe: Probe, called: nn.Module, first: Tensor, again: Tensor) -> None:
    """Raise for a model whose second answer to the same rows is another one, and say why it is."""
    operators: dict[str, None] = {}

    class RandomOperators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags:
                # names of the modules around it begin with the model's class; the innermost has most dots
                path = max(tracker.parents, key=lambda name: name.count(".")).partition(".")[2]
                place = f"`{path}` ({type(twin.get_submodule(path)).__name__})" if path else "the model itself"
                operators[f"`{func.overloadpacket}` in {place}"] = None
            return func(*args, **(kwargs or {}))

    twin = copy_model(probe.model, share=True)
    with no_fast_path, no_fused_attention, ModuleTracker() as tracker, RandomOperators():
        probe.run(twin)
    if same(again, first) and not operators:
        return  # an unlucky order of summation
    memory, name = find_changes(probe.model, called), type(probe.model).__name__
    if not memory or not same(probe.run(), first, exact=True):
        raise ModelError(
            f"Expected the same output for the same inputs, but {name} draws its own randomness: "
            f"{', '.join(operators) or 'not with an operator of torch'}. Switch it off in evaluation mode, for example with "
            "`F.dropout(x, training=self.training)`."
        )
    raise ModelError(
        f"Expected outputs that do not depend on earlier calls, but {name} remembers them in "
        f"{join_names(memory)}. Update such state in training mode only, `if self.training:`."
    )


def _check_recomputes(probe: Probe, called: nn.Module) -> None:
    """Refuse a model that, once called, answers to new weights as if they were the old ones."""
    moved = replace(probe, weights=perturb(probe.weights, 0.3))
    try:
        fresh = moved.run()
    except MODEL_ERRORS:  # it does not take any weights
        return
    if not same(moved.run(called), fresh):
        raise ModelError(
            f"Expected a model that computes anew from its weights, but {type(probe.model).__name__} keeps what it made of them "
            f"in {join_names(find_changes(probe.model, called))}. Do so in training mode only, or clear it in every call."
        )


def same(a: Tensor, b: Tensor, *, exact: bool = False) -> bool:
    """Equal up to what another order of summation can do, or to the bit; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or exact:
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    tolerance = TOLERANCE[a.dtype]
    size = b.abs().nan_to_num(0.0, 0.0, 0.0).max() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(size), equal_nan=True)


@torch.no_grad()
def choose_chunk(model: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs, output_fn: OutputFn = first_tensor) -> int:
    """Choose how many draws of every member, {name: (M, ...)}, run at once. Sizes alone decide, so that all processes agree:

    1. never more than MOST_DRAWS draws or CHUNK_NUMBERS weights;
    2. plain stacks of layers on a table run in batched products: as many as that;
    3. models that `vmap` cannot run, and those whose widest result for `inputs` has more than WIDE numbers (with torch's own
       attention half of that), are looped over: 1;
    4. others run under `vmap`, the widest result of a chunk within CHUNK_ACTIVATIONS numbers.
    """
    most = min(MOST_DRAWS, CHUNK_NUMBERS // max(1, sum(w.numel() for w in weights.values())))
    if output_fn is first_tensor and is_table(inputs) and plan_layers(model):
        return max(1, most)
    if most < 4:
        return 1
    # as draws will be, in memory and with gradients: some operators mind
    pair = {n: w[:1].repeat(2, *[1] * (w.ndim - 1)).requires_grad_(w.is_floating_point()) for n, w in weights.items()}
    try:
        with torch.enable_grad():
            forward(model, pair, take_rows(inputs, slice(0, 2)), output_fn=output_fn)
    except ModelError:
        return 1
    first, widest = next(iter(weights.values())), 0
    scale = 1 if first.device.type == "cpu" else 16  # elsewhere a call costs more, beside the arithmetic
    attention = any(isinstance(m, nn.MultiheadAttention) for m in model.modules())  # fused in a loop, not under `vmap`
    for rows in (take_rows(inputs, slice(0, ROWS)), inputs):  # of large models, a few rows tell
        with replica(model) as twin, no_fast_path, no_fused_attention, CaptureMode({}, lambda use: None) as mode:
            call(twin, {n: w[0] for n, w in weights.items()}, rows, output_fn)
        widest = mode.widest
        if widest > scale * WIDE // (1 + attention):
            return 1
    return max(2, min(most, scale * CHUNK_ACTIVATIONS // max(1, widest * first.shape[0])))


@torch.no_grad()
def count_products(model: nn.Module, inputs: Inputs, output_fn: OutputFn = first_tensor) -> int:
    """Count the multiplications of weights in a pass over all rows, from a few: parameters × rows of a fully connected net."""
    few, products = take_rows(inputs, slice(0, ROWS)), list[int]()

    def visit(use: ParamUse) -> None:
        if use.input is not None:
            products.append(use.input.count * (use.input.stop - use.input.start) * use.input.view.fan_in)

    params = {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point()}
    with replica(model) as twin, no_fast_path, CaptureMode(params, visit):
        call(twin, {}, few, output_fn)
    return sum(products) * rows_of(inputs) // rows_of(few)


def find_changes(before: nn.Module, after: nn.Module) -> list[str]:
    """Names of buffers and attributes that differ between two copies of one model."""
    old, new, nothing = dict[str, bytes](), dict[str, bytes](), content_key([])
    for state, model in ((old, before), (new, after)):
        for path, module in model.named_modules():
            for name, value in (tensor_tables(module)[1] | vars(module)).items():
                leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor | bool | int | float | str | None)]
                if name not in TORCH_ATTRIBUTES:
                    state[f"{path}.{name}".lstrip(".")] = content_key(leaves)
    return [name for name in old | new if old.get(name, nothing) != new.get(name, nothing)]


def restore_state(model: nn.Module, names: Iterable[str]) -> None:
    """Make a private model forget what its calls leave under these names: after `vmap`, dead tensors that nothing can copy."""
    places = [name.rpartition(".") for name in names]
    states = [(path, name, copy.deepcopy(_table(model, path, name).get(name, ABSENT))) for path, _, name in places]
    if states:
        model.register_forward_hook(partial(_put_back, states=states), always_call=True)


def _put_back(model: nn.Module, *_: Any, states: list[tuple[str, str, Any]]) -> None:
    """Put copies of buffers and attributes back after a call, so that the next one cannot reach the originals."""
    for path, name, value in states:
        table = _table(model, path, name)
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)


def restored_names(model: nn.Module) -> list[str]:
    """List what a private model was made to forget."""
    hooks = [hook for hook in hook_tables(model)[1].values() if isinstance(hook, partial) and hook.func is _put_back]
    return [f"{path}.{name}".lstrip(".") for hook in hooks for path, name, _ in hook.keywords["states"]]


def _table(model: nn.Module, path: str, name: str) -> dict[str, Any]:
    """Find the table of a module that holds the buffer or attribute of that name."""
    module = model.get_submodule(path)
    return tensor_tables(module)[1] if name in tensor_tables(module)[1] else vars(module)
