"""Tables that are looked up by index: one-hot inputs, so the amplitude is how often each row is asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offmap.maxwent.search import unit_scale
from offmap.model.params import stack_models
from offmap.posterior.basis import observe
from zoo import Through

MODELS = {
    "embedding": Through(lambda s, x: s.table(x).mean(1), table=nn.Embedding(6, 3)),
    "bag": Through(lambda s, x: s.table(x), table=nn.EmbeddingBag(6, 3, mode="mean")),
    "functional": Through(lambda s, x: F.embedding(x, s.table.weight).mean(1), table=nn.Embedding(6, 3)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rotated", [True, False])
def test_amplitude_is_the_root_of_the_frequency_with_half_a_count_more(name: str, rotated: bool):
    batches = [torch.tensor([[0, 1], [1, 1]]), torch.tensor([[4, 0], [1, 1]])]
    stacked = stack_models(MODELS[name])
    seen = observe(stacked, lambda rows: batches, rotated=rotated)
    basis = seen.bases["table.weight"]
    shares = torch.tensor([2.5, 5.5, 0.5, 0.5, 1.5, 0.5], dtype=torch.float64) / 11
    torch.testing.assert_close(basis.input_rms, shares.sqrt().view(1, 1, 6))
    assert basis.matrix is None
    assert "table.weight" not in seen.rotation().matrices
    assert not rotated or seen.why["table.weight"] == "looked up by index: its inputs already lie along its axes"
    one_hot = torch.eye(6, dtype=torch.float64) @ stacked.mean["table.weight"][0].double()
    torch.testing.assert_close(basis.output_rms[0], (shares[:, None] * one_hot.square()).sum(0).sqrt())


def test_rows_that_were_never_seen_get_the_widest_noise_and_the_mean_square_over_the_data_is_that_of_the_table():
    x = torch.tensor([[0, 1], [1, 1], [4, 0], [1, 1]])
    stacked = stack_models(MODELS["embedding"])
    bases = observe(stacked, lambda rows: [x], rotated=True).bases
    scale = unit_scale(stacked.mean, bases, eps=1e-4)("table.weight")[0].double()
    assert bool((scale[[2, 3, 5]] > 1.5 * scale[[0, 1, 4]].amax(0)).all())
    basis = bases["table.weight"]
    over_the_data = (basis.input_rms[0, 0, :, None] * scale).square().sum(0)
    torch.testing.assert_close(over_the_data, basis.output_rms[0].square(), rtol=1e-5, atol=0)


def test_a_table_that_a_product_reads_in_parts_has_no_amplitude_although_it_is_looked_up():
    net = Through(lambda s, x: s.table(x).mean(1)[:, :2] @ s.table.weight[:, :2].mT, table=nn.Embedding(6, 3))
    seen = observe(stack_models(net), lambda rows: [torch.tensor([[0, 1], [4, 1]])], rotated=True)
    assert seen.bases == {}
    assert seen.why == {"table.weight": "read in parts of its fan-in"}
