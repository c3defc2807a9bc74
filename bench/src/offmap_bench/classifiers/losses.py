"""Trainings of image classifiers that are to tell what they do not know: the loss of each, and its score where it has one.

Those that take more than a loss have files of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offmap.likelihoods.classification import predictive_entropy
from offmap.random import generator
from offmap_bench.classifiers.training import BLOCK, BodyAndHead, Moment, TrainConfig, body_and_head


@dataclass(frozen=True)
class MixupConfig(TrainConfig):
    """Shares are drawn from Beta(α, α)."""

    alpha: float = 0.2


def shared_loss(logits: Tensor, y: Tensor, order: Tensor, share: float) -> Tensor:
    """share·CE(z, y) + (1 − share)·CE(z, y[order])."""
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def beta(alpha: float, random: torch.Generator) -> float:
    """A draw of Beta(α, α): of uniform pairs, the first with U^(1/α) + V^(1/α) ≤ 1 (Jöhnk, 1964)."""
    while True:
        first, second = torch.rand(2, dtype=torch.float64, generator=random, device="cpu").pow(1 / alpha).tolist()
        if 0 < first + second <= 1:
            return first / (first + second)


def mixup_loss(net: nn.Module, x: Tensor, y: Tensor, config: MixupConfig, moment: Moment) -> Tensor:
    """Mixup (Zhang et al., 2018; Thulasidasan et al., 2019): every image is mixed with another, all by the same share."""
    order, share = torch.randperm(len(x), generator=moment.random, device="cpu").to(x.device), beta(config.alpha, moment.random)
    return shared_loss(net(share * x + (1 - share) * x[order]), y, order, share)


def draw_box(height: int, width: int, random: torch.Generator) -> tuple[slice, slice]:
    """Of a share of the area that is uniform from 0 to 1, around a uniform centre, cut at the edges."""
    share, down, right = torch.rand(3, generator=random, device="cpu").tolist()
    side = math.sqrt(1 - share) / 2
    rows, columns = (
        slice(max(0, round((centre - side) * length)), min(length, round((centre + side) * length)))
        for centre, length in ((down, height), (right, width))
    )
    return rows, columns


def paste_box(x: Tensor, order: Tensor, box: tuple[slice, slice]) -> tuple[Tensor, float]:
    """Images with the box of x[order], and the share of x that is left: (B, K, H, W) -> the same."""
    mixed = x.clone()
    mixed[:, :, box[0], box[1]] = x[order][:, :, box[0], box[1]]
    return mixed, 1 - mixed[0, 0, box[0], box[1]].numel() / mixed[0, 0].numel()


def cutmix_loss(net: nn.Module, x: Tensor, y: Tensor, config: TrainConfig, moment: Moment) -> Tensor:
    """CutMix (Yun et al., 2019): every image gets a box of another, all the same box; the classes are shared by area."""
    order = torch.randperm(len(x), generator=moment.random, device="cpu").to(x.device)
    mixed, share = paste_box(x, order, draw_box(x.shape[2], x.shape[3], moment.random))
    return shared_loss(net(mixed), y, order, share)


@dataclass(frozen=True)
class LogitNormConfig(TrainConfig):
    """The length that logits have in the loss is 1 / temperature."""

    temperature: float = 0.04


def logitnorm_loss(net: nn.Module, x: Tensor, y: Tensor, config: LogitNormConfig, moment: Moment) -> Tensor:
    """LogitNorm (Wei et al., 2022): the cross-entropy of z / (τ·‖z‖). The score is of the plain ones, as the authors have it."""
    return F.cross_entropy(F.normalize(net(x), dim=1, eps=1e-7) / config.temperature, y)


@dataclass(frozen=True)
class DropoutConfig(TrainConfig):
    """The rate of dropping, and the number of thinned nets."""

    dropout: float = 0.5
    draws: int = 50


def masks(shape: tuple[int, ...], rate: float, random: torch.Generator) -> Tensor:
    """Zeros by `rate`, else 1 / (1 − rate)."""
    return (torch.rand(shape, generator=random, device="cpu") >= rate).float() / (1 - rate)


def dropout_loss(net: BodyAndHead, x: Tensor, y: Tensor, config: DropoutConfig, moment: Moment) -> Tensor:
    """MC-dropout (Gal and Ghahramani, 2016) on the input of the last matrix: the cross-entropy with a mask for every row."""
    features = net.body(x)
    return F.cross_entropy(net.head(features * masks(tuple(features.shape), config.dropout, moment.random).to(x)), y)


def dropout_score(net: BodyAndHead, x: Tensor, config: DropoutConfig) -> Tensor:
    """The entropy of the mean prediction of P thinned nets, each with one mask for all rows, (B,)."""
    features = net.body(x)
    thin = masks((config.draws, 1, features.shape[1]), config.dropout, generator(0, "dropout")).to(features)
    return predictive_entropy(net.head(features * thin).softmax(2))


@dataclass(frozen=True)
class ConfidenceConfig(TrainConfig):
    """The mean of −log c is held near `budget` by a price that starts at `price`."""

    budget: float = 0.3
    price: float = 0.1


class Branched(BodyAndHead):
    """Features with two heads: logits, and the logit of the confidence c."""

    price: Tensor

    def __init__(self, net: nn.Sequential, price: float) -> None:
        super().__init__(net)
        self.branch = nn.Linear(self.head.in_features, 1)
        self.register_buffer("price", torch.tensor(price, device=self.head.weight.device))

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and those of the confidence, (B,)."""
        features = self.body(x)
        return self.head(features), self.branch(features)[:, 0]


