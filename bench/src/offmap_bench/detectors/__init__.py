"""Detectors that only serve as baselines."""
