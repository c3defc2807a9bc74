"""`offmap serve`: an exported guard behind HTTP."""

from __future__ import annotations

import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

import typer

from offmap.checks import require
from offmap.cli.options import Json, UsageError, option, print_result


def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="ONNX file that `Guard.export` wrote.")],
    host: Annotated[str, option("Address to listen on; 0.0.0.0 for all, which needs a token.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="OFFMAP_TOKEN", help="Token that clients send as `Authorization: Bearer TOKEN`.")
    ] = None,
    no_token: Annotated[bool, option("Accept requests without a token.", None, "--no-token")] = False,
    max_bytes: Annotated[int, option("Largest request body, in bytes.", None, "--most-bytes", min=1)] = 8_000_000,
    max_rows: Annotated[int, option("Most rows in one request.", None, "--most-rows", min=1)] = 4096,
    body_seconds: Annotated[float, option("Timeout of the request header, and of its body, in seconds.", min=0.1)] = 10.0,
    together: Annotated[int, option("Most rows of waiting requests to score in one call.", min=1)] = 256,
    window: Annotated[int, option("Rows in the rolling share of off-map rows.", min=1)] = 1000,
    alert: Annotated[
        float | None,
        option("Rolling share of off-map rows that raises the alarm (default: more than false alarms explain).", min=0, max=1),
    ] = None,
    access_log: Annotated[bool, option("Log every request; refused requests are always logged.", None, "--access-log")] = False,
    log_format: Annotated[Literal["text", "json"], option("Format of the log, on standard error.")] = "text",
    threads: Annotated[int, option("Threads that run the model.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Serve an exported guard over HTTP.

    POST /score, GET /health and /info, Prometheus /metrics, a live page at /, OpenAPI at /docs.

    \b
    Examples:
      offmap serve g.onnx
      curl -H 'Content-Type: application/json' -d '{"inputs": [[0.1, 0.2]]}' http://127.0.0.1:8000/score
      OFFMAP_TOKEN=secret offmap serve g.onnx --host 0.0.0.0 --access-log --log-format json
    """  # noqa: D301
    for package in ("onnxruntime", "fastapi", "uvicorn", "prometheus_client"):
        require(package, "serve")
    token = _check_token(token, no_token, host)
    from offmap.serve.app import Limits, run_server
    from offmap.serve.logs import start_logging

    start_logging(log_format)

    def on_ready(url: str) -> None:
        print_result(as_json, {"url": url, "file": file}, f"Serving {file} on {url} (page /, API /docs)")
        sys.stdout.flush()

    limits = Limits(max_bytes, max_rows, body_seconds, together, window, alert, token, access_log)
    run_server(file, host=host, port=port, limits=limits, on_ready=on_ready, threads=threads)


def _check_token(token: str | None, no_token: bool, host: str) -> str | None:
    """Return the token; refuse an empty one, and none where others than this machine can ask."""
    if token is None and os.environ.get("OFFMAP_TOKEN") == "" and not no_token:  # to typer an empty variable is none
        token = ""
    if token is not None and token.split() != [token]:
        what = "it has spaces" if token.strip() else "it is empty"
        raise UsageError(f"Expected a token in --token or OFFMAP_TOKEN, but {what}. Set another, or unset it to ask for none.")
    if token is not None and no_token:
        raise UsageError("Expected a token, or --no-token, but got both. Leave one of them out.")
    if token is None and not no_token and not _is_loopback(host):
        raise UsageError(f"Expected a token to listen on {host}, which other machines can reach. Set OFFMAP_TOKEN or --no-token.")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
