"""Handwritten digits: known ones are split in three, unknown ones kept apart."""

from __future__ import annotations

import torch

from offmap_bench.tasks.synthetic import digits


def test_known_digits_are_split_and_unknown_ones_kept_apart():
    task = digits()
    parts = (task.train, task.valid, task.test)
    assert [len(x) for x, _ in parts] == [541, 180, 180]
    assert len(task.ood["digits 5–9"]) == 896
    for x, y in parts:
        assert (x.min(), x.max()) == (0, 1)
        assert y.unique().tolist() == [0, 1, 2, 3, 4]
    assert task.inputs == 64


def test_seed_alone_decides_the_split():
    assert torch.equal(digits(seed=3).train[0], digits(seed=3).train[0])
    assert not torch.equal(digits(seed=3).train[0], digits(seed=4).train[0])
