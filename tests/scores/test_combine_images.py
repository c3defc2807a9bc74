"""The default score of image classifiers: four parts, each counted as validation images have it, and their soft maximum."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.errors import DataError, ShapeError
from offmap.metrics import auroc
from offmap.scores.combine import log_uncertainty


def stripes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) with stripes in one of three directions, and which."""
    made = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=made)
    a, b = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    phase = 3 * torch.rand(n, 1, 1, generator=made)
    waves = torch.stack([(angle[None] * 1.5 + phase).sin() for angle in (a, b, (a + b) / 2)], 1)
    x = waves[torch.arange(n), y] + 0.2 * torch.randn(n, 8, 8, generator=made)
    return x.unsqueeze(1), y


def striped(seed: int = 0) -> nn.Sequential:
    """Random convolutions, a last layer by least squares."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    x, y = stripes(400, 7)
    with torch.no_grad():
        h = torch.cat([net[:-1](x), torch.ones(len(x), 1)], 1).double()
        solved = torch.linalg.lstsq(h, 6.0 * F.one_hot(y, 3).double()).solution
        net[-1].weight.copy_(solved[:-1].mT)
        net[-1].bias.copy_(solved[-1])
    return net.eval()


TRAIN, VALID, TEST = stripes(120, 0), stripes(60, 1), stripes(50, 2)
NOISE = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def quick(nets: nn.Module | list[nn.Module], **options: object) -> offmap.Guard:
    return offmap.fit(nets, TRAIN, VALID, draws=8, **options)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(striped())


def directions(net: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """By hooks: mean and deviation of every channel that the later convolutions meet, what the head meets; of length one."""
    met: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, layer in net.named_children():
            if name in ("2", "4"):
                met[name] = torch.cat([x.mean((2, 3)), x.var((2, 3), correction=0).sqrt()], 1)
            if name == "8":
                met[name] = x
            x = layer(x)
    return {name: h.double() / h.double().norm(dim=1, keepdim=True) for name, h in met.items()}


def slow_ratio(rows: Tensor, x: Tensor, *, even: bool) -> Tensor:
    """Log ratio of the mean distance to the ten nearest rows to their own spacing, or to the average one."""
    own = torch.cdist(rows, rows).sort(1).values[:, 1:11].mean(1)
    own = own.mean().expand_as(own) if even else own
    near = torch.cdist(x, rows).sort(1)
    spacing = own[near.indices[:, :10]].mean(1)
    return ((near.values[:, :10].mean(1) + 0.01 * own.mean()) / (spacing + 0.1 * own.mean())).log()


def z(own: Tensor, values: Tensor) -> Tensor:
    return ((values - own.mean()) / own.std(correction=0)).clamp_min(-1)


def test_the_score_is_the_soft_maximum_of_four_parts(guard: offmap.Guard) -> None:
    net, x = striped(), TEST[0]
    seen, met, known = (directions(net, rows) for rows in (VALID[0], x, TRAIN[0]))
    layers = [
        z(slow_ratio(known[n], seen[n], even=n == "8"), slow_ratio(known[n], met[n], even=n == "8")) for n in ("2", "4", "8")
    ]
    with torch.no_grad():
        energy = [-net(rows).double().logsumexp(1) for rows in (VALID[0], x)]
    uncertain = [log_uncertainty(guard.likelihood, guard.sampler.outputs(rows, None), 1) for rows in (VALID[0], x)]
    parts = [z(*energy), z(*uncertain), layers[2], (layers[0] + layers[1]) / 2]
    wanted = torch.stack(parts).exp().mean(0).log()
    torch.testing.assert_close(guard.score(x), wanted.float(), rtol=1e-3, atol=1e-3)


def test_noise_scores_higher_than_stripes(guard: offmap.Guard) -> None:
    assert auroc(guard.score(TEST[0]), guard.score(NOISE)) > 0.95


def test_the_last_layer_alone_is_random_by_default(guard: offmap.Guard) -> None:
    assert set(guard.predictive.q.mean) == {"8.weight", "8.bias"}
    assert guard.predictive.model.last_layer is not None
    whole = quick(striped(), params="all", solver="closed-form", risk_draws=4)
    assert len(dict(whole.predictive.q.mean.items())) == 8
    assert whole.predictive.model.last_layer is None
    assert auroc(whole.score(TEST[0]), whole.score(NOISE)) > 0.9


def test_the_guard_says_what_it_looks_at(guard: offmap.Guard) -> None:
    wanted = "score 'default': disagreement, logits, last layer (8.weight), layers (2.weight, 4.weight); holds 120 training rows"
    assert wanted in guard.summary().notes


def test_a_saved_guard_scores_the_same(guard: offmap.Guard, tmp_path: Path) -> None:
    guard.save(tmp_path / "guard.safetensors")
    loaded = offmap.load(tmp_path / "guard.safetensors", striped())
    assert torch.equal(loaded.score(TEST[0]), guard.score(TEST[0]))
    assert loaded.predictive.model.last_layer == guard.predictive.model.last_layer


def test_scores_do_not_depend_on_the_batch(guard: offmap.Guard) -> None:
    whole = guard.score(TEST[0])
    torch.testing.assert_close(torch.cat([guard.score(x[None]) for x in TEST[0][:4]]), whole[:4], rtol=1e-3, atol=1e-4)


def test_members_are_compared_side_by_side() -> None:
    together = quick([striped(0), striped(1)])
    spaces = [space for name in ("layers", "last layer") for space in together.score_module.parts[name].spaces]
    assert [space.rows.shape[1] for space in spaces] == [32, 48, 32]
    assert auroc(together.score(TEST[0]), together.score(NOISE)) > 0.95


def test_score_distance_leaves_logits_and_draws_out() -> None:
    guard = quick(striped(), score="distance")
    parts = guard.terms(TEST[0])
    assert set(parts) == {"last layer", "layers"}
    wanted = torch.stack(list(parts.values())).logsumexp(0) - math.log(2)
    torch.testing.assert_close(guard.score(TEST[0]), wanted.float())


def test_images_of_another_form_are_refused(guard: offmap.Guard) -> None:
    for x, message in (
        (torch.rand(4, 8, 8, 1), r"images of shape \(1, 8, 8\).*but the inputs have \(8, 8, 1\). Channels come first"),
        (torch.rand(4, 3, 8, 8), r"have \(3, 8, 8\). Bring them to 1 channels"),
        (torch.rand(4, 1, 16, 16), r"have \(1, 16, 16\). Resize them"),
        (torch.rand(8, 8), r"have \(8,\). Pass a batch of images"),
    ):
        with pytest.raises(ShapeError, match=message):
            guard(x)
    with pytest.raises(DataError, match=r"but the inputs are torch.uint8. Scale them alike, for example with `x.float"):
        guard.score(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(ShapeError, match=r"but the training inputs have \(1, 9, 9\). Resize them"):
        offmap.fit(striped(), (torch.rand(9, 1, 9, 9), torch.zeros(9).long()), VALID)


def test_numbers_of_another_range_are_noticed(guard: offmap.Guard, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard.save(tmp_path / "guard.safetensors")
    for made in (guard, offmap.load(tmp_path / "guard.safetensors", striped())):
        caplog.clear()
        made.score(TEST[0])
        made.score(torch.zeros(2, 1, 8, 8))
        assert caplog.text == ""
        made.score(255 * TEST[0])
        assert "The inputs range from" in caplog.text
        assert "were they scaled alike? Else scores mean little." in caplog.text
    caplog.clear()
    offmap.fit(striped(), (255 * TRAIN[0], TRAIN[1]), VALID, draws=8)
    assert "The training inputs range from" in caplog.text


def test_a_net_that_only_guesses_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    offmap.fit(striped(), TRAIN, (VALID[0], (VALID[1] + 1) % 3), draws=8)
    assert "% of the validation rows, the most frequent class makes up" in caplog.text
    assert "were they scaled so in training?" in caplog.text


def test_a_net_that_takes_bytes_itself_is_given_them(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = striped()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.float() / 32 - 4)

    def raw(x: Tensor) -> Tensor:
        return ((x + 4) * 32).round().clamp(0, 255).to(torch.uint8)

    made = offmap.fit(Scaled(), (raw(TRAIN[0]), TRAIN[1]), (raw(VALID[0]), VALID[1]), draws=8)
    assert made.image_spec is None
    assert float(auroc(made.score(raw(TEST[0])), made.score(raw(NOISE)))) > 0.8
