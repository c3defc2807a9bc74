"""Nets of `transformers`, random weights from a config, as they come: dict batches of any length, labels, masks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

import offmap
from offmap.data import Place, Rows, as_batches
from offmap.likelihoods import Categorical
from offmap.metrics import auroc
from offmap.model.forward import LastLayer
from trained import quick

WORDS, CLASSES = 24, 3
TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": CLASSES,
    "initializer_range": 0.3,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_labels": CLASSES, "initializer_range": 0.3,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8,
    "patch_size": 4, "num_channels": 1, "num_labels": CLASSES, "initializer_range": 0.3,
}  # fmt: skip

NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)), "text"),
    "bert tokens": (lambda: hf.BertForTokenClassification(hf.BertConfig(**TEXT)), "tokens"),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), "next"),
    "gpt2 classes": (lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2)), "text"),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, **TEXT)), "next"),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)), "image"),
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETS[name][0]().eval()


def count_calls(*shape: int, seed: int = 0, low: int = 3, high: int = WORDS) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def encode(texts: list[Tensor], kind: str, *, longer: int = 0) -> hf.BatchEncoding:
    """A batch as tokenizers and collators give it, padded to the longest text (and `longer`)."""
    ids = nn.utils.rnn.pad_sequence([*texts, torch.zeros(max(map(len, texts)) + longer, dtype=torch.long)], True)[:-1]
    mask = torch.stack([(torch.arange(ids.shape[1]) < len(t)).long() for t in texts])
    label = {"text": ids[:, 0] % CLASSES, "tokens": (ids % CLASSES).masked_fill(mask == 0, -100), "next": ids}[kind]
    return hf.BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": label})


def loader(kind: str, n: int = 40, seed: int = 0, batch_size: int = 8) -> DataLoader[Any]:
    if kind == "image":
        pixels = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        rows = [{"pixel_values": x, "labels": i % CLASSES} for i, x in enumerate(pixels)]
        return DataLoader(rows, batch_size=batch_size)  # pyright: ignore[reportArgumentType]
    lengths = count_calls(n, seed=seed + 1, low=2, high=12).tolist()
    texts = [count_calls(length, seed=100 * seed + i) for i, length in enumerate(lengths)]
    return DataLoader(texts, batch_size=batch_size, collate_fn=lambda rows: encode(rows, kind))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module", params=NETS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, str, offmap.Guard]:
    net, kind = build(request.param), NETS[request.param][1]
    return net, kind, quick(net, loader(kind, seed=0), loader(kind, seed=1))


Case = tuple[nn.Module, str, offmap.Guard]


def test_nets_are_guarded_as_they_come(case: Case) -> None:
    net, kind, guard = case
    data = loader(kind, 20, seed=2)
    result = guard(data)
    assert result.score.shape == result.ood.shape == result.p_value.shape == (20,)
    assert result.score.isfinite().all()
    torch.testing.assert_close(guard.score(data), result.score)
    assert guard.likelihood == Categorical(-1 if kind in ("tokens", "next") else 1)
    if kind in ("tokens", "next"):
        longest = max(batch["input_ids"].shape[1] for batch in data)
        kept = ~result.score_map.isnan()
        assert result.score_map.shape == (20, longest)
        assert kept.sum() == sum(int(batch["attention_mask"].sum()) for batch in data)
        assert result.probs.shape == (20, CLASSES if kind == "tokens" else WORDS, longest)
    else:
        assert result.score_map is None
        assert result.probs.shape == (20, CLASSES)
    # the prediction is that of the net itself where nothing is drawn
    batch = next(iter(data))
    plain = net(**{k: v for k, v in batch.items() if k != "labels"}).logits
    torch.testing.assert_close(guard.samples(batch, 1, clip=0.0)[0], plain, rtol=1e-4, atol=1e-5)
    drawn = guard.samples(batch, 2)
    assert (drawn[0] - drawn[1]).abs().max() > 1e-3


def test_fitting_leaves_the_net_as_it_was(case: Case) -> None:
    net, kind, _ = case
    name = next(n for n, (_, k) in NETS.items() if type(build(n)) is type(net) and k == kind)
    for (key, now), before in zip(net.state_dict().items(), build(name).state_dict().values(), strict=True):
        assert torch.equal(now, before), key
    assert all(p.requires_grad for p in net.parameters())


def test_guards_of_transformers_survive_a_file(case: Case, tmp_path: Path) -> None:
    net, kind, guard = case
    guard.save(tmp_path / "guard.safetensors")
    again = offmap.load(tmp_path / "guard.safetensors", net)
    data = loader(kind, 12, seed=2)
    assert again.likelihood == guard.likelihood
    assert torch.equal(again.score(data), guard.score(data))
    assert again.threshold == guard.threshold


def test_scores_do_not_depend_on_padding(case: Case) -> None:
    _, kind, guard = case
    if kind == "image":
        pytest.skip("images are not padded")
    texts = [count_calls(length, seed=length) for length in (2, 5, 7)]
    whole = guard(encode(texts, kind))
    for longer in (1, 6):
        padded = guard(encode(texts, kind, longer=longer))
        torch.testing.assert_close(padded.score, whole.score, rtol=1e-4, atol=1e-5)
        for how in ("mean", "max"):
            torch.testing.assert_close(
                guard.score(encode(texts, kind, longer=longer), reduce=how), guard.score(encode(texts, kind), reduce=how),
                rtol=1e-4, atol=1e-5,
            )  # fmt: skip
        if whole.score_map is not None:
            torch.testing.assert_close(padded.score_map[:, :7], whole.score_map, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert padded.score_map[:, 7:].isnan().all()
    alone = torch.cat([guard.score(encode([text], kind)) for text in texts])
    torch.testing.assert_close(alone, whole.score, rtol=1e-4, atol=1e-5)


def test_loop_and_vmap_agree(case: Case) -> None:
    net, kind, guard = case
    looped = quick(net, loader(kind, seed=0), loader(kind, seed=1), chunk_size=1)
    data = loader(kind, 12, seed=2)
    torch.testing.assert_close(looped.score(data), guard.score(data), rtol=1e-3, atol=1e-4)
    assert guard.predictive.model.chunk_size > 1 or kind == "image"


@pytest.mark.parametrize("name", ["bert tokens", "gpt2"])
def test_gradient_steps_run_over_batches_of_any_length(name: str) -> None:
    kind = NETS[name][1]
    guard = quick(build(name), loader(kind, seed=0), loader(kind, seed=1), solver="refine", steps=6, check_every=3)
    assert guard.score(loader(kind, 12, seed=2)).isfinite().all()


def test_nets_that_vmap_cannot_run_are_looped_over() -> None:
    config = hf.BloomConfig(vocab_size=WORDS, hidden_size=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    guard = quick(hf.BloomForCausalLM(config).eval(), loader("next", seed=0), loader("next", seed=1))
    assert guard.predictive.model.chunk_size == 1
    assert guard(loader("next", 9, seed=2)).score.shape == (9,)


# ------------------------------------------------------------------------------------------------------ next tokens


def test_labels_of_a_language_model_are_those_of_its_own_loss() -> None:
    net = build("gpt2")
    batch = encode([count_calls(7, seed=i) for i in range(6)], "next")
    rows = as_batches(batch, Place.of(net), name="valid")
    assert isinstance(rows, Rows)
    ours = Categorical(-1).nll(net(**rows.inputs).logits[None], rows.targets).mean()
    torch.testing.assert_close(ours, net(**batch).loss)


# ------------------------------------------------------------------------------------------------------ trained nets


def train_net(net: nn.Module, batch: Callable[[int], hf.BatchEncoding], steps: int, lr: float = 3e-3) -> nn.Module:
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr)
    for step in range(steps):
        loss = net(**batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def counting(n: int, seed: int, *, high: int = 16) -> list[Tensor]:
    """Texts of one grammar: by ones or by twos around a circle of `high` − 3 words. What is next depends on the last two."""
    generator = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, high, (n, 1), generator=generator), torch.randint(1, 3, (n, 1), generator=generator)
    lengths = torch.randint(6, 11, (n,), generator=generator).tolist()
    return [3 + row[:length] % (high - 3) for row, length in zip(start + step * torch.arange(10), lengths, strict=True)]


def shuffle_words(texts: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [text[torch.randperm(len(text), generator=generator)] for text in texts]


def counting_loader(kind: str, n: int, seed: int) -> DataLoader[Any]:
    return DataLoader(counting(n, seed), batch_size=25, collate_fn=lambda rows: encode(rows, kind))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def speaker() -> offmap.Guard:
    torch.manual_seed(0)
    shrink_to_feasible = {"initializer_range": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_embd": 32}
    net = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2 | shrink_to_feasible))
    net = train_net(net, lambda step: encode(counting(32, 1000 + step), "next"), 250)
    return offmap.fit(
        net, counting_loader("next", 200, 0), counting_loader("next", 100, 1), solver="closed-form", draws=20, risk_draws=20
    )


def test_a_language_model_finds_shuffled_and_unseen_words_ood(speaker: offmap.Guard) -> None:
    texts = counting(60, 2)
    known = speaker.score(encode(texts, "next"))
    assert auroc(known, speaker.score(encode(shuffle_words(texts), "next"))) > 0.9
    assert auroc(known, speaker.score(encode([t + 8 for t in counting(60, 3)], "next"))) > 0.9
    assert (known > speaker.threshold).float().mean() < 0.2


def test_the_score_map_of_a_language_model_points_at_the_ood_word(speaker: offmap.Guard) -> None:
    texts = [t[:6] for t in counting(60, 4)]
    spoiled = [torch.cat([t[:3], t.new_tensor([WORDS - 1]), t[4:]]) for t in texts]
    before, after = (speaker.score(encode(each, "next"), reduce=None).mean(0) for each in (texts, spoiled))
    torch.testing.assert_close(after[:3], before[:3], rtol=1e-3, atol=1e-3)  # a causal model cannot know yet
    assert after[3] > before[3] + 1


def test_a_token_classifier_finds_unseen_words_ood_where_they_stand() -> None:
    net = train_net(build("bert tokens"), lambda step: encode(counting(32, 1000 + step), "tokens"), 150)
    guard = offmap.fit(
        net, counting_loader("tokens", 200, 0), counting_loader("tokens", 100, 1), solver="closed-form", draws=20, risk_draws=20
    )
    texts = [t[:6] for t in counting(60, 4)]
    spoiled = [torch.cat([t[:3], t.new_tensor([WORDS - 1 - i % 4]), t[4:]]) for i, t in enumerate(texts)]
    map_ = guard.score(encode(spoiled, "tokens"), reduce=None)
    others = torch.cat([map_[:, :3], map_[:, 4:]], 1)
    assert map_[:, 3].mean() > 5 * others.mean()
    assert guard.score(encode(spoiled, "tokens")).mean() > 2 * guard.score(encode(texts, "tokens")).mean()


def test_an_image_classifier_with_two_heads_makes_both_random_and_runs_the_rest_once(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**IMAGE)).eval()
    x = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = net(x).logits.argmax(1)
    guard = offmap.fit(net, (x[:30], y[:30]), (x[30:], y[30:]), draws=8, risk_draws=8)
    heads = ("cls_classifier", "distillation_classifier")
    assert {name.rpartition(".")[0] for name in guard.predictive.q.mean} == set(heads)  # pyright: ignore
    assert guard.predictive.model.last_layer == LastLayer(heads, "mean")  # pyright: ignore
    guard.save(tmp_path / "guard.safetensors")
    assert torch.equal(offmap.load(tmp_path / "guard.safetensors", net).score(x), guard.score(x))
    assert guard.export(tmp_path / "guard.onnx", x[:4]).draws == 8


def test_experts_have_the_basis_of_the_rows_that_they_are_given() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = hf.MixtralConfig(num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, **TEXT)
        net: Any = hf.MixtralForSequenceClassification(config).eval()
    texts = [{"input_ids": count_calls(40, 6, seed=seed)} for seed in (0, 1)]
    train, valid = ((x, net(**x).logits.argmax(1)) for x in texts)
    q = {}
    for how in ("eager", "grouped_mm", "batched_mm"):
        net.set_experts_implementation(how)
        q[how] = quick(net, train, valid, params="*experts*").predictive.q  # pyright: ignore
    names = list(q["eager"].rotation)
    assert len(names) == 4
    for name in names:
        torch.testing.assert_close(q["grouped_mm"].scale()[name], q["eager"].scale()[name], rtol=1e-3, atol=1e-5)
        assert q["grouped_mm"].views[name].blocks == q["eager"].views[name].blocks
    assert set(q["batched_mm"].why.values()) == {"picked by index, as a copy: what reads the copy is not followed"}
