# %% [markdown]
# # Your own method: MC dropout by hand
#
# For you, if you have an uncertainty method of your own and want a threshold, p-values and a fair table. It needs scikit-learn
# and matplotlib, no download, and a few seconds.
#
# The data are 442 patients of scikit-learn. Methods learn from those with a body mass index below 30, and meet the others.

# %%
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import offmap

torch.manual_seed(0)
table = load_diabetes(scaled=False)
x, y = (torch.tensor(values, dtype=torch.float32) for values in (table.data, table.target))
heavy = x[:, table.feature_names.index("bmi")] >= 30
lean = (~heavy).nonzero()[:, 0]
train_rows, valid_rows, test_rows = lean[torch.randperm(len(lean))].split([150, 90, len(lean) - 240])
x, y = ((values - values[train_rows].mean(0)) / values[train_rows].std(0) for values in (x, y))
train, valid, test = ((x[rows], y[rows]) for rows in (train_rows, valid_rows, test_rows))

net = nn.Sequential(
    nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-2)
for _ in range(100):
    loss = nn.functional.mse_loss(net(train[0])[:, 0], train[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
_ = net.eval()

# %% [markdown]
# ## A Predictive
#
# It returns a stack of outputs, `(members · draws, rows, ...)`. They must depend on the seed alone: the same call returns the
# same numbers. `clip` is for methods that can be narrowed; clip 0 means the trained network itself.


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


dropout = offmap.guard(MCDropout(net), valid, score="epistemic", clip=None)
result = dropout(x[heavy])
print(f"{result.ood.float().mean():.0%} of heavy patients flagged, p-values from {result.p_value.min():.2f} on")

# %% [markdown]
# ## A Scorer
#
# A distance, or a detector of another library, needs no stack of outputs. `offmap.evaluate` takes any object with `score(x)`,
# higher for more OOD inputs.


# %%
@dataclass(frozen=True)
class Nearest:
    """The distance to the nearest training row."""

    rows: Tensor

    def score(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.rows).amin(1)


# %% [markdown]
# ## One table
#
# `score="epistemic"` is the disagreement alone; the default score adds distances to training rows.

# %%
scorers = {
    "dropout": dropout,
    "nearest row": Nearest(train[0]),
    "MaxWEnt, disagreement": offmap.fit(net, train, valid, score="epistemic", progress=False),
    "MaxWEnt, default score": offmap.fit(net, train, valid, progress=False),
}
evaluation = offmap.evaluate(scorers, test, {"heavy": x[heavy]})
auroc = {row["scorer"]: 100 * row["auroc"] for row in evaluation.rows if row["set"] == "heavy"}
for name, value in auroc.items():
    print(f"{name}: AUROC {value:.0f}")

# %%
figure, axes = plt.subplots(figsize=(7, 1.8))
axes.barh(list(auroc), list(auroc.values()), color="#2f6fb5")
axes.set(xlim=(50, 100), xlabel="AUROC of heavy patients, %; 50 is chance")
axes.invert_yaxis()
