"""UCI tables from zips as the archive has them: made here from the tables at hand, in the archive's formats."""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offmap.errors import DataError
from offmap_bench.tasks.uci import ORIGINALS, digest, download, read, uci
from sites import Site, serving


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("OFFMAP_OFFLINE", "0")
    with serving() as server:
        yield server


def zip_table(name: str, values: np.ndarray, folder: str = "") -> bytes:
    """A zip of the archive's kind: columns in its order, its delimiter and header, another file beside."""
    original = ORIGINALS[name]
    wide = np.zeros((len(values), max(original["columns"]) + 1))
    wide[:, list(original["columns"])] = values
    delimiter = original.get("delimiter", "   ")
    lines = "\n".join(delimiter.join(map(repr, row)) for row in wide.tolist())
    text = "a header\n" * original.get("skip", 0) + lines
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("Readme.txt", "about the data")
        archive.writestr(folder + original["member"], text + "\n")
    return content.getvalue()


@pytest.mark.parametrize("name", ["yacht", "wine", "naval"])
def test_the_archives_zip_gives_the_table_of_the_records(name: str, site: Site, data_folder: Path, tmp_path: Path) -> None:
    values = read(name, data_folder / "uci")
    site.content = zip_table(name, values, "UCI CBM Dataset/")
    download(name, tmp_path / f"{name}.csv.gz", ORIGINALS[name] | {"url": site.url})
    np.testing.assert_array_equal(read(name, tmp_path), values)
    assert [file.name for file in tmp_path.iterdir()] == [f"{name}.csv.gz"]


def test_protein_has_its_target_first_in_the_archive(data_folder: Path) -> None:
    values = read("protein", data_folder / "uci")
    assert digest(values) == ORIGINALS["protein"]["order"]
    assert digest(values[np.lexsort(values.T[::-1])]) == ORIGINALS["protein"]["rows"]
    assert list(ORIGINALS["protein"]["columns"])[-1] == 0


def test_a_missing_set_is_downloaded_once_to_its_place(
    site: Site, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = read("yacht", data_folder / "uci")
    site.content = zip_table("yacht", values)
    monkeypatch.setenv("OFFMAP_DATA", str(tmp_path))
    monkeypatch.setitem(ORIGINALS, "yacht", ORIGINALS["yacht"] | {"url": site.url})
    for _ in range(2):
        assert uci("yacht", "extrapolation").inputs == 6
    assert len(site.asked) == 1
    assert (tmp_path / "uci" / "yacht.csv.gz").exists()


def test_rows_in_another_order_are_taken_and_said(
    site: Site, data_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.content = zip_table("yacht", read("yacht", data_folder / "uci")[::-1])
    with caplog.at_level(logging.WARNING, "offmap"):
        download("yacht", tmp_path / "yacht.csv.gz", ORIGINALS["yacht"] | {"url": site.url})
    assert "The rows of yacht come in another order than in offmap's records" in caplog.text


def test_other_numbers_are_refused(site: Site, data_folder: Path, tmp_path: Path) -> None:
    values = read("yacht", data_folder / "uci")
    values[7, 3] += 0.01
    site.content = zip_table("yacht", values)
    with pytest.raises(DataError, match="but it differs from the known one. Put one that you trust at .*yacht"):
        download("yacht", tmp_path / "yacht.csv.gz", ORIGINALS["yacht"] | {"url": site.url})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>Not here any more</html>", "File is not a zip file"),
        (zip_table("wine", np.ones((3, 12))), "it holds only \\['Readme.txt', 'winequality-red.csv'\\]"),
        (zip_table("yacht", np.ones((3, 7)))[:-30], "File is not a zip file"),
    ],
    ids=["a page", "another table", "cut"],  # an archive tells the time, so its bytes are no name
)
def test_another_file_than_the_zip_is_said(content: bytes, message: str, site: Site, tmp_path: Path) -> None:
    site.content = content
    with pytest.raises(DataError, match=f"Expected yacht_hydrodynamics.data in the zip at http.*cannot be read: {message}"):
        download("yacht", tmp_path / "yacht.csv.gz", ORIGINALS["yacht"] | {"url": site.url})
    assert list(tmp_path.iterdir()) == []


def test_a_zip_that_would_fill_the_memory_is_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmap_bench.tasks.uci.MAX_TEXT", 1000)
    site.content = zip_table("yacht", np.ones((1000, 7)))
    with pytest.raises(DataError, match="it would be larger than 1000 bytes"):
        download("yacht", tmp_path / "yacht.csv.gz", ORIGINALS["yacht"] | {"url": site.url})
