"""A small web server that drops connections, ignores ranges, changes its files and refuses requests, as it is told."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

CONTENT = np.random.RandomState(0).bytes(300_000)


class Site(ThreadingHTTPServer):
    """Serves `content`; what it does wrong, and what it was asked, are attributes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.etag = CONTENT, '"one"'
        self.drops: list[int] = []  # bytes after which the next connections break
        self.codes: list[int] = []  # what the next requests are answered instead
        self.ranges = True
        self.moved: list[str] = []  # where the next requests are sent on to
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/table.zip"


class Handler(BaseHTTPRequestHandler):
    """Ranges, If-Range and broken connections."""

    server: Site

    def do_GET(self) -> None:
        site, wanted = self.server, self.headers.get("Range")
        site.asked.append(wanted)
        if site.moved:
            self.send_response(302)
            self.send_header("Location", site.moved.pop(0))
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if site.codes:
            return self.send_error(site.codes.pop(0))
        start = 0
        if wanted and site.ranges and self.headers.get("If-Range") in (None, site.etag):
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            if start >= len(site.content):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}")
        else:
            self.send_response(200)
        if site.etag:
            self.send_header("ETag", site.etag)
        self.send_header("Content-Length", str(len(site.content) - start))
        self.end_headers()
        body = site.content[start:]
        self.wfile.write(body[: site.drops.pop(0)] if site.drops else body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving() -> Generator[Site]:
    """A server on a free port of this machine, in a thread."""
    server = Site()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
