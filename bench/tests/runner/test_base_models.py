from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from offmap.likelihoods import Gaussian
from offmap_bench.cache import cache_folder
from offmap_bench.methods import deep_ensemble
from offmap_bench.runner import base_models as module
from offmap_bench.runner.base_models import Recipe, digest, models
from offmap_bench.tasks.catalog import task

RECIPE = Recipe(hidden=(8,), members=2, training=deep_ensemble.Config(steps=20, check_every=10))


def weights(nets: list[nn.Module]) -> torch.Tensor:
    return torch.stack([torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets])


def test_models_are_trained_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = models(task("regression"), 0, RECIPE, tmp_path)
    monkeypatch.setattr(module, "train", None)
    assert torch.equal(weights(models(task("regression"), 0, RECIPE, tmp_path)), weights(first))
    assert not any(net.training for net in first)
    assert [p.suffix for p in (tmp_path / "models").iterdir()] == [".safetensors"]


def test_members_start_apart_and_do_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    two = weights(models(task("regression"), 1, RECIPE, tmp_path))
    three = weights(models(task("regression"), 1, replace(RECIPE, members=3), tmp_path))
    torch.testing.assert_close(three[:2], two)
    assert not torch.equal(two[0], two[1])


def test_the_digest_knows_the_data_the_seed_and_every_part_of_the_recipe() -> None:
    base = task("regression")
    changed = replace(base, train=(base.train[0], base.train[1] + 1))
    training = replace(RECIPE.training, lr=1e-2)
    others = [
        digest(changed, 0, RECIPE), digest(base, 1, RECIPE), digest(base, 0, replace(RECIPE, hidden=(9,))),
        digest(base, 0, replace(RECIPE, training=training)), digest(base, 0, replace(RECIPE, batch_size=64)),
        digest(base, 0, replace(RECIPE, raw_units=True)), digest(base, 0, replace(RECIPE, start_std=0.1)),
    ]  # fmt: skip
    assert len({digest(base, 0, RECIPE), *others}) == 8


def test_a_damaged_file_is_said_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = models(task("regression"), 0, RECIPE, tmp_path)
    (path,) = (tmp_path / "models").iterdir()
    whole = path.read_bytes()
    for content, reason in ((whole[:40], ""), (whole[:-1] + bytes([whole[-1] ^ 1]), "its checksum does not fit")):
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "offmap"):
            again = models(task("regression"), 0, RECIPE, tmp_path)
        assert f"{path} cannot be read ({reason}" in caplog.text
        torch.testing.assert_close(weights(again), weights(first))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("OFFMAP_CACHE")
    assert cache_folder().parts[-2:] == (".cache", "offmap")
    assert os.fspath(cache_folder()).startswith(os.path.expanduser("~"))


def test_raw_units_are_those_of_a_net_whose_mean_alone_is_rescaled() -> None:
    """As in the authors' code: y = unit·y₀ + c, outputs unit·μ + c and log σ² as it is. Its gradients are ours."""
    made, unit, shift = replace(task("regression"), unit=16.0), 16.0, 7.0
    (x, y), law = made.train, Gaussian()
    plain, ours = (module.init_nets(made, 0, replace(RECIPE, raw_units=raw))[0] for raw in (False, True))
    theirs = plain(x) * torch.tensor([unit, 1.0]) + torch.tensor([shift, 0.0])
    law.nll(theirs[None], unit * y + shift).mean().backward()
    loss = law.nll(ours(x)[None], y).mean()
    loss.backward()
    torch.testing.assert_close(law.nll(theirs[None], unit * y + shift).mean(), loss + math.log(unit))
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_full_batches_have_every_row_as_often() -> None:
    made, how = task("regression"), replace(RECIPE, full_batches=True)
    rows, _, _ = module.prepare(module.init_nets(made, 0, how), made, 128, module.repeats(made, how))
    sizes = [len(y) for _, y in rows.iter_shuffled(0, 0)]
    assert rows.rows == sum(sizes) >= 10_000
    assert set(sizes[:-1]) == {128}
    counts = torch.cat([x for x, _ in rows.iter_shuffled(0, 0)]).unique(dim=0, return_counts=True)[1]
    assert set(counts.tolist()) == {rows.rows // len(made.train[1])}


def test_a_normal_start_has_its_deviation() -> None:
    (net,) = module.init_nets(task("regression"), 0, replace(RECIPE, members=1, hidden=(100, 100), start_std=0.1))
    for p in net.parameters():
        if p.numel() >= 100:
            assert 0.08 < float(p.detach().std()) < 0.12
