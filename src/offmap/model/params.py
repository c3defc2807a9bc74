"""The models of a fit: checked, copied, stacked, and which of their parameters are random.

Weights are keyed by name; tied ones appear once, under their first name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offmap._torch_private import TorchDispatchMode, tree_leaves
from offmap._types import Inputs, Weights
from offmap.data.batch import take_rows
from offmap.errors import ConfigError, ModelError
from offmap.model.capture import LOOKUP, CaptureMode, ParamUse
from offmap.model.forward import (
    MODEL_ERRORS,
    BatchedModel,
    OutputFn,
    apply_last_layer,
    call,
    copy_model,
    first_tensor,
    no_fast_path,
    no_fused_attention,
    read_module_input,
    replica,
)
from offmap.model.inspect import ROWS, attributes, listed, one_device, restore_state

ParamSelection: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool] | None
"""Which parameters are random: a word, name patterns (fnmatch), a predicate on (name, tensor), or None for all."""

LAST_LAYER = "last-layer"
"""The word that only a forward pass can tell: the parameters of the last matrix product on the way to the output."""

WORDS: dict[str, Callable[[str, Tensor], bool]] = {
    "all": lambda name, tensor: True,
    "matrices": lambda name, tensor: tensor.ndim >= 2,
}
"""Words for `params` and what they stand for. A word wins over a pattern of the same spelling."""


def chooser(params: ParamSelection) -> Callable[[str, Tensor], bool]:
    """The predicate on (name, tensor) that `params` stands for.

    >>> chooser("matrices")("fc.bias", torch.zeros(3))
    False
    """
    if params is None:
        return WORDS["all"]
    if callable(params):
        return params
    given = entries(params)
    if LAST_LAYER in given:
        raise ConfigError(
            f"Expected names, but {LAST_LAYER!r} takes a forward pass to tell. Use `offmap.fit`, or pass a pattern."
        )
    tests = [WORDS.get(entry) or partial(_fits, entry) for entry in given]
    return lambda name, tensor: any(test(name, tensor) for test in tests)


def entries(params: str | Sequence[str]) -> list[str]:
    """The words and patterns of `params`, refused unless all are strings."""
    given: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    if not all(isinstance(entry, str) for entry in given):
        raise ConfigError(
            f"Expected `params` to be a pattern, a list of them, a function or None, but got {params!r}. "
            f"The words {[*WORDS, LAST_LAYER]} are patterns too."
        )
    return given


def _fits(pattern: str, name: str, tensor: Tensor) -> bool:
    return fnmatch(name, pattern)


def select_params(net: nn.Module, params: ParamSelection = None) -> Weights:
    """Detached floating-point parameters of `net` that `params` picks, by name.

    >>> list(select_params(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)), params="*.weight"))
    ['0.weight', '1.weight']
    """
    known = floating(net)
    if not known:
        raise ModelError(f"Expected a model with floating-point parameters, but {type(net).__name__} has none.")
    wanted = chooser(params)
    chosen = {n: p for n, p in known.items() if wanted(n, p)}
    if not chosen:
        raise ConfigError(f"Expected `params` to pick at least one parameter, but {params!r} fits none of {list(known)}.")
    return chosen


def floating(net: nn.Module) -> Weights:
    """The floating-point parameters of `net`, detached: all that can be random."""
    return {n: p.detach() for n, p in net.named_parameters() if p.is_floating_point()}


def remainder(net: nn.Module, chosen: Mapping[str, Tensor]) -> Weights:
    """Everything else that a call of `net` reads: the other parameters, and the buffers."""
    return {n: t.detach() for n, t in all_params(net).items() if n not in chosen}


def all_params(net: nn.Module) -> Weights:
    """All tensors that a call of `net` reads: parameters, then buffers, tied ones once."""
    return dict(net.named_parameters()) | dict(net.named_buffers())


def stack(weights: Sequence[Mapping[str, Tensor]]) -> Weights:
    """Weights of several models of one architecture with a leading axis: M × {name: (...)} -> {name: (M, ...)}."""
    return {name: torch.stack([w[name] for w in weights]) for name in weights[0]}


def at(weights: Mapping[str, Tensor], index: int) -> Weights:
    """One entry of a stack: {name: (S, ...)} -> {name: (...)}."""
    return {name: tensor[index] for name, tensor in weights.items()}


def count(weights: Mapping[str, Tensor]) -> int:
    """How many numbers there are in one model's weights.

    >>> count({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})
    9
    """
    return sum(tensor.numel() for tensor in weights.values())


def same_architecture(nets: Sequence[nn.Module]) -> None:
    """Raise a ModelError that names the first difference unless all models have the same names, shapes, dtypes and devices."""
    for what, says, remedy in _ASPECTS:
        first = {n: says(t) for n, t in all_params(nets[0]).items()}
        for position, net in enumerate(nets[1:], start=1):
            given = {n: says(t) for n, t in all_params(net).items()}
            for name in first | given:
                here, there = first.get(name, "nothing"), given.get(name, "nothing")
                if here != there:
                    raise ModelError(
                        f"Expected members of one {what}, but `{name}` is {here} in member 0 and {there} in "
                        f"member {position}. {remedy}"
                    )


_ASPECTS: tuple[tuple[str, Callable[[Tensor], str], str], ...] = (
    (
        "architecture",
        lambda t: str(tuple(t.shape)),
        "Fit them apart and join their guards with `offmap.combine`, or pass members built by one function.",
    ),
    ("dtype", lambda t: str(t.dtype), "Convert them, for example with `net.float()`."),
    ("device", lambda t: str(t.device), "Move them, for example with `net.to('cpu')`."),
)


aten = torch.ops.aten

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Modules that hold a whole model under `module`."""

