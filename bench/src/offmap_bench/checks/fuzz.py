"""Fuzzing of everything that parses bytes: `python -m offmap_bench.checks.fuzz [TARGET ...] [--minutes 5]`.

Atheris (the extra `fuzz`) makes bytes by what they make the code do, beginning with valid files. Any error but one of ours is a
crash, as are hangs and more memory than LARGEST; runs go on after a crash and add up in `bench/records/fuzz/TARGET.json`.
What was found lies in `build/fuzz/TARGET`: `corpus` to go on with, `found` with the bytes of each crash. `make test` runs the
same readers on bytes that are changed at random (`bench/tests/faults/changed_bytes.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from offmap_bench.paths import RECORDS, ROOT

FOLDER = RECORDS / "fuzz"
WORK = ROOT / "build" / "fuzz"

LARGEST = 3000
"""Megabytes that a process may take; torch alone takes some hundreds."""

SLOWEST = 20
"""Seconds that one input may take."""

FOLLOWED = ["offmap", "json", "csv", "tomllib", "zipfile", "gzip"]
"""Packages whose branches guide the search."""


def inside(target: str) -> None:
    """In a process of its own: fuzz one reader, and keep the bytes of each kind of error once."""
    import atheris

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench/tests")]
    with atheris.instrument_imports(include=FOLLOWED):
        from faults.readers import READERS, attempt
    folder = Path(tempfile.mkdtemp(prefix="offmap-fuzz-"))
    for place, seed in enumerate(READERS[target].seeds(folder)):
        (WORK / target / "corpus" / f"seed-{place}").write_bytes(seed)

    def one(data: bytes) -> None:
        try:
            attempt(target, data, folder)
        except Exception as error:
            keep(target, data, error)

    atheris.Setup(sys.argv[:1] + sys.argv[3:], one)
    atheris.Fuzz()


def keep(target: str, data: bytes, error: Exception) -> None:
    """The bytes and the traceback, under a name made of the kind of error and where it arose."""
    where = [(line.filename, line.lineno) for line in traceback.extract_tb(error.__traceback__)][-3:]
    name = hashlib.sha256(repr((type(error).__name__, where)).encode()).hexdigest()[:12]
    path = WORK / target / "found" / name
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def run(target: str, minutes: float) -> None:
    """Fuzz one reader for so long, in as many processes as that takes, and add to its record."""
    for name in ("corpus", "found"):
        (WORK / target / name).mkdir(parents=True, exist_ok=True)
    record = read(target)
    end = time.monotonic() + 60 * minutes
    while (left := int(end - time.monotonic())) > 0:
        start = time.monotonic()
        said = subprocess.run(command(target, left), cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace").stderr
        (WORK / target / "log.txt").write_text(said, encoding="utf-8")
        if "number_of_executed_units" not in said and "ERROR: libFuzzer" not in said:
            raise RuntimeError(f"the fuzzer did not start:\n{said[-2000:]}")
        add(record, said, time.monotonic() - start)
        record["crashes"] = crashes(target)
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{target}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{target}: {record}", flush=True)


def command(target: str, seconds: int) -> list[str]:
    """A process of the fuzzer, with the limits that it keeps."""
    found = WORK / target / "found"
    limits = [f"-max_total_time={seconds}", f"-timeout={SLOWEST}", f"-rss_limit_mb={LARGEST}", "-max_len=65536"]
    started = [sys.executable, "-m", "offmap_bench.checks.fuzz", target, "--inside", "-print_final_stats=1", "-verbosity=1"]
    return [*started, *limits, f"-artifact_prefix={found}/", str(WORK / target / "corpus")]


def add(record: dict[str, Any], said: str, seconds: float) -> None:
    """What the fuzzer said at its end."""

    def last(pattern: str) -> int:
        return int((re.findall(pattern, said) or ["0"])[-1])

    record["executions"] += last(r"number_of_executed_units: (\d+)") or last(r"^#(\d+)\s")
    record["seconds"] += last(r"Done \d+ runs in (\d+) second") or round(seconds)
    record["features"] = max(record["features"], last(r"ft: (\d+)"))
    record["peak_mb"] = max(record["peak_mb"], last(r"peak_rss_mb: (\d+)") or last(r"rss: (\d+)Mb"))


def crashes(target: str) -> list[str]:
    """One line for each: the error, or what killed the process."""
    found = sorted((WORK / target / "found").iterdir())
    told = [path.read_text(encoding="utf-8").strip().splitlines()[-1][:200] for path in found if path.suffix == ".txt"]
    return told + [path.name for path in found if path.name.startswith(("crash-", "timeout-", "oom-"))]


def read(target: str) -> dict[str, Any]:
    """The record so far."""
    path = FOLDER / f"{target}.json"
    empty: dict[str, Any] = {"executions": 0, "seconds": 0, "features": 0, "peak_mb": 0, "crashes": []}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty


def main() -> None:
    """The command line."""
    if "--inside" in sys.argv:
        return inside(sys.argv[1])
    parser = argparse.ArgumentParser(prog="python -m offmap_bench.checks.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names of readers in bench/tests/faults/readers.py; all by default")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each")
    asked = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench/tests")]
    from faults.readers import READERS

    for target in asked.targets or READERS:
        if target not in READERS:
            parser.error(f"expected one of {', '.join(READERS)}, but got {target}")
        run(target, asked.minutes)


if __name__ == "__main__":
    main()
