"""A file larger than the memory that scoring it may take."""

from __future__ import annotations

import pytest

from offmap_bench.speed import measure, processes

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'offmap[parquet]'")


def test_the_record_of_five_million_rows_keeps_its_claims():
    record = measure.read("command")
    assert record is not None
    assert [claim.what for claim in record.claims if not claim.met] == []
    assert any("5,000,000 rows" in claim.what and claim.target <= 1000 for claim in record.claims)


@pytest.mark.slow
def test_five_million_rows_are_scored_in_less_than_a_gigabyte(tmp_path):
    processes.prepare_small(tmp_path)
    found = processes.score_large(tmp_path, *processes.CASES[1])
    assert found.size > 400
    assert found.peak < processes.LIMIT
