"""The models of a fit: checked, stacked, and which parameters are random, by name (tied ones once, under their first)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offmap._torch_private import child_table, tree_leaves
from offmap._types import Inputs, Weights
from offmap.data.batch import take_rows
from offmap.errors import ConfigError, ModelError
from offmap.model.capture import LOOKUP, PICKED, CaptureMode, ParamUse
from offmap.model.forward import (
    BatchedModel,
    OutputFn,
    call,
    copy_model,
    copy_module,
    first_tensor,
    no_fast_path,
    no_fused_attention,
)
from offmap.model.inspect import join_names, restore_state

# which parameters are random: a word, name patterns (fnmatch), a predicate on (name, tensor), or None for all
ParamSelection: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool] | None
LAST_LAYER = "last-layer"  # the word that only a forward pass can tell: the last matrix product on the way to the output
# the other words for `params`; a word wins over a pattern of the same spelling
WORDS: dict[str, Callable[[Tensor], bool]] = {"all": lambda tensor: True, "matrices": lambda tensor: tensor.ndim >= 2}

SHARDED = (
    "Expected a model whose parameters are whole in every process, but those of {kind} are divided among them. Gather them: "
    "`state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))` of `torch.distributed.checkpoint."
    "state_dict` on every rank, then pass a net built anew with `plain.load_state_dict(state)`."
)


SCRIPTED = (
    "Expected a model whose weights can be exchanged, but {kind} is or holds TorchScript. Pass the module it was made from; "
    "`net.load_state_dict(scripted.state_dict())` gives it the weights."
)


def as_models(models: Any) -> list[nn.Module]:
    """One model or several as a list, unwrapped, refused unless they are modules with whole, finite floating-point parameters."""
    several: list[Any] = list(models) if isinstance(models, list | tuple | nn.ModuleList) else [models]
    result = [_unwrap(model) for model in several]
    if not result or not all(isinstance(model, nn.Module) for model in result):
        roads = (
            " Put `offmap.integrations.sklearn.OffmapDetector` beside other models, or guard trees as draws with `offmap.guard` "
            "(docs: guides/trees)."
        )
        raise ModelError(
            f"Expected a torch.nn.Module or a list of them, but got {type(models).__name__}."
            + (roads if hasattr(models, "predict") else "")
        )
    for model in result:
        if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
            raise ModelError(SCRIPTED.format(kind=type(model).__name__))
        kinds = {type(m).__name__ for m in model.modules() if type(m).__name__ == "FullyShardedDataParallel"}
        kinds |= {type(p).__name__ for p in model.parameters() if type(p).__name__ == "DTensor" or hasattr(p, "to_local")}
        if kinds:
            raise ModelError(SHARDED.format(kind=" and ".join(sorted(kinds))))
        if any(is_lazy(p) for p in (*model.parameters(), *model.buffers())):
            raise ModelError(f"Expected a trained model, but {type(model).__name__} has parameters without a size. Call it once.")
        if not any(p.is_floating_point() for p in model.parameters()):
            quantised = any(".quantized." in type(m).__module__ for m in model.modules())
            reason = "is quantised: pass the model in floating-point numbers that it was made from" if quantised else "has none"
            raise ModelError(f"Expected a model with floating-point parameters, but {type(model).__name__} {reason}.")
        _check_device(model)
        for name, p in model.named_parameters():
            if p.is_floating_point() and torch.finfo(p.dtype).bits < 16:
                raise ModelError(f"Expected weights of 16 bits or more, but `{name}` is {p.dtype}. Fit a copy, `model.float()`.")
            if not bool(p.detach().isfinite().all()):
                raise ModelError(f"Expected a trained model with finite weights, but `{name}` holds NaN or infinite values.")
    return result


def _unwrap(model: Any) -> Any:
    """Return the module inside wrappers that compute the same: data parallel ones, `torch.compile`, an exported program."""
    while True:
        if type(model).__name__ == "ExportedProgram":
            model = model.module()
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            model = child_table(model)["_orig_mod"]
        else:
            break
    if isinstance(model, nn.Module) and any(type(m).__name__ == "OptimizedModule" for m in model.modules()):
        model = copy_module(model, share=True)
        for module in list(model.modules()):
            child_table(module).update({name: _unwrap(child) for name, child in child_table(module).items()})
    return model


def _check_device(model: nn.Module) -> None:
    """Raise a ModelError unless all parameters and buffers live on one device; it names those elsewhere."""
    places = {n: t.device for n, t in (*model.named_parameters(), *model.named_buffers())}
    first, *others = dict.fromkeys(places.values())
    if others:
        each = "; ".join(f"{join_names(n for n, place in places.items() if place == d)} on {d}" for d in (first, *others))
        raise ModelError(f"Expected a model on one device, but it has {each}. Move it, for example with `model.to('{first}')`.")
    if first.type == "meta":
        raise ModelError(f"{type(model).__name__} is on the meta device, without numbers. Load its weights first.")


def detach_params(model: nn.Module) -> Weights:
    """The floating-point parameters of a model, detached: all that can be random."""
    return {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point()}


def all_params(model: nn.Module) -> Weights:
    """All tensors that a call of a model reads: parameters, then buffers, tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def at(weights: Mapping[str, Tensor], index: int) -> Weights:
    """One entry of a stack: {name: (S, ...)} -> {name: (...)}."""
    return {name: tensor[index] for name, tensor in weights.items()}


