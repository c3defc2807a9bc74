"""Pictures of guides: each shows what the code of its page has computed. `python docs/printed.py PAGE ...` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure

from offmap.report.page import COLOURS, MAP, RC, colour
from offmap_bench.studies.study import render_svg

FOLDER = Path(__file__).parent / "figures"
NAME = re.compile(r"figures/(guide-[\w-]+)-light\.svg")
LOOK = RC | {"font.family": "sans-serif", "axes.titlesize": 8.5, "axes.titlecolor": colour("ink"), "axes.titlelocation": "left"}

Names = Mapping[str, Any]
PICTURES: dict[str, tuple[Callable[..., None], tuple[int, int], tuple[float, float]]] = {}
"""{picture: (how to draw it, rows and columns of panels, width and height in inches)}."""


def picture(name: str, panels: tuple[int, int] = (1, 2), size: tuple[float, float] = (7.6, 2.35)) -> Callable[..., Any]:
    """Register a function that draws a page's names into so many panels."""

    def register(draw: Callable[..., None]) -> Callable[..., None]:
        PICTURES[f"guide-{name}"] = draw, panels, size
        return draw

    return register


def draw(name: str, names: Names) -> dict[str, str]:
    """Draw a picture from the names that a page has defined: {"light": SVG, "dark": SVG}."""
    function, panels, size = PICTURES[name]
    return render(panels, size, lambda axes: function(axes, names))


