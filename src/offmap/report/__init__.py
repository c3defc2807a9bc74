"""Evaluations and arrays become figures, tables, and one self-contained HTML page. Nothing is trained here."""
