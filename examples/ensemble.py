# %% [markdown]
# # Five nets instead of one
#
# A list of nets is an ensemble: `offmap.fit` widens every member, all in one pass, and the guard predicts with their mixture.
# This example compares one net with five on the paper's one-dimensional task: in a gap in the middle of the data, and outside.

# %%
import os

import torch

import offmap
from offmap.data import Place, as_batches, load_rows
from offmap.integrations.nets import mlp
from offmap.likelihoods import Gaussian
from offmap_bench.methods import deep_ensemble
from offmap_bench.tasks.synthetic import regression

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
task = regression()

# %% [markdown]
# The nets may come from anywhere, as long as they differ in weights only. `offmap_bench` can also train them, stacked, in one
# loop: `deep_ensemble.fit` keeps each net at its lowest validation loss.

# %%
initial = [mlp(1, 2, hidden=(64, 64), seed=seed) for seed in range(5)]
place = Place(torch.device("cpu"), torch.float32)
train, valid = as_batches(task.train, place, name="train"), load_rows(as_batches(task.valid, place, name="valid"))
config = deep_ensemble.Config(steps=100 if SMOKE else 1500, lr=2e-3)
ensemble = deep_ensemble.fit(initial, train, valid, likelihood=Gaussian(), config=config)
nets = ensemble.nets()

# %%
guards = {
    "deep ensemble": offmap.guard(ensemble, task.valid, score="epistemic"),
    "one net, MaxWEnt": offmap.fit(
        nets[0], task.train, task.valid, score="epistemic", steps=20 if SMOKE else 500, progress=False
    ),
    "five nets, MaxWEnt": offmap.fit(nets, task.train, task.valid, score="epistemic", steps=20 if SMOKE else 500, progress=False),
}

# %% [markdown]
# `score="epistemic"` is the disagreement only, so that the table shows what members and draws add. The default score adds the
# distance to training rows.

# %%
evaluation = offmap.evaluate(guards, task.test, task.ood)
print(f"{'guard':20} {'outside':>8} {'gap':>8}   (AUROC)")
for name in guards:
    numbers = {row["set"]: row["auroc"] for row in evaluation.rows if row["scorer"] == name and row["set"] != "test"}
    print(f"{name:20} {numbers['outside']:8.1%} {numbers['gap']:8.1%}")
print(f"draws of five nets: {tuple(guards['five nets, MaxWEnt'].samples(task.test[0][:3], draws=4).shape)}, member by member")
