# %% [markdown]
# # Which pixels are OOD?
#
# A small net classifies every pixel of a synthetic image: background, disc or square. Then an image contains an object of no
# known class, and the guard's `score_map` shows where.

# %%
import os

import torch
from torch import Tensor, nn

import offmap

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
SIZE = 24
torch.manual_seed(0)
rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")


def scene(stripes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """An image (1, 24, 24), the class of every pixel, and a mask of the OOD object."""
    image, label = 0.1 * torch.randn(SIZE, SIZE), torch.zeros(SIZE, SIZE, dtype=torch.long)
    where = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    for kind, left in ((1, 0), (2, 12)):
        i, j, r = (int(torch.randint(low, high, ())) for low, high in ((5, 19), (left + 4, left + 9), (2, 5)))
        near = (
            (rows - i) ** 2 + (columns - j) ** 2 <= r * r if kind == 1 else ((rows - i).abs() <= r) & ((columns - j).abs() <= r)
        )
        image[near], label[near] = image[near] + (0.6 if kind == 1 else 1.2), kind
    if stripes:
        i, j = (int(torch.randint(0, SIZE - 8, ())) for _ in range(2))
        where[i : i + 8, j : j + 8] = True
        image[where] = (2.0 * (columns % 2) - 0.5)[where]
    return image[None], label, where


def scenes(n: int, stripes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Several, stacked."""
    image, label, where = zip(*(scene(stripes) for _ in range(n)), strict=True)
    return torch.stack(image), torch.stack(label), torch.stack(where)


# %%
train, valid, test = (scenes(n)[:2] for n in ((60, 30, 20) if SMOKE else (300, 80, 60)))
net = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv2d(12, 3, 1)
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(30 if SMOKE else 300):
    pick = torch.arange(32) + 32 * step
    loss = nn.functional.cross_entropy(net(train[0][pick % len(train[0])]), train[1][pick % len(train[0])])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% [markdown]
# Targets `(B, H, W)` with an output `(B, C, H, W)` are a dense classification: `label`, `probs` and `score_map` keep the
# positions, and `score` has one number per image. Dense outputs have the paper's score, the entropy of the mean prediction.

# %%
guard = offmap.fit(net, train, valid, solver="closed-form", draws=10 if SMOKE else 30, risk_draws=10 if SMOKE else 30)
result = guard(test[0])
print(f"pixels right: {(result.label == test[1]).float().mean():.1%}; images flagged: {result.ood.float().mean():.0%}")

# %%
image, _, where = scenes(20 if SMOKE else 60, stripes=True)
result = guard(image)
print(f"with a striped patch, images flagged: {result.ood.float().mean():.0%}")
inside, outside = result.score_map[where].mean(), result.score_map[~where].mean()
print(f"score inside the patch {inside:.3f}, outside {outside:.3f} nats")

# %% [markdown]
# One image as text: the predicted classes, and, as #, the 5 % of pixels with the highest scores.

# %%
far = result.score_map[0] > result.score_map[0].quantile(0.95)
for line, marks in zip(result.label[0][::2].tolist(), far[::2].tolist(), strict=True):
    print("".join("#" if mark else ".o■"[kind] for kind, mark in zip(line, marks, strict=True)))
