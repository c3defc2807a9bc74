"""Drawn weights as constants of a graph: every weight set is run, together where the model allows it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offmap._types import Inputs, Weights
from offmap.data.inputs import is_table
from offmap.errors import ConfigError
from offmap.export.passes import Passed
from offmap.model.forward import BatchedModel, apply_last_layer, call, plan_layers, run_layers
from offmap.model.params import NamedTensors, at, copy_model
from offmap.posterior.predictive import CachedPredictive, Predictive, Sampled, Stochastic

Own = Stochastic | Sampled
"""Predictives that are a model of ours and its weights."""


def own(predictive: Predictive) -> Own:
    """The predictive, refused unless its weights can be written down."""
    predictive = predictive.source if isinstance(predictive, CachedPredictive) else predictive
    if isinstance(predictive, Stochastic | Sampled):
        return predictive
    raise ConfigError(
        f"Expected a guard over a model and its drawn weights to export, but got one over {type(predictive).__name__}, which "
        "keeps them to itself. Fit it with `offmap.fit`."
    )


def together(model: BatchedModel) -> bool:
    """Whether a few products run any number of draws: then a graph stays small."""
    return bool(model.layers) or model.last_layer is not None


class Draws(nn.Module):
    """A model over a fixed stack of weights: inputs of B rows -> (S, B, ...), member-major.

    `drawn` are the random weights {name: (S, ...)}, `fixed` the others {name: (M, ...)}. With `half` they are kept in half
    precision and computed with in their own. Three ways: of a model with an `ending` only the last layer is run, on what a pass
    of every plain member met there; a plain stack of layers runs in batched products; others run once for every set.
    """

    def __init__(self, model: BatchedModel, drawn: Weights, fixed: Weights, members: int, *, half: bool = False) -> None:
        super().__init__()
        # in a list: its own weights are none of this module's, all of them are replaced
        self.model = [(copy_model(model.net), model.output_fn)]
        self.members, self.sets = members, len(next(iter(drawn.values())))
        self.dtypes = {name: w.dtype for name, w in {**drawn, **fixed}.items()}
        self.last_layer = model.last_layer
        self.layers = plan_layers(self.model[0][0]) if model.layers and self.last_layer is None else None
        small = {name: w.half() if half and w.dtype == torch.float32 else w for name, w in {**drawn, **fixed}.items()}
        stacked = {n: small[n] for n in drawn}
        apart = self.last_layer is None and not self.layers
        self.stack = None if apart else NamedTensors(_own(stacked))
        self.each = nn.ModuleList(NamedTensors(_own(at(stacked, i))) for i in range(self.sets if apart else 0))
        kept = {} if self.last_layer is not None else {n: small[n] for n in fixed}
        self.fixed = nn.ModuleList(NamedTensors(_own(at(kept, m))) for m in range(members))

    def forward(self, inputs: Inputs, passed: Passed | None = None) -> Tensor:
        """Outputs of every weight set, in float32 at least."""
        net, output_fn = self.model[0]
        if self.last_layer is not None:
            assert passed is not None
            outputs = apply_last_layer(self.last_layer, tuple(passed.ends), self._stacked())
        elif self.layers is not None and is_table(inputs):
            outputs = self._batched(inputs)
        else:
            outputs = torch.stack([call(net, self.weights(i), inputs, output_fn) for i in range(self.sets)])
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32))

    def weights(self, index: int) -> Weights:
        """One weight set by name."""
        drawn = dict(self.each[index].items()) if self.stack is None else at(self._stacked(), index)  # pyright: ignore
        fixed = dict(self.fixed[index * self.members // self.sets].items())  # pyright: ignore
        return {name: w.to(self.dtypes[name]) for name, w in (drawn | fixed).items()}

    def _stacked(self) -> Weights:
        assert self.stack is not None
        return {name: w.to(self.dtypes[name]) for name, w in self.stack.items()}

    def _batched(self, x: Tensor) -> Tensor:
        assert self.layers is not None
        weights, times = self._stacked(), self.sets // self.members
        for name in set(self.dtypes) - set(weights):
            every = [f[name].to(self.dtypes[name]) for f in self.fixed]  # pyright: ignore
            weights[name] = torch.stack(every).repeat_interleave(times, 0)
        with torch.enable_grad():  # in one piece: tiles would fix the number of rows
            return run_layers(self.layers, weights, x, self.sets)


def _own(weights: Weights) -> Weights:
    """Copies: a view would be written to the file with all that it is a view of."""
    return {name: w.clone() for name, w in weights.items()}


def draws_of(predictive: Own, draws: int, *, clip: float | None, seed: int, half: bool = False) -> Draws:
    """The draws that `predictive.outputs` runs; clip 0, and a predictive without randomness, give the members themselves."""
    members = predictive.members
    if isinstance(predictive, Sampled):
        drawn = predictive.weights if predictive.draw is None or clip == 0 else predictive.draw(range(draws), seed)
        return Draws(predictive.model, _plain(drawn), {}, members, half=half)
    q = predictive.q
    drawn = q.draw(range(1 if clip == 0 else draws), seed=seed, clip=clip)
    fixed = dict(q.fixed.items())
    return Draws(predictive.model, _plain({n: drawn[n] for n in q.mean}), _plain(fixed), members, half=half)


def _plain(weights: Weights) -> Weights:
    return {name: w.detach() for name, w in weights.items()}
