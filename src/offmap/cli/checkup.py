"""What this installation is made of, and whether it works: versions, devices, threads, extras, and a fit on made-up data."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from offmap.evaluation import detection
from offmap.fit import fit
from offmap.integrations.mlp import mlp
from offmap.random import generator
from offmap.table import Table

NEEDED = ("torch", "numpy", "safetensors", "rich", "typer")
EXTRAS = {
    "scikit-learn": "estimators, and data of the demo",
    "matplotlib": "pages and figures",
    "lightning": "the Lightning callback",
    "pytorch-lightning": "the same under its older name",
    "transformers": "Hugging Face nets",
    "pyarrow": "Parquet tables",
    "onnxruntime": "exported guards",
    "fastapi": "offmap serve",
    "ray": "--engine ray",
}
"""Optional packages, and what they are for."""

ROWS = 200
LEAST_AUROC = 0.9
"""Inputs ten standard deviations away; less than this is no guard."""


@dataclass(frozen=True)
class Health:
    """Names to values, as they can be written to JSON; a package that is absent has no version."""

    versions: dict[str, str | None]
    devices: dict[str, str]
    threads: dict[str, Any]
    extras: dict[str, str | None]
    test: dict[str, Any]

    @property
    def well(self) -> bool:
        """Whether the self-test passed."""
        return bool(self.test["passed"])

    def record(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    def table(self) -> Table:
        """Everything as rows for reading."""
        extras = {name: version or f"not installed ({EXTRAS[name]})" for name, version in self.extras.items()}
        parts = {"version": self.versions, "device": self.devices, "threads": self.threads, "extra": extras, "test": self.test}
        return Table(
            [{"what": part, "name": name, "value": _text(v)} for part, values in parts.items() for name, v in values.items()]
        )


def examine_installation(*, seed: int = 0) -> Health:
    """Look at what is there, and try it."""
    from offmap import __version__

    versions = {"offmap": __version__, "python": platform.python_version(), **{name: version_of(name) for name in NEEDED}}
    threads = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }
    return Health(versions, devices(), threads, {name: version_of(name) for name in EXTRAS}, self_test(seed))


def version_of(package: str) -> str | None:
    """The version of an installed package.

    >>> version_of("a-package-that-nobody-has") is None
    True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> dict[str, str]:
    """Where models can run, by torch's names."""
    found = {"cpu": platform.processor() or platform.machine()}
    found |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return found | ({"mps": "Apple"} if torch.backends.mps.is_available() else {})


def self_test(seed: int = 0) -> dict[str, Any]:
    """Guard a net whose own outputs are the targets, and see whether far inputs look OOD; what goes wrong is told."""
    start = time.perf_counter()
    try:
        source = generator(seed, "doctor")
        net = mlp(4, 1, hidden=(16, 16), seed=seed)
        x = torch.randn(3 * ROWS, 4, generator=source, device="cpu")
        with torch.no_grad():
            y = net(x)[:, 0] + 0.1 * torch.randn(len(x), generator=source, device="cpu")
        rows = [(x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, len(x), ROWS)]
        guard = fit(net, rows[0], rows[1], solver="closed-form", draws=20, seed=seed, progress=False)
        auroc = detection(guard.score(rows[2][0]), guard.score(rows[2][0] + 10))["auroc"]
    except Exception as error:  # whatever it is, the user should read it here
        return {"passed": False, "seconds": time.perf_counter() - start, "error": f"{type(error).__name__}: {error}"}
    return {"passed": auroc >= LEAST_AUROC, "seconds": time.perf_counter() - start, "auroc": auroc}


def _text(value: Any) -> str:
    words = {True: "yes", False: "no", None: "not set"}
    return (
        words[value] if value is None or isinstance(value, bool) else f"{value:.2f}" if isinstance(value, float) else str(value)
    )
