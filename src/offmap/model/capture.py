"""Layer inputs: the rows of activations that are multiplied with each parameter in one forward pass.

`CaptureMode` watches the operators: every product of an activation with (a view of) a parameter is a *use* of it, so attention
projections, tied weights and `x @ self.weight` are found without the name of any layer. Where the parameter is the weight of a
plain Linear or convolution, `capture` reads the same input at no cost, by a forward pre-hook.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap._torch_private import TorchDispatchMode
from offmap._types import Inputs, Weights
from offmap.data.batch import rows_of, take_rows
from offmap.errors import ConfigError, nearest
from offmap.model.forward import MODEL_ERRORS, OutputFn, call, first_tensor, hook_inputs, model_failed, no_fast_path, replica
from offmap.model.matrix_view import AliasTable, MatrixView, ParamView

Names: TypeAlias = Collection[str] | None  # of parameters; None are all that take part in a product
aten: Any = torch.ops.aten

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

BLOCK = 1 << 20  # numbers per block of gathered rows: what bounds the memory of a convolution's layer inputs
# why a parameter has no basis
PARTLY = "read in parts of its fan-in"
TWICE = "read along two different axes"
LOOKUP = "looked up by index: its inputs already lie along its axes"
PICKED = "picked by index, as a copy: what reads the copy is not followed"


@dataclass(frozen=True)
class LayerInput:
    """Inputs of output rows `start` to `stop` of a parameter in its matrix view: `count` rows in each of `groups` blocks."""

    view: MatrixView
    start: int
    stop: int
    groups: int
    count: int
    rows: Callable[[Tensor | None], Iterable[Tensor]]  # gathers all, or those of the given numbers, in blocks (groups, n, D)
    map: Tensor | None = None  # the whole input (B, C, *space) of a convolution

    def per_example(self, batch: int) -> Tensor | None:
        """Return the rows (B, D) if there is one for every example, else None."""
        return torch.cat([block[0] for block in self.rows(None)]) if self.count == batch and self.groups == 1 else None


@dataclass(frozen=True)
class ParamUse:
    """One use of a parameter: a product with layer inputs, a lookup, or `why` neither; or a bias alone, of the use before."""

    name: str
    bias: str | None = None
    input: LayerInput | None = None
    index: Tensor | None = None  # of the rows that were looked up
    why: str = ""
    final: bool = False  # whatever other uses there are, the parameter cannot be rotated


def capture(
    model: nn.Module, weights: Weights, x: Inputs, names: Names = None, *, output_fn: OutputFn = first_tensor, last: bool = False
) -> tuple[Tensor, dict[str, LayerInput]]:
    """Run a model that threads may share; return its output and each parameter's first (or last) layer input, as executed."""
    layers = {} if names is None else _find_hookable(model, names)
    uses: dict[str, LayerInput] = {}

    def visit(use: ParamUse) -> None:
        if use.input is not None and (last or use.name not in uses):
            uses[use.name] = use.input

    params = {n: weights.get(n, p.detach()) for n, p in model.named_parameters() if p.is_floating_point()}
    watched = {n: w for n, w in params.items() if names is None or (n in names and n not in layers)}
    # in inference mode products are not taken apart, and nobody sees what they read
    with torch.inference_mode(False), torch.no_grad(), no_fast_path, replica(model) as twin:
        try:
            with hook_inputs(twin, layers, last=last) as hooked, CaptureMode(watched, visit) if watched else nullcontext():
                output = call(twin, weights, x, output_fn)
            if uncalled := {n: params[n] for n in layers if n not in hooked}:  # layers whose weight other code reads
                with CaptureMode(uncalled, visit):
                    call(twin, weights, x, output_fn)
        except MODEL_ERRORS as error:
            raise model_failed(model, x, error) from error
    uses |= {n: _as_layer_input(model.get_submodule(layers[n]), h) for n, h in hooked.items()}
    return output, uses if names is None else {n: uses[n] for n in names if n in uses}


