"""The plans of the demo as data, and one plan run to its result: train, fit, score, and predict on the grid that is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from offmap import Evaluation, Guard, Predictive, Scorer, evaluate, fit, guard
from offmap.detectors.input_distance import Nearest
from offmap.integrations.nets import mlp
from offmap_bench.methods import deep_ensemble, mc_dropout
from offmap_bench.runner.base_models import SILENT, as_predictive, prepare
from offmap_bench.runner.run import single_thread, warm_up
from offmap_bench.runner.watch import View, grid, view_of
from offmap_bench.tasks.synthetic import digits, moons, regression
from offmap_bench.tasks.task import Task

Value = TypeVar("Value")
Report = Callable[[str], None]  # called with what is about to be done

PLAIN, ENSEMBLE, DROPOUT = "Plain net", "Deep ensemble ×5", "MC-dropout"
SCALING, SVD, SVD5, NEAREST = "MaxWEnt", "MaxWEnt-SVD", "MaxWEnt-SVD ×5", "Nearest row"
JOINED = "offmap default ×5"
METHODS = (PLAIN, ENSEMBLE, DROPOUT, SCALING, SVD, SVD5, JOINED, NEAREST)  # in the order of tables, panels and colours


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
    grid: int = 64  # points per axis of the views


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
    return replace(plan, steps=plan.steps // 20, fit=options, members=2, draws=10, grid=24)


@dataclass(frozen=True)
class Result:
    """The result of one plan. `seconds` of a method that starts from the plain net (or the ensemble) omit that net's training."""

    plan: Plan
    task: Task
    evaluation: Evaluation
    seconds: dict[str, float]
    thresholds: dict[str, float]
    views: dict[str, View]
    labels: Tensor | None  # what the SVD guard takes the first OOD set for, (n,)
    clip: float | None  # the SVD guard's own choice


@dataclass
class Bench:
    """Makes and trains the nets of a plan, and keeps the time."""

    plan: Plan
    task: Task
    seed: int
    report: Report = lambda doing: None

    def __post_init__(self) -> None:
        self.train, self.valid, self.likelihood = prepare(self.init_nets(range(1)), self.task, self.plan.batch_size)
        self.seconds: dict[str, float] = {}

    def init_nets(self, members: range, dropout: float = 0.0) -> list[nn.Module]:
        """Return untrained nets; a member's start depends on the seed and its number alone."""
        first, hidden = self.seed * self.plan.members, self.plan.hidden
        return [mlp(self.task.inputs, self.task.outputs, hidden=hidden, dropout=dropout, seed=first + m) for m in members]

    def train_nets(self, method: Any, nets: list[nn.Module]) -> Any:
        config = method.Config(steps=self.plan.steps, lr=self.plan.lr)
        return method.fit(nets, self.train, self.valid, likelihood=self.likelihood, config=config, seed=self.seed, runtime=SILENT)

    def train_members(self, members: range) -> list[nn.Module]:
        return self.train_nets(deep_ensemble, self.init_nets(members)).nets()

    def guard(self, predictive: Predictive, **options: Any) -> Guard:
        draws = self.plan.draws
        return guard(predictive, self.task.valid, likelihood=self.likelihood, draws=draws, seed=self.seed, **options)

    def maxwent(self, nets: list[nn.Module], basis: str, **options: Any) -> Guard:
        options = {"score": "paper"} | self.plan.fit | options
        return fit(
            nets, self.task.train, self.task.valid, likelihood=self.likelihood, basis=basis,  # pyright: ignore[reportArgumentType]
            draws=self.plan.draws, seed=self.seed, progress=False, **options,
        )  # fmt: skip

    def time_work(self, label: str, work: Callable[[], Value]) -> Value:
        self.report(label)
        start = time.perf_counter()
        result = work()
        self.seconds[label] = time.perf_counter() - start
        return result


@single_thread()
def run(plan: Plan, seed: int, report: Report = lambda doing: None) -> Result:
    task = plan.task()
    bench = Bench(plan, task, seed, report)
    warm_up()
    first = bench.time_work(PLAIN, lambda: bench.train_members(range(1)))
    nets = first + bench.time_work(ENSEMBLE, lambda: bench.train_members(range(1, plan.members)))
    bench.seconds[ENSEMBLE] += bench.seconds[PLAIN]
    guards = {label: bench.guard(as_predictive(n, task), score="paper") for label, n in ((PLAIN, first), (ENSEMBLE, nets))}
    dropout = bench.time_work(DROPOUT, lambda: bench.train_nets(mc_dropout, bench.init_nets(range(1), plan.dropout)))
    guards[DROPOUT] = bench.guard(dropout, score="paper")
    for label, basis in ((SCALING, "identity"), (SVD, "svd")):
        guards[label] = bench.time_work(label, lambda basis=basis: bench.maxwent(first, basis))
    entropy_weight = guards[SVD].history.chosen["entropy_weight"]  # what one net chose serves for five
    guards[SVD5] = bench.time_work(SVD5, lambda: bench.maxwent(nets, "svd", entropy_weight=entropy_weight))
    joined = bench.time_work(JOINED, lambda: bench.guard(guards[SVD5].predictive, train=task.train))
    bench.seconds[JOINED] += bench.seconds[SVD5]
    baseline = bench.time_work(NEAREST, lambda: Nearest(task.train[0], standardise=plan.standardise))
    report("Looking around")
    scorers: dict[str, Scorer] = {**guards, JOINED: joined, NEAREST: baseline}
    thresholds = {label: g.threshold for label, g in {**guards, JOINED: joined}.items()}
    x, views = grid(task.inputs, plan.grid), dict[str, View]()
    if x is not None:  # every guard unclipped, and the SVD guard clipped
        views = {label: view_of(g.predict(x, clip=None)) for label, g in guards.items()}
        views[f"{SVD}, clipped at {plan.clip:g}"] = view_of(guards[SVD].predict(x, clip=plan.clip))
    labels = guards[SVD].predict(next(iter(task.ood.values()))).label
    evaluation = evaluate(scorers, task.test, task.ood)
    return Result(plan, task, evaluation, bench.seconds, thresholds, views, labels, guards[SVD].clip)
