"""Promises put to the test: each module has a `CHECK`, whose trials differ by a seed and end well or raise.

`make test` runs the first few trials of each (`test_trials.py`); `make trust-run` runs all and keeps records.
"""
