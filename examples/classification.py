# %% [markdown]
# # Digits of unknown classes
#
# A net learns to classify the digits 0 to 4. Then somebody writes a 7. This example compares the guard's score with post-hoc
# detectors of classifiers, all in one table.

# %%
import os

import torch
from torch import nn

import offmap
from offmap_bench.tasks.synthetic import digits

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
torch.manual_seed(0)
task = digits()  # scikit-learn's images, 8 × 8; training, validation and test data of 0–4, and 5–9 beside them
(x, y), valid, test, ood = task.train, task.valid, task.test, task.ood["digits 5–9"]

net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 5))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for _ in range(60 if SMOKE else 300):
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% [markdown]
# Integer targets mean classification. The net returns logits.

# %%
guard = offmap.fit(net, (x, y), valid, steps=20 if SMOKE else 500, progress=False)
result = guard(ood)
print(f"flagged: {guard(test[0]).ood.float().mean():.0%} of 0–4, {result.ood.float().mean():.0%} of 5–9")

# %% [markdown]
# `prediction_set` returns the digits that cannot be ruled out, at a level that holds for in-distribution images.

# %%
sets = guard.prediction_set(test[0], level=0.95)
holds = sets.gather(1, test[1][:, None]).float().mean()
print(f"the right digit is in the set for {holds:.0%} of 0–4; {sets.sum(1).float().mean():.2f} digits per set")

# %% [markdown]
# Other scores and post-hoc detectors have the same threshold, the same sign and the same table. Without `methods=`, `detect_all`
# fits all detectors that the net allows.

# %%
others = offmap.detect_all(net, (x, y), valid, methods=["msp", "energy", "knn", "vim"])
paper = offmap.fit(net, (x, y), valid, score="paper", steps=20 if SMOKE else 500, progress=False)
evaluation = offmap.evaluate({"default": guard, "paper": paper, **others}, test, {"5–9": ood})
print("scorer    AUROC  FPR@95")
for row in evaluation.rows:
    if row["set"] != "test":
        print(f"{row['scorer']:8} {row['auroc']:6.1%} {row['fpr95']:7.1%}")