def hinted_loss(logits: Tensor, confidence: Tensor, y: Tensor, hinted: Tensor, price: Tensor) -> tuple[Tensor, Tensor]:
    """−log p′_y + price·(−log c), p′ = c·p + (1 − c)·onehot(y) for rows that are `hinted`, else p; and the mean of −log c."""
    c, p = confidence.sigmoid(), logits.softmax(1).gather(1, y[:, None])[:, 0]
    hint_cost = F.softplus(-confidence).mean()
    likelihood = torch.where(hinted, c * p + (1 - c), p)
    return -likelihood.clamp_min(1e-12).log().mean() + price * hint_cost, hint_cost


def confidence_loss(net: Branched, x: Tensor, y: Tensor, config: ConfidenceConfig, moment: Moment) -> Tensor:
    """DeVries and Taylor (2018): the net may ask for hints on half of the rows, and pays for them.

    The price rises by a hundredth where they cost more than the budget, else it falls.
    """
    hinted = (torch.rand(len(x), generator=moment.random, device="cpu") < 0.5).to(x.device)
    total, asked = hinted_loss(*net.both(x), y, hinted, net.price.clone())
    net.price.mul_(1 / 1.01 if float(asked.detach()) < config.budget else 1 / 0.99)
    return total


STEPS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
"""Steps of the input that are tried, for pixels from 0 to 1."""


class Quotient(nn.Module):
    """Hsu et al. (2020): z_c = h_c(x) / g(x), h the cosine between features and a direction for every class, g a sigmoid of one
    number, standardised, that learns how far the domain reaches.
    """

    step: Tensor

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, head = body_and_head(net)
        self.direction = nn.Parameter(head.weight.detach().clone())
        self.domain = nn.Sequential(nn.Linear(head.in_features, 1), nn.BatchNorm1d(1), nn.Sigmoid())
        self.register_buffer("step", torch.zeros((), device=head.weight.device))

    def cosine(self, features: Tensor) -> Tensor:
        """(B, D) -> (B, C)."""
        return F.normalize(features, dim=1) @ F.normalize(self.direction, dim=1).mT

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        features = self.body(x)
        return self.cosine(features) / self.domain(features)

    def nearest(self, x: Tensor) -> Tensor:
        """max_c h_c(x), (B,)."""
        return self.cosine(self.body(x)).amax(1)

    def score_at(self, x: Tensor, step: float) -> Tensor:
        """max_c h_c at x + step·sign ∇_x max_c h_c, (B,)."""
        with torch.inference_mode(False), torch.enable_grad():
            near = x.clone().requires_grad_(True)
            best = self.nearest(near)
            (slope,) = torch.autograd.grad(best.sum(), near)
        with torch.no_grad():
            return self.nearest(near.detach() + step * slope.sign()) if step else best.detach()


def choose_step(net: Quotient, x: Tensor, y: Tensor, config: TrainConfig) -> None:
    """The step that makes validation images most in-distribution, as the authors choose it without OOD ones."""
    gains = [torch.cat([net.score_at(part, step) for part in x.split(BLOCK)]).mean() for step in STEPS]
    net.step.fill_(STEPS[int(torch.stack(gains).argmax())])


@dataclass(frozen=True)
class ARPLConfig(TrainConfig):
    """How much the bound on distances counts."""

    bound: float = 0.1


