"""The HTTP face: POST /score, /health, /metrics, /live and the page that shows it."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from offmap._version import __version__
from offmap.serve.batching import Batcher
from offmap.serve.body import Refused, arrays_of
from offmap.serve.metrics import Seen
from offmap.serve.model import Arrays, Model, Wanted
from offmap.serve.page import PAGE, documentation


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and when the live page gives alarm; with a `token`, all but /health and the page want it."""

    most_bytes: int = 8_000_000
    most_rows: int = 4096
    body_seconds: float = 10.0
    together: int = 256
    window: int = 1000
    alert: float = 0.2
    token: str | None = None


def application(model: Model, limits: Limits) -> FastAPI:
    """The server over one model."""
    seen = Seen((*model.levels, model.threshold), window=limits.window, alert=limits.alert)
    batcher = Batcher(model, together=limits.together, waiting=4 * max(limits.most_rows, limits.together))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        batcher.close()

    app = FastAPI(title="offmap", version=__version__, lifespan=lifespan, redoc_url=None, docs_url=None)

    @app.post("/score", responses=_responses(model), openapi_extra=_accepted(model, limits))
    async def score(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prediction, score and verdict of every row."""
        start, status = time.perf_counter(), 200
        try:
            _admit(request, limits.token)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            inputs = arrays_of(kind, await _body(request, limits), model.wanted, limits.most_rows)
            told = await batcher(inputs)
            seen.answered(told)
            return Response(_written(told), media_type="application/json")
        except Refused as refused:
            status = refused.status
            return _refusal(refused)
        finally:
            seen.ended(status, time.perf_counter() - start)

    @app.get("/health")
    async def health() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        """Whether the server is there."""
        return {"status": "ok", "version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse, responses=_guarded())
    async def metrics(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Counts in Prometheus' text format."""
        return _asked(request, limits.token, lambda: PlainTextResponse(seen.text(model.threshold), media_type=PROMETHEUS))

    @app.get("/live", responses=_guarded())
    async def live(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The rolling share of off-map rows."""
        return _asked(request, limits.token, lambda: JSONResponse(seen.live()))

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:  # pyright: ignore[reportUnusedFunction]
        """The live page."""
        return HTMLResponse(PAGE)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:  # pyright: ignore[reportUnusedFunction]
        """The API to read."""
        return HTMLResponse(documentation(app.openapi()))

    return app


PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _asked(request: Request, token: str | None, result: Any) -> Response:
    try:
        _admit(request, token)
    except Refused as refused:
        return _refusal(refused)
    return result()


def _admit(request: Request, token: str | None) -> None:
    """Refuse who does not show the token; the time this takes does not tell how much of it was right."""
    given = request.headers.get("authorization", "").encode("latin-1", "replace")
    if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Refused(401, "Expected the header `Authorization: Bearer TOKEN` with the server's token.")


async def _body(request: Request, limits: Limits) -> bytes:
    """The whole body, if it is short enough and comes in time."""
    too_long = Refused(413, f"Expected a body of at most {limits.most_bytes} bytes. Send the rows in parts.")
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > limits.most_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.most_bytes:
                    raise too_long
    except TimeoutError as error:
        raise Refused(408, f"Expected the whole body within {limits.body_seconds:g} seconds.") from error
    return bytes(body)


def _written(told: Arrays) -> bytes:
    """JSON, in which what is not finite is null."""
    try:
        return json.dumps({name: values.tolist() for name, values in told.items()}, allow_nan=False).encode()
    except ValueError:
        return json.dumps({name: _finite(values.tolist()) for name, values in told.items()}).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if not isinstance(value, float) or abs(value) < float("inf") else None


def _refusal(refused: Refused) -> JSONResponse:
    extra = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}, 408: {"Connection": "close"}}
    return JSONResponse({"detail": refused.reason}, refused.status, headers=extra.get(refused.status))


DETAIL = {
    "application/json": {"schema": {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}}
}

REASONS = {
    401: "Wrong or missing token.",
    408: "The body came too slowly.",
    413: "Too many bytes or rows.",
    415: "Another content type.",
    422: "The body is not what its content type says, or has another form than the model takes.",
    500: "The model failed on these rows.",
    503: "Too many rows are waiting.",
}


def _guarded() -> dict[int | str, dict[str, Any]]:
    return {401: {"description": REASONS[401], "content": DETAIL}}


def _responses(model: Model) -> dict[int | str, dict[str, Any]]:
    """Every status of /score."""
    lists = {name: {"type": "array", "items": {}} for name in model.outputs}
    lists["ood"] = {"type": "array", "items": {"type": "boolean"}}
    lists["score"] = {"type": "array", "items": {"type": ["number", "null"]}}
    result = {"type": "object", "properties": lists, "required": list(model.outputs)}
    good: dict[int | str, dict[str, Any]] = {
        200: {"description": "A row per example of each.", "content": {"application/json": {"schema": result}}}
    }
    return good | {code: {"description": reason, "content": DETAIL} for code, reason in REASONS.items()}


def _accepted(model: Model, limits: Limits) -> dict[str, Any]:
    """The bodies that /score takes, for the OpenAPI page."""

    def rows(wanted: Wanted) -> dict[str, Any]:
        kind = np.dtype(wanted.dtype)
        whole = kind.kind in "iu"
        bounds: Any = np.iinfo(kind) if whole else np.finfo(kind)  # pyright: ignore[reportArgumentType, reportCallIssue]
        low, high = (int(b) if whole else float(b) for b in (bounds.min, bounds.max))
        inner: dict[str, Any] = {"type": "integer" if whole else "number", "minimum": low, "maximum": high}
        for size in reversed(wanted.shape):
            inner = {"type": "array", "items": inner} | ({} if size is None else {"minItems": size, "maxItems": size})
        return {"type": "array", "items": inner, "minItems": 1, "maxItems": limits.most_rows}

    each = {wanted.name: rows(wanted) for wanted in model.wanted}
    named = {"type": "object", "properties": each, "required": list(each), "additionalProperties": False}
    inputs = {"anyOf": [*each.values(), named]} if len(each) == 1 else named
    schema = {"type": "object", "properties": {"inputs": inputs}, "required": ["inputs"]}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if len(each) == 1:
        content["application/x-npy"] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}
