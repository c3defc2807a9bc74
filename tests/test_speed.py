"""The page of speed is that of its records, and every ratio on it has one."""

import math

import pytest

from benchmarks import exponents, page, ratios, record
from benchmarks.__main__ import THEMES
from benchmarks.record import Claim, Measurement, Record

KEPT = {theme: kept for theme in THEMES if (kept := record.read(theme)) is not None}


def test_the_page_is_that_of_the_records():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(list(KEPT.values())), "run `python -m benchmarks table`"


@pytest.mark.parametrize("source", [source for cells in ratios.ROWS.values() for source in cells.values()], ids="-".join)
def test_a_ratio_is_that_of_a_record(source: ratios.Source):
    assert 0 < ratios.ratio(KEPT, source) < math.inf


def test_a_ratio_is_a_claim_or_one_best_time_over_another():
    times = [Measurement("slow", "s", 6.0, 8.0), Measurement("quick", "s", 2.0, 9.0)]
    records = {"race": Record("race", "", "", 1, times, [Claim("times faster", 5.0, "at least", 1.0)], {})}
    assert ratios.ratio(records, ("race", "times faster")) == 5.0
    assert ratios.ratio(records, ("race", "slow", "quick")) == 3.0


def test_what_was_not_measured_has_a_dash():
    header, rows = ratios.table({})
    assert len(header) == 1 + len(ratios.PEERS) + len(ratios.LIMITS)
    assert {cell for row in rows for cell in row[1:]} == {"–"}
    assert {column for cells in ratios.ROWS.values() for column in cells} <= {*ratios.PEERS, *ratios.LIMITS}


def test_exponents_are_the_slopes_of_what_was_measured():
    kept = KEPT["exponents"]
    slopes = {f"exponent, {name}": exponents.slope(seconds) for name, seconds in exponents.series_of(kept).items()}
    assert slopes == pytest.approx({claim.what: claim.value for claim in kept.claims}, abs=1e-3)
    assert all(len(seconds) == 4 for seconds in exponents.series_of(kept).values())
    assert {name.partition(", ")[2] for name in exponents.series_of(kept)} == {"rows", "draws", "weights", "members"}
