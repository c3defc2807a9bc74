# %% [markdown]
# # A table: patients unlike those before
#
# For you, if your network predicts a number from a table. It needs scikit-learn and matplotlib, no download, and a few seconds.
#
# How far has diabetes progressed after a year? A network learns it from scikit-learn's table of 442 patients, but only from
# those with a body mass index below 30. Then it predicts for the others. Without a guard nothing shows that these patients
# differ.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import offmap

torch.manual_seed(0)
table = load_diabetes(scaled=False)
x, y = (torch.tensor(values, dtype=torch.float32) for values in (table.data, table.target))
bmi = x[:, table.feature_names.index("bmi")]

# %% [markdown]
# Set rows aside that the network will not see. Standardise inputs and targets by the training rows.

# %%
lean = (bmi < 30).nonzero()[:, 0]
train_rows, valid_rows, test_rows = lean[torch.randperm(len(lean))].split([150, 90, len(lean) - 240])
heavy_rows = (bmi >= 30).nonzero()[:, 0]
inputs = (x - x[train_rows].mean(0)) / x[train_rows].std(0)
centre, unit = y[train_rows].mean(), y[train_rows].std()
targets = (y - centre) / unit
train, valid, test = ((inputs[rows], targets[rows]) for rows in (train_rows, valid_rows, test_rows))

# %%
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-2)
for _ in range(100):
    loss = nn.functional.mse_loss(net(train[0])[:, 0], train[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% [markdown]
# One line fits the guard.

# %%
guard = offmap.fit(net, train, valid, progress=False)
for name, rows in {"lean": test_rows, "heavy": heavy_rows}.items():
    result = guard(inputs[rows])
    print(f"{name}: {result.ood.float().mean():.0%} of {len(rows)} patients flagged")

# %% [markdown]
# The score rises with the body mass index, but it is no threshold on one column. It flags patients who are unusual in other
# columns too.

# %%
figure, axes = plt.subplots(figsize=(7, 2.6))
for rows, label, look in ((test_rows, "lean, unseen", "#2f6fb5"), (heavy_rows, "heavy", "#d1541b")):
    axes.scatter(bmi[rows], guard.score(inputs[rows]), s=12, color=look, label=label)
axes.axhline(guard.threshold, color="black", linewidth=0.9, linestyle="dashed", label="threshold")
axes.set(xlabel="body mass index, kg/m²", ylabel="score")
_ = axes.legend(frameon=False)

# %% [markdown]
# Intervals are conformal: at level 0.95 they cover 19 of 20 new rows of the same distribution. They promise nothing for OOD
# rows.

# %%
interval = guard.interval(test[0], level=0.95)
inside = (interval.lower <= test[1]) & (test[1] <= interval.upper)
print(f"{inside.float().mean():.0%} of {len(test_rows)} unseen lean patients are inside")
print(f"mean width: {unit * (interval.upper - interval.lower).mean():.0f} units of progression")

# %% [markdown]
# Why was a patient flagged? `terms` splits the score, in standard deviations of in-distribution rows.

# %%
farthest = heavy_rows[guard.score(inputs[heavy_rows]).argmax()]
print(f"body mass index {bmi[farthest]:.1f}")
for term, value in guard.terms(inputs[farthest][None]).items():
    print(f"{term}: {value.item():.1f}")
