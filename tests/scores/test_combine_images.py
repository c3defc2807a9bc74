"""The default score of image classifiers: the same terms, in what convolutions get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offmap
from offmap.errors import DataError, ShapeError
from offmap.metrics import auroc
from offmap.scores.distance import Ellipsoid, KNNDistance
from offmap.scores.terms import directions as random_directions
from offmap.scores.terms import log_uncertainty, project


def stripes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) with stripes in one of three directions, and which."""
    made = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=made)
    a, b = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    phase = 3 * torch.rand(n, 1, 1, generator=made)
    waves = torch.stack([(angle[None] * 1.5 + phase).sin() for angle in (a, b, (a + b) / 2)], 1)
    x = waves[torch.arange(n), y] + 0.2 * torch.randn(n, 8, 8, generator=made)
    return x.unsqueeze(1), y


def train_striped(seed: int = 0) -> nn.Sequential:
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
    return quick(train_striped())


def layer_inputs(net: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """Mean and deviation of every channel of the later convolutions' inputs, and the inputs of the head."""
    met: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, layer in net.named_children():
            if name in ("2", "4"):
                met[name] = torch.cat([x.mean((2, 3)), x.var((2, 3), correction=0).sqrt()], 1)
            if name == "8":
                met[name] = x
            x = layer(x)
    return {name: h.double() for name, h in met.items()}


def z(own: Tensor, values: Tensor) -> Tensor:
    return ((values - own.mean()) / own.std(correction=0)).clamp_min(-1)


def test_terms_of_images_are_those_of_pooled_channels(guard: offmap.Guard) -> None:
    net, x, terms = train_striped(), TEST[0], guard.terms(TEST[0])
    known, met = (layer_inputs(net, rows) for rows in (TRAIN[0], x))
    sizes = {name: (h - h.mean(0)).square().sum(1).mean().sqrt() for name, h in known.items()}
    scaled = [torch.cat([h / sizes[name] for name, h in rows.items()], 1).float() for rows in (known, met)]
    narrow = random_directions(scaled[0].shape[1], guard.score_module.parts["layers"].most)
    space = KNNDistance.fit(project(scaled[0], narrow), standardized=False)
    torch.testing.assert_close(terms["layers"], space(project(scaled[1], narrow)).float(), rtol=1e-3, atol=1e-3)
    unit = [torch.cat([h / h.norm(dim=1, keepdim=True) for h in rows.values()], 1) for rows in (known, met)]
    white = guard.score_module.parts["whitened"].space.zscore(Ellipsoid.fit(unit[0]).log_ratio(unit[1]))
    torch.testing.assert_close(terms["whitened"], white.float(), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        energy = [-net(rows).double().logsumexp(1) for rows in (TRAIN[0], x)]
        p = [net(rows).double().softmax(1) for rows in (TRAIN[0], x)]
    gen = [(part * (1 - part)).pow(0.1).sum(1) for part in p]
    uncertain = [log_uncertainty(guard.likelihood, guard.sampler.outputs(rows, None), 1) for rows in (TRAIN[0], x)]
    for name, values in {"energy": energy, "gen": gen, "disagreement": uncertain}.items():
        torch.testing.assert_close(terms[name], z(*values).float(), rtol=1e-3, atol=1e-3)
    joined = guard.score_module.weights @ torch.stack(list(terms.values())).double()
    torch.testing.assert_close(guard.score(x), joined.float(), rtol=1e-4, atol=1e-4)


def test_noise_scores_higher_than_stripes(guard: offmap.Guard) -> None:
    assert auroc(guard.score(TEST[0]), guard.score(NOISE)) > 0.95


def test_the_last_layer_alone_is_random_by_default(guard: offmap.Guard) -> None:
    assert set(guard.predictive.q.mean) == {"8.weight", "8.bias"}
    assert guard.predictive.model.last_layer is not None
    whole = quick(train_striped(), params="all", solver="closed-form", risk_draws=4)
    assert len(dict(whole.predictive.q.mean.items())) == 8
    assert whole.predictive.model.last_layer is None
    assert auroc(whole.score(TEST[0]), whole.score(NOISE)) > 0.9


def test_the_guard_says_what_it_looks_at(guard: offmap.Guard) -> None:
    (note,) = [note for note in guard.summary().notes if note.startswith("score 'default'")]
    assert note.endswith("; layers 2.weight, 4.weight, 8.weight; holds 120 training rows")
    names = ["disagreement", "energy", "gen", "inputs", "layers", "whitened", "last-layer"]
    assert list(guard.assess().weights) == names


def test_a_saved_guard_scores_the_same(guard: offmap.Guard, tmp_path: Path) -> None:
    guard.save(tmp_path / "guard.safetensors")
    loaded = offmap.load(tmp_path / "guard.safetensors", train_striped())
    assert torch.equal(loaded.score(TEST[0]), guard.score(TEST[0]))
    assert loaded.predictive.model.last_layer == guard.predictive.model.last_layer


def test_scores_do_not_depend_on_the_batch(guard: offmap.Guard) -> None:
    whole = guard.score(TEST[0])
    torch.testing.assert_close(torch.cat([guard.score(x[None]) for x in TEST[0][:4]]), whole[:4], rtol=1e-3, atol=1e-4)


def test_members_are_compared_side_by_side() -> None:
    together = quick([train_striped(0), train_striped(1)])
    widths = {name: term.widths for name, term in together.score_module.items if term.reads.layers}
    assert widths["layers"] == widths["whitened"] == {"2.weight": 32, "4.weight": 48, "8.weight": 32}
    assert widths["last-layer"] == {"8.weight": 32}
    assert auroc(together.score(TEST[0]), together.score(NOISE)) > 0.95


def test_score_distance_leaves_logits_and_draws_out() -> None:
    guard = quick(train_striped(), score="distance")
    parts = guard.terms(TEST[0])
    assert set(parts) == {"inputs", "layers", "whitened", "last-layer"}
    assert not guard.score_module.reads.draws
    assert not guard.score_module.reads.base


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
        offmap.fit(train_striped(), (torch.rand(9, 1, 9, 9), torch.zeros(9).long()), VALID)


def test_numbers_of_another_range_are_noticed(guard: offmap.Guard, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard.save(tmp_path / "guard.safetensors")
    for made in (guard, offmap.load(tmp_path / "guard.safetensors", train_striped())):
        caplog.clear()
        made.score(TEST[0])
        made.score(torch.zeros(2, 1, 8, 8))
        assert caplog.text == ""
        made.score(255 * TEST[0])
        assert "The inputs range from" in caplog.text
        assert "were they scaled alike? Else scores mean little." in caplog.text
    caplog.clear()
    offmap.fit(train_striped(), (255 * TRAIN[0], TRAIN[1]), VALID, draws=8)
    assert "The training inputs range from" in caplog.text


def test_a_net_that_only_guesses_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    offmap.fit(train_striped(), TRAIN, (VALID[0], (VALID[1] + 1) % 3), draws=8)
    assert "% of the validation rows, the most frequent class makes up" in caplog.text
    assert "were they scaled so in training?" in caplog.text


def test_a_net_that_takes_bytes_itself_is_given_them(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = train_striped()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.float() / 32 - 4)

    def raw(x: Tensor) -> Tensor:
        return ((x + 4) * 32).round().clamp(0, 255).to(torch.uint8)

    made = offmap.fit(Scaled(), (raw(TRAIN[0]), TRAIN[1]), (raw(VALID[0]), VALID[1]), draws=8)
    assert made.image_spec is None
    assert float(auroc(made.score(raw(TEST[0])), made.score(raw(NOISE)))) > 0.8
