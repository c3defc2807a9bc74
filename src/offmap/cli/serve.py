"""`offmap serve`: an exported guard behind HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offmap.cli.options import Json, option, print_result
from offmap.extras import require


def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="ONNX file that `Guard.export` wrote.")],
    host: Annotated[str, option("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, option("Port; 0 for a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="OFFMAP_TOKEN", help="Token that clients send as `Authorization: Bearer TOKEN`.")
    ] = None,
    max_bytes: Annotated[int, option("Largest body of a request.", None, "--most-bytes", min=1)] = 8_000_000,
    max_rows: Annotated[int, option("Most rows of a request.", None, "--most-rows", min=1)] = 4096,
    body_seconds: Annotated[float, option("Timeout for a header, and for its body.", min=0.1)] = 10.0,
    together: Annotated[int, option("Most rows of waiting requests to run in one call.", min=1)] = 256,
    window: Annotated[int, option("Rows in the rolling share of off-map rows.", min=1)] = 1000,
    alert: Annotated[float, option("Rolling share of off-map rows that raises the alarm.", min=0, max=1)] = 0.2,
    threads: Annotated[int, option("Threads of the model.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Serve an exported guard: POST /score, /health, Prometheus /metrics, a live page at /, OpenAPI at /docs.

    \b
    Examples:
      offmap serve g.onnx
      curl -H 'Content-Type: application/json' -d '{"inputs": [[0.1, 0.2]]}' http://127.0.0.1:8000/score
      OFFMAP_TOKEN=secret offmap serve g.onnx --host 0.0.0.0 --alert 0.1
    """  # noqa: D301
    for package in ("onnxruntime", "fastapi", "uvicorn", "prometheus_client"):
        require(package, "serve")
    from offmap.serve.app import Limits, run_server

    def on_ready(url: str) -> None:
        print_result(as_json, {"url": url, "file": file}, f"Serving {file} on {url} (page /, API /docs)")
        sys.stdout.flush()

    limits = Limits(max_bytes, max_rows, body_seconds, together, window, alert, token or None)
    run_server(file, host=host, port=port, limits=limits, on_ready=on_ready, threads=threads)
