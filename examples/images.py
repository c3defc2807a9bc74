# %% [markdown]
# # Images: digits of unknown classes
#
# For you, if you have an image classifier. It needs scikit-learn and matplotlib, no download, and a few seconds.
#
# A network learns to read the digits 0 to 4. Then somebody writes a 7. It must answer one of five, and is often sure of it.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import offmap

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8)
y = torch.tensor(digits.target)
known = (y < 5).nonzero()[:, 0]
train_rows, valid_rows, test_rows = known[torch.randperm(len(known))].split([500, 200, len(known) - 700])
train, valid, test = ((x[rows], y[rows]) for rows in (train_rows, valid_rows, test_rows))
unknown = x[y >= 5]

# %%
layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
net = nn.Sequential(*layers, nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for _ in range(15):
    for batch in torch.randperm(len(train_rows)).split(50):
        loss = nn.functional.cross_entropy(net(train[0][batch]), train[1][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

print(f"{(net(test[0]).argmax(1) == test[1]).float().mean():.0%} of new images of 0 to 4 are right")
sure = net(unknown).softmax(1).amax(1) > 0.9
print(f"{sure.float().mean():.0%} of images of 5 to 9 get a class with more than 90 % confidence")

# %% [markdown]
# Integer targets and one logit per class mean classification. `valid` are images that the network has not seen.

# %%
guard = offmap.fit(net, train, valid, progress=False)
print(f"0 to 4: {guard(test[0]).ood.float().mean():.0%} flagged")
print(f"5 to 9: {guard(unknown).ood.float().mean():.0%} flagged")
print(f"5 to 9, if the network is sure: {guard(unknown[sure]).ood.float().mean():.0%} flagged")

# %% [markdown]
# Unknown digits by score, from those that the guard takes for known ones to the most unusual.

# %%
score, order = guard.score(unknown).sort()
figure, axes = plt.subplots(1, 10, figsize=(7.5, 1.2))
for place, row in zip(axes, torch.linspace(0, len(order) - 1, 10).long().tolist(), strict=True):
    place.imshow(unknown[order[row], 0].numpy(), cmap="gray_r")
    place.set_title(f"{score[row]:.1f}", fontsize=8, color="#d1541b" if score[row] > guard.threshold else "#2f6fb5")
    place.axis("off")

# %% [markdown]
# `prediction_set` returns the digits that cannot be ruled out. For in-distribution images it holds the true one at the level
# you ask for.

# %%
sets = guard.prediction_set(test[0], level=0.95)
holds = sets.gather(1, test[1][:, None]).float().mean()
print(f"the true digit is in the set of {holds:.0%} of new images; {sets.sum(1).float().mean():.2f} digits per set")

# %% [markdown]
# Post-hoc detectors have the same threshold, sign and table. Without `methods=`, `detect_all` fits all that the network allows.

# %%
others = offmap.detect_all(net, train, valid, methods=["msp", "energy", "knn", "vim"])
evaluation = offmap.evaluate({"guard": guard, **others}, test, {"5 to 9": unknown})
for row in evaluation.rows:
    if row["set"] == "5 to 9":
        print(f"{row['scorer']}: AUROC {100 * row['auroc']:.1f}")
