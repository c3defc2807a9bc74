"""One self-contained page, written whole or not at all, and figures in its colours."""

from __future__ import annotations

import sys

import pytest

from offmap.errors import ConfigError, FileError
from offmap.report import page
from offmap.report.page import COLOURS, apply_theme, draw_svg, series
from offmap.table import Table
from pages import check_page


def test_contents_lead_to_every_section():
    text = page.render("T", "lead", [page.Section("One & two", "<p>a</p>"), page.Section("Three", "")])
    assert {"one-two", "three"} <= set(check_page(text).ids)
    assert '<a href="#one-two">One &amp; two</a>' in text


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a < b, **so** *do* `x`", "<p>a &lt; b, <b>so</b> <em>do</em> <code>x</code></p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("a\n\n\n\nb", "<p>a</p>\n<p>b</p>"),
    ],
)
def test_a_little_markdown_becomes_html(text, html):
    assert page.paragraphs(text) == html


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1000, "1000"), (1e6, "1e6"), (-3e-5, "−3e−5"), (float("inf"), "∞"), (1e-10, "1e−10")],
)
def test_numbers_take_few_characters(value, text):
    assert page.format_number(value) == text


def test_the_best_of_a_column_is_bold_at_either_end():
    rows = Table(
        [{"m": "a", "up": "1.0", "down": "3.0"}, {"m": "b", "up": "2.0", "down": "–"}, {"m": "c", "up": "2.0", "down": "4"}]
    )
    text = page.table(rows, best={"up": "max", "down": "min"})
    assert text.count("class=best") == 3
    assert "<td class=best>3.0</td>" in text


def test_a_missing_folder_is_found_out_first(tmp_path):
    with pytest.raises(FileError, match=r"Cannot write .*/no/page.html: the folder .*/no does not exist. Create it"):
        page.check_path(tmp_path / "no" / "page.html")


def test_a_folder_is_not_a_page(tmp_path):
    with pytest.raises(FileError, match="Expected the path of a file to write, but .* is a folder. Add a file name."):
        page.check_path(tmp_path)


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(page.os, "access", lambda folder, mode: False)
    with pytest.raises(FileError, match="Cannot write .*: no permission to write in .*. Choose another path."):
        page.check_path(tmp_path / "page.html")


def lines(count: int) -> str:
    """The SVG of lines in the colours of series."""

    def draw(axes):
        for position in range(count):
            axes.plot([0, 1], [0, position], color=series(position)[0])
        axes.set(xlabel="x")

    return draw_svg(draw, width=3, height=2, margins=(0.3, 0.3, 0.1, 0.1))


def test_the_same_figure_is_the_same_text():
    def draw() -> str:
        return apply_theme(lines(2), "a")

    assert draw() == draw()


def test_figures_take_the_colours_of_the_page():
    svg = apply_theme(lines(8), "a")
    assert svg.startswith("<svg")
    for name in ("soft", "line", *(f"series{i}" for i in range(8))):
        assert f"var(--{name})" in svg
    assert not [light for light, _ in COLOURS.values() if light in svg]


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib is needed here and is not installed: pip install 'offmap\[figures\]'"):
        lines(1)


def test_light_colours_differ_so_that_each_can_be_found():
    lights = [light for light, _ in COLOURS.values()]
    assert len(set(lights)) == len(lights)


def test_coordinates_are_rounded_and_words_are_not():
    svg = '<svg><path d="M 1.23456 2.5"/><text x="3.98765">0.0123</text></svg>'
    assert apply_theme(svg, "a") == '<svg><path d="M 1.23 2.5"/><text x="3.98">0.0123</text></svg>'
