"""Who is slow with a header is not waited for without end: uvicorn's own protocol, with a clock."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def patience(seconds: float) -> type[H11Protocol]:
    """A protocol that hangs up on clients whose next request has not begun, header and all, in so many seconds.

    The clock runs from the connection to its first request, then from the first byte of every next one; between requests it is
    uvicorn's `timeout_keep_alive` that counts. A body has its own time, in the application.
    """

    class Patient(H11Protocol):
        clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self.clock = self.loop.call_later(seconds, self._hang_up)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            waiting = self.cycle is before and (before is None or before.response_complete)
            if not waiting:
                self._stop()
            elif self.clock is None:
                self.clock = self.loop.call_later(seconds, self._hang_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _stop(self) -> None:
            if self.clock is not None:
                self.clock.cancel()
                self.clock = None

        def _hang_up(self) -> None:
            self.clock = None
            if self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE:  # what comes is a header, no rest of a body whose answer is out
                self.transport.write(TOO_SLOW)
            self.transport.close()

    return Patient
