"""Figures and pages of experiments."""
