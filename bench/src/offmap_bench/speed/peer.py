"""The authors' package, `maxwent`, through its own interface and its torch back-end."""

from __future__ import annotations

from typing import Any

import torch
from maxwent.tch import MaxWEnt, set_maxwent_model
from torch import Tensor, nn

from offmap.likelihoods import Gaussian
from offmap_bench.speed import subject


def model() -> Any:
    """The peer around the same net, with its SVD basis, ready for `fit` and `predict_std`."""
    peer = around(subject.net())
    peer.fit_svd(subject.table()["train"][0].numpy(), batch_size=subject.BATCH)
    random = [p for p in peer.network.parameters() if p.requires_grad]
    peer.compile(torch.optim.Adam(random, lr=1e-3), loss, metrics=[])
    return peer


def around(net: nn.Module) -> Any:
    """The peer around any net of linear layers."""
    return MaxWEnt(set_maxwent_model(net), lambda_=10.0)


def loss(output: Tensor, y: Tensor) -> Tensor:
    """The same negative log-likelihood as ours."""
    return Gaussian().nll(output.unsqueeze(0), y).mean()
