"""The HTTP application, POST /score, /health, /info, /metrics, /live, a live page and a page about the API, and its server."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import h11
import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from numpy.typing import NDArray
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from uvicorn.protocols.http.h11_impl import H11Protocol

from offmap._version import __version__
from offmap.errors import ConfigError, first_line
from offmap.report.page import style
from offmap.serve.logs import log_event, note, watch_requests
from offmap.serve.model import Batcher, Model
from offmap.serve.monitor import Monitor
from offmap.serve.parsing import Arrays, RequestError, parse_inputs

REASONS = {
    401: "Wrong or missing token.",
    408: "The body came too slowly.",
    413: "Too many bytes or rows.",
    415: "Unsupported content type or encoding.",
    422: "The body is not what its content type says, or has another shape than the model takes.",
    500: "The model failed on these rows, or the server on this request.",
    503: "Too many rows are waiting.",
}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}, 408: {"Connection": "close"}}


SMALL = 1 << 16
"""Bytes of a body, or numbers of a response, up to which they are worked on at once; more in a thread: others need not wait."""

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of a request; `window` rows make the rolling share of off-map rows, and more than `alert` of them an alarm.

    Without `alert`, that is more than the promised share of false alarms explains. Waiting requests run in one call if they have
    at most `together` rows. All but /health and the pages require `token`. `access_log`: log every request, not refusals alone.
    """

    max_bytes: int = 8_000_000
    max_rows: int = 4096
    body_seconds: float = 10.0
    together: int = 256
    window: int = 1000
    alert: float | None = None
    token: str | None = None
    access_log: bool = False


