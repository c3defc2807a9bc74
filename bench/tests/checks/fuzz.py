"""Fuzzing of everything that parses bytes: `python -m checks.fuzz [TARGET ...] [--minutes 5]`.

Atheris (the extra `fuzz`) makes bytes by what they make the code do, beginning with valid files. Any error but one of ours is a
crash, as are 20 seconds for one input and 3 GB of memory; runs go on after a crash and add up in `bench/records/fuzz.jsonl`. In
`build/fuzz/TARGET` are `corpus` to go on with, and `found` with the bytes of each crash. `make test` runs the same readers on
bytes that are changed at random (`bench/tests/faults/changed_bytes.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from checks import records
from offmap_bench.paths import ROOT

WORK = ROOT / "build" / "fuzz"
COUNTS = ("executions", "seconds", "features", "peak_mb", "crashes")
sys.path.insert(0, str(ROOT / "tests"))


def fuzz(target: str) -> None:
    """In a process of its own: fuzz one reader, and keep the bytes of each kind of error once."""
    import atheris

    with atheris.instrument_imports(include=["offmap", "offmap_bench", "json", "csv", "tomllib", "zipfile", "gzip"]):
        from faults.readers import READERS, attempt
    folder = Path(tempfile.mkdtemp(prefix="offmap-fuzz-"))
    for place, seed in enumerate(READERS[target].seeds(folder)):
        (WORK / target / "corpus" / f"seed-{place}").write_bytes(seed)

    def one(data: bytes) -> None:
        try:
            attempt(target, data, folder)
        except Exception as error:
            where = [(line.filename, line.lineno) for line in traceback.extract_tb(error.__traceback__)][-3:]
            name = hashlib.sha256(repr((type(error).__name__, where)).encode()).hexdigest()[:12]
            path = WORK / target / "found" / name
            if not path.exists():
                path.write_bytes(data)
                path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")

    atheris.Setup(sys.argv[:1] + sys.argv[3:], one)
    atheris.Fuzz()


def run(target: str, minutes: float) -> None:
    """Fuzz one reader for so long, in as many processes as that takes, and add to its record."""
    corpus, crashed = WORK / target / "corpus", WORK / target / "found"
    for folder in (corpus, crashed):
        folder.mkdir(parents=True, exist_ok=True)
    entries = {entry["name"]: entry for entry in records.read("fuzz")}
    zeros = dict.fromkeys(("executions", "seconds", "features", "peak_mb"), 0)
    record = entries.setdefault(target, {"name": target, "crashes": [], **zeros})
    command = [sys.executable, "-m", "checks.fuzz", target, "--inside", "-print_final_stats=1", "-verbosity=1"]
    command += ["-timeout=20", "-rss_limit_mb=3000", "-max_len=65536", f"-artifact_prefix={crashed}/"]
    end = time.monotonic() + 60 * minutes
    while (left := int(end - time.monotonic())) > 0:
        start = time.monotonic()
        words = [*command, f"-max_total_time={left}", str(corpus)]
        log = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace").stderr
        (WORK / target / "log.txt").write_text(log, encoding="utf-8")
        if "number_of_executed_units" not in log and "ERROR: libFuzzer" not in log:
            raise RuntimeError(f"the fuzzer did not start:\n{log[-2000:]}")
        add(record, log, time.monotonic() - start)
        files = sorted(crashed.iterdir())
        errors = [path.read_text(encoding="utf-8").strip().splitlines()[-1][:200] for path in files if path.suffix == ".txt"]
        record["crashes"] = errors + [p.name for p in files if p.name.startswith(("crash-", "timeout-", "oom-"))]
        records.write("fuzz", (entries[name] for name in sorted(entries)))
    print(f"{target}: {record}", flush=True)


def add(record: dict[str, Any], log: str, seconds: float) -> None:
    """Add what the fuzzer printed at its end."""

    def last(pattern: str) -> int:
        return int((re.findall(pattern, log) or ["0"])[-1])

    record["executions"] += last(r"number_of_executed_units: (\d+)") or last(r"^#(\d+)\s")
    record["seconds"] += last(r"Done \d+ runs in (\d+) second") or round(seconds)
    record["features"] = max(record["features"], last(r"ft: (\d+)"))
    record["peak_mb"] = max(record["peak_mb"], last(r"peak_rss_mb: (\d+)") or last(r"rss: (\d+)Mb"))


def main() -> None:
    if "--inside" in sys.argv:
        return fuzz(sys.argv[1])
    from faults.readers import READERS

    parser = argparse.ArgumentParser(prog="python -m checks.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names of readers in bench/tests/faults/readers.py; all by default")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each")
    asked = parser.parse_args()
    for target in asked.targets or READERS:
        if target not in READERS:
            parser.error(f"expected one of {', '.join(READERS)}, but got {target}")
        run(target, asked.minutes)


if __name__ == "__main__":
    main()
