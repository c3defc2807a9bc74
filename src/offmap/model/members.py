"""The nets that a user passes, as plain modules that can be guarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offmap.data import Rows
from offmap.errors import ModelError
from offmap.model.params import copy_model, one_device
from offmap.posterior.predictive import Sampled

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


def same_function(models: Sequence[nn.Module], plain: Sampled, valid: Rows) -> None:
    """Refuse members that differ in more than weights and buffers: stacking would quietly run all of them as the first."""
    if len(models) == 1:
        return
    few = valid.take(torch.arange(min(4, valid.rows), device=valid.targets.device)).inputs
    together = plain.outputs(few, 1)
    for member, model in enumerate(models):
        weights = {n: w[member : member + 1] for n, w in plain.weights.items()}
        own = Sampled(replace(plain.model, net=copy_model(model, share=True)), weights).outputs(few, 1)[0]
        if not torch.allclose(own, together[member], rtol=1e-3, atol=1e-4 * float(own.abs().max()) + 1e-6):
            raise ModelError(
                f"Expected members that differ in weights and buffers alone, but member {member} computes something else than "
                "member 0 with its weights. Keep what differs in buffers, or fit the members apart and join "
                "their guards with `offmap.combine`."
            )
