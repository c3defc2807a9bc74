"""Downloads against a server that drops connections, ignores ranges, changes its files and lies."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from offmap.errors import DataError
from offmap_bench.tasks import download, pretrained
from offmap_bench.tasks.download import fetch
from offmap_bench.tasks.uci import ORIGINALS
from sites import CONTENT, Handler, Site, serving

DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("OFFMAP_OFFLINE", "0")
    with serving() as server:
        yield server


def get(site: Site, path: Path, sha256: str | None = DIGEST, tries: int = 2) -> Path:
    return fetch(site.url, path, sha256=sha256, tries=tries, pause=0, show=False)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_file_comes_whole_and_leaves_nothing_beside_it(site: Site, tmp_path: Path) -> None:
    path = get(site, tmp_path / "deep" / "table.zip")
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["table.zip"]


def test_a_file_that_is_there_is_not_asked_for(site: Site, tmp_path: Path) -> None:
    (tmp_path / "table.zip").write_bytes(b"mine")
    assert get(site, tmp_path / "table.zip").read_bytes() == b"mine"
    assert site.asked == []


def test_a_broken_connection_goes_on_where_it_broke(site: Site, tmp_path: Path) -> None:
    site.drops = [100_000, 50_000]
    assert get(site, tmp_path / "table.zip", tries=1).read_bytes() == CONTENT
    assert site.asked == [None, "bytes=98304-", "bytes=147456-"]  # in blocks of 8 KiB


def test_another_call_goes_on_where_the_last_gave_up(site: Site, tmp_path: Path) -> None:
    site.drops, path = [100_000, 0], tmp_path / "table.zip"
    with pytest.raises(DataError, match="table.zip, but there is none and the server cannot be reached or broke off"):
        get(site, path, None, tries=1)
    assert not path.exists()
    assert (tmp_path / "table.zip.part").stat().st_size == 98_304
    assert get(site, path, None).read_bytes() == CONTENT
    assert site.asked[-1] == "bytes=98304-"
    assert names(tmp_path) == ["table.zip"]


def test_another_version_on_the_server_begins_anew(site: Site, tmp_path: Path) -> None:
    site.drops = [100_000, 0]
    with pytest.raises(DataError):
        get(site, tmp_path / "table.zip", None, tries=1)
    site.content, site.etag = CONTENT[::-1], '"two"'
    assert get(site, tmp_path / "table.zip", None).read_bytes() == CONTENT[::-1]


def test_without_a_tag_or_a_digest_nothing_is_joined(site: Site, tmp_path: Path) -> None:
    site.drops, site.etag = [100_000], ""
    assert get(site, tmp_path / "table.zip", None).read_bytes() == CONTENT
    assert site.asked == [None, None]


def test_without_a_tag_a_digest_vouches_for_what_is_joined(site: Site, tmp_path: Path) -> None:
    site.drops, site.etag = [100_000], ""
    assert get(site, tmp_path / "table.zip").read_bytes() == CONTENT
    assert site.asked == [None, "bytes=98304-"]


def test_a_server_that_ignores_ranges_sends_all_again(site: Site, tmp_path: Path) -> None:
    site.drops, site.ranges = [100_000], False
    assert get(site, tmp_path / "table.zip").read_bytes() == CONTENT
    assert site.asked == [None, "bytes=98304-"]


def test_a_server_that_always_breaks_at_one_place_is_given_up(site: Site, tmp_path: Path) -> None:
    site.drops, site.ranges = [1000] * 10, False
    with pytest.raises(DataError, match="broke off: .*. Put http://127.0.0.1:.*/table.zip there"):
        get(site, tmp_path / "table.zip", tries=3)
    assert len(site.asked) == 3


def test_a_part_that_is_too_long_begins_anew(site: Site, tmp_path: Path) -> None:
    (tmp_path / "table.zip.part").write_bytes(CONTENT + b"more")
    assert get(site, tmp_path / "table.zip").read_bytes() == CONTENT


def test_a_wrong_digest_is_said_and_the_file_removed(site: Site, tmp_path: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(DataError, match=f"SHA-256 {wrong} at http.*but got {DIGEST}. It was removed"):
        get(site, tmp_path / "table.zip", wrong)
    assert "table.zip" not in names(tmp_path)
    assert "table.zip.part" not in names(tmp_path)


def test_the_beginning_of_a_digest_is_not_enough(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"SHA-256 {DIGEST[:8]} at http.*but got {DIGEST}"):
        get(site, tmp_path / "table.zip", DIGEST[:8])


@pytest.mark.parametrize("code", [403, 404, 410])
def test_a_file_that_is_gone_says_where_it_belongs(site: Site, tmp_path: Path, code: int) -> None:
    site.codes = [code] * 5
    with pytest.raises(
        DataError, match=f"Expected a file at {tmp_path}/table.zip, but .* answered {code}.*Put http.*there"
    ) as error:
        get(site, tmp_path / "table.zip")
    assert "\n" not in str(error.value)
    assert len(site.asked) == 1


def test_a_server_that_is_busy_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.codes = [503, 429]
    assert get(site, tmp_path / "table.zip", tries=3).read_bytes() == CONTENT
    site.codes = [503] * 3
    with pytest.raises(DataError, match="answered 503"):
        get(site, tmp_path / "other.zip", tries=3)


def test_no_server_gives_one_line(site: Site, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}/table.zip"
    server.server_close()
    with pytest.raises(DataError, match="cannot be reached or broke off: .*refused.* Put http") as error:
        fetch(url, tmp_path / "table.zip", tries=1, pause=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/table.zip", "file:///etc/hostname", "data:,x", "gopher://127.0.0.1/"])
def test_a_server_that_sends_on_to_another_protocol_is_not_followed(site: Site, tmp_path: Path, target: str) -> None:
    site.moved = [target]
    with pytest.raises(DataError, match="the server sends on to an address that is refused"):
        get(site, tmp_path / "table.zip", None)
    assert not (tmp_path / "table.zip").exists()


def test_a_server_may_send_on_to_another_address(site: Site, tmp_path: Path) -> None:
    site.moved = [f"{site.url}?again"]
    assert get(site, tmp_path / "table.zip").read_bytes() == CONTENT
    assert len(site.asked) == 2


def test_a_secure_address_never_becomes_an_open_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_OFFLINE", "0")
    response = requests.Response()
    response.url, response.status_code, response.raw = "http://a.example/table.zip", 200, io.BytesIO()
    monkeypatch.setattr(requests, "get", lambda *args, **options: response)
    with pytest.raises(DataError, match="sends on to an address that is refused: http://a.example/table.zip is not secure"):
        fetch("https://a.example/table.zip", tmp_path / "table.zip", tries=1, pause=0)


def test_a_file_without_end_is_cut_off_and_removed(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offmap_bench.tasks.download.LARGEST", 100_000)
    with pytest.raises(DataError, match="Expected a file of at most 100000 bytes at .*, but it is longer. It was removed"):
        get(site, tmp_path / "table.zip", None)
    assert "table.zip" not in names(tmp_path)
    assert "table.zip.part" not in names(tmp_path)


def test_every_download_is_verified() -> None:
    assert re.fullmatch("[0-9a-f]{64}", pretrained.RESNET50_SHA256)
    assert pretrained.RESNET50.endswith(f"-{pretrained.RESNET50_SHA256[:8]}.pth")
    for original in ORIGINALS.values():  # by the numbers of the table: archives are packed anew now and then
        assert re.fullmatch("[0-9a-f]{64}", original["rows"])
    users = [p for p in Path(download.__file__).parents[1].rglob("*.py") if " fetch(" in p.read_text(encoding="utf-8")]
    assert sorted(path.name for path in users) == ["download.py", "pretrained.py", "uci.py"]


def test_offline_asks_nobody(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFMAP_OFFLINE", "1")
    with pytest.raises(DataError, match="OFFMAP_OFFLINE forbids to download it. Put http"):
        get(site, tmp_path / "table.zip")
    assert site.asked == []


def test_a_folder_that_cannot_be_made_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="file/table.zip, but there is none and it cannot be written"):
        get(site, tmp_path / "file" / "table.zip")


def test_two_at_once_ask_once(site: Site, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: get(site, tmp_path / "table.zip"), range(4)))
    assert all(path.read_bytes() == CONTENT for path in paths)
    assert site.asked == [None]
