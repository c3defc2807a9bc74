"""Distances in hidden layers against loops over plain layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from offmap.detectors.input_distance import shrunk_covariance
from offmap.errors import ConfigError, DataError, ModelError
from offmap.integrations.nets import mlp
from offmap.posterior.predictive import Scorer
from offmap_bench.detectors import hidden as module
from offmap_bench.detectors.hidden import hidden_layers, hidden_mahalanobis, hidden_nearest
from trained import inputs

NET = mlp(3, 2, hidden=[8, 5], seed=1)
TRAIN, X = inputs(40, 0), 2 * inputs(7, 1)


def by_hand(x: Tensor, train: Tensor = TRAIN) -> Tensor:
    """Both hidden layers, each divided by the root of its total variance on the training rows."""
    sides = []
    for depth in (2, 4):
        h, seen = NET[:depth](x).detach(), NET[:depth](train).detach()
        spread = math.sqrt(sum(float((seen[:, d] - seen[:, d].mean()).square().mean()) for d in range(seen.shape[1])))
        sides.append(h / spread)
    return torch.cat(sides, 1)


@pytest.mark.parametrize("k", [1, 3])
def test_the_nearest_row_is_that_of_a_full_search(k: int) -> None:
    rows, train = by_hand(X), by_hand(TRAIN)
    slow = torch.tensor([sorted((one - row).norm().item() for row in train)[k - 1] for one in rows])
    torch.testing.assert_close(hidden_nearest(NET, TRAIN, k=k).score(X), slow, rtol=1e-4, atol=1e-6)


def test_mahalanobis_is_the_quadratic_form_in_units_of_the_layers() -> None:
    train = by_hand(TRAIN)
    spread = train.double().std(0, correction=0)
    scale = torch.where(spread > 0, spread, 1.0)
    rows, inverse = train / scale, torch.linalg.inv(shrunk_covariance(train / scale))
    gaps = by_hand(X) / scale - rows.double().mean(0)
    slow = torch.stack([(gap @ inverse @ gap).sqrt() for gap in gaps])
    torch.testing.assert_close(hidden_mahalanobis(NET, TRAIN).score(X), slow.float(), rtol=1e-3, atol=1e-4)


def test_a_training_row_is_at_no_distance_and_far_inputs_are_farther() -> None:
    scorer = hidden_nearest(NET, TRAIN)
    assert isinstance(scorer, Scorer)
    assert scorer.score(TRAIN).abs().max() < 1e-5
    assert hidden_nearest(NET, TRAIN).score(50 * X).min() > scorer.score(X).max()


def test_some_layers_can_be_named() -> None:
    assert list(hidden_layers(NET, TRAIN).spread) == ["2.weight", "4.weight"]
    only = hidden_nearest(NET, TRAIN, names=["4.weight"])
    seen, h = NET[:4](TRAIN).detach(), NET[:4](X).detach()
    slow = torch.stack([(seen - one).norm(dim=1).min() for one in h]) / seen.var(0, correction=0).sum().sqrt()
    torch.testing.assert_close(only.score(X), slow, rtol=1e-4, atol=1e-6)
    assert list(hidden_layers(NET, TRAIN, ["0.weight"]).spread) == ["0.weight"]  # the inputs themselves, if asked for


def test_scores_do_not_depend_on_the_block_or_on_company(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hidden_nearest(NET, TRAIN).score(X)
    monkeypatch.setattr(module, "STEP", 3)
    torch.testing.assert_close(hidden_nearest(NET, TRAIN).score(X), whole)
    torch.testing.assert_close(hidden_nearest(NET, TRAIN).score(X[2:3]), whole[2:3])


def test_the_model_stays_as_it_was_and_later_changes_do_not_matter() -> None:
    net = mlp(3, 2, hidden=[8, 5], dropout=0.5, seed=1).train()
    scorer = hidden_nearest(net, TRAIN)
    assert net.training
    before = scorer.score(X)
    nn.init.zeros_(net[0].weight)
    torch.testing.assert_close(scorer.score(X), before)  # nothing is dropped either


def test_units_that_do_not_vary_do_no_harm() -> None:
    net = mlp(3, 1, hidden=[4])
    nn.init.constant_(net[0].bias, -1e3)  # all dead
    assert torch.equal(hidden_nearest(net, TRAIN).score(X), torch.zeros(7))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="Expected `names` of matrices to be one of .*4.weight.*, but got '5.weight'"):
        hidden_nearest(NET, TRAIN, names=["5.weight"])
    with pytest.raises(ModelError, match="Expected a model with hidden layers that have one row per input, but Linear has none"):
        hidden_nearest(nn.Linear(3, 1), TRAIN)
    with pytest.raises(ModelError, match="Sequential failed on inputs of shape"):
        hidden_nearest(NET, TRAIN).score(inputs(4, 0, features=2))
    with pytest.raises(DataError, match="Expected at least two training rows, but got 1"):
        hidden_mahalanobis(NET, TRAIN[:1])
    with pytest.raises(DataError, match="Expected at least one input, but got none"):
        hidden_nearest(NET, TRAIN).score(X[:0])
    with pytest.raises(DataError, match="the inputs"):
        hidden_nearest(NET, TRAIN).score(X * math.nan)
    with pytest.raises(ConfigError, match="Expected `k` from 1 to the number of rows, 40, but got 41"):
        hidden_nearest(NET, TRAIN, k=41)
    with pytest.raises(ConfigError, match="Expected `shrinkage` from 0 to 1"):
        hidden_mahalanobis(NET, TRAIN, shrinkage=2.0)