SHARDED = (
    "Expected a model whose parameters are whole in every process, but those of {kind} are divided among them. Gather them: "
    "`state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))` of `torch.distributed.checkpoint."
    "state_dict` on every rank, then pass a net built anew with `plain.load_state_dict(state)`."
)


def as_models(nets: Any) -> list[nn.Module]:
    """One model or several as a list, unwrapped, refused unless they are modules with whole, finite floating-point parameters."""
    several = isinstance(nets, list | tuple | nn.ModuleList)
    models: list[Any] = list(nets) if several else [nets]
    if not models or not all(isinstance(h, nn.Module) for h in models):
        raise ModelError(f"Expected a torch.nn.Module or a list of them, but got {type(nets).__name__}.")
    models = [unwrapped(model) for model in models]
    for model in models:
        if any(is_lazy(p) for p in (*model.parameters(), *model.buffers())):
            raise ModelError(f"Expected a trained model, but {type(model).__name__} has parameters without a size. Call it once.")
        if not any(p.is_floating_point() for p in model.parameters()):
            raise ModelError(f"Expected a model with floating-point parameters, but {type(model).__name__} has none.")
        one_device(model)
        for name, p in model.named_parameters():
            if not bool(p.detach().isfinite().all()):
                raise ModelError(f"Expected a trained model with finite weights, but `{name}` holds NaN or infinite values.")
    return models


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what trains it in parallel; one whose parameters are divided among processes is refused."""
    while isinstance(model, WRAPPERS):
        model = model.module
    kinds = {type(m).__name__ for m in model.modules() if type(m).__name__ == "FullyShardedDataParallel"}
    kinds |= {type(p).__name__ for p in model.parameters() if type(p).__name__ == "DTensor" or hasattr(p, "to_local")}
    if kinds:
        raise ModelError(SHARDED.format(kind=" and ".join(sorted(kinds))))
    return model


def check_same_function(models: Sequence[nn.Module], stacked: BatchedModel, weights: Weights, inputs: Inputs) -> None:
    """Refuse members that differ in more than weights and buffers: stacking would quietly run all of them as the first.

    Args:
        models: The users' members.
        stacked: The private model that stands for all of them.
        weights: All members' weights, {name: (M, ...)}.
        inputs: Rows to compare on; four are enough.
    """
    if len(models) == 1:
        return
    few = take_rows(inputs, slice(0, 4))
    expected = stacked.outputs(lambda span: weights, 1, few, members=len(models))
    for member, model in enumerate(models):
        alone = replace(stacked, module=copy_model(model, share=True))
        output = alone.outputs(lambda span, m=member: {n: w[m : m + 1] for n, w in weights.items()}, 1, few)[0]
        if not torch.allclose(output, expected[member], rtol=1e-3, atol=1e-4 * float(output.abs().max()) + 1e-6):
            raise ModelError(
                f"Expected members that differ in weights and buffers alone, but member {member} computes something else than "
                "member 0 with its weights. Keep what differs in buffers, or fit the members apart and join "
                "their guards with `offmap.combine`."
            )


@dataclass(frozen=True)
class StackedModel:
    """Where a distribution is centred: a private model, the members' random weights, and what else differs between them."""

    module: nn.Module
    mean: Weights
    fixed: Weights

    @property
    def members(self) -> int:
        """M."""
        return next(iter(self.mean.values())).shape[0]

    @property
    def device(self) -> torch.device:
        """Where the members live."""
        return next(iter(self.mean.values())).device

    def weights(self, member: int) -> Weights:
        """All that one member needs to be called through the private model."""
        return at(self.mean, member) | at(self.fixed, member)


