"""Checks of the project itself: fault trials, fuzzing, coverage, mutants, bill of materials."""
