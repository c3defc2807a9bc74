"""Every loss and score of trained classifiers against a slow, literal version, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offmap.random import generator
from offmap_bench.classifiers import losses
from offmap_bench.classifiers.catalog import TRAININGS
from offmap_bench.classifiers.training import BodyAndHead, Moment, TrainConfig

ROWS, CLASSES, WIDTH = 5, 3, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny() -> nn.Sequential:
    """A net of small images whose features are four numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(18, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()


IMAGES, LABELS = numbers(ROWS, 2, 3, 3), torch.tensor([0, 1, 2, 1, 0])


def negative_log(logits: Tensor, label: int) -> float:
    """−log softmax of one row, term by term."""
    powers = [math.exp(z) for z in logits.detach().tolist()]
    return -math.log(powers[label] / sum(powers))


@torch.no_grad()
def test_mixup_shares_images_and_losses() -> None:
    net, order = tiny(), torch.randperm(ROWS, generator=random(3))
    draw = random(3)
    torch.randperm(ROWS, generator=draw)
    share = losses.beta(0.4, draw)
    total = 0.0
    for i, j in enumerate(order.tolist()):
        logits = net((share * IMAGES[i] + (1 - share) * IMAGES[j])[None])[0]
        total += share * negative_log(logits, int(LABELS[i])) + (1 - share) * negative_log(logits, int(LABELS[j]))
    got = TRAININGS["mixup"].loss(net, IMAGES, LABELS, losses.MixupConfig(alpha=0.4), Moment(random(3)))
    assert float(got) == pytest.approx(total / ROWS)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_have_the_mean_and_variance_of_their_law(alpha: float) -> None:
    draw = random(1)
    shares = torch.tensor([losses.beta(alpha, draw) for _ in range(2000)])
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(shares.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)


def test_cutmix_counts_pixels() -> None:
    rows, columns = losses.draw_box(3, 3, random(7))
    inside = [(a, b) for a in range(3) for b in range(3) if rows.start <= a < rows.stop and columns.start <= b < columns.stop]
    order = torch.tensor([1, 2, 3, 4, 0])
    made, share = losses.paste_box(IMAGES, order, (rows, columns))
    assert 0 < len(inside) < 9
    assert share == pytest.approx(1 - len(inside) / 9)
    for i in range(ROWS):
        for a in range(3):
            for b in range(3):
                source = IMAGES[order[i]] if (a, b) in inside else IMAGES[i]
                assert torch.equal(made[i, :, a, b], source[:, a, b])


def test_the_share_of_boxes_is_uniform_but_for_the_edges() -> None:
    draw = random(0)
    boxes = [losses.draw_box(100, 100, draw) for _ in range(3000)]
    areas = torch.tensor([(r.stop - r.start) * (c.stop - c.start) / 1e4 for r, c in boxes])
    assert 0 <= float(areas.min()) < 0.01
    assert 0.9 < float(areas.max()) <= 1
    assert float(areas.mean()) == pytest.approx(0.317, abs=0.02)  # ∫ s·(1 − √s/4)² ds for a share s cut at the edges


def test_logitnorm_divides_by_the_length() -> None:
    logits = numbers(ROWS, CLASSES, seed=2)
    total = sum(
        negative_log(row / (0.1 * math.sqrt(sum(float(z) ** 2 for z in row))), int(y))
        for row, y in zip(logits, LABELS, strict=True)
    )
    net = nn.Identity()
    got = TRAININGS["logitnorm"].loss(net, logits, LABELS, losses.LogitNormConfig(temperature=0.1), Moment(random()))
    assert float(got) == pytest.approx(total / ROWS)


def test_hints_pull_towards_the_truth_and_cost() -> None:
    logits, doubt = numbers(ROWS, CLASSES, seed=4), numbers(ROWS, seed=5)
    hinted, price = torch.tensor([True, False, True, True, False]), torch.tensor(0.7)
    loss, paid = 0.0, 0.0
    for row, d, y, hint in zip(logits, doubt, LABELS, hinted, strict=True):
        c = 1 / (1 + math.exp(-float(d)))
        p = math.exp(-negative_log(row, int(y)))
        loss += -math.log(c * p + (1 - c) if hint else p)
        paid += -math.log(c)
    total, asked = losses.hinted_loss(logits, doubt, LABELS, hinted, price)
    assert float(asked) == pytest.approx(paid / ROWS)
    assert float(total) == pytest.approx((loss + 0.7 * paid) / ROWS)


@torch.no_grad()
def test_the_price_of_hints_follows_the_budget() -> None:
    for budget, rises in ((1e-6, True), (1e6, False)):
        net = losses.Branched(tiny(), 0.1).double()
        TRAININGS["confidence"].loss(net, IMAGES, LABELS, losses.ConfidenceConfig(budget=budget), Moment(random()))
        assert (float(net.price) > 0.1) is rises


@torch.no_grad()
def test_godin_is_a_quotient_and_scores_its_numerator() -> None:
    net = losses.Quotient(tiny()).double().eval()
    features = net.body(IMAGES)
    cosines = torch.tensor([[float(f @ w / (f.norm() * w.norm())) for w in net.direction] for f in features])
    g = net.domain(features)[:, 0]
    want = cosines / g[:, None].float()
    torch.testing.assert_close(net(IMAGES).float(), want)
    torch.testing.assert_close(TRAININGS["godin"].score(net, IMAGES, TrainConfig()).float(), -cosines.amax(1))


def test_godin_moves_images_along_the_sign_of_the_slope_and_chooses_the_step_by_in_distribution_ones() -> None:
    net = losses.Quotient(tiny()).double().eval()
    slopes = torch.zeros_like(IMAGES)
    with torch.no_grad():
        for place in range(IMAGES[0].numel()):
            shift = torch.zeros_like(IMAGES[0]).flatten()
            shift[place] = 1e-6
            up, down = (net.nearest(IMAGES + s * shift.view_as(IMAGES[0])) for s in (1, -1))
            slopes.flatten(1)[:, place] = up - down
        want = net.nearest(IMAGES + 0.02 * slopes.sign())
    torch.testing.assert_close(net.score_at(IMAGES, 0.02), want)
    losses.choose_step(net, IMAGES, LABELS, TrainConfig())
    means = [float(net.score_at(IMAGES, step).mean()) for step in losses.STEPS]
    assert float(net.step) == pytest.approx(losses.STEPS[means.index(max(means))])


def test_reciprocal_points_bound_the_distance_of_their_class() -> None:
    features, points, radius = numbers(ROWS, WIDTH), numbers(CLASSES, WIDTH, seed=1), torch.tensor(0.9)
    total = 0.0
    for f, y in zip(features, LABELS, strict=True):
        squared = [sum(float(a - b) ** 2 for a, b in zip(f, p, strict=True)) / WIDTH for p in points]
        distance = torch.tensor([s - float(f @ p) for s, p in zip(squared, points, strict=True)])
        total += negative_log(distance, int(y)) + 0.1 * max(squared[int(y)] - 0.9, 0.0)
    assert float(losses.bounded_loss(features, points, radius, LABELS, 0.1)) == pytest.approx(total / ROWS)


def test_an_outlier_is_the_draw_of_lowest_density() -> None:
    kept, noise = numbers(CLASSES, 50, WIDTH), numbers(CLASSES, 20, WIDTH, seed=1)
    means = [kept[c].mean(0) for c in range(CLASSES)]
    rows = torch.stack([row - means[c] for c in range(CLASSES) for row in kept[c]])
    covariance = sum(torch.outer(row, row) for row in rows) / len(rows)
    assert isinstance(covariance, Tensor)
    covariance = covariance + (1e-4 * covariance.diagonal().mean() + 1e-8) * torch.eye(WIDTH)
    found = losses.outliers(kept, noise)
    for c in range(CLASSES):
        law = torch.distributions.MultivariateNormal(means[c], covariance)
        draws = torch.stack([means[c] + torch.linalg.cholesky(covariance) @ n for n in noise[c]])
        torch.testing.assert_close(found[c], draws[law.log_prob(draws).argmin()])


def test_vos_adds_the_logistic_loss_of_energies_when_its_time_has_come() -> None:
    net, config = losses.Energetic(tiny(), 2).double(), losses.VOSConfig(queue=2, candidates=3, weight=0.3, start=0.5)
    with torch.no_grad():
        net.shares.copy_(torch.tensor([0.1, -0.2, 0.3]))
        net.slope.fill_(1.5)
        net.shift.fill_(-0.4)
    plain = sum(negative_log(net(x[None])[0], int(y)) for x, y in zip(IMAGES, LABELS, strict=True)) / ROWS
    with torch.no_grad():
        assert float(TRAININGS["vos"].loss(net, IMAGES, LABELS, config, Moment(random(), 0.9))) == pytest.approx(
            plain
        )  # class 2: one row
        assert float(TRAININGS["vos"].loss(net, IMAGES, LABELS, config, Moment(random(), 0.0))) == pytest.approx(plain)  # not yet
        got = float(TRAININGS["vos"].loss(net, IMAGES, LABELS, config, Moment(random(1), 0.9)))
    noise = torch.randn((CLASSES, 3, WIDTH), generator=random(1)).double()

    def energy(f: Tensor) -> float:
        return -math.log(sum(math.exp(z) for z in (net.head(f) + net.shares).tolist()))

    inside = [math.log(1 + math.exp(1.5 * energy(f) - 0.4)) for f in net.body(IMAGES)]
    outside = [math.log(1 + math.exp(-(1.5 * energy(f) - 0.4))) for f in losses.outliers(net.queue, noise)]
    assert got == pytest.approx(plain + 0.3 * (sum(inside) / ROWS + sum(outside) / CLASSES))


def test_vos_keeps_the_newest_features_of_each_class() -> None:
    net = losses.Energetic(tiny(), 2)
    for start in range(0, 6, 3):
        net.enqueue(torch.arange(start, start + 3.0)[:, None].expand(-1, WIDTH), torch.tensor([0, 0, 1]))
    assert sorted(net.queue[0, :, 0].tolist()) == [3.0, 4.0]
    assert sorted(net.queue[1, :, 0].tolist()) == [2.0, 5.0]
    assert net.count.tolist() == [4, 2, 0]


@torch.no_grad()
def test_svdd_is_the_squared_distance_to_the_first_mean() -> None:
    net = losses.Drawn(tiny(), 3).double()
    assert all("bias" not in name for name, _ in net.named_parameters())
    losses.place_centre(net, IMAGES, LABELS, losses.SVDDConfig(), 0)
    means = torch.stack([net.body(x[None])[0] for x in IMAGES]).mean(0)
    want = [m if abs(m) >= 0.1 else math.copysign(0.1, m) for m in means.tolist()]
    assert net.centre.tolist() == pytest.approx(want)
    each = [sum((float(a) - b) ** 2 for a, b in zip(net.body(x[None])[0], want, strict=True)) for x in IMAGES]
    assert float(TRAININGS["svdd"].loss(net, IMAGES, LABELS, losses.SVDDConfig(), Moment(random()))) == pytest.approx(
        sum(each) / ROWS
    )
    assert TRAININGS["svdd"].score(net, IMAGES, losses.SVDDConfig()).tolist() == pytest.approx(each)


@torch.no_grad()
def test_dropout_averages_thinned_nets() -> None:
    net, config = BodyAndHead(tiny()).double(), losses.DropoutConfig(dropout=0.4, draws=6)
    thin = losses.masks((6, 1, WIDTH), 0.4, generator(0, "dropout")).double()
    assert sorted(set(thin.flatten().tolist())) == pytest.approx([0.0, 1 / 0.6])
    for row, got in zip(IMAGES, TRAININGS["dropout"].score(net, IMAGES, config).tolist(), strict=True):
        mean = torch.stack([net.head(net.body(row[None])[0] * mask[0]).softmax(0) for mask in thin]).mean(0)
        assert got == pytest.approx(-sum(float(p) * math.log(float(p)) for p in mean))


@pytest.mark.parametrize("dropout", [0.2, 0.5])
def test_masks_keep_the_mean(dropout: float) -> None:
    assert float(losses.masks((200, 200), dropout, random()).mean()) == pytest.approx(1, abs=0.02)


def test_losses_reach_every_parameter() -> None:
    """A parameter without a gradient would stay as it started."""
    made: dict[str, tuple[Any, Any, Any]] = {
        "arpl": (TRAININGS["arpl"], losses.Reciprocal(tiny()), losses.ARPLConfig()),
        "confidence": (TRAININGS["confidence"], losses.Branched(tiny(), 0.1), losses.ConfidenceConfig()),
        "godin": (TRAININGS["godin"], losses.Quotient(tiny()), TrainConfig()),
        "svdd": (TRAININGS["svdd"], losses.Drawn(tiny(), 3), losses.SVDDConfig()),
        "dropout": (TRAININGS["dropout"], BodyAndHead(tiny()), losses.DropoutConfig()),
    }
    for name, (training, net, config) in made.items():
        net = net.double().train()
        training.loss(net, IMAGES, LABELS, config, Moment(random(2))).backward()
        for place, parameter in net.named_parameters():
            assert parameter.grad is not None, (name, place)
            assert bool(parameter.grad.ne(0).any()), (name, place)
