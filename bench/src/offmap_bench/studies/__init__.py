"""Studies behind single pages of the documentation."""
