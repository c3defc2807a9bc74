# %% [markdown]
# # From the notebook to the service
#
# A guard is one file beside the weights of the net. Another process loads both and returns the same scores to the bit. Where this
# library is not installed, one exported file predicts, scores and flags.

# %%
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import offmap
from offmap_bench.tasks.synthetic import regression

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
task = regression()
x, y = task.train


def build() -> nn.Module:
    """The architecture; the weights are in their own file."""
    return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


torch.manual_seed(0)
net = build()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(100 if SMOKE else 1000):
    mean, log_variance = net(x).unbind(1)
    loss = (log_variance + (y - mean) ** 2 / log_variance.exp()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% [markdown]
# With separate `calibration` data the threshold, p-values and intervals are exact rather than approximate. `score="epistemic"`
# keeps no training rows in the file; the default score keeps up to 4,096 of them, because it measures distances to them.

# %%
calibration = (task.test[0][:100], task.test[1][:100])
guard = offmap.fit(
    net, task.train, task.valid, calibration=calibration, score="epistemic", steps=20 if SMOKE else 500, progress=False
)
folder = Path(tempfile.mkdtemp())
torch.save(net.state_dict(), folder / "net.pt")
guard.save(folder / "guard.safetensors")
print(f"the guard's file: {(folder / 'guard.safetensors').stat().st_size / 1e3:.0f} kB")

# %% [markdown]
# In the service. A guard file holds no code and no weights: it is read with safetensors, and refused if the net has other weights
# than at fit time.

# %%
served = build()
served.load_state_dict(torch.load(folder / "net.pt", weights_only=True))
again = offmap.load(folder / "guard.safetensors", served)
inputs = torch.tensor([[0.75], [0.1], [2.0]])
print("same scores:", torch.equal(again.score(inputs), guard.score(inputs)))
print("OOD:", again(inputs).ood.tolist())

try:
    offmap.load(folder / "guard.safetensors", build())
except offmap.errors.FileError as error:
    print("another net:", type(error).__name__)

# %% [markdown]
# `guard.export` writes draws, score and threshold as one graph: `.onnx` for ONNX Runtime, `.pt2` for torch. The file is checked
# on the example rows before it is written.

# %%
info = again.export(folder / "guard.pt2", example=task.valid[0][:32])
graph = torch.export.load(folder / "guard.pt2").module()
outputs = graph(inputs)
print("outputs of the graph:", *info.outputs)
print("the same flags:", torch.equal(outputs["ood"], again(inputs).ood))

for path in folder.iterdir():
    path.unlink()
folder.rmdir()
