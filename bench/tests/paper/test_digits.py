"""Unknown handwritten digits: the SVD guard against the plain net's entropy, five seeds of nets and splits."""

from __future__ import annotations

import torch

import offmap
from offmap.data import Place, as_batches, load_rows
from offmap.integrations.nets import mlp
from offmap.likelihoods import Categorical
from offmap.metrics import auroc
from offmap_bench.methods import deep_ensemble
from offmap_bench.tasks.synthetic import digits

SEEDS = range(5)


def test_svd_guard_beats_the_plain_entropy_by_a_point_and_keeps_accuracy():
    gains, losses = [], []
    for seed in SEEDS:
        task = digits(seed=seed)
        ood = task.ood["digits 5–9"]
        net = mlp(64, 5, hidden=(100, 100), seed=seed)
        place = Place.of(net)
        train, valid = (
            as_batches(task.train, place, name="train", batch_size=32),
            load_rows(as_batches(task.valid, place, name="valid")),
        )
        plain = deep_ensemble.fit(net, train, valid, likelihood=Categorical(), config=deep_ensemble.Config(steps=1500), seed=seed)
        baseline = offmap.guard(plain, task.valid, score="paper")
        guard = offmap.fit(plain.nets()[0], task.train, task.valid, score="paper", seed=seed)
        x, y = task.test
        area = [float(auroc(g.score(x), g.score(ood))) for g in (guard, baseline)]
        accuracy = [float((g.predict(x).label == y).float().mean()) for g in (guard, baseline)]
        gains.append(area[0] - area[1])
        losses.append(accuracy[1] - accuracy[0])
    assert torch.tensor(gains).mean() >= 0.01
    assert torch.tensor(losses).mean() <= 0.005
