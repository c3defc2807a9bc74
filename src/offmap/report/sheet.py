"""Several panels as one SVG file that stands alone, for pages that cannot hold inline drawings."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from offmap.io.atomic import write_whole
from offmap.report import style
from offmap.report.figures import Panel

GAP, CAPTION = 14.0, 30.0
"""Points between panels, and above each for its title."""


def sheet(panels: Sequence[Panel], columns: int) -> str:
    """Panels in rows, as far apart as the largest needs, each with its title, in the light colours on paper."""
    sizes = [re.findall(r'(?:width|height)="([\d.]+)pt"', panel.svg)[:2] for panel in panels]
    width, height = (max(float(size[axis]) for size in sizes) for axis in (0, 1))
    rows = -(-len(panels) // columns)
    total = columns * (width + GAP) + GAP, rows * (height + CAPTION + GAP) + GAP
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'width="{total[0]:.0f}pt" height="{total[1]:.0f}pt" viewBox="0 0 {total[0]:.0f} {total[1]:.0f}" '
        f'font-family="system-ui, sans-serif">',
        f'<rect width="100%" height="100%" fill="{style.colour("paper")}"/>',
    ]
    for place, panel in enumerate(panels):
        x, y = GAP + place % columns * (width + GAP), GAP + place // columns * (height + CAPTION + GAP)
        words = f'<tspan font-weight="bold" fill="{style.colour("ink")}">{html.escape(panel.title)}</tspan>'
        subtitle = f'<tspan x="{x:.0f}" dy="11" fill="{style.colour("soft")}">{html.escape(panel.subtitle)}</tspan>'
        parts.append(f'<text x="{x:.0f}" y="{y + 8:.0f}" font-size="9">{words}{subtitle}</text>')
        parts.append(_plain(panel).replace("<svg", f'<svg x="{x:.0f}" y="{y + CAPTION - 6:.0f}"', 1))
    return _shortened("\n".join([*parts, "</svg>"])) + "\n"


def _shortened(svg: str) -> str:
    """The looks of repeated marks said once, as classes."""
    looks = list(dict.fromkeys(re.findall(r'<use [^>]*style="([^"]*)"', svg)))
    for place, look in enumerate(looks):
        svg = re.sub(rf'(<use [^>]*)style="{re.escape(look)}"', rf'\1class="m{place}"', svg)
    rules = "".join(f".m{place} {{ {look} }}" for place, look in enumerate(looks))
    return svg.replace("<rect ", f"<style>{rules}</style>\n<rect ", 1)


def _plain(panel: Panel) -> str:
    """A panel with ids of its own and plain colours."""
    svg = style.themed(panel.svg, panel.title + panel.subtitle + panel.alt)
    svg = svg.replace("var(--font)", "system-ui, sans-serif")
    svg = re.sub(r"var\(--(\w+)\)", lambda found: style.colour(found[1]), svg)
    svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg, count=2)  # in the sheet's own units
    return "\n".join(line.rstrip() for line in svg.splitlines())


def write(path: Path, panels: Sequence[Panel], columns: int) -> Path:
    """Write a sheet, and return its path."""
    write_whole(path, sheet(panels, columns).encode())
    return path
