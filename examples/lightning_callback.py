# %% [markdown]
# # A guard at the end of `Trainer.fit`
#
# `GuardCallback` fits a guard on the trainer's loaders when training ends, evaluates it on OOD data, and logs the metrics.

# %%
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offmap.integrations.lightning import GuardCallback
from offmap_bench.tasks.synthetic import moons

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
task = moons()


class Moons(pl.LightningModule):
    """Which of two moons?"""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.binary_cross_entropy_with_logits(self(batch[0])[:, 0], batch[1].float())

    def validation_step(self, batch, index):
        self.log("valid_accuracy", ((self(batch[0])[:, 0] > 0) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


# %% [markdown]
# All other arguments of the callback go to `offmap.fit`. Fifty validation points on which the net makes no mistake leave little
# room to widen: `tolerance="smoothed"` adds one more point, at chance level.

# %%
torch.manual_seed(0)
callback = GuardCallback(
    ood={"off the moons": task.ood["off the moons"]},
    test=task.test,
    tolerance="smoothed",
    steps=20 if SMOKE else 500,
    progress=False,
)
trainer = pl.Trainer(
    max_epochs=2 if SMOKE else 60, callbacks=[callback], logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False,
)  # fmt: skip
train, valid = TensorDataset(*task.train), TensorDataset(*task.valid)
trainer.fit(Moons(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(valid, batch_size=50))

# %%
for name, value in sorted(callback.metrics.items()):
    print(f"{name:32} {value:8.3f}")

# %%
result = callback.guard(torch.tensor([[-0.5, 0.7], [0.0, 0.0], [3.0, 3.0]]))
print("on a moon, between, far away:", result.ood.tolist())
