"""Layer inputs: the rows of activations that are multiplied with each parameter in one forward pass.

There are two ways to find them. `CaptureMode` watches the operators: every product of an activation with (a view of) a
parameter is a *use* of it, so attention projections, tied weights and `x @ self.weight` are found without the name of any
layer. Where the parameter is the weight of a plain Linear or convolution module, a forward pre-hook reads the same input at no
cost. `capture` uses hooks where it can, and the operators for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from offmap._torch_private import TorchDispatchMode, tensor_tables
from offmap._types import Inputs
from offmap.data.batch import rows_of, take_rows
from offmap.model.forward import MODEL_ERRORS, OutputFn, call, first_tensor, model_failed, no_fast_path, replica
from offmap.model.matrix_view import BLOCK, AliasTable, MatrixView, ParamView, Windows

aten = torch.ops.aten

Rows: TypeAlias = Callable[[Tensor | None], Iterable[Tensor]]
"""All rows, or those of the given numbers, in blocks (groups, n, D)."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

PARTLY = "read in parts of its fan-in"
TWICE = "read along two different axes"
LOOKUP = "looked up by index: its inputs already lie along its axes"


@dataclass(frozen=True)
class LayerInput:
    """Inputs of output rows `start` to `stop` of a parameter in its matrix view: `count` rows in each of `groups` equal blocks.

    `rows` gathers them when asked; `map` is the whole input (B, C, *space) of a convolution.
    """

    view: MatrixView
    start: int
    stop: int
    groups: int
    count: int
    rows: Rows
    map: Tensor | None = None

    def per_example(self, batch: int) -> Tensor | None:
        """Return the rows (B, D) if there is one for every example, else None."""
        return torch.cat([block[0] for block in self.rows(None)]) if self.count == batch and self.groups == 1 else None


@dataclass(frozen=True)
class ParamUse:
    """One use of a parameter: a product with layer inputs, a lookup by index, or `why` there is neither; or a bias alone, of the
    use before. `final`: whatever other uses there are, the parameter cannot be rotated.
    """

    name: str
    bias: str | None = None
    input: LayerInput | None = None
    index: Tensor | None = None  # of the rows that were looked up
    why: str = ""
    final: bool = False


# ------------------------------------------------------------------------------------------------------------ capture


def capture(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    names: Collection[str] | None = None,
    *,
    output_fn: OutputFn = first_tensor,
    last: bool = False,
) -> dict[str, LayerInput]:
    """Run the model once and return the layer input of each parameter, in order of execution; threads may share the model.

    Args:
        model: A model in evaluation mode; it is not touched.
        weights: Weights to run it with, by name; the others are its own.
        inputs: A tensor, a tuple or a dict of them.
        names: Parameters to read; None finds all that take part in a product.
        output_fn: Picks the tensor that matters of what the model returns.
        last: Return the last use of each parameter instead of the first.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> {name: tuple(h.per_example(4).shape) for name, h in capture(net, {}, torch.ones(4, 2)).items()}
    {'0.weight': (4, 2), '2.weight': (4, 3)}
    """
    return run_and_capture(model, weights, inputs, names, output_fn=output_fn, last=last)[1]


def run_and_capture(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    names: Collection[str] | None = None,
    *,
    output_fn: OutputFn = first_tensor,
    last: bool = False,
) -> tuple[Tensor, dict[str, LayerInput]]:
    """Do as `capture`, and return the model's output as well."""
    layers = {} if names is None else {n: path for n, path in _hookable(model).items() if n in names}
    uses: dict[str, LayerInput] = {}

    def visit(use: ParamUse) -> None:
        if use.input is not None and (last or use.name not in uses):
            uses[use.name] = use.input

    watched = {n: weights.get(n, p.detach()) for n, p in model.named_parameters() if p.is_floating_point() and n not in layers}
    watched = watched if names is None else {n: w for n, w in watched.items() if n in names}
    # in inference mode products are not taken apart, and nobody sees what they read
    with torch.inference_mode(False), torch.no_grad(), no_fast_path, replica(model) as twin:
        try:
            with hook_inputs(twin, layers, last=last) as hooked, CaptureMode(watched, visit) if watched else nullcontext():
                output = call(twin, weights, inputs, output_fn)
            if uncalled := [n for n in layers if n not in hooked]:  # layers whose weight other code reads
                with CaptureMode({n: weights.get(n, model.get_parameter(n).detach()) for n in uncalled}, visit):
                    call(twin, weights, inputs, output_fn)
        except MODEL_ERRORS as error:
            raise model_failed(model, inputs, error) from error
    uses |= {n: _as_layer_input(model.get_submodule(layers[n]), x) for n, x in hooked.items()}
    return output, uses if names is None else {n: uses[n] for n in names if n in uses}


