"""One self-contained page, written whole or not at all."""

from __future__ import annotations

import pytest
import torch

from offmap.errors import FileError
from offmap.evaluation import evaluate
from offmap.report import page
from offmap.table import Table
from pages import check_page


class Norm:
    """How far from the origin."""

    def score(self, x):
        return x.norm(dim=1)


@pytest.fixture(scope="module")
def evaluation():
    noise = torch.Generator().manual_seed(0)
    test = (torch.randn(40, 2, generator=noise), torch.zeros(40, dtype=torch.int64))
    ood = {"far <away>": 4 + torch.randn(30, 2, generator=noise), "near": torch.randn(30, 2, generator=noise)}
    return evaluate({"norm": Norm(), "again": Norm()}, test, ood)


def test_a_page_of_an_evaluation_is_self_contained_and_described(evaluation, tmp_path):
    path = page.write_page(evaluation, tmp_path / "page.html", title="A & B")
    text = path.read_text(encoding="utf-8")
    found = check_page(text)
    assert len(found.labels) == 4  # two histograms, two ROC panels
    assert "<title>A &amp; B</title>" in text
    assert "far &lt;away&gt;" in text
    assert "<away>" not in text
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


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
