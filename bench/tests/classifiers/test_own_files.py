"""CSI, MOS, OpenGAN, CutPaste, DRAEM and PixMix against slow, literal versions, row by row and pixel by pixel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offmap_bench.classifiers import csi, cutpaste, draem, mos, opengan, pixmix
from offmap_bench.classifiers.catalog import TRAININGS
from offmap_bench.classifiers.training import Moment

ROWS, CLASSES, WIDTH, SIDE = 6, 4, 5, 8
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(rows: int = ROWS, side: int = SIDE, seed: int = 0, channels: int = 1) -> Tensor:
    return torch.rand(rows, channels, side, side, generator=random(seed), dtype=torch.float64)


def tiny() -> nn.Sequential:
    """A net whose features are five numbers, none of them 0."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 2, 3, padding=1)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(2 * SIDE * SIDE, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, CLASSES)).double()


def build_net(name: str, **changes: Any) -> tuple[Any, Any]:
    config = TRAININGS[name].config(**changes)
    torch.manual_seed(1)
    return TRAININGS[name].build(tiny(), config).double(), config


def negative_log(logits: Tensor, label: int) -> float:
    powers = [math.exp(z) for z in logits.tolist()]
    return -math.log(powers[label] / sum(powers))


def loss_of(name: str, net: nn.Module, config: Any, x: Tensor | None = None, seed: int = 0) -> Tensor:
    return TRAININGS[name].loss(net, images() if x is None else x, LABELS, config, Moment(random(seed)))


# ------------------------------------------------------------------------------------------------ MOS


@torch.no_grad()
def test_mos_sums_the_cross_entropies_of_its_groups_and_scores_the_smallest_others() -> None:
    net, config = build_net("mos", groups=2)
    net.group.copy_(torch.tensor([0, 1, 1, 0]))
    total = 0.0
    for row, y in zip(images(), LABELS.tolist(), strict=True):
        logits = net.head(net.body(row[None]))[0]
        others = []
        for group, members in enumerate(([0, 3], [1, 2])):
            mine = torch.cat([logits[members], logits[CLASSES + group : CLASSES + group + 1]])
            total += negative_log(mine, members.index(y) if y in members else 2)
            others.append(math.exp(-negative_log(mine, 2)))
            for place, c in enumerate(members):
                assert float(net(row[None])[0, c]) == pytest.approx(-negative_log(mine, place))
        assert float(TRAININGS["mos"].score(net, row[None], config)) == pytest.approx(math.log(min(others)))
    assert float(loss_of("mos", net, config)) == pytest.approx(total / ROWS)


def test_mos_groups_classes_whose_mean_images_are_alike() -> None:
    level = torch.tensor([0.9, 0.1, 0.8, 0.2])
    x = level[LABELS].view(-1, 1, 1, 1) + 0.01 * images()
    net, config = build_net("mos", groups=2)
    mos.form_groups(net, x, LABELS, config, 0)
    assert net.group[0] == net.group[2] != net.group[1] == net.group[3]
    net, config = build_net("mos", groups=3)
    mos.form_groups(net, x, LABELS, config, 0)
    assert net.group.bincount().tolist() == [2, 1, 1]


# ------------------------------------------------------------------------------------------------ CSI


def literal_contrast(z: Tensor, y: list[int], temperature: float) -> float:
    total = 0.0
    for i in range(len(y)):
        near = [float(z[i] @ z[j] / (z[i].norm() * z[j].norm())) / temperature for j in range(len(y))]
        bottom = sum(math.exp(s) for j, s in enumerate(near) if j != i)
        alike = [j for j in range(len(y)) if j != i and y[j] == y[i]]
        total -= sum(math.log(math.exp(near[j]) / bottom) for j in alike) / len(alike)
    return total / len(y)


