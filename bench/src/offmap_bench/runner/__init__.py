"""Experiments as data: a plan becomes cells, cells become records, records become tables."""
