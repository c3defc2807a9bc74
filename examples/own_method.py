# %% [markdown]
# # The same verdicts for a method of your own
#
# Whatever gives a stack of outputs can have a guard: threshold, p-values, intervals, evaluation. Two attributes are asked of it,
# `members` and `outputs`. Here that is dropout left on while predicting, written by hand, beside MaxWEnt on the same net.

# %%
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import offmap
from offmap_bench.tasks.synthetic import regression

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
task = regression()
x, y = task.train
torch.manual_seed(0)

net = nn.Sequential(
    nn.Linear(1, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 2)
)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(100 if SMOKE else 1500):
    mean, log_variance = net(x).unbind(1)
    loss = (log_variance + (y - mean) ** 2 / log_variance.exp()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
net.eval()

# %% [markdown]
# Outputs are `(members · draws, rows, ...)`. The seed must decide them: the same call must give the same numbers. `clip` is for
# methods that can be narrowed; where nothing can, it is ignored, and clip 0 means "as the net was trained".


# %%
@dataclass(frozen=True)
class LeftOn:
    """Dropout while predicting."""

    net: nn.Module
    members: int = 1

    @torch.no_grad()
    def outputs(self, x: Tensor, draws: int, *, clip: float | None, seed: int) -> Tensor:
        if clip == 0:
            return self.net(x)[None].repeat(draws, 1, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net.train()
            try:
                return torch.stack([self.net(x) for _ in range(draws)])
            finally:
                self.net.eval()


# %%
own = offmap.guard(LeftOn(net), task.valid, score="epistemic", clip=None)
ours = offmap.fit(net, task.train, task.valid, score="epistemic", steps=20 if SMOKE else 500, progress=False)
found = offmap.evaluate({"dropout, by hand": own, "MaxWEnt": ours}, task.test, task.ood)
print("guard             set       AUROC")
for row in found.rows:
    if row["set"] != "test":
        print(f"{row['scorer']:17} {row['set']:8} {row['auroc']:6.1%}")
    else:
        print(f"{row['scorer']:17} {row['set']:8} {row['rmse']:7.3f} RMSE, {row['conformal_coverage']:.0%} inside their interval")

# %% [markdown]
# What only scores, such as a distance or a detector from another library, needs no stack: an object with `score(x)`, higher for
# more OOD inputs, goes into `offmap.evaluate` as it is.


# %%
@dataclass(frozen=True)
class Nearest:
    """The distance to the nearest training row."""

    rows: Tensor

    def score(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.rows).amin(1)


print(f"nearest row, gap: {offmap.evaluate(Nearest(x), task.test, task.ood).rows[-1]['auroc']:.1%}")
