"""`offmap doctor`: versions, devices, threads and optional packages of this installation, and a small fit that tests it."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from typing import Any

import torch
import typer

from offmap._version import __version__
from offmap.cli.options import Json, print_result
from offmap.evaluation import measure_separation
from offmap.fit import fit
from offmap.integrations.nets import mlp
from offmap.random import generator
from offmap.table import Table

REQUIRED = ("torch", "numpy", "safetensors", "rich", "typer")
EXTRAS = {
    "scikit-learn": "estimators, and data of the demo",
    "matplotlib": "pages and figures",
    "lightning": "the Lightning callback",
    "pytorch-lightning": "the same under its older name",
    "transformers": "Hugging Face models",
    "pyarrow": "Parquet tables",
    "pillow": "folders of images",
    "onnxruntime": "exported guards",
    "fastapi": "offmap serve",
    "ray": "--engine ray",
}
"""Optional packages, and what they are for."""


def doctor(as_json: Json = False) -> None:
    """Check the installation, with a small fit. Example: offmap doctor --json"""
    record = examine_installation()
    rows = [
        {"what": part.removesuffix("s"), "name": name, "value": _format(name, value)}
        for part, values in record.items()
        for name, value in values.items()
    ]
    print_result(as_json, record, str(Table(rows)))
    if not record["test"]["passed"]:
        raise typer.Exit(1)


def examine_installation() -> dict[str, dict[str, Any]]:
    """Return versions, devices, threads, extras and the result of a test; the version of an absent package is None."""
    versions = {"offmap": __version__, "python": platform.python_version()} | {name: _find_version(name) for name in REQUIRED}
    devices = {"cpu": platform.processor() or platform.machine()}
    devices |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return {
        "versions": versions,
        "devices": devices | ({"mps": "Apple"} if torch.backends.mps.is_available() else {}),
        "threads": {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch": torch.get_num_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
        "extras": {name: _find_version(name) for name in EXTRAS},
        "test": self_test(),
    }


def self_test() -> dict[str, Any]:
    """Fit a guard to a model's own outputs, and test whether far inputs are detected; an error is part of the result."""
    start, rows = time.perf_counter(), 200
    try:
        source, model = generator(0, "doctor"), mlp(4, 1, hidden=(16, 16), seed=0)
        x = torch.randn(3 * rows, 4, generator=source, device="cpu")
        with torch.no_grad():
            y = model(x)[:, 0] + 0.1 * torch.randn(len(x), generator=source, device="cpu")
        train, valid, test = zip(x.split(rows), y.split(rows), strict=True)
        guard = fit(model, train, valid, solver="closed-form", draws=20, progress=False)
        auroc = measure_separation(guard.score(test[0]), guard.score(test[0] + 10))["auroc"]
    except Exception as error:  # whatever it is, the user should read it here
        return {"passed": False, "seconds": time.perf_counter() - start, "error": f"{type(error).__name__}: {error}"}
    return {"passed": auroc >= 0.9, "seconds": time.perf_counter() - start, "auroc": auroc}  # of inputs ten deviations away


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _format(name: str, value: Any) -> str:
    if value is None:
        return f"not installed ({EXTRAS[name]})" if name in EXTRAS else "not set"
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.2f}" if isinstance(value, float) else str(value)