class Reciprocal(nn.Module):
    """Chen et al. (2021): each class has a point for all that it is not, (C, D), far from it; and the radius that bounds them."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, head = body_and_head(net)
        self.points = nn.Parameter(0.1 * torch.randn_like(head.weight.detach()))
        self.radius = nn.Parameter(torch.zeros((), device=head.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        features = self.body(x)
        return squared_distance(features, self.points) - features @ self.points.mT


def squared_distance(features: Tensor, points: Tensor) -> Tensor:
    """‖f − p_c‖² / D: (B, D), (C, D) -> (B, C)."""
    return (features[:, None] - points).square().mean(2)


def bounded_loss(features: Tensor, points: Tensor, radius: Tensor, y: Tensor, bound: float) -> Tensor:
    """CE(d, y) + bound·mean max(d_e(f, p_y) − R, 0), d = d_e(f, p) − f·p, d_e the mean squared distance."""
    distance = squared_distance(features, points)
    to_label = distance.gather(1, y[:, None])[:, 0]
    return F.cross_entropy(distance - features @ points.mT, y) + bound * (to_label - radius).clamp_min(0).mean()


@dataclass(frozen=True)
class VOSConfig(TrainConfig):
    """Outliers count by `weight` from a share `start` of all steps on: of `candidates` draws of each class, the furthest."""

    weight: float = 0.1
    start: float = 0.4
    queue: int = 200
    candidates: int = 1_000


class Energetic(BodyAndHead):
    """A net with its last features of each class, (C, Q, D), and a logistic rule on its energy, which weighs classes."""

    queue: Tensor
    count: Tensor

    def __init__(self, net: nn.Sequential, length: int) -> None:
        super().__init__(net)
        classes, width, device = self.head.out_features, self.head.in_features, self.head.weight.device
        self.shares = nn.Parameter(torch.zeros(classes, device=device))  # the logarithm of what a class counts in the energy
        self.slope, self.shift = nn.Parameter(torch.ones((), device=device)), nn.Parameter(torch.zeros((), device=device))
        self.register_buffer("queue", torch.zeros(classes, length, width, device=device))
        self.register_buffer("count", torch.zeros(classes, dtype=torch.long, device=device))

    def energy(self, features: Tensor) -> Tensor:
        """−log Σ_c w_c exp z_c: (B, D) -> (B,)."""
        return -(self.head(features) + self.shares).logsumexp(1)

    @torch.no_grad()
    def enqueue(self, features: Tensor, y: Tensor) -> None:
        """The newest features of each class take the places of the oldest."""
        for c in y.unique().tolist():
            new = features[y == c][-self.queue.shape[1] :]
            places = (int(self.count[c]) + torch.arange(len(new), device=y.device)) % self.queue.shape[1]
            self.queue[c, places] = new
            self.count[c] += len(new)


def outliers(queue: Tensor, noise: Tensor) -> Tensor:
    """The least likely of S draws of every class: (C, Q, D), (C, S, D) -> (C, D).

    Draws are μ_c + L·n with L·Lᵀ = Σ, the covariance of all features around the means of their classes; the least likely one has
    the longest n.
    """
    mean = queue.mean(1)
    centred = (queue - mean[:, None]).flatten(0, 1)
    covariance = centred.mT @ centred / len(centred)
    ridge = (1e-4 * covariance.diagonal().mean() + 1e-8) * torch.eye(len(covariance), device=queue.device, dtype=queue.dtype)
    longest = noise[torch.arange(len(noise), device=noise.device), noise.square().sum(2).argmax(1)]
    return mean + longest @ torch.linalg.cholesky(covariance + ridge).mT


def vos_loss(net: Energetic, x: Tensor, y: Tensor, config: VOSConfig, moment: Moment) -> Tensor:
    """Du et al. (2022): CE and, once every class has a full queue and the time has come, weight·(logistic loss of energies).

    Features beyond the Gaussian of every class teach the energy where to end: slope·energy + shift should be negative for images
    and positive for outliers.
    """
    features = net.body(x)
    total = F.cross_entropy(net.head(features), y)
    net.enqueue(features.detach(), y)
    if moment.done < config.start or int(net.count.min()) < config.queue:
        return total
    shape = (net.queue.shape[0], config.candidates, net.queue.shape[2])
    virtual = outliers(net.queue, torch.randn(shape, generator=moment.random, device="cpu").to(x))
    inside, outside = (net.slope * net.energy(f) + net.shift for f in (features, virtual))
    return total + config.weight * (F.softplus(inside).mean() + F.softplus(-outside).mean())


@dataclass(frozen=True)
class SVDDConfig(TrainConfig):
    """Numbers that the net gives."""

    width: int = 32


class Drawn(nn.Module):
    """Ruff et al. (2018): all images are drawn towards one point, classes are not looked at.

    The net without biases, with another last matrix, and the centre, (width,).
    """

    centre: Tensor

    def __init__(self, net: nn.Sequential, width: int) -> None:
        super().__init__()
        body, head = body_and_head(net)
        for module in body.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_parameter("bias", None)
        self.body = nn.Sequential(*body, nn.Linear(head.in_features, width, bias=False))
        self.register_buffer("centre", torch.zeros(width, device=head.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """‖φ(x) − c‖²: (B, ...) -> (B,)."""
        return (self.body(x) - self.centre).square().sum(1)


@torch.no_grad()
def place_centre(net: Drawn, x: Tensor, y: Tensor, config: SVDDConfig, seed: int) -> None:
    """The mean of what the untrained net gives, kept 0.1 from 0, which a net without biases reaches too easily."""
    centre = torch.stack([net.body(part).sum(0) for part in x.split(BLOCK)]).sum(0) / len(x)
    away = centre.abs().clamp_min(0.1)
    net.centre.copy_(torch.where(centre < 0, -away, away))
