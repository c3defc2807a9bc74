"""The server's process: it opens the file, listens, and ends when told to, after the answers it owes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from offmap.errors import ConfigError
from offmap.serve.app import Limits, application
from offmap.serve.model import Model
from offmap.serve.patience import patience

GRACE = 10
"""Seconds for answers that are under way when the server is told to end."""


def serve(path: Path, *, host: str, port: int, limits: Limits, say: Callable[[str], None], threads: int = 1) -> None:
    """Answer until SIGINT or SIGTERM; `say` is told the address once it is listened on."""
    app = application(Model.open(path, threads), limits)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=GRACE, server_header=False,
        timeout_keep_alive=30, http=patience(limits.body_seconds),
    )  # fmt: skip
    server = uvicorn.Server(config)
    with listening(host, port) as found:
        say(f"http://{f'[{host}]' if ':' in host else host}:{found.getsockname()[1]}")
        try:
            server.run(sockets=[found])
        except (SystemExit, KeyboardInterrupt):  # uvicorn raises the signal again once it has ended well
            if not server.started:
                raise


def listening(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 takes a free one."""
    # by its name: only of sockets that say they are TCP does asyncio send short answers at once, else each waits 40 ms
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(1024)
        return found
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot listen on {host}:{port}: {reason}. Pass another --host or --port.") from error
