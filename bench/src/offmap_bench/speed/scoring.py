"""Themes of work in memory: scores of many rows and of one, other libraries, plain calls of the model, and how costs grow."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

import offmap
from offmap.integrations.nets import mlp
from offmap.maxwent.config import Runtime
from offmap.model.params import stack_models
from offmap.posterior.distribution import svd
from offmap.posterior.predictive import Stochastic
from offmap.report import page
from offmap_bench.paths import DOCS
from offmap_bench.speed import measure
from offmap_bench.speed import subjects as on
from offmap_bench.speed.measure import GEMM, Claim, Record, Work, at_most, count_flops, measurements, once, race, record, repeat
from offmap_bench.studies.study import render_svg


def peers(rounds: int = 3) -> Record:
    """Fits in turns, then scores in turns."""

    def race_all(works: dict[str, Work]) -> dict[str, measure.Timing]:
        return race(works, rounds=rounds, gemm={f"{on.STACKED}, {GEMM}": works[on.STACKED]})

    scorers = on.scorers(on.table()["score"][0])
    calls = {name: 10 if "ensemble" in name else 1 for name in scorers}  # five passes are short
    timings = {f"fit: {name}": t for name, t in race_all(on.fits()).items()}
    scores = race_all({name: repeat(calls[name], work) for name, work in scorers.items()})
    return record("peers", rounds, timings | {f"10,000 rows: {n}": t.times(1 / calls.get(n, 10)) for n, t in scores.items()})


def scoring(rounds: int = 7) -> Record:
    """10,000 rows with 50 new draws: ours, the authors' package, and a bare GEMM."""
    x, theirs = on.table()["score"][0], on.maxwent()
    paper, default = on.fit_guard(score="paper"), on.fit_guard()

    def predict_std(batch: int) -> Work:
        return lambda: theirs.predict_std(x.numpy(), batch_size=batch, n_sample=on.DRAWS)

    ours, combined = 'offmap, `guard.score`, score="paper"', "offmap, `guard.score`, the default score"
    tuned = {f"maxwent, `predict_std`, batch {batch}": predict_std(batch) for batch in (512, 1024, 2048, 4096)}
    untuned = "maxwent, `predict_std`, batch 32 (its default)"
    works: dict[str, Work] = {ours: lambda: on.reseed(paper).score(x), combined: lambda: on.reseed(default).score(x)}
    timings = race({**works, **tuned, untuned: predict_std(32)}, rounds=rounds, at_most={untuned: 2}, gemm={GEMM: works[ours]})
    quickest = min(tuned, key=lambda name: timings[name].best)
    best, tuned_best, untuned_best, gemm = (timings[name].best for name in (ours, quickest, untuned, GEMM))
    products = sum(p.numel() for p in on.trained_net().parameters() if p.ndim == 2)
    claims = [
        Claim("times faster than the peer at its best", tuned_best / best, "at least", 3.5),
        Claim("times faster than the peer at its default", untuned_best / best, "at least", 40.0),
        Claim("times the bare GEMM", best / gemm, "at most", 1.7),
    ]
    values = {"gflop": round(count_flops(works[ours]) / 1e9, 1), "passes": round(2 * on.DRAWS * len(x) * products / 1e9, 1)}
    shown = measurements({name: timings[name] for name in (ours, combined, quickest, untuned, GEMM)})
    return Record("scoring", rounds, shown, claims, values)


def latency(rounds: int = 15, calls: int = 20) -> Record:
    """One row: ours, others and the model alone."""
    x, theirs, net = on.table()["score"][0][:1], on.maxwent(), on.trained_net()
    guard, default, fresh = (on.fit_guard(score=score) for score in ("paper", "default", "paper"))
    works: dict[str, Work] = {
        'offmap, `guard.score(x)`, score="paper"': lambda: guard.score(x),
        "offmap, `guard.score(x)`, the default score": lambda: default.score(x),
        "offmap, `guard(x)`": lambda: guard(x),
        "offmap, `guard.score(x)`, the first call": lambda: on.reseed(fresh).score(x),  # leaves the cache of `guard` alone
        "maxwent, `predict_std(x)`": lambda: theirs.predict_std(x.numpy(), n_sample=on.DRAWS),
        "the plain net": torch.no_grad()(lambda: net(x)),
    }
    works |= {name: work for name, work in on.scorers(x).items() if name != "offmap"}
    turns = {name: repeat(calls, work) for name, work in works.items()}
    return record("latency", rounds, race(turns, rounds=rounds, gemm={GEMM: next(iter(turns.values()))}), "ms", per=calls)


SMALL = [
    (subject, 50, batch, 0.5 if batch <= 128 else 1.2, all_rows)
    for subject in (on.MLP, on.SMALL_CONV1D, on.CONV1D)
    for all_rows in (True, False)
    for batch in (32, 128, 512)
]
LARGE = [(on.RESNET, 10, 1, None, False), (on.RESNET, 10, 128, 1.3, False), (on.TRANSFORMER, 10, 32, None, False),
         (on.TRANSFORMER, 10, 128, 1.3, False), (on.TRANSFORMER, 10, 512, 1.3, False)]  # fmt: skip
"""Subject, draws, batch, the bound of the cost against plain calls, and whether all rows are scored or one batch."""


