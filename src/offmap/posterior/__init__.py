"""The weight distribution: w = w̄ + V·clip(φ ⊙ z, c)."""
