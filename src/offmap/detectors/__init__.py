"""Scorers that need no sampled weights, one file each, function first."""
