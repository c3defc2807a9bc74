"""One self-contained page, written whole or not at all."""

from __future__ import annotations

import pytest

from offmap.errors import FileError
from offmap.report import page
from offmap.table import Table
from pages import check_page


def test_contents_lead_to_every_section():
    text = page.render("T", "lead", [page.Section("One & two", "<p>a</p>"), page.Section("Three", "")])
    assert {"one-two", "three"} <= set(check_page(text).ids)
    assert '<a href="#one-two">One &amp; two</a>' in text


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
