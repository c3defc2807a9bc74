"""Weights become distributions, distributions become outputs. Needs torch alone."""