def stack_models(nets: nn.Module | Sequence[nn.Module], params: ParamSelection = None) -> StackedModel:
    """A private copy of the models; the users' own are never touched."""
    models = [nets] if isinstance(nets, nn.Module) else list(nets)
    same_architecture(models)
    net = copy_model(models[0], share=len(models) > 1)
    restore_state(net, attributes(net))
    chosen = [select_params(model, params) for model in [net, *models[1:]]]
    mean = {n: w.unsqueeze(0) for n, w in chosen[0].items()} if len(models) == 1 else stack(chosen)
    fixed: Weights = {}
    if len(models) > 1:
        fixed = stack([remainder(model, c) for model, c in zip(models, chosen, strict=True)])
        for name, p in net.named_parameters():  # the private model reads the stack, which is all that is held
            p.data = (mean if name in mean else fixed)[name][0]
    return StackedModel(net, mean, fixed)


def choose(
    at: StackedModel,
    inputs: Inputs,
    params: ParamSelection = None,
    output_fn: OutputFn = first_tensor,
    *,
    unreached: Collection[str] = (),
) -> StackedModel:
    """The same centre with those parameters random that `params` asks for and some input reaches; the others stay fixed."""
    asked = select_params(at.module, _spelled_out(at.module, inputs, params, output_fn))
    names = [name for name in asked if name not in unreached]
    if not names:
        raise ConfigError(
            f"Expected `params` to pick a parameter that some input reaches, but {params!r} picks {listed(asked)} alone. "
            "Check `output_fn`, or pick others."
        )
    rest = {n: w for n, w in at.mean.items() if n not in names}
    # one member alone finds its fixed weights in the private model itself
    return replace(at, mean={n: at.mean[n] for n in names}, fixed=at.fixed | rest if at.members > 1 else at.fixed)


def _spelled_out(net: nn.Module, inputs: Inputs, params: ParamSelection, output_fn: OutputFn) -> ParamSelection:
    """`params` with "last-layer" replaced by what it stands for."""
    if params is None or callable(params) or LAST_LAYER not in entries(params):
        return params
    names = last_layer(net, take_rows(inputs, slice(0, ROWS)), output_fn)
    rest = chooser([entry for entry in entries(params) if entry != LAST_LAYER])
    return lambda name, tensor: name in names or rest(name, tensor)


