"""Data and nets of the golden cases: torch alone, the same numbers every time.

Hidden layers are random, last layers are solved in float64 by ridge regression: nets are good at once, and no training loop
carries rounding into what is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

WORDS, TAGS = 11, 3


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(n: int, seed: int, features: int = 3) -> Tensor:
    return torch.randn(n, features, generator=source(seed))


def new_rows(seed: int = 5, features: int = 3) -> Tensor:
    """Six in-distribution rows, and four that are farther and farther away."""
    return torch.cat([rows(6, seed, features), 2 + torch.arange(1.0, 5.0)[:, None] * rows(4, seed + 1, features)])


# ----------------------------------------------------------------------------------------------------------------- tables


def quantity(n: int, seed: int, targets: int | None = None) -> tuple[Tensor, Tensor]:
    """y = (x₀ + tanh x₁)·k with noise of standard deviation 0.3: (n,), or (n, K)."""
    x = rows(n, seed)
    noise = 0.3 * torch.randn(n, targets or 1, generator=source(seed + 1000))
    y = (x[:, :1] + x[:, 1:2].tanh()) * torch.arange(1.0, (targets or 1) + 1) + noise
    return x, y if targets else y[:, 0]


def kinds(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Which of three numbers is the largest, one row in twenty mislabelled."""
    x = rows(n, seed)
    y = x.argmax(1)
    return x, torch.where(torch.rand(n, generator=source(seed + 1000)) < 0.05, (y + 1) % 3, y)


def yes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = rows(n, seed)
    return x, (x[:, 0] + 0.3 * torch.randn(n, generator=source(seed + 1000)) > x[:, 1]).long()


def labels(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two yes-or-no labels of one row."""
    x = rows(n, seed)
    return x, (x[:, :2] + 0.3 * torch.randn(n, 2, generator=source(seed + 1000)) > 0).long()


def solve_head(body: nn.Module, head: nn.Linear, x: Any, wanted: Tensor) -> None:
    """Give the last layer the weights of least squares."""
    with torch.no_grad():
        h = body(x).double()
        h = torch.cat([h, torch.ones(*h.shape[:-1], 1, dtype=torch.float64)], -1).flatten(0, -2)
        ridge = 1e-2 * torch.eye(h.shape[1], dtype=torch.float64)
        weights = torch.linalg.solve(h.mT @ h + ridge, h.mT @ wanted.double().reshape(len(h), -1))
        head.weight.copy_(weights[:-1].mT)
        head.bias.copy_(weights[-1])


def run_stack(
    x: Tensor, wanted: Tensor, *, seed: int = 0, hidden: tuple[int, ...] = (24, 16), kind: Any = nn.ReLU
) -> nn.Sequential:
    """A plain stack of layers."""
    torch.manual_seed(seed)
    widths = [x.shape[1], *hidden]
    body = [layer for a, b in zip(widths, hidden, strict=False) for layer in (nn.Linear(a, b), kind())]
    net = nn.Sequential(*body, nn.Linear(widths[-1], wanted.shape[1]))
    solve_head(net[:-1], net[-1], x, wanted)
    return net


def mean_and_variance(seed: int = 0, targets: int = 1, **options: Any) -> nn.Sequential:
    x, y = quantity(200, 7, targets)
    return run_stack(x, torch.cat([y, -2.2 + 0.1 * x[:, :targets]], 1), seed=seed, **options)


def means(seed: int = 0, targets: int = 1, **options: Any) -> nn.Sequential:
    x, y = quantity(200, 7, targets)
    return run_stack(x, y, seed=seed, **options)


def classifier(seed: int = 0, **options: Any) -> nn.Sequential:
    x, y = kinds(200, 7)
    return run_stack(x, 4.0 * F.one_hot(y, 3), seed=seed, **options)


def decider(seed: int = 0) -> nn.Sequential:
    x, y = yes(200, 7)
    return run_stack(x, 6.0 * y[:, None] - 3.0, seed=seed)


def labeller(seed: int = 0) -> nn.Sequential:
    x, y = labels(200, 7)
    return run_stack(x, 6.0 * y - 3.0, seed=seed)


class Squeezed(nn.Module):
    """A net whose only output has no column of its own, (B,)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


# --------------------------------------------------------------------------------------------------------------- pictures


def stripes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) with stripes in one of three directions, and which."""
    made = source(seed)
    y = torch.randint(3, (n,), generator=made)
    a, b = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    phase = 3 * torch.rand(n, 1, 1, generator=made)
    waves = torch.stack([(angle[None] * 1.5 + phase).sin() for angle in (a, b, (a + b) / 2)], 1)
    x = waves[torch.arange(n), y] + 0.2 * torch.randn(n, 8, 8, generator=made)
    return x.unsqueeze(1), y


def new_images() -> Tensor:
    """Four in-distribution images, and four of noise."""
    return torch.cat([stripes(4, 5)[0], torch.randn(4, 1, 8, 8, generator=source(6))])


def eye(seed: int = 0, width: int = 6) -> nn.Sequential:
    """A small convolutional classifier."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip
    x, y = stripes(300, 7)
    solve_head(net[:-1], net[-1], x, 6.0 * F.one_hot(y, 3))
    return net.eval()


