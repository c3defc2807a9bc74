"""The HTTP application, POST /score, /health, /metrics, /live, a live page and a page about the API, and its server."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import h11
import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from uvicorn.protocols.http.h11_impl import H11Protocol

from offmap._version import __version__
from offmap.errors import ConfigError, first_line
from offmap.serve.model import Batcher, Model
from offmap.serve.parsing import Arrays, RequestError, parse_inputs

REASONS = {
    401: "Wrong or missing token.",
    408: "The body came too slowly.",
    413: "Too many bytes or rows.",
    415: "Another content type.",
    422: "The body is not what its content type says, or has another shape than the model takes.",
    500: "The model failed on these rows.",
    503: "Too many rows are waiting.",
}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}, 408: {"Connection": "close"}}


@dataclass(frozen=True)
class Limits:
    """Limits of a request; `window` rows make the rolling share of off-map rows, and more than `alert` of them an alarm.

    Waiting requests run in one call if they have at most `together` rows. All but /health and the pages require `token`.
    """

    max_bytes: int = 8_000_000
    max_rows: int = 4096
    body_seconds: float = 10.0
    together: int = 256
    window: int = 1000
    alert: float = 0.2
    token: str | None = None


class Monitor:
    """Counts since the start for Prometheus, and the share of off-map rows among the latest `limits.window`."""

    def __init__(self, model: Model, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("offmap_requests", "Requests to /score by HTTP status.", ["code"], registry=registry)
        self.rows = Counter("offmap_rows", "Rows scored.", registry=registry)
        self.flagged = Counter("offmap_rows_flagged", "Rows called off the map.", registry=registry)
        share = Gauge("offmap_share", "Share of off-map rows among the latest.", registry=registry)
        share.set_function(lambda: self.share)
        alert = Gauge("offmap_alert", "1 if that share is above the alert line.", registry=registry)
        alert.set_function(lambda: self.share > limits.alert)
        Gauge("offmap_threshold", "Scores above it are called off the map.", registry=registry).set(model.threshold)
        self.bounds = sorted({float(level) for level in (*model.levels, model.threshold) if np.isfinite(level)}) or [0.0]
        self.scores = Histogram("offmap_score", "Scores of rows.", buckets=self.bounds, registry=registry)
        bounds = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
        self.seconds = Histogram("offmap_seconds", "Seconds that requests to /score took.", buckets=bounds, registry=registry)
        self.alert, self.clock, self.start = limits.alert, clock, clock()
        self.latest: deque[bool] = deque(maxlen=limits.window)
        self.line: deque[tuple[float, float]] = deque(maxlen=300)  # of the live page, a point a second at most

    def count_rows(self, outputs: Arrays) -> None:
        """Count the rows of one response."""
        infinite = np.nextafter(self.bounds[-1], np.inf)  # counts in the last bucket, but does not spoil the sum
        for score in np.where(np.isfinite(outputs["score"]), outputs["score"], infinite).tolist():
            self.scores.observe(score)
        self.latest.extend(outputs["ood"].tolist())
        self.rows.inc(len(outputs["ood"]))
        self.flagged.inc(int(outputs["ood"].sum()))
        now = self.clock() - self.start
        if self.line and now - self.line[-1][0] < 1.0:
            now = self.line.pop()[0]
        self.line.append((now, self.share))

    @property
    def share(self) -> float:
        """Share of off-map rows among the latest; 0 before the first."""
        return sum(self.latest) / len(self.latest) if self.latest else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return what the live page draws."""
        rows, flagged = (int(self.registry.get_sample_value(f"offmap_{name}_total") or 0) for name in ("rows", "rows_flagged"))
        return {
            "share": self.share, "alert": self.alert, "alarm": self.share > self.alert, "window": len(self.latest),
            "rows": rows, "flagged": flagged, "line": [[round(t, 1), share] for t, share in self.line],
        }  # fmt: skip