@torch.no_grad()
def test_csi_contrasts_classes_and_turns_and_reads_both() -> None:
    net, config = build_net("csi", crop=1.0, jitter=0.0, temperature=0.3, width=3)  # views show the whole image
    turned = [(row.rot90(k, (1, 2)), k * CLASSES + int(y)) for k in range(4) for row, y in zip(images(), LABELS, strict=True)] * 2
    features = torch.stack([net.body(row[None])[0] for row, _ in turned])
    y = [label for _, label in turned]
    read = sum(negative_log(net.joint(f), label) for f, label in zip(features, y, strict=True)) / len(y)
    want = literal_contrast(net.projection(features), y, 0.3) + read
    assert float(loss_of("csi", net, config)) == pytest.approx(want)


@torch.no_grad()
def test_csi_predicts_by_the_mean_logits_of_a_class_over_turns() -> None:
    net, config = build_net("csi")
    for row, got, score in zip(images(), net(images()), TRAININGS["csi"].score(net, images(), config), strict=True):
        each = [net.joint(net.body(row.rot90(k, (1, 2))[None]))[0, k * CLASSES : (k + 1) * CLASSES] for k in range(4)]
        torch.testing.assert_close(got, torch.stack(each).mean(0))
        assert float(score) == pytest.approx(1 - float(got.softmax(0).max()))


def test_the_classifier_of_csi_does_not_teach_the_features() -> None:
    net, config = build_net("csi")
    loss_of("csi", net, config).backward()
    before = net.body[0].weight.grad.clone()
    net.zero_grad()
    with torch.no_grad():
        net.joint.weight.mul_(9)
    loss_of("csi", net, config).backward()
    torch.testing.assert_close(net.body[0].weight.grad, before)


def test_views_of_csi_are_crops() -> None:
    down = torch.linspace(0, 1, 16, dtype=torch.float64).view(1, 1, 16, 1).expand(50, 1, 16, 16)
    seen = csi.view(down, csi.Config(crop=0.25, jitter=0.0), random())[:, 0, 2:-2, 8]
    slopes = seen.diff(dim=1) * 15
    torch.testing.assert_close(slopes, slopes[:, :1].expand(-1, 11))  # every crop is a scaled part
    assert 0.5 <= float(slopes.min()) < 0.6
    assert 0.9 < float(slopes.max()) <= 1


# ------------------------------------------------------------------------------------------------ OpenGAN


def log_sigmoid(z: float) -> float:
    return math.log(1 / (1 + math.exp(-z)))


def test_opengan_teaches_the_discriminator_and_the_generator_apart() -> None:
    net, config = build_net("opengan", noise=7, width=4)
    net.unit.fill_(0.5)
    noise = torch.randn(ROWS, 7, generator=random()).double()
    loss_of("opengan", net, config).backward()
    got = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    d_real, d_fake = net.discriminator(2 * net.body(images())), net.discriminator(net.generator(noise))
    total = -sum(log_sigmoid(z) for z in d_real[:, 0].tolist()) - sum(
        log_sigmoid(-z) + log_sigmoid(z) for z in d_fake[:, 0].tolist()
    )
    assert float(loss_of("opengan", net, config).detach()) == pytest.approx(total / ROWS)
    teaches_d = -d_real.sigmoid().log().mean() - (1 - d_fake.sigmoid()).log().mean()
    for name, p in net.discriminator.named_parameters():
        torch.testing.assert_close(got["discriminator." + name], torch.autograd.grad(teaches_d, p, retain_graph=True)[0])
    for name, p in net.generator.named_parameters():
        (slope,) = torch.autograd.grad(-d_fake.sigmoid().log().mean(), p, retain_graph=True)
        torch.testing.assert_close(got["generator." + name], slope)
    assert not any(name.startswith(("body", "head")) for name in got)
    torch.testing.assert_close(TRAININGS["opengan"].score(net, images(), config), -d_real[:, 0])


def test_opengan_trains_the_classifier_first_and_leaves_it_alone_then() -> None:
    net, config = build_net("opengan", epochs=3, batch_size=3)
    net = net.float()
    before = net.head.weight.detach().clone()
    opengan.train_classifier(net, images().float(), LABELS, config, 0)
    assert not torch.equal(net.head.weight, before)
    assert not any(p.requires_grad for part in (net.body, net.head) for p in part.parameters())
    net.train()
    loss_of("opengan", net, config, images().float())
    assert not net.body.training
    assert float(net.features(images().float()).square().mean()) == pytest.approx(1)


