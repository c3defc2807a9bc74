"""The table of promises: each with the tests that hold it and the last figures, declared in `templates/promises.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Any

from offmap_bench.checks import trust
from offmap_bench.paths import DOCS
from offmap_bench.studies.study import TEMPLATES

PROMISES: list[dict[str, Any]] = tomllib.loads((TEMPLATES / "promises.toml").read_text(encoding="utf-8"))["promise"]


def render(cell: Callable[..., str]) -> str:
    """Promise, tests and figures as Markdown; `cell` reads one of a page."""
    models = re.findall(r"^\| \w+ \| .* \| (?:vmap|loop) \|$", (DOCS / "hosts.md").read_text("utf-8"), re.MULTILINE)
    lines = ["| promise | held by | last measured |", "|---|---|---|"]
    for promise in PROMISES:
        tests = "<br>".join(f"`{test}`" for test in promise["tests"])
        figures = [describe_trials(name) for name in promise.get("trials", ()) if trust.read(name).done]
        cells = {key: cell(*source) for key, source in promise.get("cells", {}).items()}
        figures += [promise["figure"].format(zoo=f"{len(models):,}", **cells)] if "figure" in promise else []
        lines.append(f"| **{promise['name']}.** {promise['sentence']} | {tests} | {'<br>'.join(figures)} |")
    return "\n".join(lines)


def describe_trials(name: str) -> str:
    """Trials on record, and how many of them failed."""
    found = trust.read(name)
    hangs = sum(failure.startswith("hang") for failure in found.failures.values())
    return f"[{name}](trust.md): {found.done:,} trials, {len(found.failures)} failures, {hangs} hangs"
