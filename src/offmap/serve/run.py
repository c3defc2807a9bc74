"""The server's process: it opens the file, listens, and ends when told to, after the answers it owes."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import uvicorn

from offmap.errors import ConfigError
from offmap.serve.app import Limits, application
from offmap.serve.model import Model

GRACE = 10
"""Seconds for answers that are under way when the server is told to end."""


def serve(path: Path, *, host: str, port: int, limits: Limits, threads: int = 1) -> None:
    """Answer until SIGINT or SIGTERM."""
    app = application(Model.open(path, threads), limits)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=GRACE, server_header=False,
        timeout_keep_alive=30,
    )  # fmt: skip
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again once it has ended well
            signal.signal(number, lambda *_: None)
    with listening(host, port) as found:
        print(f"Serving {path} on http://{host}:{found.getsockname()[1]} (page /, docs /docs)", flush=True)
        uvicorn.Server(config).run(sockets=[found])


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
