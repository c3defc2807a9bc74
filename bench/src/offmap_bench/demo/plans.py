"""What the demo runs, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from offmap_bench.tasks.synthetic import digits, moons, regression
from offmap_bench.tasks.task import Task

PLAIN, ENSEMBLE, DROPOUT = "Plain net", "Deep ensemble ×5", "MC-dropout"
SCALING, SVD, SVD5, NEAREST = "MaxWEnt", "MaxWEnt-SVD", "MaxWEnt-SVD ×5", "Nearest row"
JOINED = "The same, default score"
METHODS = (PLAIN, ENSEMBLE, DROPOUT, SCALING, SVD, SVD5, JOINED, NEAREST)
"""In the order of tables, panels and colours."""


@dataclass(frozen=True)
class Plan:
    """One task, and what differs between tasks: the model, how long it is trained, and how its distribution is fitted."""

    title: str
    task: Callable[[], Task]
    hidden: tuple[int, ...]
    steps: int
    dropout: float  # of 0.05, 0.1 and 0.2 the one of lowest validation NLL
    clip: float  # of the clipped panel
    least: float = 0.0  # scores below are drawn there: the entropy of a confident net has no lower end
    standardise: bool = True  # inputs, for the nearest training row
    fit: dict[str, Any] = field(default_factory=dict[str, Any])  # options of `offmap.fit`
    lr: float = 2e-3
    batch_size: int = 32
    members: int = 5
    draws: int = 50
    grid: int = 64  # points per axis of the pictures


REGRESSION = Plan("1-D regression", regression, (100, 100, 100), steps=2000, batch_size=100, dropout=0.05, clip=0.5, grid=300)

# Every net fits the 50 validation points of the moons to an NLL of almost 0, so that τ = risk + 2·std/√n would leave no room: one
# more point at chance is counted. λ by the rule of the paper's appendix B: the highest entropy below τ. No OOD data needed
MOONS = Plan(
    "Two moons", moons, (100, 100, 100), steps=800, dropout=0.05, clip=2.0, least=1e-6,
    fit={"tolerance": "smoothed", "entropy_weight": (0.1, 1.0, 10.0)},
)  # fmt: skip

DIGITS = Plan("Handwritten digits", digits, (100, 100), steps=800, dropout=0.1, clip=0.5, least=1e-6, standardise=False)

PLANS = (REGRESSION, MOONS, DIGITS)


def quick(plan: Plan) -> Plan:
    """The same in a few seconds, to see that everything runs; the numbers mean little."""
    options = {**plan.fit, "steps": 50, "check_every": 25, "risk_draws": 10}
    if "threshold" in options:
        options["threshold"] = 1.0  # nets that are hardly trained never reach a small one
    return replace(plan, steps=plan.steps // 20, fit=options, members=2, draws=10, grid=24)
