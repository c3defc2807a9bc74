"""All ratios of the records in one table: what is done, by the side of what others take and of the least that it could take."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.record import Record

Source = tuple[str, str] | tuple[str, str, str]
"""(theme, claim), or (theme, what takes longer, what takes less): the best time of one over that of the other."""

PEERS = ("maxwent", "laplace-torch", "bayesian-torch", "MC-dropout", "deep ensemble")
LIMITS = ("a bare GEMM", "plain")

TEXT = """## Ratios

Of the tables below, in one. Against peers: how many times faster this library is. Against a bare GEMM of the same FLOPs, and
against what the first column calls *plain*: how many times as long it takes. The fit of `maxwent` has 20,000 gradient steps. A
dash is where nothing was measured, or there is nothing to compare with: MC-dropout is not fitted, and no peer exports or serves.
"""

ROWS: dict[str, dict[str, Source]] = {
    "fit, by default": {
        "maxwent": ("fitting", "maxwent, 20,000 steps (extrapolated)", 'offmap, solver="refine", 500 steps (the default)'),
        "bayesian-torch": ("peers", "fit, by default: times faster than bayesian-torch"),
        "laplace-torch": ("peers", "fit: laplace-torch", "fit: offmap, default"),
        "deep ensemble": ("peers", "fit, by default: times faster than deep ensemble"),
    },
    "fit, closed form": {
        "maxwent": ("fitting", "times faster, closed form against 20,000 steps"),
        "bayesian-torch": ("peers", "fit, closed form: times faster than bayesian-torch"),
        "laplace-torch": ("peers", "fit, closed form: times faster than laplace-torch"),
        "deep ensemble": ("peers", "fit, closed form: times faster than deep ensemble"),
    },
    "score, 10,000 rows": {
        "maxwent": ("scoring", "times faster than the peer at its best"),
        "bayesian-torch": ("peers", "scores: times faster than bayesian-torch"),
        "laplace-torch": ("peers", "scores: times faster than laplace-torch"),
        "MC-dropout": ("peers", "scores: times faster than MC-dropout"),
        "a bare GEMM": ("scoring", "times the bare GEMM"),
    },
    "answer, `guard(x)`, a block of rows": {"a bare GEMM": ("throughput", "times the bare GEMM of both passes, `guard(x)`")},
    "score of one row, plain: the net": {
        "maxwent": ("latency", "maxwent, `predict_std(x)`", "offmap, `guard.score(x)`"),
        "plain": ("latency", "offmap, `guard.score(x)`", "the plain net"),
    },
    "a step of ensemble training, five nets stacked, plain: of one": {"plain": ("stacking", "times the step of one")},
    "a step of ensemble training, thirty nets stacked, plain: in turn": {
        "plain": ("grids", "stacked, times thirty nets one after another"),
    },
    "basis pass of an MLP, plain: a forward pass": {"plain": ("basis", "MLP 8-100-100-100-2: basis pass, times a plain pass")},
    "basis pass of a ResNet-20, plain: a forward pass": {
        "plain": ("basis", "ResNet-20, 32 × 32 images: basis pass, times a plain pass"),
    },
    "exported graph, 32 rows": {},
    "server, 32 rows, plain: the bare graph": {"plain": ("serving", "times the bare call, NPY body")},
}


def table(records: Mapping[str, Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    columns = [*PEERS, *LIMITS]
    rows = [
        [what, *(f"{ratio(records, cells[c]):.3g}" if c in cells and cells[c][0] in records else "–" for c in columns)]
        for what, cells in ROWS.items()
    ]
    return ["", *(f"times faster than {peer}" for peer in PEERS), *(f"times {limit}" for limit in LIMITS)], rows


def ratio(records: Mapping[str, Record], source: Source) -> float:
    """The value of a claim, or of one best time over another."""
    record = records[source[0]]
    if len(source) == 2:
        return next(claim.value for claim in record.claims if claim.what == source[1])
    longer, less = (next(m for m in record.measurements if m.what == what) for what in source[1:])
    assert longer.unit == less.unit
    return longer.best / less.best
