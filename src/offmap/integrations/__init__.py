"""Interfaces for scikit-learn and Lightning, each imported only when asked for."""
