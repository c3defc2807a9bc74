# %% [markdown]
# # A guard over your own method
#
# Any object that returns a stack of outputs can have a guard: threshold, p-values, intervals, evaluation. It needs two
# attributes, `members` and `outputs`. This example writes MC-dropout by hand, and compares it with MaxWEnt on the same net.

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
# Outputs are `(members · draws, rows, ...)`. They must depend on the seed only: the same call must return the same numbers.
# `clip` is for methods that can be narrowed, others ignore it; clip 0 means the trained net itself.


# %%
@dataclass(frozen=True)
class MCDropout:
    """Predict with dropout switched on."""

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
dropout = offmap.guard(MCDropout(net), task.valid, score="epistemic", clip=None)
maxwent = offmap.fit(net, task.train, task.valid, score="epistemic", steps=20 if SMOKE else 500, progress=False)
evaluation = offmap.evaluate({"dropout, by hand": dropout, "MaxWEnt": maxwent}, task.test, task.ood)
print("guard             set       AUROC")
for row in evaluation.rows:
    if row["set"] != "test":
        print(f"{row['scorer']:17} {row['set']:8} {row['auroc']:6.1%}")
    else:
        print(f"{row['scorer']:17} {row['set']:8} {row['rmse']:7.3f} RMSE, {row['conformal_coverage']:.0%} inside their interval")

# %% [markdown]
# A distance, or a detector from another library, needs no stack of outputs: `offmap.evaluate` takes any object with `score(x)`,
# higher for more OOD inputs.


# %%
@dataclass(frozen=True)
class Nearest:
    """The distance to the nearest training row."""

    rows: Tensor

    def score(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.rows).amin(1)


print(f"nearest row, gap: {offmap.evaluate(Nearest(x), task.test, task.ood).rows[-1]['auroc']:.1%}")