def _find_hookable(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Those parameters whose layer input is the input of the module that alone owns them: {name: path}."""
    known = [*model.named_parameters(remove_duplicate=False)]
    for name in set(names) - {name for name, _ in known}:
        raise ConfigError(f"Expected the name of a parameter, {nearest(name, (n for n, _ in known))}, but got {name!r}.")
    owners = Counter(id(p) for _, p in known)
    result: dict[str, str] = {}
    for name in names:
        path, parameter = name.rpartition(".")[0], model.get_parameter(name)
        module: Any = model.get_submodule(path)
        plain = type(module) in CONVOLUTIONS and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        if (plain or type(module) is nn.Linear) and module.weight is parameter and owners[id(parameter)] == 1:
            result[name] = path
    return result


def _as_layer_input(module: nn.Module, x: Tensor) -> LayerInput:
    """Describe what a Linear or convolution module was given as the layer input of its weight."""
    shape: tuple[int, ...] = tuple(module.get_parameter("weight").shape)
    if not isinstance(module, CONVOLUTIONS):
        rows = x.reshape(1, -1, x.shape[-1])
        return LayerInput(MatrixView(shape, (0,), (1,)), 0, shape[0], 1, rows.shape[1], _gather(rows))
    x = x if x.ndim == len(shape) else x.unsqueeze(0)
    stride, padding, dilation = module.stride, [int(p) for p in module.padding], module.dilation
    sides = zip(x.shape[2:], shape[2:], stride, padding, dilation, module.output_padding, strict=True)
    places = [
        (n - 1) * s - 2 * p + d * (k - 1) + o + 1 if module.transposed else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d, o in sides
    ]
    return convolution_input(shape, x, places, stride, padding, dilation, module.transposed, module.groups)


def pool_map(x: Tensor) -> Tensor:
    """Mean and standard deviation of every channel over its positions, (B, C, *space) -> (B, 2C)."""
    flat = x.flatten(2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return torch.cat([flat.mean(2), flat.std(2, correction=0)], 1)


def pool_tokens(x: Tensor, inputs: Inputs) -> Tensor:
    """Mean over positions that an `attention_mask` (B, T) of the inputs does not call padding, (B, ..., D) -> (B, D)."""
    if x.ndim == 2:
        return x
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    tokens = x.flatten(1, -2).to(torch.promote_types(x.dtype, torch.float32))
    if mask is None or mask.shape != tokens.shape[:2]:
        return tokens.mean(1)
    weights = (mask != 0).to(tokens).unsqueeze(2)
    return (tokens * weights).sum(1) / weights.sum(1).clamp_min(1)


def features(
    model: nn.Module, weights: Weights, x: Inputs, output_fn: OutputFn = first_tensor, *, names: Names = None, maps: bool = False
) -> dict[str, Tensor]:
    """First layer inputs with one row per example, {parameter: (B, D)}; with `maps`, also of convolutions and tokens, pooled."""
    # of one row, some operators make a vector, and every count looks like the batch
    batch, pair = rows_of(x), take_rows(x, [0, 0]) if rows_of(x) == 1 else x
    result: dict[str, Tensor | None] = {}
    for name, layer_input in capture(model, weights, pair, names, output_fn=output_fn)[1].items():
        size, count = rows_of(pair), layer_input.count
        if maps and layer_input.map is not None and len(layer_input.map) == size:
            result[name] = pool_map(layer_input.map)
        elif maps and layer_input.map is None and layer_input.groups == 1 and count > size and count % size == 0:
            rows = torch.cat([block[0] for block in layer_input.rows(None)])
            result[name] = pool_tokens(rows.unflatten(0, (size, -1)), pair)
        else:
            result[name] = layer_input.per_example(size)
    return {name: rows[:batch] for name, rows in result.items() if rows is not None}


# an operand that may be a parameter, its bias, and what multiplies it, given the parameter's shape and where it lies there
Operand: TypeAlias = tuple[Tensor, Tensor | None, Callable[[tuple[int, ...], ParamView], LayerInput | None]]


class CaptureMode(TorchDispatchMode):
    """While active, call `visit` with a ParamUse for every use of one of `weights` in a product or lookup."""

    def __init__(self, weights: Mapping[str, Tensor], visit: Callable[[ParamUse], None]) -> None:
        super().__init__()
        self.aliases: AliasTable = AliasTable(weights)
        self.visit = visit
        self.widest: int = 0  # numbers in the largest result
        self.result: Any = None  # of the operator that is being visited
        self.last: tuple[str, Tensor] | None = None  # the latest product without a bias: its parameter and result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then report what it used."""
        self.result = result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if isinstance(result, Tensor):
            self.widest = max(self.widest, result.numel())
        if packet in COPIES:
            self._follow(args, result)
        elif packet in SUMS and self.last is not None:
            self._join_bias(*self.last, args)
        elif packet in LOOKUPS and (name := self.aliases.owner(args[0])) is not None:
            view = self.aliases.locate(args[0])
            self.last = None
            self.visit(ParamUse(name, index=args[1] if view is not None and view.complete else None, why=LOOKUP))
        elif packet is aten.index and (name := self.aliases.owner(args[0])) is not None:
            self.visit(ParamUse(name, why=PICKED))
        for alternatives in READERS[packet](result, *args) if packet in READERS else ():
            self._report_first(alternatives)
        return result

    def _report_first(self, operands: Iterable[Operand]) -> None:
        """Visit the use of the first of these operands that is a parameter."""
        for operand, bias, describe in operands:
            if (name := self.aliases.owner(operand)) is not None:
                view = self.aliases.locate(operand)
                layer_input = view and describe(self.aliases.shapes[name], view)
                use = ParamUse(name, why=PARTLY, final=True)
                if layer_input:
                    use = ParamUse(name, self.aliases.owner(bias), layer_input)
                self.last = (name, self.result) if layer_input and use.bias is None and isinstance(self.result, Tensor) else None
                return self.visit(use)

    def _join_bias(self, name: str, product: Tensor, args: Any) -> None:
        """A vector that is added to a product is its bias: torch's Linear does so for inputs that are not contiguous."""
        here = product.untyped_storage().data_ptr()
        for x, vector in (args[:2], args[1::-1]):
            if isinstance(x, Tensor) and isinstance(vector, Tensor) and x.untyped_storage().data_ptr() == here:
                self.last = None
                if vector.shape == x.shape[-1:] and (bias := self.aliases.owner(vector)) is not None:
                    self.visit(ParamUse(name, bias))
                return

    def _follow(self, args: Any, result: Any) -> None:
        """A copy of a parameter, or what a parametrization makes of it, stands for the parameter itself."""
        copy = result[0] if isinstance(result, tuple) else result
        for source in args[:2]:
            if isinstance(source, Tensor) and source.shape == copy.shape and self.aliases.owner(source) is not None:
                view = self.aliases.locate(source)
                if view is not None and copy.is_floating_point():
                    self.aliases.add(copy, view)
                return


def product_input(shape: tuple[int, ...], place: ParamView, rows: Tensor, fan_in: int) -> LayerInput | None:
    """Describe a product of `rows` (batch, n, D) with an operand (batch, ·, ·) at `place`, whose dimension `fan_in` is D."""
    # batch axes come first, then the other outputs; the one axis that is cut comes first of all
    batch, axes, outs = place.dims[0], place.dims[fan_in], place.dims[3 - fan_in]
    if place.repeats[fan_in] > 1 or place.repeats[3 - fan_in] > 1:
        return None
    start, stop, groups = 0, 1, math.prod(shape[a] for a in batch)
    if place.part is not None:
        part, start, stop = place.part
        if part in axes or (batch and batch[0] != part) or (not batch and outs and outs[0] != part and part in outs):
            return None
        groups = groups // shape[part] * (stop - start) if part in batch else groups
        batch = batch if part in batch else (part, *batch)
    order = tuple(dict.fromkeys((*batch, *outs)))
    # axes of size one belong anywhere: to the fan-in if that is one number, else to the outputs
    rest = [a for a in range(len(shape)) if a not in order and a not in axes]
    axes, order = (tuple(rest[-1:]), (*rest[:-1], *order)) if not axes else (axes, (*order, *rest))
    view = MatrixView(shape, tuple(order), axes)
    inner = view.outputs // (shape[place.part[0]] if place.part else 1)
    times = place.repeats[0]
    several = times > 1 or groups > 1
    grouped = rows.unflatten(0, (times, groups)).transpose(0, 1).flatten(1, 2) if several else rows.flatten(0, 1)[None]
    return LayerInput(view, start * inner, stop * inner, groups, grouped.shape[1], _gather(grouped))


def _gather(rows: Tensor) -> Callable[[Tensor | None], Iterable[Tensor]]:
    return lambda chosen: (rows if chosen is None else rows[:, chosen],)


def convolution_input(
    shape: tuple[int, ...], x: Tensor, places: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, groups: int,
) -> LayerInput:  # fmt: skip
    """Describe a convolution of x (B, C, *space) with a weight of that shape: one row for each of B · prod(places) windows."""
    taps, kernel, count = range(2, len(shape)), shape[2:], len(x) * math.prod(places)
    view = MatrixView(shape, (0,), (1, *taps))
    if transposed:  # (in, out/g, *kernel)
        view = MatrixView((groups, shape[0] // groups, *shape[1:]), (0, 2), (1, *(t + 1 for t in taps)))

    def rows(chosen: Tensor | None) -> Iterator[Tensor]:
        source, steps, pads = x, stride, [(p, p) for p in padding]
        if transposed:  # a plain convolution, taps counted backwards, over the input with zeros between its numbers
            source = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)))
            source[(..., *(slice(None, None, s) for s in stride))] = x
            sides = zip(dilation, kernel, padding, places, source.shape[2:], strict=True)
            steps, pads = [1] * len(kernel), [(d * (k - 1) - p, place + p - n) for d, k, p, place, n in sides]
        padded = F.pad(source, [p for pair in reversed(pads) for p in pair])
        batch, channel, *strides = padded.stride()
        across, within = ([a * n for a, n in zip(strides, by, strict=True)] for by in (steps, dilation))
        windows = padded.as_strided((len(x), *places, x.shape[1], *kernel), (batch, *across, channel, *within))
        numbers = torch.arange(count, device=x.device) if chosen is None else chosen.to(x.device)
        for few in numbers.split(max(1, BLOCK // (x.shape[1] * math.prod(kernel)))):
            block = windows[torch.unravel_index(few, (len(x), *places))]
            block = block.flip([*taps]) if transposed else block
            yield block.reshape(len(few), groups, -1).transpose(0, 1)

    return LayerInput(view, 0, view.outputs, groups, count, rows, x)


def outer_input(shape: tuple[int, ...], left: Tensor, right: Tensor) -> LayerInput:
    """Describe an nn.Bilinear: the input of each output row is the outer product of two vectors."""

    def rows(chosen: Tensor | None) -> Iterator[Tensor]:
        a, b = (left, right) if chosen is None else (left[chosen], right[chosen])
        step = max(1, BLOCK // (a.shape[1] * b.shape[1]))
        pairs = zip(a.split(step), b.split(step), strict=True)
        return ((p.unsqueeze(2) * q.unsqueeze(1)).flatten(1)[None] for p, q in pairs)

    return LayerInput(MatrixView(shape, (0,), (1, 2)), 0, shape[0], 1, left.shape[0], rows)


# operators whose result has the rows of an operand, up to scale; by which a bias may join; that take rows by index
COPIES = (aten.clone, aten._to_copy, aten.contiguous, aten.div, aten.mul, aten._weight_norm_interface)
SUMS = (aten.add, aten.add_)
LOOKUPS = (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> list[list[Operand]]:
    """Read a @ b, (batch, ·, ·) each; of two parameters the first is the input: one that was learned, or a factor."""
    right = b, bias, lambda shape, place: product_input(shape, place, a, 1)
    return [[right, (a, bias, lambda shape, place: product_input(shape, place, b.mT, 2))]]


def _convolution(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, _: list[int], groups: int,
) -> list[list[Operand]]:  # fmt: skip
    how = y.shape[2:], stride, padding, dilation, transposed, groups
    return [[(weight, bias, lambda shape, place: convolution_input(shape, x, *how) if place.complete else None)]]


def _rnn_layer(
    y: Any, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h0: Tensor, c0: Tensor, reverse: bool, *_: Any
) -> list[list[Operand]]:
    """One fused layer of an LSTM: the input of the recurrent weight is the layer's output one step earlier."""
    before = torch.cat([y[0][1:], h0[None]]) if reverse else torch.cat([h0[None], y[0][:-1]])
    products = (x, w_ih, b_ih), (before, w_hh, b_hh)
    return [_product(rows.flatten(0, 1)[None], w.mT[None], bias)[0][:1] for rows, w, bias in products]


def _grouped_product(
    y: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor | None = None, bias: Tensor | None = None, *_: Any
) -> list[list[Operand]]:
    """Experts (E, D, out), each applied to the rows up to its end: those of one expert are a product with a part of the stack."""
    if ends is None or rows.ndim != 2 or matrices.ndim != 3:
        return []
    spans = pairwise([0, *ends.tolist()])
    return [_product(rows[None, a:b], matrices[e, None])[0][:1] for e, (a, b) in enumerate(spans) if a < b]


# the operands of each operator that may be parameters: of each group of alternatives, the first that is one
READERS: dict[Any, Callable[..., list[list[Operand]]]] = {
    aten.mm: lambda y, a, b, *_: _product(a[None], b[None]),
    aten.addmm: lambda y, bias, a, b, *_: _product(a[None], b[None], bias),
    aten.bmm: lambda y, a, b, *_: _product(a, b),
    aten.baddbmm: lambda y, bias, a, b, *_: _product(a, b, bias),
    aten.mv: lambda y, a, b, *_: [_product(a[None], b[None, :, None])[0][:1]],
    aten.convolution: _convolution,
    aten._trilinear: lambda y, a, weight, b, *_: [
        [(weight, None, lambda shape, place: outer_input(shape, a, b) if place.complete else None)]
    ],
    aten.mkldnn_rnn_layer: _rnn_layer,
}
if hasattr(aten, "_grouped_mm"):  # since torch 2.8
    READERS[aten._grouped_mm] = _grouped_product
