# %% [markdown]
# # A series: runs, windows and a threshold that follows
#
# Eight sensors of a valve bench are read at every step. A net predicts the next reading from a window of sixteen. Windows of one
# run are alike, and every run is a little different: so windows are not exchangeable, but runs are.

# %%
import os

import torch
from torch import Tensor, nn

import offmap

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
WINDOW, SENSORS = 16, 8
torch.manual_seed(0)
mixing = torch.randn(3, SENSORS) / 3**0.5


def record(drift: float = 0.0, steps: int = 150) -> Tensor:
    """The readings of one run, with a level, a load and a period of its own: (steps, SENSORS)."""
    time, load = torch.arange(steps) / (20 + 2 * torch.randn(())), 1 + 0.1 * torch.randn(())
    cycle = load * torch.stack([time.sin(), (2 * time).cos(), torch.ones(steps)], 1)
    level = 0.15 * torch.randn(SENSORS) + drift * torch.arange(steps)[:, None] / steps
    return cycle @ mixing + level + 0.1 * torch.randn(steps, SENSORS)


def cut(runs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Windows (n, WINDOW, SENSORS), the readings after them (n, SENSORS), and the run of each window (n,)."""
    windows = [run[:-1].unfold(0, WINDOW, 4).mT for run in runs]
    following = [run[WINDOW::4] for run in runs]
    labels = [torch.full((len(part),), number) for number, part in enumerate(windows)]
    return torch.cat(windows), torch.cat(following), torch.cat(labels)


count = 20 if SMOKE else 60
x, y, _ = cut([record() for _ in range(count)])
new_x, new_y, new_runs = cut([record() for _ in range(2 * count)])  # runs that the net never sees

order = torch.randperm(len(x))
train, valid = order[len(x) // 5 :], order[: len(x) // 5]
net = nn.Sequential(nn.Flatten(), nn.Linear(WINDOW * SENSORS, 64), nn.ReLU(), nn.Linear(64, SENSORS))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(5 if SMOKE else 20):
    for batch in train[torch.randperm(len(train))].split(64):
        loss = nn.functional.mse_loss(net(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% [markdown]
# Windows of one run went into training and validation both, as a random split does it. New runs are flagged far too often.

# %%
guard = offmap.fit(net, (x[train], y[train]), (x[valid], y[valid]), solver="closed-form", draws=20, progress=False)
calibrating = new_runs < count
unseen, test = (new_x[calibrating], new_y[calibrating]), new_x[~calibrating]
print(f"validated on windows of the training runs: {guard(test).ood.float().mean():.1%} of new runs flagged")

# %% [markdown]
# Whole runs that the net has not seen calibrate the threshold. In a new run, at most 5 % of windows are flagged on average,
# however alike its windows are. That takes 19 runs; offmap says so if there are fewer.

# %%
guard = guard.calibrate(unseen, groups=new_runs[calibrating])
print(f"calibrated on {guard.calibration.groups} new runs: {guard(test).ood.float().mean():.1%} of new runs flagged")
print(guard)

# %% [markdown]
# A sensor that has come loose is off the map in every run.

# %%
loose = test.clone()
loose[:, :, 0] += 0.5 * torch.randn(loose.shape[:2])
print(f"with a loose sensor: {guard(loose).ood.float().mean():.0%} flagged")

# %% [markdown]
# The bench wears out, and its levels drift. No calibration of today can promise anything for then. An `AdaptiveThreshold` follows
# the stream, at the price that it gets used to what lasts; its state is a few numbers.

# %%
scores = guard.score(cut([record(drift=0.5, steps=1000 if SMOKE else 20_000)])[0])
adaptive = offmap.AdaptiveThreshold(guard)
flagged = adaptive.update(scores)
print(
    f"in a drift: {(scores > guard.threshold).float().mean():.1%} above the fixed threshold, {flagged.float().mean():.1%} flagged"
)
print(adaptive)
restored = offmap.AdaptiveThreshold(guard)
restored.load_state_dict(adaptive.state_dict())
