"""The page about models tells what is found today."""

from __future__ import annotations

import zoo_table
from zoo import ZOO
from zoo_table import PAGE


def test_the_committed_page_of_models_is_what_the_library_finds():
    assert PAGE.read_text(encoding="utf-8") == zoo_table.page(), "run `python tests/zoo_table.py` and look at the difference"


def test_the_zoo_is_large_and_every_host_says_what_it_shows():
    assert len(ZOO) >= 45
    assert all(case.shows for case in ZOO.values())
    assert len({case.shows for case in ZOO.values()}) == len(ZOO)