def select_params(model: nn.Module, params: ParamSelection = None, last: Collection[str] | None = None) -> Weights:
    """Detached floating-point parameters that `params` picks, by name; `last` are those of the last layer, if known."""
    candidates = detach_params(model)
    if not candidates:
        raise ModelError(f"Expected a model with floating-point parameters, but {type(model).__name__} has none.")
    if callable(params):
        chosen = {n: p for n, p in candidates.items() if params(n, p)}
    else:
        entries: list[Any] = list(params) if isinstance(params, list | tuple) else ["all" if params is None else params]
        if not all(isinstance(entry, str) for entry in entries):
            raise ConfigError(
                f"Expected `params` to be a pattern, a list of them, a function or None, but got {params!r}. "
                f"The words {[*WORDS, LAST_LAYER]} are patterns too."
            )
        if LAST_LAYER in entries and last is None:
            raise ConfigError(f"Only `offmap.fit` finds {LAST_LAYER!r}, by a forward pass. Pass a pattern here.")

        def picks(entry: str, name: str, tensor: Tensor) -> bool:
            if entry == LAST_LAYER:
                return name in (last or ())
            return WORDS[entry](tensor) if entry in WORDS else fnmatch(name, entry)

        chosen = {n: p for n, p in candidates.items() if any(picks(entry, n, p) for entry in entries)}
    if not chosen:
        raise ConfigError(f"Expected `params` to pick at least one parameter, but {params!r} fits none of {list(candidates)}.")
    return chosen


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


def stack_models(models: nn.Module | Sequence[nn.Module], params: ParamSelection = None) -> StackedModel:
    """A private copy of the models; the users' own are never touched."""
    models = [models] if isinstance(models, nn.Module) else list(models)
    _check_same_architecture(models)
    module = copy_model(models[0], share=len(models) > 1)
    # hooks make some tensors that are neither parameters nor buffers anew in every call, as pruning does
    attributes = [(f"{path}.{n}".lstrip("."), t) for path, m in module.named_modules() for n, t in vars(m).items()]
    if names := [name for name, value in attributes if isinstance(value, Tensor)]:
        restore_state(module, names)
    chosen = [select_params(model, params) for model in (module, *models[1:])]
    if len(models) == 1:
        return StackedModel(module, {n: w.unsqueeze(0) for n, w in chosen[0].items()}, {})
    mean = {n: torch.stack([weights[n] for weights in chosen]) for n in chosen[0]}
    rest = [{n: t.detach() for n, t in all_params(model).items() if n not in mean} for model in models]
    fixed = {n: torch.stack([tensors[n] for tensors in rest]) for n in rest[0]}
    for name, p in module.named_parameters():  # the private model reads the stack, which is all that is held
        p.data = (mean if name in mean else fixed)[name][0]
    return StackedModel(module, mean, fixed)


