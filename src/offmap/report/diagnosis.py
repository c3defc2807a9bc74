"""A diagnosis as figures: φ over amplitude per layer (the paper's figure 6), and the fit step by step (figures 5 and 9–11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offmap.diagnosis import Diagnosis, Layer
from offmap.maxwent.monitors import History
from offmap.report import style
from offmap.report.figures import Array, Panel, drawn
from offmap.report.page import Section, check_path, gallery, legend, paragraphs, render, table, write
from offmap.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PANELS, MOST_POINTS = 36, 1500
"""Layers that are drawn, spread evenly over the net, and points of one layer; the table has them all."""

LEAD = """What the fit did, and whether it did what the theory says: the noise on a weight is wide where the training data
hardly use it, and narrow where they do."""

AMPLITUDES = """Every dot is one direction of a layer's inputs: to the right those that the training data use much, upwards those
that were given much noise (the mean φ over the layer's outputs). The dashed line is φ proportional to 1/amplitude, the
paper's optimum for deep nets; ρ is the rank correlation, −1 for strictly inverse. Dots at the left end are directions that
the data do not use at all."""

TRACES = """Validation risk with its threshold τ, the weights' entropy (1/d) Σ log φ², and the mean uncertainty of
validation inputs, which are in-distribution, at every check. Each member keeps its last state at or below τ, at the dotted
line. Risks far above τ are cut off."""


def amplitude_panel(layer: Layer) -> str:
    """Mean φ over amplitude, both on log axes, with the line of slope −1 through the middle of what is used."""
    x, y = (t.double().flatten().cpu().numpy() for t in (layer.floored, layer.scale))
    seen = (x > 0) & (y > 0)
    x, y = x[seen], y[seen]
    few = np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).astype(int) if len(x) else np.arange(0)

    def draw(axes: Axes) -> None:
        axes.set(xscale="log", yscale="log", xlabel="amplitude", ylabel="mean φ")
        if not len(x):
            return
        ends = np.array([x.min(), x.max()])
        used = x > 1.01 * x.min()  # what lies on the floor has no amplitude to speak of
        middle = math.exp(np.log((x * y)[used if used.any() else slice(None)]).mean())
        axes.plot(ends, middle / ends, color=style.colour("soft"), linewidth=0.9, linestyle=(0, (4, 2)))
        axes.plot(x[few], y[few], "o", markersize=2.8, color=style.colour("in-distribution"), markeredgewidth=0, alpha=0.6)
        axes.minorticks_off()
        axes.set(xlim=(x.min() / 1.4, x.max() * 1.4), ylim=(y.min() / 1.6, y.max() * 1.6))
        if x.max() < 20 * x.min():  # powers of ten would hardly mark anything
            axes.set_xticks(ends, [f"{end:.2g}" for end in ends])
        if y.max() < 20 * y.min():
            axes.set_yticks([y.min(), y.max()], [f"{end:.2g}" for end in (y.min(), y.max())])

    return drawn(draw, width=2.7, height=2.2, margins=(0.6, 0.38, 0.1, 0.08))


def trace_panel(history: History, values: list[list[float]], label: str, *, bound: list[float] | None = None) -> str:
    """One quantity over the steps, a line per member; its bound dashed, and the kept step dotted, in the member's colour."""
    steps, lines = np.array(history.step), np.array(values, dtype=np.float64)  # (checks,), (checks, M)

    def draw(axes: Axes) -> None:
        for member in range(lines.shape[1]):
            shade, _ = style.series(member + 4)
            axes.plot(steps, lines[:, member], color=shade, linewidth=1.3, marker="o" if len(steps) < 3 else "", markersize=3)
            axes.axvline(history.kept[member], color=shade, linewidth=0.9, linestyle=(0, (1, 2)))
            if bound is not None:
                axes.axhline(bound[member], color=shade, linewidth=0.9, linestyle=(0, (4, 2)))
        axes.set(xlabel="step", ylabel=label)
        limits = risk_limits(lines, bound) if bound is not None else None
        if limits is not None:
            axes.set_ylim(*limits)

    return drawn(draw, width=3.2, height=2.1, margins=(0.62, 0.38, 0.1, 0.08))


def risk_limits(lines: Array, bound: list[float]) -> tuple[float, float] | None:
    """Ends of the risk's axis: all that lies below τ, and twice as far above; None where that is nothing.

    >>> risk_limits(np.array([[1.0], [2.0], [90.0]]), [3.0])
    (0.9, 7.0)
    """
    finite = lines[np.isfinite(lines)]
    if not len(finite):
        return None
    low, high = min(float(finite.min()), min(bound)), max(bound)
    room = high - low
    top = min(float(finite.max()), high + 2 * room)
    return (low - 0.05 * room, max(top, high) + (0.0 if top < finite.max() else 0.05 * room)) if room > 0 else None


def write_diagnosis(diagnosis: Diagnosis, path: str | Path, *, title: str = "What the fit did") -> Path:
    """One self-contained page: amplitudes, the fit step by step, and the table."""
    target = check_path(Path(path))
    sections = [
        Section("Amplitude and φ", paragraphs(AMPLITUDES) + gallery(amplitude_panels(diagnosis), width="13rem")),
        Section("The fit, step by step", paragraphs(TRACES) + gallery(trace_panels(diagnosis.history), legend=_key(diagnosis))),
        Section("Numbers", table(_texts(diagnosis.table())) + paragraphs("\n\n".join(diagnosis.table().notes), "note")),
    ]
    return write(render(title, LEAD, sections), target)


def shown(layers: Sequence[Layer]) -> list[Layer]:
    """The layers that are drawn: all, or some spread over the net where there are many."""
    places = np.linspace(0, len(layers) - 1, min(len(layers), MOST_PANELS)).round().astype(int)
    return [layers[place] for place in places]


def amplitude_panels(diagnosis: Diagnosis) -> list[Panel]:
    """A panel per layer."""
    return [_amplitude(layer) for layer in shown(diagnosis.layers)]


def _amplitude(layer: Layer) -> Panel:
    rho, slope = f"ρ {_signed(layer.correlation)}", f"slope {_signed(layer.slope)}"
    alt = f"Mean φ over input amplitude of {layer.name}, {layer.amplitude.shape[-1]} directions: {rho}, {slope}."
    return Panel(amplitude_panel(layer), layer.name, alt, f"{rho}, {slope}")


def trace_panels(history: History) -> list[Panel]:
    """Risk with τ, entropy, and uncertainty on in-distribution data over the steps."""
    if not history.step:
        return []
    kept = f"kept at step {', '.join(map(str, history.kept))}"
    panels = [
        Panel(
            trace_panel(history, history.risk, "validation risk", bound=history.max_risk), "Risk and τ",
            f"Validation risk over steps; it ends at {history.risk[-1]}, τ is {history.max_risk}; {kept}.",
        ),
        Panel(
            trace_panel(history, history.entropy, "(1/d) Σ log φ²"), "Entropy",
            f"Entropy over steps, from {history.entropy[0]} to {history.entropy[-1]}; {kept}.",
        ),
    ]  # fmt: skip
    if history.uncertainty:
        words = f"Mean uncertainty of validation inputs, from {history.uncertainty[0]} to {history.uncertainty[-1]}; {kept}."
        svg = trace_panel(history, history.uncertainty, "mean uncertainty")
        panels.append(Panel(svg, "Uncertainty on in-distribution data", words))
    return panels


def _key(diagnosis: Diagnosis) -> str:
    members = len(diagnosis.history.kept)
    lines = [("line", f"var(--series{(m + 4) % style.SERIES})", f"member {m}") for m in range(members)]
    return legend([*lines, ("line 5 3", "var(--ink)", "τ"), ("line 1 3", "var(--ink)", "the step that was kept")])


def _texts(rows: Table) -> Table:
    return Table([{k: f"{v:.3g}" if isinstance(v, float) else str(v) for k, v in row.items()} for row in rows.rows])


def _signed(value: float) -> str:
    """Two decimals with a true minus.

    >>> _signed(-0.987), _signed(float("nan"))
    ('−0.99', '–')
    """
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")
