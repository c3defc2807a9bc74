"""Checks of the project itself: trials of its promises, fuzzing, coverage, mutants, bill of materials. `make` has their targets.

Modules run as `PYTHONPATH=bench/tests python -m checks.NAME` in a checkout: they need its tests, records and pins.
"""
