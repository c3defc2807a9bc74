# %% [markdown]
# # A table with a numeric target
#
# How far has diabetes progressed after a year? A net learns it from scikit-learn's table of 442 patients, but only from the
# leaner ones. Then it is asked about the others. A plain net would answer with the same calm voice; a guard tells that these
# patients are not like those it learned from.

# %%
import os

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import offmap

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))  # a few steps, to see that everything runs
torch.manual_seed(0)

table = load_diabetes(scaled=False)
x, y = (torch.tensor(values, dtype=torch.float32) for values in (table.data, table.target))
bmi = x[:, table.feature_names.index("bmi")]
known = bmi < 30

# %% [markdown]
# Standardise by what the net is trained on, inputs and target. A net that is to say how sure it is gives two numbers per row: a
# mean, and the logarithm of a variance.

# %%
order = torch.randperm(int(known.sum()))
train, valid, test = order[:240], order[240:290], order[290:]
inputs = (x - x[known][train].mean(0)) / x[known][train].std(0)
centre, unit = y[known][train].mean(), y[known][train].std()
targets = (y - centre) / unit

net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-3)
for _ in range(30 if SMOKE else 200):
    mean, log_variance = net(inputs[known][train]).unbind(1)
    loss = (log_variance + (targets[known][train] - mean) ** 2 / log_variance.exp()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% [markdown]
# One line makes the guard. `valid` must be rows that the net was not trained on: they decide how wide the weights may spread.

# %%
guard = offmap.fit(
    net,
    (inputs[known][train], targets[known][train]),
    (inputs[known][valid], targets[known][valid]),
    steps=20 if SMOKE else 500,
    progress=False,
)

# %%
print("patients            rows  flagged  mean ± standard deviation")
for name, rows in {"like the training's": inputs[known][test], "heavier": inputs[~known]}.items():
    result = guard(rows)
    spread = f"{float(centre + unit * result.mean.mean()):.0f} ± {float(unit * result.std.mean()):.0f}"
    print(f"{name:19} {len(rows):4} {result.ood.float().mean():8.0%}  {spread}")

interval = guard.interval(inputs[known][test])  # conformal: right for 19 of 20 new rows of the same kind
inside = (interval.lower <= targets[known][test]) & (targets[known][test] <= interval.upper)
print(f"inside their interval: {inside.float().mean():.0%} of {len(test)} test rows")

# %% [markdown]
# The most and the least in-distribution of the heavier patients, by score. Higher is more OOD, everywhere.

# %%
score = guard.score(inputs[~known])
for row in (int(score.argmin()), int(score.argmax())):
    print(f"score {score[row]:5.2f}: body mass index {bmi[~known][row]:.1f}, blood pressure {x[~known][row][3]:.0f}")