def create_app(model: Model, limits: Limits) -> FastAPI:
    """Return the application for one model."""
    monitor = Monitor(model, limits)
    batcher = Batcher(model, together=limits.together, max_waiting=4 * max(limits.max_rows, limits.together))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        batcher.thread.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="offmap", version=__version__, lifespan=lifespan, redoc_url=None, docs_url=None)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"detail": error.reason}, error.status, headers=HEADERS.get(error.status))

    @app.post("/score", responses=_score_responses(model), openapi_extra=_score_body(model, limits))
    async def score(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prediction, score and verdict of every row."""
        start, status = time.perf_counter(), 200
        try:
            _check_token(request, limits.token)
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            outputs = await batcher(parse_inputs(content_type, await _read_body(request, limits), model.inputs, limits.max_rows))
            monitor.count_rows(outputs)
            return Response(_to_json(outputs), media_type="application/json")
        except RequestError as error:
            status = error.status
            raise
        finally:
            monitor.requests.labels(status).inc()
            monitor.seconds.observe(time.perf_counter() - start)

    @app.get("/health")
    async def health() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        """Whether the server is there."""
        return {"status": "ok", "version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse, responses=_errors(401))
    async def metrics(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Counts in Prometheus' text format."""
        _check_token(request, limits.token)
        return Response(generate_latest(monitor.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live", responses=_errors(401))
    async def live(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The rolling share of off-map rows."""
        _check_token(request, limits.token)
        return JSONResponse(monitor.to_dict())

    for path, file in {"/": "live.html", "/docs": "api.html"}.items():
        page = HTMLResponse(files("offmap.serve").joinpath(file).read_text(encoding="utf-8"))
        app.get(path, response_class=HTMLResponse, include_in_schema=False)(lambda page=page: page)
    return app


def _check_token(request: Request, token: str | None) -> None:
    """Refuse a wrong token; the time this takes does not tell how much of it was right."""
    header = request.headers.get("authorization", "").encode("latin-1", "replace")
    if token is not None and not hmac.compare_digest(header, f"Bearer {token}".encode()):
        raise RequestError(401, "Expected the header `Authorization: Bearer TOKEN` with the server's token.")


async def _read_body(request: Request, limits: Limits) -> bytes:
    too_long = RequestError(413, f"Expected a body of at most {limits.max_bytes} bytes. Send the rows in parts.")
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > limits.max_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_bytes:
                    raise too_long
    except TimeoutError as error:
        raise RequestError(408, f"Expected the whole body within {limits.body_seconds:g} seconds.") from error
    return bytes(body)


def _to_json(outputs: Arrays) -> bytes:
    """Write JSON, with null for numbers that are not finite."""
    lists = {name: values.tolist() for name, values in outputs.items()}
    try:
        return json.dumps(lists, allow_nan=False).encode()
    except ValueError:
        return json.dumps(json.loads(json.dumps(lists), parse_constant=lambda _: None)).encode()


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    error = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    return {code: {"description": REASONS[code], "content": {"application/json": {"schema": error}}} for code in codes}


def _score_responses(model: Model) -> dict[int | str, dict[str, Any]]:
    """Describe every status of /score for OpenAPI."""
    items: dict[str, Any] = {"ood": {"type": "boolean"}, "score": {"type": ["number", "null"]}}
    lists = {name: {"type": "array", "items": items.get(name, {})} for name in model.outputs}
    schema = {"type": "object", "properties": lists, "required": list(lists)}
    return {
        200: {"description": "A row per example of each.", "content": {"application/json": {"schema": schema}}},
        **_errors(*REASONS),
    }


def _score_body(model: Model, limits: Limits) -> dict[str, Any]:
    """Describe the bodies that /score takes for OpenAPI."""
    arrays: dict[str, Any] = {}
    for spec in model.inputs:
        integer = np.dtype(spec.dtype).kind in "iu"
        bounds: Any = np.iinfo(spec.dtype) if integer else np.finfo(spec.dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
        low, high = (int(b) if integer else float(b) for b in (bounds.min, bounds.max))
        inner: dict[str, Any] = {"type": "integer" if integer else "number", "minimum": low, "maximum": high}
        for size in reversed(spec.shape):
            inner = {"type": "array", "items": inner} | ({} if size is None else {"minItems": size, "maxItems": size})
        arrays[spec.name] = {"type": "array", "items": inner, "minItems": 1, "maxItems": limits.max_rows}
    by_name = {"type": "object", "properties": arrays, "required": list(arrays), "additionalProperties": False}
    inputs = {"anyOf": [*arrays.values(), by_name]} if len(arrays) == 1 else by_name
    schema = {"type": "object", "properties": {"inputs": inputs}, "required": ["inputs"]}
    binary = {"application/x-npy": {"schema": {"type": "string", "format": "binary"}}} if len(arrays) == 1 else {}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}} | binary}}


def run_server(path: Path, *, host: str, port: int, limits: Limits, on_ready: Callable[[str], None], threads: int = 1) -> None:
    """Serve until SIGINT or SIGTERM; call `on_ready` with the address once it is listened on."""
    config = uvicorn.Config(
        create_app(Model.load(path, threads), limits), log_level="warning", access_log=False, lifespan="on",
        timeout_graceful_shutdown=10, server_header=False, timeout_keep_alive=30, http=header_timeout(limits.body_seconds),
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
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()

    return TimeoutProtocol
