"""Optional packages: asked for when needed, and missed in one clear line."""

from __future__ import annotations

import importlib
from typing import Any

from offmap.errors import ConfigError

PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow", "laplace": "laplace-torch"}

SINGLE_PROCESS = {"laplace": "laplace-torch curvlinops-for-pytorch backpack-for-pytorch"}
"""What no extra may name, for it asks for torchvision and with it another torch: installed without what it asks for."""


def require(module: str, extra: str = "demo") -> Any:
    """An optional module, or a ConfigError that says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != root:
            raise
        alone = f" && pip install --no-deps {SINGLE_PROCESS[root]}" if root in SINGLE_PROCESS else ""
        raise ConfigError(
            f"{PACKAGES.get(root, root)} is needed here and is not installed: pip install 'offmap[{extra}]'{alone}"
        ) from error