# ------------------------------------------------------------------------------------------------ CutPaste


def test_a_patch_is_a_copy_of_a_box() -> None:
    x = images(1)
    source, target, size = torch.tensor([[2.0, 5.0]]), torch.tensor([[5.0, 2.0]]), torch.tensor([[3.0, 5.0]])
    got = cutpaste.paste(x, source, target, size, torch.zeros(1), torch.tensor([0.5]))
    for a in range(SIDE):
        for b in range(SIDE):
            inside = 4 <= a <= 6 and b <= 4
            assert float(got[0, 0, a, b]) == pytest.approx(float(x[0, 0, a - 3, b + 3] / 2 if inside else x[0, 0, a, b]))


def test_a_scar_is_turned() -> None:
    x = images(1)
    source = target = torch.tensor([[4.0, 4.0]])
    got = cutpaste.paste(x, source, target, torch.tensor([[5.0, 1.0]]), torch.tensor([torch.pi / 2]), torch.ones(1))
    changed = (got != x)[0, 0].nonzero().tolist()
    assert changed == [[4, b] for b in (2, 3, 5, 6)]  # a column of five has become a row; its middle stays
    assert [float(got[0, 0, 4, b]) for b in (2, 3, 5, 6)] == [float(x[0, 0, a, 4]) for a in (2, 3, 5, 6)]


def test_patches_have_their_share_of_the_area_unless_they_leave_the_image() -> None:
    config = cutpaste.Config(jitter=0.0, area=(0.1, 0.1), aspect=1.0)
    x = torch.rand(200, 1, 40, 40, generator=random())
    patched, scarred = cutpaste.damage(x, config, random(1))
    share = (patched != x).float().mean((1, 2, 3))
    assert float(share.max()) == pytest.approx(0.1, abs=0.02)
    assert 0 < float((scarred != x).float().mean((1, 2, 3)).max()) < 32 * 50 / 256**2 + 0.02


@torch.no_grad()
def test_cutpaste_tells_three_kinds_and_scores_by_a_gaussian() -> None:
    net, config = build_net("cutpaste")
    parts = [images(), *cutpaste.damage(images(), config, random())]
    rows = [negative_log(net.kinds(net.body(row[None]))[0], kind) for kind, part in enumerate(parts) for row in part]
    assert float(loss_of("cutpaste", net, config)) == pytest.approx(sum(rows) / len(rows))
    valid = images(2000, seed=3)
    cutpaste.fit_gaussian(net, valid, LABELS, config)
    features = net.body(valid)
    torch.testing.assert_close(net.mean, features.mean(0))
    assert float((net.covariance - features.mT.cov()).norm()) < 0.05 * float(net.covariance.norm())  # little is left to shrink
    precision = torch.linalg.inv(net.covariance)
    for row, got in zip(images(), TRAININGS["cutpaste"].score(net, images(), config).tolist(), strict=True):
        gap = net.body(row[None])[0] - features.mean(0)
        assert got == pytest.approx(math.sqrt(float(gap @ precision @ gap)))


# ------------------------------------------------------------------------------------------------ DRAEM


def test_perlin_noise_blends_the_slopes_of_its_corners() -> None:
    got = draem.perlin(2, 6, 8, (2, 4), random(5))
    angle = 2 * math.pi * torch.rand(2, 3, 5, generator=random(5))
    for row in range(2):
        for a in range(6):
            for b in range(8):
                y, x, value = a / 3, b / 2, 0.0
                for i in (int(y), int(y) + 1):
                    for j in (int(x), int(x) + 1):
                        slope, weight = float(angle[row, i, j]), 1.0
                        for t in (1 - abs(y - i), 1 - abs(x - j)):
                            weight *= 6 * t**5 - 15 * t**4 + 10 * t**3
                        value += weight * (math.cos(slope) * (y - i) + math.sin(slope) * (x - j))
                assert float(got[row, a, b]) == pytest.approx(math.sqrt(2) * value, abs=1e-6)


