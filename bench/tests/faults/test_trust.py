"""Trials are repeated by a seed, and what came of it is kept and shown."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from checks import records, trust
from checks.trust import Outcomes


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Records of two checks, and a list of what is tried again: trials of seeds from 20 fail."""
    asked: list[tuple[str, list[int]]] = []

    def try_seeds(name: str, seeds: list[int], patience: float) -> Iterator[tuple[int, str, str | None, float]]:
        asked.append((name, seeds))
        for seed in seeds:
            yield seed, "held", f"AssertionError: {seed}" if seed >= 20 else None, 0.0

    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(trust, "CHECKS", ("rescaled", "soak", "degenerate"))
    monkeypatch.setattr(trust, "try_seeds", try_seeds)
    trust.write(Outcomes("rescaled", 40, {"alike": 38}, {"3": "no", "5": "no"}, 20.0))
    trust.write(Outcomes("soak", 2, {"level": 2}, {}, 1.0))
    return asked


def test_a_tenth_of_the_trials_on_record_is_repeated_and_kept(tried: list[tuple[str, list[int]]]):
    failed = trust.again(["soak", "rescaled", "degenerate"])
    again = dict(tried)
    assert {name: len(seeds) for name, seeds in again.items()} == {"rescaled": 4, "soak": 1}  # one at least, of those on record
    assert len(set(again["rescaled"])) == 4
    assert set(again["rescaled"]) <= set(range(40))
    late = {name: {str(s): f"AssertionError: {s}" for s in seeds if s >= 20} for name, seeds in again.items()}
    repeated = {entry["name"]: entry["repeated"] for entry in records.read("trust")}
    assert list(repeated) == ["rescaled", "soak"]
    assert {n: (r["trials"], r["failures"]) for n, r in repeated.items()} == {n: (len(s), late[n]) for n, s in again.items()}
    assert failed == len(late["rescaled"]) == 2


def test_the_same_seed_repeats_the_same_trials_and_other_checks_are_kept(tried: list[tuple[str, list[int]]]):
    trust.again(["rescaled", "soak"])
    before = trust.read("soak")
    trust.again(["rescaled"])
    assert tried[0] == tried[2]
    assert trust.read("soak") == before


def test_the_page_shows_trials_and_repetitions_and_what_has_none(tried: list[tuple[str, list[int]]]):
    assert "In all 42 trials and 2 failures." in trust.page()
    trust.again(["rescaled"])
    row, soak, none = (line for line in trust.page().splitlines() if line.startswith("| ") and "(`" in line)
    assert row.endswith("| 40 | alike: 38 | 2 | 0.50 | 4 | 2 |")
    assert soak.endswith("| 2 | level: 2 | 0 | 0.50 | – | – |")
    assert none.endswith("| 0 |  | 0 | – | – | – |")
    assert "In all 42 trials and 2 failures; repeated 4, with 2 failures, in 0 minutes." in trust.page()


def test_failed_trials_are_run_again_and_replaced(tried: list[tuple[str, list[int]]]):
    assert trust.run(["rescaled"], failed=True) == 0
    assert tried == [("rescaled", [3, 5])]
    assert trust.read("rescaled") == Outcomes("rescaled", 40, {"alike": 38, "held": 2}, {}, 20.0)