def architectures(rounds: int = 5) -> Record:
    """Draws against as many plain calls of the model, case by case."""
    result = Record("architectures", rounds, [])
    for subject, draws, batch, target, all_rows in SMALL + LARGE:
        net, x = subject.net(), subject.inputs(subject.rows if all_rows else batch)
        stacked = stack_models(net)
        model = Runtime(batch_size=batch).model(stacked.module, stacked.mean, x)
        predictive, seeds = Stochastic(model, svd(net, [subject.inputs(64)])), iter(range(10**6))
        works: dict[str, Work] = {
            "plain": lambda net=net, x=x, batch=batch, draws=draws: on.run_passes(net, x, batch, draws),
            "ours": lambda p=predictive, x=x, draws=draws, seeds=seeds: p.outputs(x, draws, clip=None, seed=next(seeds)),
        }
        plain, ours = race(works, rounds=rounds).values()
        ratio = ours.best / plain.best
        rows = f"{subject.rows:,} rows in batches of {batch}" if all_rows else f"one batch of {batch}"
        case, chunks = f"{subject.name}, {draws} draws, {rows}", f"offmap, chunks of {model.chunk_size} ({ratio:.2f} times)"
        result.measurements.extend(measurements({f"{case}: plain calls": plain, chunks: ours}, "ms"))
        result.claims.extend(at_most([(f"{case}: times the plain calls", ratio, target)] if target else []))
        print(case, chunks, flush=True)
    return result


FIGURE = DOCS / "figures" / "exponents.svg"


def exponents(rounds: int = 3) -> Record:
    seconds: dict[str, dict[int, float]] = {}
    for name, works in series().items():
        timings = race({str(size): work for size, work in works.items()}, rounds=rounds)
        seconds[name] = {int(size): timing.best for size, timing in timings.items()}
    measured = [once(f"{name}: {size:,}", "ms", 1e3 * best) for name, sizes in seconds.items() for size, best in sizes.items()]
    most = dict.fromkeys(seconds, 1.1) | {"fit, weights": 1.5}  # eigenvectors take the third power of a width
    claims = at_most((f"exponent, {name}", slope(sizes), most[name]) for name, sizes in seconds.items())
    return Record("exponents", rounds, measured, claims)


def series() -> dict[str, dict[int, Work]]:
    """{what grows: {size: work}}."""
    x, guard = on.table()["score"][0], on.fit_guard(score="paper")

    def score(guard: offmap.Guard, rows: int = 4_000, draws: int = 20) -> Work:
        return lambda: on.reseed(guard, draws=draws).score(x[:rows])

    widths = {sum(p.numel() for p in three_layers(n).parameters()): n for n in (32, 64, 128, 256)}
    return {
        "score, rows": {n: score(guard, rows=n) for n in (1_250, 2_500, 5_000, 10_000)},
        "score, draws": {n: score(guard, draws=n) for n in (10, 20, 40, 80)},
        "score, weights": {size: score(_fit(width=n)) for size, n in widths.items()},
        "score, members": {n: score(_fit(members=n)) for n in (1, 2, 4, 8)},
        "fit, rows": {n: lambda n=n: _fit(rows=n) for n in (450, 900, 1_800, 3_600)},
        "fit, weights": {size: lambda n=n: _fit(width=n) for size, n in widths.items()},
        "fit, members": {n: lambda n=n: _fit(members=n) for n in (1, 2, 4, 8)},
    }


def three_layers(width: int, seed: int = 0) -> torch.nn.Module:
    return mlp(on.FEATURES, on.OUTPUTS, hidden=[width] * 3, seed=seed)


def _fit(*, rows: int = 3_600, width: int = 100, members: int = 1) -> offmap.Guard:
    (x, y), valid = on.table()["train"], on.table()["valid"]
    nets = [three_layers(width, seed) for seed in range(members)]
    return offmap.fit(nets, (x[:rows], y[:rows]), valid, solver="closed-form", score="paper", draws=20, progress=False)


def slope(seconds: Mapping[int, float]) -> float:
    """The slope of the least-squares line through (log size, log seconds).

    >>> round(slope({1: 3.0, 10: 300.0, 100: 30000.0}), 3)
    2.0
    """
    return float(np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)[0])


def series_of(record: Record) -> dict[str, dict[int, float]]:
    """{what grows: {size: seconds}} of a record."""
    seconds: dict[str, dict[int, float]] = {}
    for measured in record.measurements:
        name, size = measured.what.split(": ")
        seconds.setdefault(name, {})[int(size.replace(",", ""))] = measured.best / 1e3
    return seconds


def draw_exponents(record: Record) -> None:
    """Draw scores on the left, fits on the right; sizes in multiples of the smallest, with fitted lines."""
    with matplotlib.rc_context(page.RC | {"savefig.facecolor": page.colour("paper"), "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        panels = dict(zip(("score", "fit"), figure.subplots(1, 2, sharey=True), strict=True))
        looks = {"rows": (4, "o"), "draws": (1, "s"), "weights": (5, "^"), "members": (6, "D")}  # place of the colour, and marker
        for name, seconds in series_of(record).items():
            kind, _, what = name.partition(", ")
            place, marker = looks[what]
            colour, dashes = page.series(place)
            sizes = np.array(list(seconds)) / min(seconds)
            line = np.polyfit(np.log(sizes), np.log(list(seconds.values())), 1)
            fitted = np.exp(np.polyval(line, np.log(sizes)))
            panels[kind].plot(sizes, fitted, color=colour, dashes=dashes or (None, None), linewidth=1)
            panels[kind].plot(sizes, list(seconds.values()), marker, color=colour, markersize=4, label=f"{what}, {line[0]:.2f}")
        for kind, axes in panels.items():
            axes.set(xscale="log", yscale="log", xlabel="times the smallest size")
            axes.set_title(f"{kind}, with exponents", loc="left")
            axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
            axes.xaxis.minorticks_off()
            axes.legend(frameon=False, handlelength=3)
        panels["score"].set_ylabel("seconds")
        FIGURE.write_text(render_svg(figure), encoding="utf-8")
