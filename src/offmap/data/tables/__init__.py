"""A user's tables and images as streams of rows: one file for each format, found by the suffix of a path."""

from offmap.data.tables import csv, npz, parquet

__all__ = ["csv", "npz", "parquet"]
