"""`offmap serve`: an exported guard behind HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offmap.cli.options import Json, tell
from offmap.extras import require


def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .onnx that `Guard.export` wrote.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="OFFMAP_TOKEN", help="Asked for as `Authorization: Bearer TOKEN`.", show_default=False)
    ] = None,
    most_bytes: Annotated[int, typer.Option(min=1, help="Of one request's body.")] = 8_000_000,
    most_rows: Annotated[int, typer.Option(min=1, help="Of one request.")] = 4096,
    body_seconds: Annotated[float, typer.Option(min=0.1, help="In which a header, and then its body, must have come.")] = 10.0,
    together: Annotated[int, typer.Option(min=1, help="Rows of waiting requests that are run in one call.")] = 256,
    window: Annotated[int, typer.Option(min=1, help="Rows in the rolling share.")] = 1000,
    alert: Annotated[float, typer.Option(min=0, max=1, help="Rolling share of off-map rows above which is alarm.")] = 0.2,
    threads: Annotated[int, typer.Option(min=1, help="Of the model.")] = 1,
    as_json: Json = False,
) -> None:
    """Serve an exported guard: POST /score, /health, Prometheus /metrics, a live page at /, OpenAPI at /docs.

    \b
    Examples:
      offmap serve g.onnx
      curl -H 'Content-Type: application/json' -d '{"inputs": [[0.1, 0.2]]}' http://127.0.0.1:8000/score
      OFFMAP_TOKEN=secret offmap serve g.onnx --host 0.0.0.0 --alert 0.1
    """  # noqa: D301
    for package in ("onnxruntime", "fastapi", "uvicorn"):
        require(package, "serve")
    from offmap.serve.app import Limits
    from offmap.serve.run import serve as run

    def say(url: str) -> None:
        tell(as_json, {"url": url, "file": file}, f"Serving {file} on {url} (page /, API /docs)")
        sys.stdout.flush()

    limits = Limits(most_bytes, most_rows, body_seconds, together, window, alert, token or None)
    run(file, host=host, port=port, limits=limits, say=say, threads=threads)
