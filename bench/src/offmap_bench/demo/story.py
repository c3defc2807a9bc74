"""Results in words: one table per task, and the sections of the page. Every number comes from the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from offmap.report.page import MAP, Array, Panel, Section, gallery, legend, paragraphs, table
from offmap.table import Table
from offmap_bench.demo.run import ENSEMBLE, JOINED, NEAREST, PLAIN, SCALING, SVD, SVD5, Result
from offmap_bench.report.panels import CLASSES, SETS, band_panel, image_panel, map_panel, roc_gallery, score_panels
from offmap_bench.runner.watch import grid
from offmap_bench.tasks.synthetic import SQUARE, truth

LIMITS = (-2.0, 2.0)
TOP = math.log(2)
ON_TOP = (SCALING, SVD, SVD5, JOINED)
"""Fitted around nets that are trained already."""

NOTE = """AUROC: the chance that an OOD input scores above an in-distribution one, in percent. FPR@95: the percentage of OOD
inputs that go unnoticed while 95 % of the in-distribution ones pass. The default score joins the disagreement of MaxWEnt-SVD ×5
with the distance to training rows, in the inputs and in hidden layers; all others have the paper's score. Nearest row: the
distance to the nearest training row, no network at all. A + marks seconds on top of nets that are trained already. Bold: the
best of a column."""


def rows(result: Result) -> Table:
    """Detection on every OOD set, quality on test data, and seconds, as text."""
    title, key = ("RMSE", "rmse") if result.task.likelihood == "gaussian" else ("accuracy", "accuracy")
    found = {(row["scorer"], row["set"]): row for row in result.evaluation.rows}
    several = len(result.task.ood) > 1
    lines: list[dict[str, str]] = []
    for method in result.evaluation.scores:
        line = {"method": method}
        for name, measure in (("AUROC", "auroc"), ("FPR@95", "fpr95")):
            for ood in result.task.ood:
                line[f"{name} {ood}" if several else name] = f"{100 * found[method, ood][measure]:.1f}"
        value = found.get((method, "test"), {}).get(key)
        line[title] = "–" if value is None else f"{value:.4f}" if key == "rmse" else f"{100 * value:.1f}"
        line["fit, s"] = f"{'+' if method in ON_TOP else ''}{result.seconds[method]:.1f}"
        lines.append(line)
    return Table(lines)


def section(result: Result) -> Section:
    """All about one task."""
    tell = {"gaussian": regression, "bernoulli": moons, "categorical": digits}[result.task.likelihood]
    numbers = rows(result)
    ends = {"AUROC": "max", "FPR@95": "min", "RMSE": "min", "accuracy": "max"}
    best = {c: end for c in numbers.columns for word, end in ends.items() if c.startswith(word)}
    sets = ["test data (in-distribution)", *result.task.ood]
    key = [("area", f"var(--{shade})", words) for shade, words in zip(SETS, sets, strict=False)]
    key.append(("line 3 3", "var(--ink)", "alarm threshold: 5 % of validation data lie above"))
    panels = score_panels(result.evaluation, thresholds=result.thresholds, alone=[JOINED, NEAREST], least=result.plan.least)
    body = [
        tell(result),
        "<h3>Numbers</h3>",
        table(numbers, best=best, dots=True),
        paragraphs(NOTE, "note"),
        "<h3>Scores</h3>",
        paragraphs("How OOD each method finds in-distribution and OOD inputs; further right is more OOD. The networks share "
                   "one axis, and scores beyond its ends are drawn there. The default score, in standard deviations, and "
                   "distances have axes of their own."),
        gallery(panels, legend=legend(key)),
        "<h3>ROC curves</h3>",
        roc_gallery(result.evaluation),
    ]  # fmt: skip
    return Section(result.plan.title, "\n".join(body))


def clip_words(result: Result) -> str:
    """Which clip the SVD guard predicts with."""
    if result.clip is None:
        return "For its own predictions this guard chose, on validation data, no clip at all."
    plain = ": the plain net itself" if result.clip == 0 else ""
    return f"For its own predictions this guard chose, on validation data, a clip of {result.clip:g}{plain}."


def times(value: float, base: float) -> str:
    """A ratio in words.

    >>> times(3.0, 2.0), times(2468.0, 1.0)
    ('1.5 times', '2,000 times')
    """
    ratio = value / base
    return f"{ratio:.2g} times" if ratio < 100 else f"{float(f'{ratio:.1g}'):,.0f} times"


def share(flags: Tensor) -> str:
    """How many are set, in percent."""
    return f"{100 * float(flags.float().mean()):.0f} %"


def regression(result: Result) -> str:
    """Bands of all methods."""
    x = grid(result.task.inputs, result.plan.grid)
    assert x is not None
    line, points = x[:, 0].numpy(), (result.task.train[0][:, 0].numpy(), result.task.train[1].numpy())
    panels: list[Panel] = []
    for name, view in result.views.items():
        mean, std = view.band()
        svg = band_panel(line, mean, std, points=points, truth=truth(line), limits=LIMITS)
        panels.append(Panel(svg, name, f"{name}: mean prediction and a band of two standard deviations. {widths(line, std)}"))
    key = legend([
        ("area", "var(--band)", "mean ± 2 standard deviations"), ("line", "var(--series4)", "mean prediction"),
        ("line 5 3", "var(--ink)", "the truth"), ("dot", "var(--ood)", "training points"),
    ])  # fmt: skip
    scored = result.evaluation.scores
    svd, plain = ({s: float(v.sqrt().median()) for s, v in scored[name].items()} for name in (SVD, PLAIN))
    text = f"""Nets see {len(points[0])} noisy points around x = −0.5 and x = 0.75, and must say how sure they are
    elsewhere: beside the data (−1.5 to −1.1 and 1.1 to 1.5, "outside") and between them (−0.1 to
    0.4, "gap").

    The **MaxWEnt-SVD** guard is calm on the data and opens right beside them. Its standard deviation on test
    data (the median) is {svd["test"]:.2g}; outside it is **{times(svd["outside"], svd["test"])}** as large, in
    the gap **{times(svd["gap"], svd["test"])}**. The plain net's is {plain["test"]:.2g}, and
    {times(plain["outside"], plain["test"])} and {times(plain["gap"], plain["test"])} as large there. Bands that
    leave the frame go on far beyond it.

    The last panel shows the same distribution with its weights clipped, the milder of the two ways to use it.
    {clip_words(result)}"""
    return paragraphs(text) + "<h3>Confidence bands</h3>" + gallery(panels, legend=key)


def widths(x: Array, std: Array) -> str:
    """A band in words."""
    places = {"on the data": -0.5, "in the gap": 0.15, "at the left edge": -1.4, "at the right edge": 1.4}
    at = [f"{std[int(np.abs(x - place).argmin())]:.2g} {words}" for words, place in places.items()]
    return f"Standard deviation {', '.join(at)}."


def moons(result: Result) -> str:
    """Uncertainty maps of all methods."""
    x, y = (t.numpy() for t in result.task.train)
    panels: list[Panel] = []
    for name, view in result.views.items():
        values = view.map()
        svg = map_panel(values, half=SQUARE, points=[x[y == c] for c in (0, 1)], top=TOP)
        dark = 100 * float((values > TOP / 2).mean())
        alt = f"{name}: map of the predictive entropy around two moons, above half its maximum on {dark:.0f} % of the square."
        panels.append(Panel(svg, name, alt))
    key = legend([
        ("area", f"linear-gradient(90deg, {', '.join(MAP)})", "entropy, from 0 to log 2 (undecided)"),
        ("dot", CLASSES[0], "training points of one class"), ("dot", CLASSES[1], "and of the other"),
    ])  # fmt: skip
    order = (PLAIN, ENSEMBLE, SVD, SVD5)
    far, near = (listed([share(result.evaluation.scores[m][s] > TOP / 2) for m in order]) for s in (*result.task.ood, "test"))
    text = f"""Nets learn to tell two moons apart. Far from both there is nothing to go by, and a good net is undecided
    there: dark. On the moons themselves it is calm: light.

    A plain net, a deep ensemble, **MaxWEnt-SVD** and five of those are more undecided than decided (entropy above half
    its maximum) at {far} of the points far from the moons, and at {near} of the test points on them. The light
    rays that remain lie behind the tips of the moons, where a ReLU net goes on as it began; the paper sees them too.

    The last panel shows the same distribution with its weights clipped. {clip_words(result)} Every net here fits
    the validation points almost perfectly, so that the paper's risk threshold would leave no room to widen anything. It is
    therefore taken with one more point at chance, and λ is the one of 0.1, 1 and 10 that gives the highest entropy below
    it, as the paper's appendix B says. Both need in-distribution data alone."""
    return paragraphs(text) + "<h3>Uncertainty maps</h3>" + gallery(panels, legend=key)


