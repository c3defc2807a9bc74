"""Files of data sets: where they are, and downloads by pooch that go on where a connection broke and are checked."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pooch
import requests
from filelock import FileLock

from offmap.errors import DataError
from offmap.progress import bar
from offmap_bench.cache import cache_folder

LARGEST = 1 << 30
"""Bytes of a file that is downloaded; the largest that offmap knows has a tenth of it."""


def data_folder() -> Path:
    """OFFMAP_DATA, or `data` below the cache: data sets are looked for here, and downloaded to here."""
    root = os.environ.get("OFFMAP_DATA")
    return Path(root) if root else cache_folder() / "data"


def offline() -> bool:
    """Whether OFFMAP_OFFLINE forbids downloads."""
    return os.environ.get("OFFMAP_OFFLINE", "0") not in ("", "0")


def fetch(url: str, path: str | Path, **options: Any) -> Path:
    """Return the file at `path`, downloaded unless it is there; options are fields of `Downloader`.

    Raises:
        DataError: Offline, not found, or not what was expected; the message says where to put the file by hand.
    """
    path = Path(path)
    if path.exists():
        return path
    downloader = Downloader(url, path, **options)
    if offline():
        raise downloader.build_error("OFFMAP_OFFLINE forbids to download it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):  # another process may be faster: pooch looks again
            pooch.get_logger().setLevel("WARNING")
            pooch.retrieve(url, None, path.name, path.parent, downloader=downloader)  # pyright: ignore[reportArgumentType]
        Path(f"{path}.lock").unlink(missing_ok=True)
    except OSError as error:
        raise downloader.build_error(f"it cannot be written: {error}") from error
    return path


@dataclass(frozen=True)
class Downloader:
    """A downloader for pooch that asks for the rest of a file, and begins again if the server has another version by now.

    Bytes gather in `<path>.part`, which outlives a broken connection or a killed process. `tries` attempts in a row may bring
    nothing, with `pause` seconds between them. The file takes its name when it is complete and its digest is `sha256`; None: the
    caller verifies what the file holds.
    """

    url: str
    path: Path
    sha256: str | None = None
    show: bool | None = None
    tries: int = 4
    pause: float = 1.0
    timeout: float = 30.0

    @property
    def part(self) -> Path:
        """The bytes that are there; their version stands in a file beside it."""
        return self.path.with_name(f"{self.path.name}.part")

    def build_error(self, reason: str) -> DataError:
        """The error that says which file belongs where."""
        return DataError(f"Expected a file at {self.path}, but there is none and {reason}. Put {self.url} there.")

    def __call__(self, url: str, output: Any, caller: Any) -> None:
        """Download until the part is complete, verify it, and move it to `output`."""
        idle, reason = 0, ""
        while idle < self.tries:
            before = self.size()
            try:
                self.attempt()
                break
            except requests.HTTPError as error:
                code = 0 if error.response is None else error.response.status_code
                reason = f"the server answered {code} ({error})"
                if code not in (408, 416, 425, 429, 500, 502, 503, 504):  # another attempt may improve these
                    raise self.build_error(reason) from None
                if code == 416:  # nothing lies beyond what is there
                    self.discard()
            except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL) as error:
                raise self.build_error(f"the server sends on to an address that is refused: {error}") from error
            except requests.RequestException as error:
                reason = f"the server cannot be reached or broke off: {error}"
            idle = 0 if self.size() > before else idle + 1
            time.sleep(self.pause)
        else:
            raise self.build_error(reason)
        with self.part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if self.sha256 is not None and digest != self.sha256:
            self.discard()
            raise DataError(
                f"Expected a file with SHA-256 {self.sha256} at {self.url}, but got {digest}. It was removed; try again."
            )
        os.replace(self.part, output)
        self.discard()

    def attempt(self) -> None:
        """Send one request, for the rest if there is a part."""
        version_file = self.part.with_name(f"{self.part.name}.tag")
        have, version = self.size(), version_file.read_text("latin-1") if version_file.exists() else ""
        headers = {"User-Agent": "offmap", "Accept-Encoding": "identity"}
        if have and (version or self.sha256):
            headers |= {"Range": f"bytes={have}-"} | ({"If-Range": version} if version else {})
        with requests.get(self.url, headers=headers, stream=True, timeout=self.timeout) as response:
            if self.url.startswith("https://") and not response.url.startswith("https://"):
                raise requests.exceptions.InvalidSchema(f"{response.url} is not secure")
            response.raise_for_status()
            if response.status_code != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                have = 0
                self.discard()
                etag = response.headers.get("ETag", "")
                version_file.write_text(etag if etag.startswith('"') else response.headers.get("Last-Modified", ""), "latin-1")
            total = have + int(response.headers["Content-Length"]) if "Content-Length" in response.headers else None
            with bar(self.path.name, total, show=self.show, size=True) as advance, self.part.open("ab") as file:
                for block in response.iter_content(1 << 13):
                    file.write(block)
                    have += len(block)
                    advance(have)
                    if have > LARGEST:
                        break
        if have > LARGEST:
            self.discard()
            raise DataError(f"Expected a file of at most {LARGEST} bytes at {self.url}, but it is longer. It was removed.")

    def size(self) -> int:
        """Bytes that are there."""
        return self.part.stat().st_size if self.part.exists() else 0

    def discard(self) -> None:
        """Remove the part and its version."""
        self.part.unlink(missing_ok=True)
        self.part.with_name(f"{self.part.name}.tag").unlink(missing_ok=True)