@torch.no_grad()
def last_layer(net: nn.Module, x: Inputs, output_fn: OutputFn = first_tensor) -> list[str]:
    """Weight and bias of the last matrix product that leads to the selected output, in order of execution.

    Products are tried from the last one backwards: the first whose result matters when it is changed is the one.

    >>> last_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.ones(4, 2))
    ['2.weight', '2.bias']
    """
    weights = floating(net)

    def run(nudge: Nudge) -> Tensor:
        with no_fast_path, no_fused_attention, CaptureMode(weights, nudge.uses.append), nudge:
            return call(copy_model(net, share=True), weights, x, output_fn)

    plain = run(watched := Nudge(weights))
    for position, use in reversed(list(enumerate(watched.uses))):
        if use.why != LOOKUP and weights[use.name].ndim >= 2 and not torch.equal(run(nudge := Nudge(weights, position)), plain):
            return [name for name in floating(net) if name in (use.name, use.bias, nudge.bias)]
    raise ConfigError(
        f"Expected a matrix product on the way to the output for params={LAST_LAYER!r}, but {type(net).__name__} has none. "
        "Pick parameters by name."
    )


class Nudge(TorchDispatchMode):
    """Inside a CaptureMode that files into `uses`: change the result of the use at `position`, and note what is added to it."""

    def __init__(self, weights: Weights, position: int = -1) -> None:
        super().__init__()
        self.uses: list[ParamUse] = []
        self.position = position
        self.bias: str | None = None
        self.names = {w.data_ptr(): n for n, w in weights.items()}
        self.product = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and change what it gives if it is the one."""
        before = len(self.uses)
        if self.product and func.overloadpacket in (aten.add, aten.add_):
            a, b = args[:2]
            for left, right in ((a, b), (b, a)):
                if isinstance(left, Tensor) and isinstance(right, Tensor) and _address(left) == self.product:
                    self.bias = self.bias or self.names.get(right.data_ptr())
        result = func(*args, **(kwargs or {}))
        if before <= self.position < len(self.uses):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    # not a constant: a softmax would not see it
                    leaf.add_(torch.linspace(0.5, 1.5, leaf.numel(), device=leaf.device).reshape(leaf.shape).to(leaf))
                    self.product = _address(leaf)
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def find_last_layer(
    net: nn.Module, random: Collection[str], weights: Weights, x: Inputs, output_fn: OutputFn = first_tensor
) -> str | None:
    """Name the last `nn.Linear` of a model if the parameters in `random` are its own, and used nowhere else.

    Other weights are put there, and the model's output is compared with the layer's: whatever else a model does shows.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> x = torch.ones(4, 2)
    >>> find_last_layer(net, ["2.weight", "2.bias"], {}, x), find_last_layer(net, ["0.weight"], {}, x)
    ('2', None)
    """
    for name, module in net.named_modules():
        names = [f"{name}.{leaf}" if name else leaf for leaf, _ in module.named_parameters()]
        if type(module) is not nn.Linear or set(names) != set(random):
            continue
        other = {n: weights.get(n, net.get_parameter(n)).flip(0) + 0.5 for n in random}
        try:  # what comes after the layer may leave one sign alone
            trials = (other, {n: -w for n, w in other.items()})
            gives = all(_gives_output(net, name, weights, w, take_rows(x, slice(0, 4)), output_fn) for w in trials)
        except MODEL_ERRORS:
            return None
        return name if gives else None
    return None


def _gives_output(net: nn.Module, layer: str, weights: Weights, other: Weights, x: Inputs, output_fn: OutputFn) -> bool:
    """Tell whether the model's output with other weights in the layer is the layer's own."""
    with replica(net) as twin:
        h, _ = read_module_input(twin, layer, weights, x, output_fn)
        output = call(twin, weights | other, x, output_fn)
    if h.ndim != 2:
        return False
    expected = apply_last_layer(layer, (h,), {n: w.unsqueeze(0) for n, w in other.items()})[0]
    near = 1e-3 * float(output.abs().max())
    return expected.shape == output.shape and torch.allclose(expected, output, rtol=1e-2, atol=near)
