# %% [markdown]
# # Deploy: from the notebook to the service
#
# For you, if you have a guard and want it in production. It needs scikit-learn and matplotlib, no download, and a few seconds.
#
# A network tells benign from malignant tumours by 30 measurements of cells. Then a laboratory sends lengths in other units.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import offmap

torch.manual_seed(0)
table = load_breast_cancer()
order = torch.randperm(len(table.data))
raw, y = torch.tensor(table.data).float()[order], torch.tensor(table.target)[order]
mean, std = raw[:250].mean(0), raw[:250].std(0)
train, valid, calibration, test = (
    ((raw[rows] - mean) / std, y[rows]) for rows in (slice(250), slice(250, 350), slice(350, 450), slice(450, None))
)


def build() -> nn.Module:
    """The architecture; the weights are in their own file."""
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))


net = build()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1e-3)
for _ in range(100):
    loss = nn.functional.cross_entropy(net(train[0]), train[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{(net(test[0]).argmax(1) == test[1]).float().mean():.0%} of new tumours are right")

# %% [markdown]
# ## Save
#
# Separate `calibration` rows make the promise exact. A guard is one file beside the weights. It holds no code and no weights,
# and with the default score up to 4,096 training rows, because it measures distances to them.

# %%
guard = offmap.fit(net, train, valid, calibration=calibration, progress=False)
folder = Path(tempfile.mkdtemp())
torch.save(net.state_dict(), folder / "net.pt")
guard.save(folder / "guard.safetensors")
print(f"{(folder / 'guard.safetensors').stat().st_size / 1000:.0f} kB, exact: {guard.calibration.exact}")

# %% [markdown]
# ## Load
#
# In the service, the same scores to the bit. A network with other weights is refused.

# %%
served = build()
served.load_state_dict(torch.load(folder / "net.pt"))
loaded = offmap.load(folder / "guard.safetensors", served)
print("same scores:", torch.equal(loaded.score(test[0]), guard.score(test[0])))
try:
    offmap.load(folder / "guard.safetensors", build())
except offmap.errors.FileError as error:
    print("another network:", type(error).__name__)

# %% [markdown]
# ## Watch p-values
#
# p-values of in-distribution rows are spread evenly over 0 to 1. So a shift shows as a heap at 0, before many rows are flagged.
# Here a laboratory reports radii (columns 0, 10 and 20) in units that are a quarter larger.

# %%
shifted = raw[450:].clone()
shifted[:, [0, 10, 20]] *= 1.25
shifted = (shifted - mean) / std
figure, axes = plt.subplots(figsize=(7, 2.4))
result = {"as before": loaded(test[0]), "other units": loaded(shifted)}
axes.hist([each.p_value for each in result.values()], bins=10, range=(0, 1), label=list(result), color=["#2f6fb5", "#d1541b"])
axes.set(xlabel="p-value", ylabel="tumours")
_ = axes.legend(frameon=False)
for name, each in result.items():
    print(f"{name}: {each.ood.float().mean():.0%} flagged, {(each.p_value < 0.2).float().mean():.0%} of p-values below 0.2")

# %% [markdown]
# ## Export
#
# One file for a service without this library: `.onnx` for ONNX Runtime, `.pt2` for torch. `export` runs it on the example rows
# and compares before it writes. `offmap serve guard.onnx` puts such a file behind HTTP.

# %%
info = loaded.export(folder / "guard.pt2", example=valid[0][:32])
graph = torch.export.load(folder / "guard.pt2").module()
print("outputs:", *info.outputs)
print("same flags:", torch.equal(graph(shifted)["ood"], loaded(shifted).ood))

# %%
for path in folder.iterdir():
    path.unlink()
folder.rmdir()
