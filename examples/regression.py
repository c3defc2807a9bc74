# %% [markdown]
# # A table with a numeric target
#
# How far has diabetes progressed after a year? A net learns it from scikit-learn's table of 442 patients, but only from those
# with a body mass index below 30. Then it predicts for the others. Without a guard nothing would show that these patients
# differ from the training data.

# %%
import os

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import offmap

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))  # a few steps, to check that everything runs
torch.manual_seed(0)

table = load_diabetes(scaled=False)
x, y = (torch.tensor(values, dtype=torch.float32) for values in (table.data, table.target))
bmi = x[:, table.feature_names.index("bmi")]
lean = bmi < 30

# %% [markdown]
# Standardise inputs and targets by the training rows. A net with an uncertainty returns two numbers per row: a mean, and the
# logarithm of a variance.

# %%
order = torch.randperm(int(lean.sum()))
train, valid, test = order[:240], order[240:290], order[290:]
inputs = (x - x[lean][train].mean(0)) / x[lean][train].std(0)
centre, unit = y[lean][train].mean(), y[lean][train].std()
targets = (y - centre) / unit

net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-3)
for _ in range(30 if SMOKE else 200):
    mean, log_variance = net(inputs[lean][train]).unbind(1)
    loss = (log_variance + (targets[lean][train] - mean) ** 2 / log_variance.exp()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% [markdown]
# One line fits the guard. `valid` must hold rows that the net did not train on: they decide how wide the weight distribution
# may be.

# %%
guard = offmap.fit(
    net,
    (inputs[lean][train], targets[lean][train]),
    (inputs[lean][valid], targets[lean][valid]),
    steps=20 if SMOKE else 500,
    progress=False,
)

# %%
print("patients            rows  flagged  mean ± standard deviation")
for name, rows in {"like the training's": inputs[lean][test], "heavier": inputs[~lean]}.items():
    result = guard(rows)
    prediction = f"{float(centre + unit * result.mean.mean()):.0f} ± {float(unit * result.std.mean()):.0f}"
    print(f"{name:19} {len(rows):4} {result.ood.float().mean():8.0%}  {prediction}")

interval = guard.interval(inputs[lean][test])  # conformal: covers 19 of 20 new rows of the same distribution
inside = (interval.lower <= targets[lean][test]) & (targets[lean][test] <= interval.upper)
print(f"inside their interval: {inside.float().mean():.0%} of {len(test)} test rows")

# %% [markdown]
# The heavier patients of lowest and of highest score. Higher always means more OOD.

# %%
score = guard.score(inputs[~lean])
for row in (int(score.argmin()), int(score.argmax())):
    print(f"score {score[row]:5.2f}: body mass index {bmi[~lean][row]:.1f}, blood pressure {x[~lean][row][3]:.0f}")
