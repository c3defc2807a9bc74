"""A guard in single precision says what the same guard says in double precision, whatever the model.

Where amplitudes of a matrix' inputs are equal (more directions than rows, ties), the data do not tell which of their directions
to take: other roundings take other ones, and give other draws of the same law.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import offmap
from checks.trust import Check
from offmap.model.params import stack_models
from offmap.posterior.basis import Basis, observe
from offmap.posterior.distribution import WeightDistribution
from zoo import ZOO, Case

TOLERANCE = 5e-3
"""Of scores, which are in standard deviations of in-distribution rows: of one and the largest. Their weights follow ranks, where
nearly equal rows change places.
"""

ROUNDED = 5e-3
"""Of outputs along the same directions: of one and the largest. Directions that met nothing get noise of up to 1/ε = 10⁴ times
the others', and so do the roundings, 6e-8, of what is met along them.
"""

CLOSE = 1e-5
"""Of amplitudes and covariances, by the largest."""

GAP = 1e-6
"""Amplitudes that are nearer to each other, by the largest, leave their directions open."""

MODELS = [name for name in ZOO if name not in ("float64", "bfloat16")]
DRAWS = 16


class Fitted(NamedTuple):
    """A guard, its distribution, what the fit saw of the data, and inputs to ask about."""

    guard: offmap.Guard
    q: WeightDistribution
    seen: Mapping[str, Basis]
    inputs: Any

    def outputs(self) -> Tensor:
        """Of the draws behind the scores."""
        return self.guard.predictive.outputs(self.inputs, DRAWS, clip=None, seed=0).double()


def trial(seed: int, folder: Path) -> str:
    """One model of the zoo: the even seeds along its axes, the odd ones along its principal directions."""
    name, basis = MODELS[seed // 2 % len(MODELS)], ("identity", "svd")[seed % 2]
    single, double = (_fit(ZOO[name], basis, dtype) for dtype in (torch.float32, torch.float64))
    scores = single.guard.score(single.inputs).double(), double.guard.score(double.inputs)
    assert bool(scores[0].isfinite().all()), name
    if basis == "svd":
        _same_law(single, double, name)
    if basis == "identity" or not leaves_open(double.seen):
        _alike(*scores, TOLERANCE, f"scores of {name}, {basis}")
        return f"{basis}: alike"
    single.q.load_state_dict(double.q.state_dict())
    _alike(single.outputs(), double.outputs(), ROUNDED, f"outputs of {name}, along the same directions")
    return f"{basis}: the same law, and alike along the same directions"


def leaves_open(seen: Mapping[str, Basis]) -> bool:
    """Whether some matrix has directions of one amplitude."""
    turned = [b.input_rms for b in seen.values() if b.matrix is not None]  # (M, G, D) each, falling
    return any(bool((s.diff().neg() <= GAP * s.amax(-1, keepdim=True)).any()) for s in turned)


def law(q: WeightDistribution) -> dict[str, Tensor]:
    """V·diag(φ²)·Vᵀ of every row of what is rotated, (out, D, D), and φ² of the rest, for one member."""
    found = {name: phi.detach()[0].double().square() for name, phi in q.scale().items()}
    for name, matrix in q.rotation.items():
        frame = q.views[name]
        sizes = torch.tensor(frame.blocks)
        v = matrix[0, :, 0].double().repeat_interleave(sizes, 0)  # no model of the zoo is cut into pieces
        found[name] = (v * frame.rows(found[name].unsqueeze(0))[0].unsqueeze(-2)) @ v.mT
    return found


def _same_law(single: Fitted, double: Fitted, name: str) -> None:
    """Amplitudes agree, and covariances do up to c, which draws choose."""
    for parameter, basis in double.seen.items():
        _near(single.seen[parameter].input_rms, basis.input_rms, f"amplitudes of {name}, {parameter}")
    c = [each.guard.history.chosen["factor"] ** 2 for each in (single, double)]
    found, expected = law(single.q), law(double.q)
    for parameter, covariance in expected.items():
        _near(found[parameter] / c[0], covariance / c[1], f"covariances of {name}, {parameter}")


def _near(found: Tensor, expected: Tensor, what: str) -> None:
    apart = float((found - expected).abs().max() / expected.abs().max())
    assert apart < CLOSE, f"{what}: {apart:.1e} apart"


def _alike(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    apart = float((found - expected).abs().max() / (1 + expected.abs().max()))
    assert apart < tolerance, f"{what}: {apart:.1e} apart"


def _fit(case: Case, basis: str, dtype: torch.dtype) -> Fitted:
    def cast(data: Any) -> Any:
        return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, data)

    net, train = case.build().to(dtype), cast(case.data(40))
    guard = offmap.fit(
        net, train, cast(case.data(30)), output_fn=case.output_fn, chunk_size=3 if case.vmap else 1,
        basis=basis, solver="closed-form", draws=DRAWS, risk_draws=DRAWS, progress=False,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    seen = observe(stack_models(net), lambda rows: [train[0]], rotated=basis == "svd", output_fn=case.output_fn)
    q = guard.predictive.q  # pyright: ignore[reportAttributeAccessIssue]
    return Fitted(guard, q, seen.bases, cast(case.inputs(8)))


CHECK = Check(
    "Scores in float32 are those in float64 to 0.001 standard deviations, over the model zoo; where data leave directions open, "
    "the law of the weights is the same to 1e-5.",
    trial, 2 * len(MODELS), 60.0, 16,
)  # fmt: skip
