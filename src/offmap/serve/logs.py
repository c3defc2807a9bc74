"""Logs of the server, text or JSON lines on standard error: requests, refusals, alarms. No token, no query, no row is in them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from fastapi.requests import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger: logging.Logger = logging.getLogger("offmap.serve")

CLIENT_LEFT = 499
UNEXPECTED = "The server failed on this request, which is its own mistake: its log says where."


class TextFormatter(logging.Formatter):
    """Time, level and sentence; what is not printable, such as a line break that somebody sent, is escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format all but a traceback."""
        message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.getMessage())
        return f"{self.formatTime(record)} {record.levelname} {message}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, event, message, and what the event has."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, a traceback included."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = {"time": moment, "level": record.levelname, "event": "log", "message": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, allow_nan=False)


FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def start_logging(name: str) -> None:
    """Log in this format to standard error, what uvicorn and offmap say included."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS[name]())
    for each in ("offmap", "uvicorn"):
        logging.getLogger(each).handlers, logging.getLogger(each).propagate = [handler], False
    logger.setLevel(logging.INFO)


def log_event(level: int, event: str, message: str, **fields: Any) -> None:
    """Log a sentence, with its parts for the JSON format."""
    logger.log(level, message, extra={"fields": {"event": event, **fields}})


def watch_requests(app: ASGIApp, *, every: bool, done: Callable[[str, int, float], None]) -> ASGIApp:
    """Wrap an application: log refused requests, or every one; call `done` with path, status and seconds of each.

    What the application raises becomes a 500 with a sentence, and a traceback in the log.
    """

    async def watch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status, start, state = 0, time.perf_counter(), scope.setdefault("state", {})

        async def note(message: Message) -> None:
            nonlocal status
            status = message["status"] if message["type"] == "http.response.start" else status
            await send(message)

        try:
            await app(scope, receive, note)
        except ClientDisconnect:
            pass
        except Exception:
            logger.exception("%s %s failed.", scope["method"], scope["path"][:200])
            if not status:
                state["reason"] = UNEXPECTED
                await JSONResponse({"detail": UNEXPECTED}, 500)(scope, receive, note)
        finally:
            seconds = time.perf_counter() - start
            done(scope["path"], status or CLIENT_LEFT, seconds)
            if every or not status or status >= 400:
                _log_request(scope, status or CLIENT_LEFT, seconds)

    return watch


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    state: dict[str, Any] = scope["state"]
    client, path, method = (scope.get("client") or ["?"])[0], scope["path"][:200], scope["method"]
    reason = "The client left." if status == CLIENT_LEFT else state.get("reason")
    rows = "" if "rows" not in state else f", {state['rows']} rows, {state['flagged']} off the map"
    message = f"{method} {path} {status} {1e3 * seconds:.1f} ms from {client}{rows}{f': {reason}' if reason else ''}"
    fields = {"method": method, "path": path, "status": status, "ms": round(1e3 * seconds, 1), "client": client}
    fields |= {name: state[name] for name in ("rows", "flagged") if name in state} | ({"reason": reason} if reason else {})
    log_event(logging.WARNING if status >= 400 else logging.INFO, "request", message, **fields)


def note(request: Request, **fields: Any) -> None:
    """Keep what the line about this request is to say."""
    request.scope["state"].update(fields)
