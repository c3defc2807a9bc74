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

ROWS = 200
MIN_AUROC = 0.9
"""For inputs that are ten standard deviations away."""


def doctor(as_json: Json = False) -> None:
    """Show versions, devices, threads and optional packages, and test a small fit. Example: offmap doctor --json"""
    record = examine_installation()
    print_result(as_json, record, str(to_table(record)))
    if not record["test"]["passed"]:
        raise typer.Exit(1)


def to_table(record: dict[str, dict[str, Any]]) -> Table:
    """Return a row for each version, device, thread setting, extra and test result."""
    rows: list[dict[str, str]] = []
    for part, values in record.items():
        for name, value in values.items():
            absent = f"not installed ({EXTRAS[name]})" if part == "extras" else "not set"
            rows.append({"what": part.removesuffix("s"), "name": name, "value": absent if value is None else _format(value)})
    return Table(rows)


def examine_installation(*, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return versions, devices, threads, extras and the result of a test; the version of an absent package is None."""
    versions = {"offmap": __version__, "python": platform.python_version()} | {name: find_version(name) for name in REQUIRED}
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
        "extras": {name: find_version(name) for name in EXTRAS},
        "test": self_test(seed),
    }


def find_version(package: str) -> str | None:
    """Return the version of an installed package.

    >>> find_version("a-package-that-nobody-has") is None
    True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def self_test(seed: int = 0) -> dict[str, Any]:
    """Fit a guard to a model's own outputs, and test whether far inputs are detected; an error is part of the result."""
    start = time.perf_counter()
    try:
        source = generator(seed, "doctor")
        model = mlp(4, 1, hidden=(16, 16), seed=seed)
        x = torch.randn(3 * ROWS, 4, generator=source, device="cpu")
        with torch.no_grad():
            y = model(x)[:, 0] + 0.1 * torch.randn(len(x), generator=source, device="cpu")
        train, valid, test = ((x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, len(x), ROWS))
        guard = fit(model, train, valid, solver="closed-form", draws=20, seed=seed, progress=False)
        auroc = measure_separation(guard.score(test[0]), guard.score(test[0] + 10))["auroc"]
    except Exception as error:  # whatever it is, the user should read it here
        return {"passed": False, "seconds": time.perf_counter() - start, "error": f"{type(error).__name__}: {error}"}
    return {"passed": auroc >= MIN_AUROC, "seconds": time.perf_counter() - start, "auroc": auroc}


def _format(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.2f}" if isinstance(value, float) else str(value)