def test_defects_are_where_the_blots_are_in_half_of_the_images() -> None:
    x = torch.rand(300, 1, 16, 16, generator=random())
    damaged, blots = draem.damage(x, random(2))
    assert set(blots.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(damaged[blots == 0], x[blots == 0])
    assert float((damaged != x)[blots == 1].float().mean()) > 0.99
    assert 0 <= float(damaged.min()) <= float(damaged.max()) <= 1
    assert 0.2 < float(blots.amax((1, 2, 3)).mean()) <= 0.6


def test_ssim_compares_means_variances_and_covariances_in_gaussian_windows() -> None:
    x, z = images(2), images(2, seed=1)
    total = 0.0
    for row, other in zip(x[:, 0], z[:, 0], strict=True):
        for a in range(SIDE):
            for b in range(SIDE):
                bell = {(i, j): math.exp(-(i * i + j * j) / 4.5) for i in range(-5, 6) for j in range(-5, 6)}
                whole = sum(bell.values())
                sums = [0.0] * 5
                for (i, j), w in bell.items():
                    if 0 <= a + i < SIDE and 0 <= b + j < SIDE:  # zeros around the image
                        p, q = float(row[a + i, b + j]), float(other[a + i, b + j])
                        sums = [s + w / whole * v for s, v in zip(sums, (p, q, p * p, q * q, p * q), strict=True)]
                mp, mq, pp, qq, pq = sums
                top = (2 * mp * mq + 0.01**2) * (2 * (pq - mp * mq) + 0.03**2)
                total += top / ((mp**2 + mq**2 + 0.01**2) * (pp - mp**2 + qq - mq**2 + 0.03**2))
    assert float(draem.ssim(x, z)) == pytest.approx(total / (2 * SIDE * SIDE))
    assert float(draem.ssim(x, x)) == pytest.approx(1)


@torch.no_grad()
def test_draem_repairs_finds_and_scores_the_worst_window() -> None:
    net, config = build_net("draem", width=2, gamma=2.0)
    net.eval()
    damaged, blots = draem.damage(images(), random())
    repaired, logits = net(damaged)
    focal = 0.0
    for z, blot in zip(logits.flatten().tolist(), blots.flatten().tolist(), strict=True):
        p = 1 / (1 + math.exp(-z if blot else z))
        focal -= (1 - p) ** 2 * math.log(p)
    squares = sum((a - b) ** 2 for a, b in zip(repaired.flatten().tolist(), images().flatten().tolist(), strict=True))
    want = squares / images().numel() + 1 - float(draem.ssim(repaired, images())) + focal / blots.numel()
    assert float(loss_of("draem", net, config)) == pytest.approx(want)
    for probs, got in zip(net(images())[1].sigmoid()[:, 0], TRAININGS["draem"].score(net, images(), config), strict=True):
        wide = nn.functional.pad(probs, (1, 1, 1, 1))
        windows = [float(wide[a : a + 3, b : b + 3].sum()) / 9 for a in range(SIDE) for b in range(SIDE)]
        assert float(got) == pytest.approx(max(windows))


# ------------------------------------------------------------------------------------------------ PixMix


@pytest.mark.parametrize("adds", [True, False])
def test_pixels_are_added_around_grey_or_multiplied_as_powers(adds: bool) -> None:
    first, second = images(1), images(1, seed=1)
    for a, b in ((0.7, 0.2), (1.3, -0.4)):
        got = pixmix.mix(first, second, torch.tensor(a), torch.tensor(b), torch.tensor(adds))
        for x, z, value in zip(first.flatten().tolist(), second.flatten().tolist(), got.flatten().tolist(), strict=True):
            want = (a * (2 * x - 1) + b * (2 * z - 1) + 1) / 2 if adds else (2 * x) ** a * (2 * z) ** b / 2
            assert value == pytest.approx(min(1, max(0, want)), rel=1e-5)


def test_weights_are_of_beta_laws() -> None:
    a, b = (weights.flatten() for weights in pixmix.draw_weights(20_000, 3.0, random()))
    plain = b >= 0
    assert float(plain.float().mean()) == pytest.approx(0.5, abs=0.02)
    for values, mean in ((a[plain], 0.75), (b[plain], 0.25), (a[~plain] - 1, 0.25), (-b[~plain], 0.25)):
        assert float(values.mean()) == pytest.approx(mean, abs=0.01)
        assert float(values.var()) == pytest.approx(3 / 80, abs=0.003)  # of Beta(3, 1) and Beta(1, 3)


def test_altered_copies_have_fewer_shades_turned_lights_or_full_contrast() -> None:
    x = 0.2 + 0.5 * images(400)
    kind = torch.randint(0, 8, (400,), generator=(draw := random(4)))
    level = (0.1 + 2.9 * torch.rand(400, generator=draw)) / 10
    altered = pixmix.alter(x, 3.0, random(4))
    for row, got, number, up in zip(x, altered, kind.tolist(), level.tolist(), strict=True):
        shades = 2.0 ** (4 - math.floor(4 * up))
        wants = {5: (row * shades).floor() / shades, 6: torch.where(row < 1 - up, row, 1 - row)}
        wants[7] = (row - row.min()) / (row.max() - row.min())
        if number in wants:
            torch.testing.assert_close(got, wants[number], rtol=1e-5, atol=1e-5)
    assert set(kind.tolist()) == set(range(8))


def test_small_alterations_move_images_little() -> None:
    down = torch.linspace(0.2, 0.8, 16).view(1, 1, 16, 1).expand(400, 1, 16, 16)
    kind = torch.randint(0, 8, (400,), generator=random(1))
    moved = (pixmix.alter(down, 3.0, random(1)) - down)[:, 0, 6:10, 6:10].abs()
    assert float(moved[kind == 3].max()) < 1e-5  # sideways, along which nothing changes
    assert 0.02 < float(moved[kind == 4].max()) <= 0.1 * 16 * 0.04 + 1e-5  # a tenth of the side
    assert 0 < float(moved[kind == 0].max()) < 0.05


def test_fractals_are_always_the_same_and_differ_from_each_other() -> None:
    first = pixmix.fractals(3, 16)
    pixmix.fractals.cache_clear()
    torch.manual_seed(3)
    assert torch.equal(pixmix.fractals(3, 16), first)
    assert first.shape == (pixmix.FRACTALS, 3, 16, 16)
    assert 0 <= float(first.min()) < float(first.max()) <= 1
    assert len(first.flatten(1).unique(dim=0)) == len(first)
    assert float(first.flatten(2).std(2).mean()) > 0.05


def test_pixmix_mixes_up_to_four_times_and_takes_the_cross_entropy() -> None:
    x = images(500)
    same = (pixmix.pixmix(x, pixmix.Config(), random()) == x).flatten(1).all(1).float().mean()
    assert float(same) == pytest.approx(0.5 / 5, abs=0.05)  # not altered, and no round of five choices
    net, config = build_net("pixmix")
    with torch.no_grad():
        mixed = pixmix.pixmix(images(), config, random())
        each = [negative_log(net(row[None])[0], int(y)) for row, y in zip(mixed, LABELS, strict=True)]
        assert float(loss_of("pixmix", net, config)) == pytest.approx(sum(each) / ROWS)


# ------------------------------------------------------------------------------------------------ all


@pytest.mark.parametrize("name", ["csi", "cutpaste", "draem", "mos", "opengan"])
def test_losses_reach_every_parameter_that_they_teach(name: str) -> None:
    net, config = build_net(name)
    if name == "opengan":
        for part in (net.body, net.head):
            part.requires_grad_(False)
    loss_of(name, net.train(), config, seed=2).backward()
    for place, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, place
            assert bool(parameter.grad.ne(0).any()), place
