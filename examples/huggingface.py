# %% [markdown]
# # A guard around a Hugging Face model
#
# Which sentences are unlike those it was trained on? This runs in half a minute on one core and downloads nothing: the model is a
# small BERT, trained here. With your own, only the last cells matter: `offmap.fit(model, train, valid)` takes it unchanged, with
# batches from your tokenizer. Token classifiers and language models work as well; `guard(x).score_map` then has a score for every
# token.

# %%
import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"  # this example needs no network

import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import offmap

SMOKE = bool(os.environ.get("OFFMAP_SMOKE"))
ANIMALS, MACHINES = ["cat", "dog", "owl", "fox", "horse"], ["engine", "drill", "crane", "robot", "tractor"]
LIFE, WORK = ["sleeps", "eats", "runs", "hides"], ["hums", "turns", "starts", "stops"]
PLACES = ["barn", "yard", "field", "street", "garden", "shed"]
OTHERS = ["sonnet", "tensor", "quark", "madrigal", "isotope", "whispers", "integrates", "decays", "rhymes", "verse", "lattice"]
VOCABULARY = ["[PAD]", "the", "old", "in", "near", *ANIMALS, *MACHINES, *LIFE, *WORK, *PLACES, *OTHERS]
IDS = {word: number for number, word in enumerate(VOCABULARY)}

# %% [markdown]
# Sentences about animals and about machines.


# %%
def sentence(subjects: list[str], verbs: list[str], places: list[str]) -> str:
    """The (old) subject verb in/near the (old) place."""
    subject, place = (random.choice(["", "old "]) + random.choice(words) for words in (subjects, places))
    return f"the {subject} {random.choice(verbs)} {random.choice(['in', 'near'])} the {place}"


def sentences(n: int) -> list[tuple[str, int]]:
    """Sentences about animals (0) and machines (1)."""
    topics = [(ANIMALS, LIFE), (MACHINES, WORK)]
    return [(sentence(*topics[i % 2], PLACES), i % 2) for i in range(n)]


# %% [markdown]
# Batches as a tokenizer and a collator give them, and a net trained on them.


# %%
def collate(rows: list[tuple[str, int]]) -> BatchEncoding:
    """Return what a tokenizer does: ids padded to the longest sentence of the batch, and a mask of the padding."""
    words = [text.split() for text, _ in rows]
    longest = max(map(len, words))
    ids = torch.tensor([[IDS[w] for w in line] + [0] * (longest - len(line)) for line in words])
    return BatchEncoding({"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([y for _, y in rows])})


def trained(loader: DataLoader) -> BertForSequenceClassification:
    """Train a small BERT to classify animals and machines."""
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(1 if SMOKE else 6):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()  # dropout off: a model must not draw random numbers


# %%
torch.manual_seed(0)
random.seed(0)
train = DataLoader(sentences(400 if SMOKE else 2000), batch_size=32, shuffle=True, collate_fn=collate)
valid = DataLoader(sentences(200), batch_size=32, collate_fn=collate)
model = trained(train)

# %% [markdown]
# Pass the model as it is. `closed-form` takes no gradient steps; the default solver takes longer, and detects better.

# %%
guard = offmap.fit(model, train, valid, solver="closed-form", draws=10 if SMOKE else 50, risk_draws=10 if SMOKE else 50)

# %%
test = sentences(200)
shuffled = [(" ".join(random.sample(text.split(), len(text.split()))), y) for text, y in test]
unknown = [(sentence(OTHERS[:5], OTHERS[5:9], OTHERS[9:]), 0) for _ in range(200)]
print("set             accuracy  score   called OOD")
for name, rows in {"in-distribution": test, "shuffled words": shuffled, "unknown words": unknown}.items():
    result = guard(DataLoader(rows, batch_size=64, collate_fn=collate))
    right = (result.label == torch.tensor([y for _, y in rows])).float().mean()
    accuracy = f"{right:8.0%}" if name != "unknown words" else "       -"
    print(f"{name:15} {accuracy}  {result.score.mean():.3f}  {result.ood.float().mean():8.0%}")