def render(panels: tuple[int, int], size: tuple[float, float], paint: Callable[[Any], None]) -> dict[str, str]:
    """Paint rows and columns of panels: {"light": SVG, "dark": SVG}."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure.subplots(*panels, squeeze=False).flatten())
        light = render_svg(figure)
    light = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), light)
    light = re.sub(r"font: ([\d.]+px) [^\";]+", r"font: \1 system-ui, 'DejaVu Sans', Arial, sans-serif", light)
    to_dark = {pair[0]: pair[1] for pair in COLOURS.values()}
    return {"light": light, "dark": re.sub("|".join(to_dark), lambda code: to_dark[code[0]], light)}


def write(page: str, names: Names) -> None:
    """Write the pictures that a page shows."""
    for name in NAME.findall(page):
        save(name, draw(name, names))


def save(name: str, picture: Mapping[str, str]) -> None:
    for kind, svg in picture.items():
        (FOLDER / f"{name}-{kind}.svg").write_text(svg, encoding="utf-8")


def words(svg: str) -> list[str]:
    """Return the texts of a picture, in order."""
    return re.findall(r"<text[^>]*>(.*?)</text>", svg)


# ------------------------------------------------------------------------------------------------ panels


def draw_scores(axes: Axes, scores: Mapping[str, Any], threshold: float, limits: tuple[float, float], rows: str = "rows") -> None:
    """Draw histograms of scores, the in-distribution ones first, and the threshold; a label has the share that is flagged."""
    edges = np.linspace(*limits, 41)
    for position, (label, values) in enumerate(scores.items()):
        values = np.asarray(values)
        look = colour("id" if position == 0 else ("ood", "series1", "series2")[position - 1])
        share = np.histogram(values.clip(*limits), edges)[0] / len(values)
        axes.stairs(100 * share, edges, fill=position == 0, color=look, alpha=0.35 if position == 0 else 1, linewidth=1.3)
        flagged = f"{label}: {100 * (values > threshold).mean():.0f} % flagged"
        axes.text(0.98, 0.97 - 0.11 * position, flagged, color=look, fontsize=7, ha="right", va="top", transform=axes.transAxes)
    axes.axvline(threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes.annotate(
        "threshold", (threshold, 1), (3, -7), ("data", "axes fraction"), "offset points", fontsize=7, color=colour("ink")
    )
    axes.set(xlim=limits, ylim=(0, 1.3 * axes.get_ylim()[1]), xlabel="score, higher = more OOD", ylabel=f"% of {rows}")


def draw_bars(axes: Axes, values: Mapping[str, float], xlabel: str, limits: tuple[float, float], first: int = 1) -> None:
    """Draw one bar for each value, with its number; the first ones in the colour of the guard."""
    for position, value in enumerate(values.values()):
        look = colour("series4" if position < first else "series0")
        axes.barh(position, value - limits[0], left=limits[0], height=0.62, color=look)
        axes.text(value, position, f" {value:.0f}", fontsize=7, va="center", color=colour("soft"))
    axes.set(xlim=limits, yticks=range(len(values)), yticklabels=list(values), xlabel=xlabel)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def draw_pairs(axes: Axes, values: Mapping[str, Mapping[str, float]]) -> None:
    """Draw AUROCs of two OOD sets, {set: {scorer: per cent}}, in the colours that `draw_scores` gives them."""
    for offset, look, each in zip((-0.2, 0.2), ("ood", "series1"), values.values(), strict=True):
        for position, value in enumerate(each.values()):
            axes.barh(position + offset, value - 50, left=50, height=0.36, color=colour(look))
            axes.text(value, position + offset, f" {value:.0f}", fontsize=7, va="center", color=colour("soft"))
        axes.set(yticks=range(len(each)), yticklabels=list(each))
    upper, lower = values
    axes.set(title="The guard and simple baselines", xlim=(50, 104))
    axes.set_xlabel(f"AUROC, %; 50 is chance\nupper bars: {upper}, lower bars: {lower}")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


# ------------------------------------------------------------------------------------------------ guides


def draw_by_bin(axes: Axes, at: Any, values: Mapping[str, tuple[Any, Any]], edges: Sequence[float], least: int = 30) -> None:
    """Draw means over bins of `at[rows]`, a line for each of {label: (rows, values)}; bins of fewer rows are left out."""
    edges = np.asarray(edges)
    for (label, (rows, y)), look, mark in zip(values.items(), ("id", "ood"), "os", strict=False):
        bins = np.digitize(at[rows], edges)
        kept = [each for each in range(1, len(edges)) if (bins == each).sum() >= least]
        means = [np.asarray(y, dtype=float)[bins == each].mean() for each in kept]
        middles = [(edges[each - 1] + edges[each]) / 2 for each in kept]
        axes.plot(middles, means, marker=mark, markersize=3, linewidth=1.3, color=colour(look), label=label)


@picture("regression")
def draw_regression(axes: Sequence[Axes], names: Names) -> None:
    guard, x, y, dry, winter = (names[name] for name in ("guard", "x", "y", "dry", "winter"))
    celsius = 47 * names["bike"]["temp"].to_numpy() - 8
    rows = {"other seasons": names["test_rows"].numpy(), "winter": (dry & winter).nonzero()[:, 0].numpy()}
    edges = np.arange(-8, 40, 4)
    ood = {name: (part, 100 * guard(x[part]).ood.float()) for name, part in rows.items()}
    errors = {name: (part, (guard.predict(x[part]).mean - y[part]).abs()) for name, part in rows.items()}
    for panel, values, title, label in ((axes[0], ood, "The guard flags frost", "% of hours flagged"),
                                        (axes[1], errors, "Errors are largest there", "error of log(1 + rentals)")):  # fmt: skip
        draw_by_bin(panel, celsius, values, edges)
        panel.set(title=title, xlabel="temperature, °C", ylabel=label, ylim=(0, None))
    axes[0].axhline(5, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[0].text(38, 14, "5 %, as promised", fontsize=7, ha="right")
    for panel in axes:
        panel.legend(frameon=False, fontsize=7, labelcolor="linecolor")
        panel.set_xlim(-8, 38)


def auroc(names: Names, kind: str) -> dict[str, float]:
    """Return {scorer: AUROC in per cent} of one OOD set of a page's evaluation."""
    return {row["scorer"]: 100 * row["auroc"] for row in names["evaluation"].rows if row["set"] == kind}


@picture("images")
def draw_images(axes: Sequence[Axes], names: Names) -> None:
    guard, sets = names["guard"], {"CIFAR-10": names["test"][0], **names["ood"]}
    draw_scores(axes[0], {name: guard.score(x) for name, x in sets.items()}, guard.threshold, (-2, 8), "images")
    axes[0].set_title("Scores of a ResNet-20 for CIFAR-10")
    draw_pairs(axes[1], {kind: auroc(names, kind) for kind in names["ood"]})


@picture("text")
def draw_text(axes: Sequence[Axes], names: Names) -> None:
    guard, sets = names["guard"], {"in scope": names["embedded_test"][0], "out of scope": names["embedded_unknown"][0]}
    draw_scores(axes[0], {name: guard.score(x) for name, x in sets.items()}, guard.threshold, (-2, 5), "requests")
    axes[0].set_title("Requests to an assistant")
    draw_bars(axes[1], auroc(names, "out of scope"), "AUROC, %; 50 is chance", (50, 104))
    axes[1].set_title("Requests out of scope: the guard and simple baselines")


