"""Run the server: load the file, listen, and end on a signal after the running requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from offmap.errors import ConfigError, first_line
from offmap.serve.app import Limits, create_app
from offmap.serve.model import Model

SHUTDOWN_SECONDS = 10
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def run_server(path: Path, *, host: str, port: int, limits: Limits, on_ready: Callable[[str], None], threads: int = 1) -> None:
    """Serve until SIGINT or SIGTERM; call `on_ready` with the address once it is listened on."""
    app = create_app(Model.load(path, threads), limits)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        server_header=False, timeout_keep_alive=30, http=header_timeout(limits.body_seconds),
    )  # fmt: skip
    server = uvicorn.Server(config)
    with listen(host, port) as listener:
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        try:
            server.run(sockets=[listener])
        except (SystemExit, KeyboardInterrupt):  # uvicorn raises the signal again once it has ended well
            if not server.started:
                raise


def listen(host: str, port: int) -> socket.socket:
    """Open a socket at this address; port 0 takes a free one."""
    # asyncio sends short responses at once only on sockets that are declared as TCP, else each waits 40 ms
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        return listener
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {host}:{port}: {first_line(error)}. Pass another --host or --port.") from error


def header_timeout(seconds: float) -> type[H11Protocol]:
    """Return a protocol that closes connections that do not send a full header in time.

    The clock runs from the connection to its first request, then from the first byte of every next one; between requests
    uvicorn's `timeout_keep_alive` counts. A body has its own timeout, in the application.
    """

    class TimeoutProtocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self.timer = self.loop.call_later(seconds, self._time_out)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            waiting = self.cycle is before and (before is None or before.response_complete)
            if not waiting:
                self._stop_timer()
            elif self.timer is None:
                self.timer = self.loop.call_later(seconds, self._time_out)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def _time_out(self) -> None:
            self.timer = None
            if self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE:  # a header is awaited, not the rest of a body that was answered already
                self.transport.write(TIMEOUT_RESPONSE)
            self.transport.close()

    return TimeoutProtocol
