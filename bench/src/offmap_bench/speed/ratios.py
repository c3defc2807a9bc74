"""All ratios of the records in one table: what is done, by the side of what others take and of the least that it could take."""

from __future__ import annotations

from collections.abc import Mapping

from offmap_bench.speed.limit import NAME
from offmap_bench.speed.record import Record

Source = tuple[str, str] | tuple[str, str, str]
"""(theme, claim), or (theme, what takes longer, what takes less): the best time of one over that of the other."""

PEERS = ("maxwent", "laplace-torch", "bayesian-torch", "MC-dropout", "deep ensemble")
LIMITS = ("a bare GEMM", "plain")

TEXT = """## Ratios

Of the tables below, in one. Against peers: how many times faster this library is. Against a bare GEMM of the same FLOPs, and
against what the first column calls *plain*: how many times as long it takes. The fit of `maxwent` has 20,000 gradient steps, and
a deep ensemble, written plainly, five nets, so that it scores with five passes where the others take fifty. A dash is where
there is nothing to compare with: MC-dropout is not fitted, only ours and maxwent have a basis (maxwent's of linear layers), no
peer trains nets in one stack or gives a whole answer, and none exports or serves.
"""

DEFAULT = 'offmap, solver="refine", 500 steps (the default)'
ONE_ROW = 'offmap, `guard.score(x)`, score="paper"'
MLP, RESNET = "MLP 8-100-100-100-2", "ResNet-20, 32 × 32 images"

ROWS: dict[str, dict[str, Source]] = {
    "fit, by default": {
        "maxwent": ("fitting", "maxwent, 20,000 steps (extrapolated)", DEFAULT),
        "bayesian-torch": ("peers", "fit, by default: times faster than bayesian-torch"),
        "laplace-torch": ("peers", "fit: laplace-torch", "fit: offmap, default"),
        "deep ensemble": ("peers", "fit, by default: times faster than deep ensemble"),
        "a bare GEMM": ("fitting", DEFAULT, f"{NAME} as the default"),
    },
    "fit, closed form": {
        "maxwent": ("fitting", "times faster, closed form against 20,000 steps"),
        "bayesian-torch": ("peers", "fit, closed form: times faster than bayesian-torch"),
        "laplace-torch": ("peers", "fit, closed form: times faster than laplace-torch"),
        "deep ensemble": ("peers", "fit, closed form: times faster than deep ensemble"),
        "a bare GEMM": ("fitting", 'offmap, solver="closed-form"', f"{NAME} as the closed form"),
    },
    "φ alone, by default": {
        "laplace-torch": ("peers", "fit: laplace-torch", "fit: offmap, default, φ alone"),
        "bayesian-torch": ("peers", "φ alone, by default: times faster than bayesian-torch"),
        "deep ensemble": ("peers", "φ alone, by default: times faster than deep ensemble"),
    },
    "φ alone, closed form": {
        "laplace-torch": ("peers", "φ alone, closed form: times faster than laplace-torch"),
        "bayesian-torch": ("peers", "φ alone, closed form: times faster than bayesian-torch"),
        "deep ensemble": ("peers", "φ alone, closed form: times faster than deep ensemble"),
    },
    "score, 10,000 rows": {
        "maxwent": ("scoring", "times faster than the peer at its best"),
        "bayesian-torch": ("peers", "scores: times faster than bayesian-torch"),
        "laplace-torch": ("peers", "scores: times faster than laplace-torch"),
        "MC-dropout": ("peers", "scores: times faster than MC-dropout"),
        "deep ensemble": ("peers", "10,000 rows: deep ensemble", "10,000 rows: offmap"),
        "a bare GEMM": ("scoring", "times the bare GEMM"),
    },
    "answer, `guard(x)`, a block of rows": {"a bare GEMM": ("throughput", "times the bare GEMM of both passes, `guard(x)`")},
    "score of one row, plain: the net": {
        "maxwent": ("latency", "maxwent, `predict_std(x)`", ONE_ROW),
        **{name: ("latency", name, ONE_ROW) for name in ("laplace-torch", "bayesian-torch", "MC-dropout", "deep ensemble")},
        "a bare GEMM": ("latency", ONE_ROW, NAME),
        "plain": ("latency", ONE_ROW, "the plain net"),
    },
    "a deep ensemble of five nets, 500 steps": {
        "deep ensemble": ("peers", "ensemble training: times faster than deep ensemble"),
        "a bare GEMM": ("peers", "fit: offmap, deep ensemble", f"fit: offmap, deep ensemble, {NAME}"),
    },
    "its scores, 10,000 rows": {
        "deep ensemble": ("peers", "scores of an ensemble: times faster than deep ensemble"),
        "a bare GEMM": ("peers", "10,000 rows: offmap, deep ensemble", f"10,000 rows: offmap, deep ensemble, {NAME}"),
    },
    "a step of ensemble training, five nets stacked, plain: of one": {
        "maxwent": ("stacking", "maxwent, five nets in turn", "five nets, stacked"),
        "a bare GEMM": ("stacking", "five nets, stacked", f"{NAME}, five nets"),
        "plain": ("stacking", "times the step of one"),
    },
    "a step of ensemble training, thirty nets stacked, plain: in turn": {
        "a bare GEMM": ("grids", "anchored networks: all stacked", f"anchored networks: all stacked, {NAME}"),
        "plain": ("grids", "stacked, times thirty nets one after another"),
    },
    "basis pass of an MLP, plain: a forward pass": {
        "maxwent": ("basis", f"{MLP}, 102,400 rows: maxwent, `fit_svd`", f"{MLP}, 102,400 rows: basis pass and `eigh`"),
        "a bare GEMM": ("basis", f"{MLP}, 102,400 rows: basis pass", f"{MLP}, 102,400 rows: {NAME}"),
        "plain": ("basis", f"{MLP}: basis pass, times a plain pass"),
    },
    "basis pass of a ResNet-20, plain: a forward pass": {
        "a bare GEMM": ("basis", f"{RESNET}, 4,096 rows: basis pass", f"{RESNET}, 4,096 rows: {NAME}"),
        "plain": ("basis", f"{RESNET}: basis pass, times a plain pass"),
    },
    **{
        f"exported graph, {rows} rows, plain: `guard(x)`": {
            "a bare GEMM": ("export", f"{rows} rows: the graph, ONNX Runtime", f"{rows} rows: {NAME}"),
            "plain": ("export", f"{rows} rows: times `guard(x)`"),
        }
        for rows in ("32", "4,096")
    },
    "server, 32 rows, plain: the bare graph": {
        "a bare GEMM": ("serving", "NPY body, a call", NAME),
        "plain": ("serving", "times the bare call, NPY body"),
    },
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
