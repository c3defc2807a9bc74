"""A diagnosis as figures: φ over amplitude per layer (the paper's figure 6), and the fit step by step (figures 5 and 9–11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offmap.diagnosis import Diagnosis, LayerDiagnosis
from offmap.posterior.predictive import History
from offmap.report.figures import SERIES, Array, Panel, colour, draw_svg, series
from offmap.report.page import Section, check_path, gallery, legend, paragraphs, render, table, write
from offmap.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PANELS, MOST_POINTS = 36, 1500
"""Layers that are drawn, spread evenly over the model, and points of one layer; the table has them all."""

LEAD = """What the fit did, and whether it did what the theory says: the noise on a weight is wide where the training data
hardly use it, and narrow where they do."""

AMPLITUDES = """Every dot is one direction of a layer's inputs: to the right those that the training data use much, upwards
those that get much noise (the mean φ over the layer's outputs). The dashed line is φ proportional to 1/amplitude, the paper's
optimum for deep nets; ρ is the rank correlation, −1 for strictly inverse. Dots at the left end are directions that the data do
not use."""

TRACES = """Validation risk with its bound τ, the weights' entropy (1/d) Σ log φ², and the mean uncertainty of validation
inputs, at every check. Each member keeps its last state at or below τ, at the dotted line. Risks far above τ are cut off."""


def write_diagnosis(diagnosis: Diagnosis, path: str | Path, *, title: str = "What the fit did") -> Path:
    """Write one self-contained page with the amplitudes, the fit step by step, and the table; return its full path.

    Args:
        diagnosis: What `offmap.diagnose` returned.
        path: The file to write.
        title: The title of the page.
    """
    target = check_path(Path(path))
    numbers = diagnosis.table()
    texts = [{k: f"{v:.3g}" if isinstance(v, float) else str(v) for k, v in row.items()} for row in numbers.rows]
    members = [("line", f"var(--series{(m + 4) % SERIES})", f"member {m}") for m in range(len(diagnosis.history.kept))]
    key = legend([*members, ("line 5 3", "var(--ink)", "τ"), ("line 1 3", "var(--ink)", "the step that was kept")])
    sections = [
        Section("Amplitude and φ", paragraphs(AMPLITUDES) + gallery(amplitude_panels(diagnosis), width="13rem")),
        Section("The fit, step by step", paragraphs(TRACES) + gallery(trace_panels(diagnosis.history), legend=key)),
        Section("Numbers", table(Table(texts)) + paragraphs("\n\n".join(numbers.notes), "note")),
    ]
    return write(render(title, LEAD, sections), target)


def amplitude_panels(diagnosis: Diagnosis) -> list[Panel]:
    """Draw a panel per layer."""
    panels: list[Panel] = []
    for layer in select_layers(diagnosis.layers):
        rho, slope = f"ρ {_signed(layer.correlation)}", f"slope {_signed(layer.slope)}"
        alt = f"Mean φ over input amplitude of {layer.name}, {layer.amplitude.shape[-1]} directions: {rho}, {slope}."
        panels.append(Panel(_draw_amplitudes(layer), layer.name, alt, f"{rho}, {slope}"))
    return panels


def select_layers(layers: Sequence[LayerDiagnosis]) -> list[LayerDiagnosis]:
    """Return all layers, or some spread over the model where there are many."""
    positions = np.linspace(0, len(layers) - 1, min(len(layers), MOST_PANELS)).round().astype(int)
    return [layers[position] for position in positions]


def _draw_amplitudes(layer: LayerDiagnosis) -> str:
    """Draw mean φ over amplitude on log axes, with the line of slope −1 through the centre of the directions in use."""
    x, y = (t.double().flatten().cpu().numpy() for t in (layer.clamped_amplitude, layer.scale))
    positive = (x > 0) & (y > 0)
    x, y = x[positive], y[positive]
    few = np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).astype(int) if len(x) else np.arange(0)

    def draw(axes: Axes) -> None:
        axes.set(xscale="log", yscale="log", xlabel="amplitude", ylabel="mean φ")
        if not len(x):
            return
        ends = np.array([x.min(), x.max()])
        used = x > 1.01 * x.min()  # directions at the least amplitude have none to speak of
        centre = math.exp(np.log((x * y)[used if used.any() else slice(None)]).mean())
        axes.plot(ends, centre / ends, color=colour("soft"), linewidth=0.9, linestyle=(0, (4, 2)))
        axes.plot(x[few], y[few], "o", markersize=2.8, color=colour("id"), markeredgewidth=0, alpha=0.6)
        axes.minorticks_off()
        axes.set(xlim=(x.min() / 1.4, x.max() * 1.4), ylim=(y.min() / 1.6, y.max() * 1.6))
        for values, set_ticks in ((x, axes.set_xticks), (y, axes.set_yticks)):
            low, high = values.min(), values.max()
            if high < 20 * low:  # powers of ten would hardly mark anything
                set_ticks([low, high], [f"{low:.2g}", f"{high:.2g}"])

    return draw_svg(draw, width=2.7, height=2.2, margins=(0.6, 0.38, 0.1, 0.08))


def trace_panels(history: History) -> list[Panel]:
    """Draw risk with τ, entropy, and uncertainty on validation data over the steps."""
    if not history.step:
        return []
    kept = f"kept at step {', '.join(map(str, history.kept))}"
    risk_alt = f"Validation risk over steps; it ends at {history.risk[-1]}, τ is {history.max_risk}; {kept}."
    entropy_alt = f"Entropy over steps, from {history.entropy[0]} to {history.entropy[-1]}; {kept}."
    panels = [
        Panel(_draw_trace(history, history.risk, "validation risk", bound=history.max_risk), "Risk and τ", risk_alt),
        Panel(_draw_trace(history, history.entropy, "(1/d) Σ log φ²"), "Entropy", entropy_alt),
    ]
    if history.uncertainty:
        alt = f"Mean uncertainty of validation inputs, from {history.uncertainty[0]} to {history.uncertainty[-1]}; {kept}."
        panels.append(Panel(_draw_trace(history, history.uncertainty, "mean uncertainty"), "Uncertainty on ID data", alt))
    return panels


def _draw_trace(history: History, values: list[list[float]], label: str, *, bound: list[float] | None = None) -> str:
    """Draw one quantity over the steps, a line per member; its bound dashed, and the kept step dotted, in the member's colour."""
    steps, lines = np.array(history.step), np.array(values, dtype=np.float64)  # (checks,), (checks, M)

    def draw(axes: Axes) -> None:
        for member in range(lines.shape[1]):
            shade, _ = series(member + 4)
            axes.plot(steps, lines[:, member], color=shade, linewidth=1.3, marker="o" if len(steps) < 3 else "", markersize=3)
            axes.axvline(history.kept[member], color=shade, linewidth=0.9, linestyle=(0, (1, 2)))
            if bound is not None:
                axes.axhline(bound[member], color=shade, linewidth=0.9, linestyle=(0, (4, 2)))
        axes.set(xlabel="step", ylabel=label)
        limits = risk_limits(lines, bound) if bound is not None else None
        if limits is not None:
            axes.set_ylim(*limits)

    return draw_svg(draw, width=3.2, height=2.1, margins=(0.62, 0.38, 0.1, 0.08))


def risk_limits(lines: Array, bound: list[float]) -> tuple[float, float] | None:
    """Return the ends of the risk's axis: all that lies below τ, and twice as far above; None where that is nothing.

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


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")
