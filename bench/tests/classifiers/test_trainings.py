"""Training: every way learns stripes, depends on its seed alone, and is read as a Scorer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from offmap.errors import DataError, ModelError
from offmap.metrics import auroc
from offmap.posterior.predictive import Scorer
from offmap_bench.classifiers.catalog import TRAININGS
from offmap_bench.classifiers.training import Ensemble, Learned, TrainConfig, augment, body_and_head, train
from offmap_bench.nets.lenet import lenet

SIDE = 12


def stripes(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Upright, lying or slanted stripes in noise, (B, 1, 12, 12)."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (rows,), generator=random)
    down, right = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = torch.stack([right, down, right + down])[y]
    phase = torch.randint(0, 4, (rows, 1, 1), generator=random)
    x = ((along + phase) % 4 < 2).float() + 0.1 * torch.randn(rows, SIDE, SIDE, generator=random)
    return x[:, None], y


def train_named(name: str, seed: int = 0, epochs: int = 2) -> Learned:
    way = TRAININGS[name]
    changes = {"queue": 20, "candidates": 50} if name == "vos" else {}
    config = replace(way.config(), epochs=epochs, lr=3e-3, batch_size=32, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = way.build(lenet(3, side=SIDE, seed=seed), config)
    train(way, net, stripes(192), stripes(60, 1), config=config, seed=seed)
    return Learned(way, net, config)


@pytest.mark.parametrize("name", TRAININGS)
def test_every_way_learns_and_scores(name: str) -> None:
    made = train_named(name, epochs=16)
    x, y = stripes(90, 2)
    assert isinstance(made, Scorer)
    assert made.score(x).shape == (90,)
    assert not made.score(x).requires_grad
    assert not any(module.training for module in made.net.modules())
    label = made.predict(x).label
    if not TRAININGS[name].classes:
        assert label is None
        noise = torch.rand(90, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(3))
        assert float(auroc(made.score(x), made.score(noise))) > 0.8
    else:
        assert label is not None
        assert float((label == y).float().mean()) > 0.9


@pytest.mark.parametrize("name", TRAININGS)
def test_the_seed_alone_decides(name: str) -> None:
    x, _ = stripes(20, 2)
    first = train_named(name)
    torch.manual_seed(99)
    again = train_named(name)
    for (place, before), after in zip(first.net.state_dict().items(), again.net.state_dict().values(), strict=True):
        assert torch.equal(before, after), place
    assert torch.equal(again.score(x), first.score(x))
    assert not torch.equal(train_named(name, 1).score(x), first.score(x))


@pytest.mark.parametrize("name", TRAININGS)
def test_scores_do_not_depend_on_company(name: str) -> None:
    x, _ = stripes(30, 2)
    made = train_named(name)
    torch.testing.assert_close(torch.cat([made.score(x[:7]), made.score(x[7:])]), made.score(x), rtol=1e-4, atol=1e-5)


def test_an_ensemble_predicts_the_mean_and_scores_its_entropy() -> None:
    members = [train_named("plain", seed) for seed in range(2)]
    together, (x, _) = Ensemble(members), stripes(9, 2)
    mean = sum(m.net(x).softmax(1) for m in members) / 2
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(together.predict(x).probs, mean)
    torch.testing.assert_close(together.score(x), -(mean * mean.log()).sum(1))


def test_images_are_mirrored_and_shifted() -> None:
    x = torch.arange(1.0, 37).view(1, 1, 6, 6).expand(40, -1, -1, -1)
    made = augment(x, torch.Generator().manual_seed(0), most=2)
    assert made.shape == x.shape
    kinds = {tuple(image.flatten().tolist()) for image in made}
    assert len(kinds) == 2  # one shift for the batch, mirrored or not
    shifted = [torch.nn.functional.pad(i, (2, 2, 2, 2))[0, 0, a : a + 6, b : b + 6] for a in range(5) for b in range(5)
               for i in (x[:1], x[:1].flip(3))]  # fmt: skip
    assert kinds <= {tuple(image.flatten().tolist()) for image in shifted}


def test_bad_nets_and_images_are_refused_in_words() -> None:
    with pytest.raises(ModelError, match="Expected a torch.nn.Sequential whose last layer is a Linear, but got Conv2d"):
        body_and_head(nn.Conv2d(1, 1, 1))  # pyright: ignore[reportArgumentType]
    made = Learned(TRAININGS["plain"], lenet(3, side=SIDE), TrainConfig())
    with pytest.raises(DataError, match="NaN or infinite"):
        made.score(torch.full((2, 1, SIDE, SIDE), torch.nan))