def create_app(model: Model, limits: Limits) -> FastAPI:
    """Return the application for one model."""
    monitor = Monitor(model, limits.window, limits.alert)
    batcher = Batcher(model, together=limits.together, max_waiting=4 * max(limits.max_rows, limits.together))
    worker = ThreadPoolExecutor(1, "offmap-json")

    async def work(size: int, function: Callable[..., T], *args: Any) -> T:
        """Call a function, in the worker if it has much to do."""
        return function(*args) if size < SMALL else await asyncio.get_running_loop().run_in_executor(worker, function, *args)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        for thread in (batcher.thread, worker):
            thread.shutdown(wait=False, cancel_futures=True)
        counts = {name: monitor.to_dict()[name] for name in ("rows", "flagged")}
        log_event(logging.INFO, "stop", "Stopped: {rows} rows scored, {flagged} of them off the map.".format(**counts), **counts)

    app = FastAPI(title="offmap", version=__version__, lifespan=lifespan, redoc_url=None, docs_url=None)

    def count_request(path: str, status: int, seconds: float) -> None:
        if path == "/score":
            monitor.requests.labels(status).inc()
            monitor.seconds.observe(seconds)

    app.add_middleware(watch_requests, every=limits.access_log, done=count_request)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        note(request, reason=error.reason)
        return JSONResponse({"detail": error.reason}, error.status, headers=HEADERS.get(error.status))

    @app.post("/score", responses=_score_responses(model), openapi_extra=_score_body(model, limits))
    async def score(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prediction, score and verdict of every row."""
        _check_token(request, limits.token)
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body = await _read_body(request, limits)
        inputs = await work(len(body), parse_inputs, content_type, body, model.inputs, limits.max_rows, model.columns)
        outputs = await batcher(inputs)
        monitor.count_rows(outputs)
        note(request, rows=len(outputs["ood"]), flagged=int(outputs["ood"].sum()))
        content = await work(sum(values.size for values in outputs.values()), _to_json, outputs, model)
        return Response(content, media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        """Whether the server is there."""
        return {"status": "ok", "version": __version__}

    @app.get("/info", responses=_errors(401))
    async def info(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """What the model takes and gives: inputs, columns, outputs, terms, threshold, promised share of false alarms."""
        _check_token(request, limits.token)
        names = ("outputs", "columns", "terms", "threshold", "false_alarms", "calibration_rows", "calibrated")
        inputs = [vars(spec) | {"dtype": np.dtype(spec.dtype).name} for spec in model.inputs]
        facts = {"inputs": inputs, "max_rows": limits.max_rows} | {name: getattr(model, name) for name in names}
        return Response(_dump(facts), media_type="application/json")

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
        text = files("offmap.serve").joinpath(file).read_text(encoding="utf-8")
        page = HTMLResponse(text.replace("/* style */", style()))
        app.get(path, response_class=HTMLResponse, include_in_schema=False)(lambda page=page: page)
    return app


def _check_token(request: Request, token: str | None) -> None:
    """Refuse a wrong token; the time this takes does not tell how much of it was right."""
    header = request.headers.get("authorization", "").encode("latin-1", "replace")
    if token is not None and not hmac.compare_digest(header, f"Bearer {token}".encode()):
        raise RequestError(401, "Expected the header `Authorization: Bearer TOKEN` with the server's token.")


async def _read_body(request: Request, limits: Limits) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise RequestError(415, f"Expected a body as it is, but got Content-Encoding {encoding[:40]!r}. Send it unpacked.")
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


def _to_json(outputs: Arrays, model: Model) -> bytes:
    """Write the outputs of all rows, by name; the threshold is one number, and terms have names."""
    fields = {name: _rows_to_json(values) for name, values in outputs.items() if name != "terms"}
    if model.terms:
        terms = (f"{json.dumps(name)}: {_rows_to_json(outputs['terms'][:, i])}" for i, name in enumerate(model.terms))
        fields["terms"] = "{" + ", ".join(terms) + "}"
    fields["threshold"] = _dump(model.threshold)
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()


def _rows_to_json(values: NDArray[Any]) -> str:
    """Write a list in parts: the interpreter can turn to other threads between them."""
    step = max(1, SMALL // max(1, values[0].size))
    return "[" + ", ".join(_dump(values[i : i + step].tolist())[1:-1] for i in range(0, len(values), step)) + "]"


def _dump(value: Any) -> str:
    """Write JSON, with null for numbers that are not finite."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    error = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    return {code: {"description": REASONS[code], "content": {"application/json": {"schema": error}}} for code in codes}


def _score_responses(model: Model) -> dict[int | str, dict[str, Any]]:
    """Describe every status of /score for OpenAPI."""
    items: dict[str, Any] = {"ood": {"type": "boolean"}, "score": {"type": ["number", "null"]}, "p_value": {"type": "number"}}
    fields = {name: {"type": "array", "items": items.get(name, {})} for name in model.outputs if name != "terms"}
    if model.terms:
        terms = {name: {"type": "array", "items": {"type": ["number", "null"]}} for name in model.terms}
        fields["terms"] = {"type": "object", "properties": terms, "required": list(terms)}
    fields["threshold"] = {"type": ["number", "null"]}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return {
        200: {"description": "One row per example in every output.", "content": {"application/json": {"schema": schema}}},
        **_errors(*REASONS),
    }


def _score_body(model: Model, limits: Limits) -> dict[str, Any]:
    """Describe the bodies that /score takes for OpenAPI."""
    arrays: dict[str, Any] = {}
    for spec in model.inputs:
        integer = np.dtype(spec.dtype).kind in "iu"
        bounds: Any = np.iinfo(spec.dtype) if integer else np.finfo(spec.dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
        low, high = (int(b) if integer else float(b) for b in (bounds.min, bounds.max))
        kind = "integer" if integer else ["number", "null"] if spec.allow_nan else "number"
        inner: dict[str, Any] = {"type": kind, "minimum": low, "maximum": high}
        for size in reversed(spec.shape):
            inner = {"type": "array", "items": inner} | ({} if size is None else {"minItems": size, "maxItems": size})
        arrays[spec.name] = {"type": "array", "items": inner, "minItems": 1, "maxItems": limits.max_rows}
    by_name = {"type": "object", "properties": arrays, "required": list(arrays), "additionalProperties": False}
    inputs = {"anyOf": [*arrays.values(), by_name]} if len(arrays) == 1 else by_name
    schema: dict[str, Any] = {"type": "object", "properties": {"inputs": inputs}, "required": ["inputs"]}
    if model.columns is not None:
        (array,) = arrays.values()
        values = dict.fromkeys(model.columns, array["items"]["items"])
        row = {"type": "object", "properties": values, "required": list(values), "additionalProperties": False}
        rows = {"type": "array", "items": row, "minItems": 1, "maxItems": limits.max_rows}
        schema = {"anyOf": [schema, {"type": "object", "properties": {"rows": rows}, "required": ["rows"]}]}
    binary = {"application/x-npy": {"schema": {"type": "string", "format": "binary"}}} if len(arrays) == 1 else {}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}} | binary}}


def run_server(path: Path, *, host: str, port: int, limits: Limits, on_ready: Callable[[str], None], threads: int = 1) -> None:
    """Serve until SIGINT or SIGTERM; call `on_ready` with the address once it is listened on."""
    model = Model.load(path, threads)
    if not model.calibrated:
        text = f"{path} was not calibrated on rows that its model has not seen: p-values and false alarms are not promised."
        log_event(logging.WARNING, "start", f"{text} Calibrate the guard on such rows, and export it again.")
    config = uvicorn.Config(
        create_app(model, limits), log_config=None, log_level="warning", access_log=False, lifespan="on",
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
                client = (self.client or ["?"])[0]
                reason = f"no whole header in {seconds:g} seconds"
                log_event(logging.WARNING, "request", f"408 from {client}: {reason}.", status=408, client=client, reason=reason)
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()

    return TimeoutProtocol
