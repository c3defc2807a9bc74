"""Where a checkout of the repository keeps records and pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "bench" / "records"
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"  # pages that a command writes