@contextmanager
def hook_inputs(net: nn.Module, layers: Mapping[str, str], *, last: bool = False) -> Generator[dict[str, Tensor]]:
    """While active, file what modules are given at their first (or last) call: {key: path of a module} -> {key: input}.

    The net must belong to this thread alone: `replica` lends one.
    """
    inputs: dict[str, Tensor] = {}

    def keep(key: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if args and (last or key not in inputs):
                inputs[key] = args[0]

        return hook

    handles = [net.get_submodule(path).register_forward_pre_hook(keep(key)) for key, path in layers.items()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


_HOOKABLE: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def _hookable(net: nn.Module) -> dict[str, str]:
    """Parameters whose layer input is the input of a module that owns them alone: {name: path}."""
    if net not in _HOOKABLE:
        owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for path, module in net.named_modules():
            for leaf, p in tensor_tables(module)[0].items():
                owners.setdefault(id(p), []).append((path, module, leaf))
        _HOOKABLE[net] = {
            f"{path}.{leaf}" if path else leaf: path
            for [(path, module, leaf), *others] in owners.values()
            if not others and leaf == "weight" and _shows_its_input(module)
        }
    return _HOOKABLE[net]


def _shows_its_input(module: nn.Module) -> bool:
    if isinstance(module, CONVOLUTIONS):
        return type(module) in CONVOLUTIONS and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) is nn.Linear


def _as_layer_input(module: nn.Module, x: Tensor) -> LayerInput:
    """Describe what a Linear or convolution module was given as the layer input of its weight."""
    if isinstance(module, nn.Linear):
        rows = x.reshape(1, -1, x.shape[-1])
        view = MatrixView(tuple(module.weight.shape), (0,), (1,))
        return LayerInput(
            view, 0, module.out_features, 1, rows.shape[1], lambda chosen: (rows if chosen is None else rows[:, chosen],)
        )
    assert isinstance(module, CONVOLUTIONS)
    space = len(module.kernel_size)
    x = x if x.ndim == space + 2 else x.unsqueeze(0)
    sides = zip(
        x.shape[2:], module.kernel_size, module.stride, module.padding, module.dilation, module.output_padding, strict=True
    )
    places = [
        (n - 1) * s - 2 * int(p) + d * (k - 1) + o + 1 if module.transposed else (n + 2 * int(p) - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d, o in sides
    ]
    how = list(module.stride), [int(p) for p in module.padding], list(module.dilation), module.transposed, module.groups
    return _convolution_input(x, tuple(module.weight.shape), tuple(places), *how)


def pool_map(x: Tensor) -> Tensor:
    """Mean and standard deviation of every channel over its positions, (B, C, *space) -> (B, 2C).

    >>> pool_map(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]]))
    tensor([[2., 5., 1., 0.]])
    """
    flat = x.flatten(2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return torch.cat([flat.mean(2), flat.std(2, correction=0)], 1)


def features(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    x: Inputs,
    output_fn: OutputFn = first_tensor,
    *,
    names: Collection[str] | None = None,
    maps: bool = False,
) -> dict[str, Tensor]:
    """Return {parameter: (B, D)}: the first layer input of each matrix that has one row per example.

    Layers with a row per position, as convolutions, are left out. With `maps`, convolutions are not: mean and standard deviation
    of every channel stand for the example.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> {name: tuple(h.shape) for name, h in features(net, {}, torch.ones(4, 2)).items()}
    {'0.weight': (4, 2), '2.weight': (4, 3)}
    """
    batch = rows_of(x)
    pair = (
        take_rows(x, [0, 0]) if batch == 1 else x
    )  # of one row, some operators make a vector, and every count looks like the batch
    result: dict[str, Tensor] = {}
    for name, layer_input in run_and_capture(net, weights, pair, names, output_fn=output_fn)[1].items():
        map_ = layer_input.map
        rows = (
            pool_map(map_) if maps and map_ is not None and len(map_) == rows_of(pair) else layer_input.per_example(rows_of(pair))
        )
        if rows is not None:
            result[name] = rows[:batch]
    return result


# ---------------------------------------------------------------------------------------------------- the operators


class CaptureMode(TorchDispatchMode):
    """While active, call `visit` with a ParamUse for every use of one of `weights` in a product or lookup."""

    def __init__(self, weights: Mapping[str, Tensor], visit: Callable[[ParamUse], None]) -> None:
        super().__init__()
        self.aliases = AliasTable(weights)
        self.visit = visit
        self.widest = 0  # numbers in the largest result
        self.last: tuple[str, Tensor] | None = None  # the latest product without a bias: its parameter and result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then report what it used."""
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if isinstance(result, Tensor):
            self.widest = max(self.widest, result.numel())
        if packet in COPIES:
            self._follow(args, result)
        elif packet in SUMS and self.last is not None:
            self._join_bias(*self.last, args)
        elif (reader := READERS.get(packet)) is not None:
            for use in reader(self.aliases, result, *args):
                self.last = (use.name, result) if use.input and use.bias is None else None
                self.visit(use)
        return result

    def _join_bias(self, name: str, product: Tensor, args: Any) -> None:
        """A vector that is added to a product is its bias: torch's Linear does so for inputs that are not contiguous."""
        here = product.untyped_storage().data_ptr()
        for x, vector in (args[:2], args[1::-1]):
            if isinstance(x, Tensor) and isinstance(vector, Tensor) and x.untyped_storage().data_ptr() == here:
                if vector.shape == x.shape[-1:] and (bias := self.aliases.owner(vector)) is not None:
                    self.visit(ParamUse(name, bias))
                self.last = None
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


COPIES = (aten.clone, aten._to_copy, aten.contiguous, aten.div, aten.mul, aten._weight_norm_interface)
"""Operators whose result has the rows of an operand, up to scale."""

SUMS = (aten.add, aten.add_)
"""Operators by which a bias may join."""


def _product(aliases: AliasTable, rows: Tensor, operand: Tensor, fan_in: int, bias: Tensor | None = None) -> Iterator[ParamUse]:
    """The use of `operand` (batch, ·, ·) by `rows` (batch, n, D), where D runs along its dimension `fan_in`."""
    name = aliases.owner(operand)
    if name is None:
        return
    view = aliases.locate(operand)
    layer_input = view and _product_input(aliases.shapes[name], view, fan_in, rows)
    yield ParamUse(name, aliases.owner(bias), layer_input) if layer_input else ParamUse(name, why=PARTLY, final=True)


def _product_input(shape: tuple[int, ...], place: ParamView, fan_in: int, rows: Tensor) -> LayerInput | None:
    """Batch axes first, then the other outputs; the one axis that is cut comes first of all."""
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
    span = (start * inner, stop * inner) if place.part else (0, view.outputs)
    times = place.repeats[0]
    several = times > 1 or groups > 1
    grouped = rows.unflatten(0, (times, groups)).transpose(0, 1).flatten(1, 2) if several else rows.flatten(0, 1)[None]
    return LayerInput(view, *span, groups, grouped.shape[1], lambda chosen: (grouped if chosen is None else grouped[:, chosen],))


def _bmm(aliases: AliasTable, result: Tensor, a: Tensor, b: Tensor, *_: Any, bias: Tensor | None = None) -> Iterator[ParamUse]:
    yield from _product(aliases, a, b, 1, bias)
    if aliases.owner(b) is None:  # of two parameters the first is the input: one that was learned, or a factor of the second
        yield from _product(aliases, b.mT, a, 2, bias)


def _baddbmm(aliases: AliasTable, result: Tensor, bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _bmm(aliases, result, a, b, bias=bias)


def _mm(aliases: AliasTable, result: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _bmm(aliases, result, a[None], b[None])


def _addmm(aliases: AliasTable, result: Tensor, bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _bmm(aliases, result, a[None], b[None], bias=bias)


def _mv(aliases: AliasTable, result: Tensor, a: Tensor, b: Tensor, *_: Any) -> Iterator[ParamUse]:
    yield from _product(aliases, a[None], b[None, :, None], 1)


def _convolution(
    aliases: AliasTable, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Iterator[ParamUse]:  # fmt: skip
    name = aliases.owner(weight)
    if name is None:
        return
    place = aliases.locate(weight)
    if place is None or not place.complete:
        yield ParamUse(name, why=PARTLY, final=True)
        return
    places = tuple(result.shape[2:])
    layer_input = _convolution_input(x, tuple(weight.shape), places, stride, padding, dilation, transposed, groups)
    yield ParamUse(name, aliases.owner(bias), layer_input)


def _convolution_input(
    x: Tensor, shape: tuple[int, ...], places: tuple[int, ...], stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, groups: int,
) -> LayerInput:  # fmt: skip
    taps = range(2, len(shape))
    view = MatrixView(shape, (0,), (1, *taps))
    if transposed:  # (in, out/g, *kernel)
        view = MatrixView((groups, shape[0] // groups, *shape[1:]), (0, 2), (1, *(t + 1 for t in taps)))
    windows = Windows(x, shape[2:], places, stride, padding, dilation, transposed)
    return LayerInput(view, 0, view.outputs, groups, windows.count, lambda chosen: windows.rows(groups, chosen), x)


def _trilinear(aliases: AliasTable, result: Tensor, left: Tensor, weight: Tensor, right: Tensor, *_: Any) -> Iterator[ParamUse]:
    """nn.Bilinear: the input of each output row is the outer product of two vectors."""
    name = aliases.owner(weight)
    if name is None:
        return

    def rows(chosen: Tensor | None) -> Iterator[Tensor]:
        a, b = (left, right) if chosen is None else (left[chosen], right[chosen])
        step = max(1, BLOCK // (a.shape[1] * b.shape[1]))
        pairs = zip(a.split(step), b.split(step), strict=True)
        return ((p.unsqueeze(2) * q.unsqueeze(1)).flatten(1)[None] for p, q in pairs)

    place = aliases.locate(weight)
    if place is None or not place.complete:
        yield ParamUse(name, why=PARTLY, final=True)
    else:
        view = MatrixView(tuple(weight.shape), (0,), (1, 2))
        yield ParamUse(name, None, LayerInput(view, 0, view.outputs, 1, left.shape[0], rows))


def _rnn_layer(
    aliases: AliasTable, result: Any, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h0: Tensor, c0: Tensor,
    reverse: bool, *_: Any,
) -> Iterator[ParamUse]:  # fmt: skip
    """One fused layer of an LSTM: the input of the recurrent weight is the layer's output one step earlier."""
    outputs: Tensor = result[0]
    before = torch.cat([outputs[1:], h0[None]]) if reverse else torch.cat([h0[None], outputs[:-1]])
    yield from _product(aliases, x.flatten(0, 1)[None], w_ih.mT[None], 1, b_ih)
    yield from _product(aliases, before.flatten(0, 1)[None], w_hh.mT[None], 1, b_hh)


def _lookup(aliases: AliasTable, result: Any, weight: Tensor, index: Tensor, *_: Any) -> Iterator[ParamUse]:
    name = aliases.owner(weight)
    if name is not None:
        place = aliases.locate(weight)
        yield ParamUse(name, index=index if place is not None and place.complete else None, why=LOOKUP)


READERS: dict[Any, Callable[..., Iterator[ParamUse]]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.bmm: _bmm,
    aten.baddbmm: _baddbmm,
    aten.mv: _mv,
    aten.convolution: _convolution,
    aten._trilinear: _trilinear,
    aten.mkldnn_rnn_layer: _rnn_layer,
    aten.embedding: _lookup,
    aten._embedding_bag: _lookup,
    aten._embedding_bag_forward_only: _lookup,
}