def _check_same_architecture(models: Sequence[nn.Module]) -> None:
    """Raise a ModelError that names the first difference unless all models have the same names, shapes, dtypes and devices."""
    join = "Fit them apart and join their guards with `offmap.combine`, or pass members built by one function."
    aspects: list[tuple[str, Callable[[Tensor], object], str]] = [
        ("architecture", lambda t: tuple(t.shape), join),
        ("dtype", lambda t: t.dtype, "Convert them, for example with `net.float()`."),
        ("device", lambda t: t.device, "Move them, for example with `model.to('cpu')`."),
    ]
    for what, describe, remedy in aspects:
        first, *others = [{n: describe(t) for n, t in all_params(model).items()} for model in models]
        for position, other in enumerate(others, start=1):
            for name in first | other:
                here, there = first.get(name, "nothing"), other.get(name, "nothing")
                if here != there:
                    raise ModelError(
                        f"Expected members of one {what}, but `{name}` is {here} in member 0 and {there} in "
                        f"member {position}. {remedy}"
                    )


def check_same_function(models: Sequence[nn.Module], stacked: BatchedModel, weights: Weights, inputs: Inputs) -> None:
    """Refuse members that differ in more than weights and buffers: stacking would quietly run all of them as the first."""
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


def choose(
    models: StackedModel,
    inputs: Inputs,
    params: ParamSelection = None,
    output_fn: OutputFn = first_tensor,
    *,
    unreached: Collection[str] = (),
) -> StackedModel:
    """The same models with those parameters random that `params` asks for and some input reaches; the others stay fixed."""
    last = None
    if params == LAST_LAYER or (isinstance(params, list | tuple) and LAST_LAYER in params):
        last = last_layer(models.module, inputs, output_fn)
    asked = select_params(models.module, params, last)
    mean = {n: models.mean[n] for n in asked if n not in unreached}
    if not mean:
        raise ConfigError(
            f"Expected `params` to pick a parameter that some input reaches, but {params!r} picks {join_names(asked)} alone. "
            "Check `output_fn`, or pick others."
        )
    rest = {n: w for n, w in models.mean.items() if n not in mean}
    # one member alone finds its fixed weights in the private model itself
    return replace(models, mean=mean, fixed=models.fixed | rest if models.members > 1 else models.fixed)


class _OriginMode(CaptureMode):
    """Follow the results of products: every tensor knows the matrices that made it, no other one in between."""

    def __init__(self, weights: Weights) -> None:
        self.used, self.matrices = set[str](), {name for name, w in weights.items() if w.ndim >= 2}
        self.origins, self.biases = dict[int, set[str]](), dict[str, str]()
        self.alive: list[Any] = []  # memory that is used again would inherit the origins of what lay there
        super().__init__(weights, self._note)

    def _note(self, use: ParamUse) -> None:
        if use.why not in (LOOKUP, PICKED) and use.name in self.matrices:
            self.used.add(use.name)
            self.biases |= {} if use.bias is None else {use.bias: use.name}

    def of(self, values: Any) -> set[str]:
        """Return the matrices that made these tensors."""
        tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
        return set().union(*(self.origins.get(t.untyped_storage().data_ptr(), ()) for t in tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; its result is made by the matrices that it used, else by those of its arguments."""
        self.used = set()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made_by = self.used or self.of((args, kwargs))
        self.alive.append(result)
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.numel():
                self.origins.setdefault(t.untyped_storage().data_ptr(), set()).update(made_by)
        return result


@torch.no_grad()
def last_layer(model: nn.Module, x: Inputs, output_fn: OutputFn = first_tensor) -> list[str]:
    """Weight and bias of the last matrices on the way to the output: those that no other one follows, such as all heads."""
    weights = detach_params(model)
    with no_fast_path, no_fused_attention, _OriginMode(weights) as mode:
        matrices = mode.of(call(copy_model(model, share=True), weights, take_rows(x, slice(0, 2)), output_fn))
    if matrices:
        return [name for name in weights if name in matrices or mode.biases.get(name) in matrices]
    raise ConfigError(
        f"Expected a matrix product on the way to the output for params={LAST_LAYER!r}, but {type(model).__name__} has none. "
        "Pick parameters by name."
    )
