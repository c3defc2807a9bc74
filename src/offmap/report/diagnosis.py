"""A diagnosis as figures: φ over amplitude per layer (the paper's figure 6), and the fit step by step (figures 5 and 9–11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offmap import checks
from offmap.diagnosis import Diagnosis, LayerDiagnosis
from offmap.posterior.predictive import History
from offmap.report import page
from offmap.report.page import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PANELS, MOST_POINTS = 36, 1500
"""Layers that are drawn, spread evenly over the model, and points of one layer; the table has them all."""


def write_diagnosis(diagnosis: Diagnosis, path: str | Path, *, title: str = "What the fit did") -> Path:
    """Write one self-contained page with the amplitudes, the fit step by step, and the table; return its full path.

    Args:
        diagnosis: What `offmap.diagnose` returned.
        path: The file to write.
        title: The title of the page.
    """
    target, words, numbers = page.check_path(checks.path("path", path)), page.texts()["diagnosis"], diagnosis.table()
    members = [("line", f"var(--series{(m + 4) % page.SERIES})", f"member {m}") for m in range(len(diagnosis.history.kept))]
    key = page.legend([*members, ("line 5 3", "var(--ink)", "τ"), ("line 1 3", "var(--ink)", "the step that was kept")])
    bodies = {
        "Amplitude and φ": page.paragraphs(words["amplitudes"]) + page.gallery(amplitude_panels(diagnosis), width="13rem"),
        "The fit, step by step": page.paragraphs(words["traces"]) + page.gallery(trace_panels(diagnosis.history), legend=key),
        "Numbers": page.table(numbers) + page.paragraphs("\n\n".join(numbers.notes), "note"),
    }
    return page.write(page.render(title, words["lead"], [page.Section(*item) for item in bodies.items()]), target)


def amplitude_panels(diagnosis: Diagnosis) -> list[page.Panel]:
    """Draw a panel per layer."""
    panels: list[page.Panel] = []
    for layer in select_layers(diagnosis.layers):
        values = {"ρ": layer.correlation, "slope": layer.slope}
        numbers = ", ".join(f"{k} {f'{v:.2f}'.replace('-', '−').replace('nan', '–')}" for k, v in values.items())
        alt = f"Mean φ over input amplitude of {layer.name}, {layer.amplitude.shape[-1]} directions: {numbers}."
        panels.append(page.Panel(_draw_amplitudes(layer), layer.name, alt, numbers))
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

    def draw(axes: Axes) -> None:
        axes.set(xscale="log", yscale="log", xlabel="amplitude", ylabel="mean φ")
        if not len(x):
            return
        few = np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).astype(int)
        ends = np.array([x.min(), x.max()])
        used = x > 1.01 * x.min()  # directions at the least amplitude have none to speak of
        centre = math.exp(np.log((x * y)[used if used.any() else slice(None)]).mean())
        axes.plot(ends, centre / ends, color=page.colour("soft"), linewidth=0.9, linestyle=(0, (4, 2)))
        axes.plot(x[few], y[few], "o", markersize=2.8, color=page.colour("id"), markeredgewidth=0, alpha=0.6)
        axes.minorticks_off()
        axes.set(xlim=(x.min() / 1.4, x.max() * 1.4), ylim=(y.min() / 1.6, y.max() * 1.6))
        for values, set_ticks in ((x, axes.set_xticks), (y, axes.set_yticks)):
            low, high = values.min(), values.max()
            if high < 20 * low:  # powers of ten would hardly mark anything
                set_ticks([low, high], [f"{low:.2g}", f"{high:.2g}"])

    return page.draw_svg(draw, width=2.7, height=2.2, margins=(0.6, 0.38, 0.1, 0.08))


def trace_panels(history: History) -> list[page.Panel]:
    """Draw risk with τ, entropy, and uncertainty on validation data over the steps."""
    traces = [
        ("Risk and τ", "validation risk", history.risk),
        ("Entropy", "(1/d) Σ log φ²", history.entropy),
        ("Uncertainty on ID data", "mean uncertainty", history.uncertainty),
    ]
    panels: list[page.Panel] = []
    for title, label, values in traces:
        if history.step and values:
            bound = history.max_risk if values is history.risk else None
            limit = f"; τ is {bound}" if bound is not None else ""
            kept_at = ", ".join(map(str, history.kept))
            alt = f"The {label} over the steps, from {values[0]} to {values[-1]}{limit}; kept at step {kept_at}."
            steps, several = np.array(history.step), np.array(values, dtype=np.float64)  # (checks,), (checks, M)
            lines = [(steps, line, kept) for line, kept in zip(several.T, history.kept, strict=True)]
            limits = None if bound is None else risk_limits(several, bound)
            panels.append(page.Panel(draw_trace(lines, label, bound or (), limits, first=4), title, alt))
    return panels


def draw_trace(
    lines: Sequence[tuple[Array, Array, float]], label: str, bounds: Sequence[float] = (),
    limits: tuple[float, float] | None = None, first: int = 0,
) -> str:  # fmt: skip
    """Draw one quantity over the steps of several fits where it is finite; the kept step is dotted, bounds are dashed.

    Args:
        lines: (steps, values, the step that was kept) of each fit.
        label: What the values are.
        bounds: One for all fits, or for each.
        limits: The ends of the axis of values.
        first: The number of the first colour.
    """

    def draw(axes: Axes) -> None:
        for place, (steps, values, kept) in enumerate(lines):
            (shade, dashes), finite = page.series(place + first), np.isfinite(values)
            axes.plot(steps[finite], values[finite], color=shade, dashes=dashes or (None, None), linewidth=1.3,
                      marker="o" if len(steps) < 3 else "", markersize=3)  # fmt: skip
            axes.axvline(kept, color=shade, linewidth=0.9, linestyle=(0, (1, 2)))
        for place, bound in enumerate(bounds):
            shade = page.series(place + first)[0] if len(bounds) > 1 else page.colour("ink")
            axes.axhline(bound, color=shade, linewidth=0.9, linestyle=(0, (4, 2)))
        axes.set(xlabel="step", ylabel=label)
        if limits is not None:
            axes.set_ylim(*limits)

    return page.draw_svg(draw, width=3.2, height=2.1, margins=(0.62, 0.38, 0.1, 0.08))


def risk_limits(lines: Array, bound: list[float]) -> tuple[float, float] | None:
    """Return the ends of the risk's axis: all that lies below τ, and twice as far above; None where that is nothing."""
    finite = lines[np.isfinite(lines)]
    if not len(finite):
        return None
    low, high = min(float(finite.min()), min(bound)), max(bound)
    room = high - low
    top = min(float(finite.max()), high + 2 * room)
    return (low - 0.05 * room, max(top, high) + (0.0 if top < finite.max() else 0.05 * room)) if room > 0 else None