@picture("deploying")
def draw_deploying(axes: Sequence[Axes], names: Names) -> None:
    guard, other_units = names["loaded"], names["other_units"]
    sets = {"as before": (names["test"][0], "id"), "radii × 1.5": (other_units(1.5), "ood")}
    for label, (rows, look) in sets.items():
        p = guard(rows).p_value.numpy()
        share = 100 * np.histogram(p, np.linspace(0, 1, 11))[0] / len(p)
        first = look == "id"
        axes[0].stairs(
            share, np.linspace(0, 1, 11), fill=first, color=colour(look), alpha=0.35 if first else 1, label=label, linewidth=1.3
        )
    axes[0].set(title="p-values of a shift heap up at 0", xlabel="p-value", ylabel="% of tumours", xlim=(0, 1))
    axes[0].legend(frameon=False, fontsize=7)
    factors = np.geomspace(0.5, 3, 25)
    axes[1].plot(
        factors, [100 * guard(other_units(float(f))).ood.float().mean() for f in factors], color=colour("ood"), linewidth=1.3
    )
    axes[1].axhline(5, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[1].text(3, 9, "5 %, as promised", fontsize=7, ha="right")
    axes[1].set(title="A wrong unit is flagged", xlabel="radii × …", ylabel="% flagged", ylim=(0, 100), xlim=(0.5, 3))


@picture("own-methods")
def draw_own_methods(axes: Sequence[Axes], names: Names) -> None:
    guard, x, frost, test_rows = (names[name] for name in ("guard", "x", "frost", "test_rows"))
    celsius = 47 * names["bike"]["temp"].to_numpy() - 8
    for label, rows, look in (("test hours", test_rows[::8], "id"), ("frost", frost.nonzero()[::3, 0], "ood")):
        axes[0].plot(celsius[rows], guard.score(x[rows]), "o", markersize=1.4, alpha=0.6, color=colour(look), label=label)
    axes[0].axhline(guard.threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[0].text(38, guard.threshold * 1.1, "threshold", fontsize=7, ha="right")
    axes[0].set(
        title="Ten snapshots of one run hardly disagree about frost", xlabel="temperature, °C", ylabel="score", yscale="log"
    )
    axes[0].set_yticks([0.003, 0.01, 0.03], ["0.003", "0.01", "0.03"])
    axes[0].set_yticks([], minor=True)
    axes[0].legend(frameon=False, fontsize=7, markerscale=3, labelcolor="linecolor", loc="lower right")
    draw_bars(axes[1], auroc(names, "frost"), "AUROC, %; 50 is chance", (50, 104), first=0)
    axes[1].set_title("Three methods, one table: hours of frost")


@picture("classification")
def draw_classification(axes: Sequence[Axes], names: Names) -> None:
    guard, sets = names["guard"], {"0 to 4": names["test"][0], "5 to 9": names["unknown"]}
    edges = np.linspace(0.2, 1, 41)
    for (label, x), look in zip(sets.items(), ("id", "ood"), strict=True):
        confidence = names["net"](x).detach().softmax(1).amax(1).numpy()
        share = 100 * np.histogram(confidence, edges)[0] / len(x)
        axes[0].stairs(share, edges, fill=look == "id", color=colour(look), alpha=0.35 if look == "id" else 1, linewidth=1.3)
        text = f"{label}: {100 * (confidence > 0.9).mean():.0f} % above 0.9"
        axes[0].text(
            0.02, 0.97 - 0.11 * (look == "ood"), text, color=colour(look), fontsize=7, va="top", transform=axes[0].transAxes
        )
    axes[0].set(
        title="The network is sure of digits that it does not know", xlabel="confidence", ylabel="% of digits", xlim=(0.2, 1)
    )
    draw_scores(axes[1], {name: guard.score(x) for name, x in sets.items()}, guard.threshold, (-2, 6), "digits")
    axes[1].set_title("The guard is not")


@picture("sound")
def draw_sound(axes: Sequence[Axes], names: Names) -> None:
    guard, x = names["guard"], names["x"]
    sets = {"heard before": names["test"][0], **{f"unseen {each}": x[names[f"new_{each}"]] for each in ("digits", "speakers")}}
    draw_scores(axes[0], {name: guard.score(rows) for name, rows in sets.items()}, guard.threshold, (-2, 8), "recordings")
    axes[0].set_title("Spoken digits")
    draw_pairs(axes[1], {kind: auroc(names, kind) for kind in names["ood"]})


@picture("series", (1, 1), (7.6, 2.5))
def draw_series(axes: Sequence[Axes], names: Names) -> None:
    scores, guard, by_day = (names[name] for name in ("scores", "guard", "by_day"))
    flags = {"threshold from shuffled rows": (scores > guard.threshold, "ood", "solid"),
             "threshold from whole days": (scores > by_day.threshold, "series1", (0, (4, 2))),
             "adaptive threshold": (names["ood"], "series4", "solid")}  # fmt: skip
    for label, (ood, look, dashes) in flags.items():
        share = 100 * ood.float().unfold(0, 960, 240).mean(1)
        axes[0].plot(250 + 5 * np.arange(len(share)), share, color=colour(look), linestyle=dashes, linewidth=1.4, label=label)
    axes[0].axhline(5, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[0].text(575, 6.5, "5 %, as promised", fontsize=7, ha="right")
    axes[0].set(title="Electricity prices: flagged half-hours, 20 days at a time", xlabel="day", ylabel="% flagged")
    axes[0].set(xlim=(245, 577), ylim=(0, 75))
    axes[0].legend(frameon=False, fontsize=7, ncols=3, labelcolor="linecolor", loc="upper left")


@picture("segmentation", (1, 3), (7.6, 2.5))
def draw_segmentation(axes: Sequence[Axes], names: Names) -> None:
    guard, image = names["guard"], names["striped"][:1]
    result = guard(image)
    classes = ListedColormap([colour("line"), colour("series4"), colour("series5")])
    blues = LinearSegmentedColormap.from_list("map", MAP)
    panels = (("An image with stripes", image[0, 0], "gray", {}), ("Predicted classes", result.label[0], classes, {}),
              ("Score of every pixel, nats", result.score_map[0], blues, {"vmin": 0}))  # fmt: skip
    for panel, (title, values, colours, limits) in zip(axes, panels, strict=True):
        shown = panel.imshow(values.numpy(), cmap=colours, interpolation="nearest", **limits)
        panel.set(title=title, xticks=[], yticks=[])
    axes[2].figure.colorbar(shown, ax=axes[2], shrink=0.8)
    for value, word in enumerate(("background", "disc", "square")):
        look = colour(("soft", "series4", "series5")[value])
        axes[1].text((0, 0.42, 0.7)[value], -0.08, word, color=look, fontsize=7, transform=axes[1].transAxes)


@picture("large-data", (1, 4), (7.6, 2.2))
def draw_stream(axes: Sequence[Axes], names: Names) -> None:
    guard = names["guard"]
    for panel, rows in zip(axes, names["stream"], strict=True):
        panel.imshow(rows[0].view(8, 8).numpy(), cmap=LinearSegmentedColormap.from_list("map", MAP), vmin=0, vmax=1)
        flagged = 100 * (guard.score(rows) > guard.threshold).float().mean()
        panel.set(title=f"{flagged:.0f} % of 100 flagged", xticks=[], yticks=[])


@picture("ensembles")
def draw_ensembles(axes: Sequence[Axes], names: Names) -> None:
    rows = [row for row in names["evaluation"].rows if row["set"] == "test"]
    draw_bars(axes[0], auroc(names, "frost"), "AUROC of frost, %; 50 is chance", (50, 104), first=0)
    axes[0].set_title("Widened networks see frost")
    for position, row in enumerate(rows):
        axes[1].barh(position, row["rmse"], height=0.62, color=colour("series0"))
        axes[1].text(row["rmse"], position, f" {row['rmse']:.3f}", fontsize=7, va="center", color=colour("soft"))
    axes[1].set(title="Five networks predict a little better", xlabel="RMSE of log(1 + rentals) on test hours, lower is better")
    axes[1].set(yticks=range(len(rows)), yticklabels=[row["scorer"] for row in rows], xlim=(0, 0.5))
    axes[1].invert_yaxis()
    axes[1].tick_params(axis="y", length=0)


@picture("trees")
def draw_trees(axes: Sequence[Axes], names: Names) -> None:
    celsius = np.linspace(-8, 36, 89)
    noon = np.tile(names["X"][names["train"]].mean(0), (len(celsius), 1))
    noon[:, :4] = np.stack([0 * celsius, 0 * celsius - 1, 0 * celsius + 1, (celsius + 8) / 47], 1)
    stack = np.expm1(np.stack([tree.predict(noon.astype("float32")) for tree in names["forest"].estimators_]))
    axes[0].axvspan(-8, 0, color=colour("card"))
    axes[0].fill_between(celsius, *np.quantile(stack, (0.05, 0.95), axis=0), color=colour("band"), linewidth=0)
    axes[0].plot(celsius, stack.mean(0), color=colour("series4"), linewidth=1.4)
    axes[0].text(-7.5, 0.95 * axes[0].get_ylim()[1], "no data", fontsize=7, va="top", color=colour("soft"))
    axes[0].set(title="Trees are flat where they have no data", xlabel="temperature, °C", ylabel="rentals at noon, working day")
    axes[0].set(xlim=(-8, 36), ylim=(0, None))
    values = auroc(names, "frost")
    detector, X, test, frost = (names[name] for name in ("detector", "X", "test", "frost"))
    known, ood = (-detector.score_samples(X[rows]) for rows in (test, frost))
    values["OffmapDetector"] = 100 * (ood[:, None] > known[None, ::4]).mean()
    draw_bars(axes[1], values, "AUROC of frost, %; 50 is chance", (50, 104), first=0)
    axes[1].set_title("Distances see frost")


@picture("huggingface")
def draw_huggingface(axes: Sequence[Axes], names: Names) -> None:
    guard, sets = names["guard"], {"bank": names["test"], **names["ood"]}
    draw_scores(axes[0], {name: guard.score(texts) for name, texts in sets.items()}, guard.threshold, (-2, 7), "requests")
    axes[0].set_title("Requests to a bank's assistant")
    draw_pairs(axes[1], {kind: auroc(names, kind) for kind in names["ood"]})


@picture("sklearn")
def draw_sklearn(axes: Sequence[Axes], names: Names) -> None:
    guard, sets = names["classifier"].guard_, {"0 to 4": names["X_test"], "5 to 9": names["unknown"]}
    draw_scores(axes[0], {name: guard.score(rows) for name, rows in sets.items()}, guard.threshold, (-2, 8), "digits")
    axes[0].set_title("Digits that the classifier does not know")
    guard, heavy = names["regressor"].guard_, names["P"][names["heavy"]]
    for label, rows, look in (("new", names["P_test"], "id"), ("heavy", heavy, "ood")):
        axes[1].plot(rows[:, 2], guard.score(rows), "o", markersize=2.2, color=colour(look), label=label)
    axes[1].axhline(guard.threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[1].text(42, guard.threshold + 0.1, "threshold", fontsize=7, ha="right")
    axes[1].set(title="Patients heavier than those before", xlabel="body mass index, kg/m²", ylabel="score, higher = more OOD")
    axes[1].legend(frameon=False, fontsize=7, labelcolor="linecolor", loc="upper left")


@picture("lightning")
def draw_lightning(axes: Sequence[Axes], names: Names) -> None:
    guard, x, y, (new, digits) = names["callback"].guard, names["x"], names["y"], names["test"].tensors
    sets = {"0 to 4": new, "5 to 9": x[y >= 5]}
    draw_scores(axes[0], {name: guard.score(rows) for name, rows in sets.items()}, guard.threshold, (-2, 6), "digits")
    axes[0].set_title("The guard that the callback has fitted")
    parts = [new[digits == digit] if digit < 5 else x[y == digit] for digit in range(10)]
    share = [100 * float(guard(part).ood.float().mean()) for part in parts]
    axes[1].bar(range(10), share, color=[*5 * [colour("id")], *5 * [colour("ood")]], width=0.7)
    axes[1].axhline(5, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[1].set(title="It flags digits that the model has not learned", xlabel="digit", ylabel="% flagged", xticks=range(10))


@picture("distill")
def draw_distill(axes: Sequence[Axes], names: Names) -> None:
    guard, head, rows = names["guard"], names["head"], names["test"][0]
    for label, x, look in (("0 to 4", rows, "id"), ("5 to 9", names["unknown"][::3], "ood")):
        axes[0].plot(guard.score(x), head.score(x), "o", markersize=1.8, alpha=0.7, color=colour(look), label=label)
    axes[0].axvline(guard.threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[0].axhline(head.threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[0].set(title="The head predicts the guard's score", xlabel="score of the guard", ylabel="score of the head")
    axes[0].legend(frameon=False, fontsize=7, markerscale=3, labelcolor="linecolor", loc="upper left")
    factors = np.geomspace(1, 1000, 13)
    middle = rows.mean(0)
    for label, each, dashes in (("guard", guard, "solid"), ("head", head, (0, (4, 2)))):
        scores = [float(each.score(middle + float(factor) * (rows - middle)).median()) for factor in factors]
        axes[1].plot(factors, scores, color=colour("series4"), linestyle=dashes, linewidth=1.4, label=label)
    axes[1].set(title="Far from the data both grow with the logarithm", xscale="log", xlabel="distance from the mean, × …")
    axes[1].set_ylabel("median score")
    axes[1].set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes[1].legend(frameon=False, fontsize=7)


@picture("export")
def draw_export(axes: Sequence[Axes], names: Names) -> None:
    guard, session, new = names["guard"], names["session"], names["x"][450:]
    for label, x, look in (("new rows", new, "id"), ("rows + 5", new + 5, "ood")):
        (score,) = session.run(["score"], {"input": x.numpy()})
        axes[0].plot(guard.score(x), score, "o", markersize=2, alpha=0.7, color=colour(look), label=label)
    axes[0].axline((0, 0), slope=1, color=colour("soft"), linewidth=0.7)
    axes[0].axhline(guard.threshold, color=colour("ink"), linewidth=0.9, linestyle=(0, (2, 2)))
    axes[0].text(axes[0].get_xlim()[1], guard.threshold + 0.3, "threshold", fontsize=7, ha="right")
    axes[0].set(title="The file gives the guard's scores", xlabel="score of the guard", ylabel="score of the file")
    axes[0].legend(frameon=False, fontsize=7, markerscale=2, labelcolor="linecolor", loc="upper left")
    (terms,) = session.run(["terms"], {"input": (new + 5).numpy()})
    axes[1].barh(list(guard.terms(new[:2])), terms.mean(0), height=0.62, color=colour("ood"))
    axes[1].axvline(0, color=colour("ink"), linewidth=0.9)
    axes[1].set(title="Output `terms`: why rows + 5 are flagged", xlabel="mean term, standard deviations of in-distribution rows")
    axes[1].invert_yaxis()
    axes[1].tick_params(axis="y", length=0)


@picture("nonsense")
def draw_nonsense(axes: Sequence[Axes], names: Names) -> None:
    guard, net, inputs = (names[name] for name in ("guard", "net", "inputs"))
    for position, (name, x) in enumerate(list(inputs.items())[1:]):
        confidence, label = net(x).detach().softmax(1).max(1)
        row = int(confidence.argmax())
        axes[0].imshow(x[row].view(8, 8).numpy(), cmap="gray_r", extent=(1.15 * position, 1.15 * position + 1, 0, 1))
        text = f"{name}:\n“{int(label[row])}”, {100 * float(confidence[row]):.0f} % sure"
        axes[0].text(1.15 * position + 0.5, -0.06, text, fontsize=8, ha="center", va="top")
    axes[0].set(title="What the network says", xlim=(0, 3.3), ylim=(-0.35, 1.0))
    axes[0].axis("off")
    sure = [100 * float((net(x).softmax(1).amax(1) > 0.9).float().mean()) for x in inputs.values()]
    flagged = [100 * float(guard(x).ood.float().mean()) for x in inputs.values()]
    for offset, look, values in ((-0.2, "series0", sure), (0.2, "ood", flagged)):
        axes[1].barh([each + offset for each in range(len(values))], values, height=0.36, color=colour(look))
        for position, value in enumerate(values):
            axes[1].text(value, position + offset, f" {value:.0f}", fontsize=7, va="center", color=colour("soft"))
    axes[1].set(yticks=range(len(inputs)), yticklabels=list(inputs), xlim=(0, 110))
    axes[1].set(title="Grey: the network is sure. Orange: the guard flags.", xlabel="% of inputs")
    axes[1].invert_yaxis()
    axes[1].tick_params(axis="y", length=0)
