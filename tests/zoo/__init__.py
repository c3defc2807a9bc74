"""A zoo of small models with inputs to call them on. All give two numbers: a mean and a log-variance, or two logits."""

from __future__ import annotations

from zoo import convolutions, customs, dense, sequences
from zoo.case import Case, Through

ZOO: dict[str, Case] = {case.name: case for case in (*dense.CASES, *convolutions.CASES, *sequences.CASES, *customs.CASES)}

__all__ = ["ZOO", "Case", "Through"]
