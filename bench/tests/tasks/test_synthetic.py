"""The paper's synthetic data are the authors' numbers, one by one."""

from __future__ import annotations

import numpy as np
import torch

from offmap_bench.tasks.synthetic import moons, regression, truth


def test_regression_points_are_those_of_the_authors_code():
    task = regression()
    torch.testing.assert_close(task.train[0][:3, 0], torch.tensor([-0.60856306, -0.40026546, -0.47170215]))
    torch.testing.assert_close(task.train[1][:3], torch.tensor([-0.2742185, -0.0505618, -0.07587872]))
    torch.testing.assert_close(task.train[0][50:52, 0], torch.tensor([0.62059147, 0.64612118]))
    torch.testing.assert_close(task.valid[0][:2, 0], torch.tensor([-0.42966899, -0.55981053]))
    torch.testing.assert_close(task.valid[1][:2], torch.tensor([-0.05036474, -0.27371953]))
    assert [len(part[0]) for part in (task.train, task.valid, task.test)] == [100, 20, 200]


def test_regression_noise_is_two_percent():
    x, y = regression(test=20_000).test
    residual = y.double().numpy() - truth(x[:, 0].double().numpy())
    assert abs(residual.std() - 0.02) < 0.001


def test_ood_regression_inputs_lie_beside_and_between():
    ood = regression().ood
    outside, gap = ood["outside"].abs(), ood["gap"]
    assert outside.min() >= 1.1
    assert outside.max() <= 1.5
    assert gap.min() >= -0.1
    assert gap.max() <= 0.4


def test_moons_are_those_of_the_authors_code():
    task = moons()
    torch.testing.assert_close(task.train[0][:2], torch.tensor([[0.29235735, 0.25264857], [1.13158315, -0.7138967]]))
    assert task.train[1][:6].tolist() == [0, 1, 1, 0, 1, 1]
    torch.testing.assert_close(task.valid[0][:2], torch.tensor([[-0.66812182, 0.66110286], [-0.34181361, -0.33887203]]))
    assert [len(part[0]) for part in (task.train, task.valid, task.test)] == [200, 50, 400]


def test_ood_points_keep_their_distance_from_the_moons():
    task = moons(distance=0.7)
    around = task.ood["off the moons"]
    assert torch.cdist(around, task.train[0]).min() > 0.7
    assert around.abs().max() <= 3
    assert len(around) == 1000


def test_parts_do_not_repeat_each_other():
    for task in (regression(), moons()):
        rows = np.concatenate([part[0].numpy() for part in (task.train, task.valid, task.test)])
        assert len(np.unique(rows, axis=0)) == len(rows)
