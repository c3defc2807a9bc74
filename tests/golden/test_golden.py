"""Every golden case gives the numbers that `golden.json` holds.

Within one machine and version of torch all cases repeat to the bit, and `OFFMAP_GOLDEN=bits` asks for that: all digits that are
recorded. By default rounding is allowed for, as another order of sums, other instructions of a processor or other chunks make it.
How much that is was measured with vector instructions switched off (`ATEN_CPU_CAPABILITY=default`): rounding of 1e-7 reaches

    2e-5   after a fit: draws are differences of trained outputs, and gradient steps carry rounding along
    1e-4   in scores, thresholds and their parts: the logarithm of a small variance between draws, over its spread on few rows

Whole numbers, verdicts and sets are compared exactly. SENSITIVE names what rounding changes more, and why.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from golden.cases import CASES
from golden.record import FILE, to_plain

BITS = os.environ.get("OFFMAP_GOLDEN") == "bits"
UNIT = 1e-6

DIRECT = ("draws_", "metrics")
"""Cases without a fit."""

LOGARITHMS = ("score", "threshold", "part ", "score_samples", "decision_function", "far score", "identity score", "uncertainty")

SENSITIVE: dict[str, tuple[float, tuple[str, ...], str]] = {
    "config_paper": (1e-3, ("part ", "score"), "few steps from φ = 5e-5: draws differ in their last digits alone"),
    "config_reference": (1e-3, ("part ", "score"), "few steps from φ = 5e-5: draws differ in their last digits alone"),
    "distill": (0.7, ("score", "threshold", "p_value", "ood"), "the head is trained for long on few rows, and is chaotic"),
    "distill_of_images": (0.7, ("score", "threshold", "p_value", "ood"), "the head is trained for long on few rows"),
}
"""{case: (relative tolerance, beginnings of keys, reason)}."""


def test_sensitive_names_cases() -> None:
    assert SENSITIVE.keys() <= CASES.keys()


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, Any]]:
    return json.loads(Path(FILE).read_text(encoding="utf-8"))


def tolerance_of(case: str, key: str) -> float:
    """The tolerance of a key, relative and absolute."""
    if case in SENSITIVE and key.startswith(SENSITIVE[case][1]):
        return SENSITIVE[case][0]
    if case.startswith(DIRECT):
        return UNIT
    return 100 * UNIT if any(word in key for word in LOGARITHMS) else 20 * UNIT


def flat(value: Any) -> list[float | int]:
    """Numbers of nested lists, one after another."""
    if isinstance(value, list):
        return [number for each in value for number in flat(each)]
    return [float(value) if isinstance(value, str) else value]


def shape(value: Any) -> tuple[int, ...]:
    return (len(value), *(shape(value[0]) if value else ())) if isinstance(value, list) else ()


def difference(key: str, now: Any, then: Any, tolerance: float) -> str | None:
    """What differs, in words, if anything does."""
    if shape(now) != shape(then):
        return f"{key}: the shape is {shape(now)}, and was {shape(then)}"
    exact = BITS or (tolerance < 0.1 and all(isinstance(number, int) for number in flat(then)))
    found = []
    for place, (a, b) in enumerate(zip(flat(now), flat(then), strict=True)):
        same = a == b or (math.isnan(a) and math.isnan(b))
        near = not exact and math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))
        if not same and not near:
            found.append((abs(a - b) / max(1.0, abs(b)), place, a, b))
    if not found:
        return None
    most, place, a, b = max(found, key=lambda each: -math.inf if math.isnan(each[0]) else each[0])
    words = f"{len(found)} of {len(flat(now))} numbers differ, most at {place}: {a:.9g}, and was {b:.9g}"
    return f"{key}: {words} ({most:.1e}; {'exact' if exact else f'{tolerance:.0e}'} asked for)"


def compare(case: str, now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """All that differs."""
    found = [f"{key}: is new" for key in now if key not in then] + [f"{key}: is gone" for key in then if key not in now]
    both = [key for key in now if key in then]
    return found + [word for key in both if (word := difference(key, now[key], then[key], tolerance_of(case, key)))]


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, golden: dict[str, dict[str, Any]]) -> None:
    now = {key: to_plain(value) for key, value in CASES[case]().items()}
    found = compare(case, now, golden[case])
    reason = f"\n({SENSITIVE[case][2]})" if case in SENSITIVE else ""
    assert not found, f"{case}: {len(found)} of {len(now)} keys differ\n" + "\n".join(found) + reason


def test_every_record_has_its_case(golden: dict[str, dict[str, Any]]) -> None:
    assert list(golden) == list(CASES)


def test_differences_are_named_with_key_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BITS", False)
    assert compare("x", {"mean": [1.0, 2.0]}, {"mean": [1.0, 2.00001]}) == []
    (word,) = compare("x", {"mean": [1.0, 2.0]}, {"mean": [1.0, 2.5]})
    assert word.startswith("mean: 1 of 2 numbers differ, most at 1: 2, and was 2.5 (2.0e-01; ")
    assert compare("x", {"ood": [1, 0]}, {"ood": [1, 1]}) == [
        "ood: 1 of 2 numbers differ, most at 1: 0, and was 1 (1.0e+00; exact asked for)"
    ]
    assert compare("x", {"a": ["nan", "inf"]}, {"a": ["nan", "inf"]}) == []
    assert len(compare("x", {"a": "inf"}, {"a": 1.0})) == 1
    assert compare("x", {"a": [1.0]}, {"b": [1.0]}) == ["a: is new", "b: is gone"]
    assert compare("x", {"a": [1.0]}, {"a": [1.0, 2.0]}) == ["a: the shape is (1,), and was (2,)"]
