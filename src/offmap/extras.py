"""Optional packages: imported when needed, with one clear line if they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from offmap.errors import ConfigError


def require(module: str, extra: str, *, package: str = "offmap", no_deps: str = "") -> Any:
    """Import an optional module, or raise a ConfigError that says what to install: the `extra` of a `package`.

    Packages in `no_deps` are to be installed without their dependencies, since these would bring another torch.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != root:
            raise
        command = f"pip install '{package}[{extra}]'" + (f" && pip install --no-deps {no_deps}" if no_deps else "")
        packages = {"sklearn": "scikit-learn", "PIL": "pillow", "laplace": "laplace-torch"}  # modules called otherwise
        raise ConfigError(f"{packages.get(root, root)} is needed here and is not installed: {command}") from error
