"""Files from a data set's own site: resumed where a connection broke, checked, and either whole or absent."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offmap.errors import ConfigError, DataError
from offmap.progress import Advance, bar
from offmap_bench.tasks.places import offline

BLOCK = 1 << 16
RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Answers that another attempt may improve."""


LARGEST = 1 << 30
"""Bytes of a file that is downloaded; the largest that offmap knows has a tenth of it."""


class Redirections(urllib.request.HTTPRedirectHandler):
    """Followed to https, or from http to http; never to files, to other protocols, or from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request, or an error that ends the download."""
        before, after = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if after not in ("https", before):
            raise urllib.error.HTTPError(req.full_url, code, f"sends on to {after}://, which is refused", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@dataclass(frozen=True)
class Remote:
    """A file on a server. `sha256` is the whole digest or its beginning; None: the file is not verified."""

    url: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not re.match(r"https?://", self.url):
            raise ConfigError(f"Expected the address of a file to begin with https:// or http://, but got {self.url!r}.")
        if self.sha256 is not None and not re.fullmatch(r"[0-9a-f]{8,64}", self.sha256):
            raise ConfigError(f"Expected `sha256` to be 8 to 64 hexadecimal digits, but got {self.sha256!r}.")


def fetch(
    remote: Remote, path: str | Path, *, show: bool | None = None, tries: int = 4, pause: float = 1.0, timeout: float = 30.0
) -> Path:
    """The file at `path`, downloaded unless it is there.

    Bytes gather in `<path>.part`, which outlives a broken connection or a killed process: the next attempt asks for the rest,
    and begins anew if the server has another file by now. `tries` attempts in a row may bring nothing; `pause` seconds lie
    between them. The file takes its name when it is complete and its digest is right.

    Raises:
        DataError: offline, not found, or not what was expected; the message says where to put the file by hand.
    """
    path = Path(path)
    if path.exists():
        return path
    if offline():
        raise missing(remote, path, "OFFMAP_OFFLINE forbids to download it")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(part), bar(path.name, None, show=show, size=True) as advance:
            if not path.exists():  # another process may have been faster
                gather(remote, path, part, advance, tries=tries, pause=pause, timeout=timeout)
                verify(remote, part)
                os.replace(part, path)
                tag_of(part).unlink(missing_ok=True)
                lock_of(part).unlink(missing_ok=True)
    except OSError as error:
        raise missing(remote, path, f"it cannot be written: {error}") from error
    return path


def gather(
    remote: Remote,
    path: Path,
    part: Path,
    advance: Advance,
    *,
    tries: int,
    pause: float,
    timeout: float,
) -> None:
    """Attempts until the part is complete; only those that bring nothing count."""
    idle = 0
    while True:
        before = size_of(part)
        try:
            if attempt(remote, part, advance, timeout):
                return
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            with error:
                reason = f"the server answered {error.code} ({error.reason})"
            if error.code == 416:  # nothing lies beyond what we have: another file, or a complete one; begin anew
                restore_state(part)
            elif error.code not in RETRIED:
                raise missing(remote, path, reason) from error
        except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
            reason = f"the server cannot be reached or broke off: {getattr(error, 'reason', error)}"
        idle = 0 if size_of(part) > before else idle + 1
        if idle >= tries:
            raise missing(remote, path, reason)
        time.sleep(pause)


def attempt(remote: Remote, part: Path, advance: Advance, timeout: float) -> bool:
    """One request, for the rest if there is a part; True when nothing is missing any more."""
    have, tag = size_of(part), tag_of(part)
    known = tag.read_text(encoding="latin-1") if tag.exists() else ""
    headers = {"User-Agent": "offmap", "Accept-Encoding": "identity"}
    if have and (known or remote.sha256):
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": known} if known else {})
    request = urllib.request.Request(remote.url, headers=headers)
    with urllib.request.build_opener(Redirections()).open(request, timeout=timeout) as result:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", result.headers.get("Content-Range", ""))
        follows = result.status == 206 and span is not None and int(span[1]) == have
        if result.status == 206 and not follows:
            restore_state(part)
            return False
        if not follows:
            have = 0
            restore_state(part)  # first: old bytes must never meet a new tag
            tag.write_text(validator(result.headers), encoding="latin-1")
        length = result.headers.get("Content-Length")
        total = have + int(length) if length is not None and length.isdigit() else None
        with part.open("ab" if follows else "wb") as file:
            while block := result.read(BLOCK):
                file.write(block)
                have += len(block)
                advance(have, total=total)
                if have > LARGEST:
                    break
    if have > LARGEST:
        restore_state(part)
        raise DataError(f"Expected a file of at most {LARGEST} bytes at {remote.url}, but it is longer. It was removed.")
    return total is None or have == total


def validator(headers: http.client.HTTPMessage) -> str:
    """What names this version of the file: a strong ETag, else the time of its last change; empty when there is neither."""
    etag = headers.get("ETag", "")
    return etag if etag.startswith('"') else headers.get("Last-Modified", "")


def verify(remote: Remote, part: Path) -> None:
    """The digest of the part, which is removed when it is wrong."""
    if remote.sha256 is None:
        return
    with part.open("rb") as file:
        came = hashlib.file_digest(file, "sha256").hexdigest()
    if not came.startswith(remote.sha256):
        restore_state(part)
        raise DataError(
            f"Expected a file with SHA-256 {remote.sha256} at {remote.url}, but got {came}. It was removed; the file on the "
            "server has changed or was damaged on its way."
        )


def missing(remote: Remote, path: Path, reason: str) -> DataError:
    """One line that says which file belongs where."""
    return DataError(f"Expected a file at {path}, but there is none and {reason}. Put {remote.url} there.")


def size_of(part: Path) -> int:
    """Bytes that are there."""
    return part.stat().st_size if part.exists() else 0


def tag_of(part: Path) -> Path:
    """The file that remembers which version of the file the part belongs to."""
    return part.with_name(part.name + ".tag")


def lock_of(part: Path) -> Path:
    """The file that the process which gathers the part holds."""
    return part.with_name(part.name + ".lock")


def restore_state(part: Path) -> None:
    """Remove the part and what is known of it."""
    part.unlink(missing_ok=True)
    tag_of(part).unlink(missing_ok=True)


@contextmanager
def alone(part: Path) -> Generator[None]:
    """One process at a time gathers a part: the others wait. Where the system has no file locks, nothing is done."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with lock_of(part).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