def pixels(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 4, 4), and whether each pixel is bright; the first line does not count."""
    x = torch.rand(n, 1, 4, 4, generator=source(seed))
    y = (x[:, 0] + 0.1 * torch.randn(n, 4, 4, generator=source(seed + 1000)) > 0.5).long()
    y[:, 0] = -100
    return x, y


class Painter(nn.Module):
    """(B, 1, H, W) -> (B, C, H, W)."""

    def __init__(self, x: Tensor, wanted: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.head = nn.Conv2d(1, 5, 3, padding=1), nn.Linear(5, wanted.shape[1])
        solve_head(self.seen, self.head, x, wanted.movedim(1, -1))

    def seen(self, x: Tensor) -> Tensor:
        return self.look(x).relu().movedim(1, -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.seen(x)).movedim(-1, 1)


# ------------------------------------------------------------------------------------------------------------------ words


def text(n: int, length: int, seed: int) -> dict[str, Tensor]:
    """Texts of two to `length` words, as a tokenizer gives them."""
    ids = torch.randint(1, WORDS, (n, length), generator=source(seed))
    lengths = torch.randint(2, length + 1, (n, 1), generator=source(seed + 1000))
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def ood_text(n: int, length: int, seed: int) -> dict[str, Tensor]:
    """Texts of one word alone."""
    word = torch.randint(1, WORDS, (n, 1), generator=source(seed))
    return {"input_ids": word.expand(n, length).clone(), "attention_mask": torch.ones(n, length, dtype=torch.long)}


class Reader(nn.Module):
    """Two logits of a text: an Embedding, a Transformer layer with a mask, a Linear layer over the mean."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        self.body, self.head = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), nn.Linear(8, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.unsqueeze(-1)
        h = self.body(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head((h * kept).sum(1) / kept.sum(1))


class Tagger(nn.Module):
    """Logits (B, T, C) of every word beside the mean of its text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 6), nn.Linear(12, TAGS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words, kept = self.words(input_ids), attention_mask.unsqueeze(-1).float()
        context = (words * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)
        return self.head(torch.cat([words, context.expand_as(words)], -1))


def tag_batches(*lengths: int, n: int = 12, seed: int = 0) -> DataLoader[Any]:
    """Batches of texts with a tag for every word, each batch of a length of its own."""
    parts = [text(n, length, seed + i) for i, length in enumerate(lengths)]
    named = [{**x, "labels": (x["input_ids"] % TAGS).masked_fill(x["attention_mask"] == 0, -100)} for x in parts]
    return DataLoader(named, batch_size=None)  # pyright: ignore[reportArgumentType]


class Recurrent(nn.Module):
    """A number for a sequence of given length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][torch.arange(len(x)), lengths - 1])


def sequences(*lengths: int, n: int = 16) -> DataLoader[Any]:
    """Batches ((x, lengths), y), each of a length of its own."""

    def batch(length: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = rows(n * length, seed).reshape(n, length, 3)
        return (x, torch.randint(1, length + 1, (n,), generator=source(seed))), x[:, 0, 0]

    parts = [batch(length, 100 * i + length) for i, length in enumerate(lengths)]
    return DataLoader(parts, batch_size=None)  # pyright: ignore[reportArgumentType]