def listed(words: Sequence[str]) -> str:
    """A list in prose.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return f"{', '.join(words[:-1])} and {words[-1]}"


def digits(result: Result) -> str:
    """The most OOD and the least OOD of the unknown digits."""
    name, images = next(iter(result.task.ood.items()))
    scores, count = result.evaluation.scores, 10
    order = scores[SVD][name].argsort(descending=True)
    panels = [
        digit_row(images[part], result.labels[part], title)
        for part, title in ((order[:count], "Unknown digits that it finds most OOD"),
                            (order[-count:], "Unknown digits that it takes for in-distribution"))
    ]  # fmt: skip
    methods = (PLAIN, SVD, SVD5)
    alarms, false = (listed([share(scores[m][s] > result.thresholds[m]) for m in methods]) for s in (name, "test"))
    area = {row["scorer"]: f"{100 * row['auroc']:.1f}" for row in result.evaluation.rows if row["set"] == name}
    text = f"""Real images of 8 × 8 pixels. Nets are trained on {len(result.task.train[0])} handwritten digits from
    0 to 4 and then meet {len(images)} images of 5 to 9, which they can only get wrong.

    The plain net's entropy, the **MaxWEnt-SVD** guard and five of those raise the alarm on {alarms} of the
    unknown digits, and on {false} of the in-distribution test digits; their AUROC is
    {listed([area[m] for m in methods])}. No claim is complete without the simplest baseline: on images so small
    and tidy the distance to the nearest training image, without any network, gets **{area[NEAREST]}**. offmap's default score,
    which joins the draws' disagreement with distances, gets **{area[JOINED]}**.
    {clip_words(result)}"""
    return paragraphs(text) + "<h3>Most and least OOD, for the SVD guard</h3>" + gallery(panels, width="26rem")


def digit_row(images: Tensor, labels: Tensor, title: str) -> Panel:
    """A row of digits, with what the guard would call each."""
    taken = [f"{int(label)}?" for label in labels]
    svg = image_panel(images.reshape(-1, 8, 8).numpy(), taken)
    return Panel(svg, title, f"{title}: {len(taken)} images, which it calls {', '.join(taken)}.", "and what it calls them")
