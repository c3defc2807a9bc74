"""Models that read sequences: attention, Transformers, embeddings, recurrent nets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Case, Through, pair, settle, weight

ROW = "index"
"""Part of the reason why a table of embeddings is not rotated."""


def attention(forward: Any, width: int = 4, **options: Any) -> nn.Module:
    layer = nn.MultiheadAttention(width, 2, **{"batch_first": True, **options})
    return Through(forward, attention=layer, head=nn.Linear(width, 2))


def on_itself(s: Any, x: Tensor) -> Tensor:
    return s.head((x + s.attention(x, x, x, need_weights=False)[0]).mean(1))


def on_itself_with_weights(s: Any, x: Tensor) -> Tensor:
    made, weights = s.attention(x, x, x)
    return s.head(made.mean(1)) + weights.mean((1, 2))[:, None]


def positions_first(s: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return s.head(s.attention(x, x, x, need_weights=False)[0].mean(0))


def across(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.head(s.attention(x, y, y, need_weights=False)[0].mean(1))


def three(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.head(s.attention(x, y, y.tanh(), need_weights=False)[0].mean(1))


def forward_masked(s: Any, x: Tensor, hidden: Tensor) -> Tensor:
    made = s.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    return s.head(made.masked_fill(hidden.unsqueeze(-1), 0).sum(1))


def sizes(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return s.head(s.attention(x, y, y[..., :2], need_weights=False)[0].mean(1))


def with_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of one to all positions."""
    hidden = x[..., 0] > 0.3
    return x, hidden.logical_and(torch.arange(x.shape[1]) > 0)


def build_pooled() -> nn.Module:
    """Learned queries look at the sequence, as in a set transformer."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(s.attention(s.queries.expand(len(x), -1, -1), x, x, need_weights=False)[0].flatten(1))

    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    return Through(forward, queries=weight(1, 2, 4), attention=layer, head=nn.Linear(8, 2))


def hand_made() -> nn.Module:
    """Queries, keys and values from one Linear, as in a ViT."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in s.qkv(x + s.place).chunk(3, -1))
        return s.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    return Through(forward, qkv=nn.Linear(4, 12), place=weight(1, 3, 4), head=nn.Linear(4, 2))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True)
    return Through(lambda s, x: s.head(s.layer(x).mean(1)), layer=layer, head=nn.Linear(4, 2))


def norm_first() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, activation="gelu", norm_first=True, bias=False)
    return Through(lambda s, x: s.head(s.layer(x.transpose(0, 1)).mean(0)), layer=layer, head=nn.Linear(4, 2))


def encoder() -> nn.Module:
    def forward(s: Any, x: Tensor, hidden: Tensor) -> Tensor:
        return s.head(s.body(x, src_key_padding_mask=hidden).masked_fill(hidden.unsqueeze(-1), 0).sum(1))

    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)
    return Through(forward, body=body, head=nn.Linear(4, 2))


def decoder_layer() -> nn.Module:
    layer = nn.TransformerDecoderLayer(4, 2, dim_feedforward=5, batch_first=True)
    return Through(lambda s, x, y: s.head(s.layer(x, y).mean(1)), layer=layer, head=nn.Linear(4, 2))


def causal() -> nn.Module:
    """A decoder with a causal mask that gives two logits per token."""

    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return s.head(s.body(x, y, tgt_mask=mask, tgt_is_causal=True)).transpose(1, 2)

    layer = nn.TransformerDecoderLayer(4, 2, dim_feedforward=5, batch_first=True)
    return Through(forward, body=nn.TransformerDecoder(layer, 1), head=nn.Linear(4, 2))


def embedding() -> nn.Module:
    return Through(lambda s, x: s.head(s.table(x).mean(1).tanh()), table=nn.Embedding(7, 4), head=nn.Linear(4, 2))


def padded_embedding() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head((s.table(x) * (x > 0).unsqueeze(-1)).sum(1).tanh())

    return Through(forward, table=nn.Embedding(5, 3, padding_idx=0), head=nn.Linear(3, 2))


def bag(**options: Any) -> nn.Module:
    return Through(lambda s, x: s.head(s.table(x).tanh()), table=nn.EmbeddingBag(7, 4, **options), head=nn.Linear(4, 2))


def bag_by_offsets() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(s.table(x.flatten(), torch.arange(0, x.numel(), x.shape[1], device=x.device)).tanh())

    return Through(forward, table=nn.EmbeddingBag(7, 4, mode="sum"), head=nn.Linear(4, 2))


def tied_embedding() -> nn.Module:
    """Words go in and come out by one table."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.out(s.body(s.table(x).mean(1)).tanh())[:, :2]

    net = Through(forward, table=nn.Embedding(6, 4), body=nn.Linear(4, 4), out=nn.Linear(4, 6, bias=False))
    net.out.weight = net.table.weight
    return net


def recurrent(layer: nn.Module) -> nn.Module:
    width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
    return Through(lambda s, x: s.head(s.body(x)[0].mean(1)), body=layer, head=nn.Linear(width, 2))


def time_first() -> nn.Module:
    """Of two layers, time in front, with a first state of its own."""

    def forward(s: Any, x: Tensor) -> Tensor:
        start = s.start.unsqueeze(1).expand(-1, len(x), -1).contiguous()
        return s.head(s.body(x.transpose(0, 1), start)[1].mean(0))

    return Through(forward, body=nn.GRU(2, 3, num_layers=2, bias=False), start=weight(2, 3), head=nn.Linear(3, 2))


def cell(layer: nn.Module) -> nn.Module:
    """Steps written out by hand."""

    def forward(s: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = s.cell(step, state)
        return s.head(state[0] if isinstance(state, tuple) else state)

    return Through(forward, cell=layer, head=nn.Linear(layer.hidden_size, 2))


PARTS = {"attention.in_proj_weight": 2}
TOKENS = {"whole": 7, "plain": {"table.weight": ROW}}

CASES = (
    Case("attention", lambda: attention(on_itself), (3, 4), shows="packed self-attention"),
    Case("attention_weights", lambda: attention(on_itself_with_weights), (3, 4), shows="attention that returns its weights"),
    Case("attention_seq_first", lambda: attention(positions_first, batch_first=False, bias=False), (3, 4),
         shows="positions first, no bias"),
    Case("cross_attention", lambda: attention(across), (3, 4), wrap=pair, blocks=PARTS, shows="packed cross-attention: q | k, v"),
    Case("attention_three", lambda: attention(three), (3, 4), wrap=pair, blocks={"attention.in_proj_weight": 3},
         shows="q | k | v"),
    Case("attention_sizes", lambda: attention(sizes, kdim=4, vdim=2), (3, 4), wrap=pair, shows="kdim and vdim of their own"),
    Case("attention_mask", lambda: attention(forward_masked), (3, 4), wrap=with_mask, shows="variable lengths: key_padding_mask"),
    Case("attention_bias_kv", lambda: attention(on_itself, add_bias_kv=True, add_zero_attn=True), (3, 4),
         plain={"attention.bias_k": "", "attention.bias_v": ""}, shows="add_bias_kv, add_zero_attn"),
    Case("hand_made_attention", hand_made, (3, 4), plain={"place": ""}, shows="qkv from one Linear; learned places"),
    Case("learned_queries", build_pooled, (3, 4), blocks=PARTS, plain={"queries": ""},
         shows="learned queries look at the sequence"),
    Case("transformer", transformer, (3, 4), shows="TransformerEncoderLayer, fast path"),
    Case("norm_first", norm_first, (3, 4), shows="TransformerEncoderLayer, norm first, positions first, no bias"),
    Case("encoder", encoder, (3, 4), wrap=with_mask, shows="TransformerEncoder with a mask"),
    Case("decoder_layer", decoder_layer, (3, 4), wrap=pair, blocks={"layer.multihead_attn.in_proj_weight": 2},
         shows="TransformerDecoderLayer"),
    Case("causal", causal, (3, 4), wrap=pair, blocks={"body.layers.0.multihead_attn.in_proj_weight": 2}, positions=(3,),
         shows="TransformerDecoder, causal; a class per token"),
    Case("embedding", embedding, (5,), **TOKENS, shows="Embedding"),
    Case("padded_embedding", padded_embedding, (4,), whole=5, plain={"table.weight": ROW}, shows="Embedding with padding_idx"),
    Case("bag_mean", bag, (4,), **TOKENS, vmap=False, shows="EmbeddingBag, mean"),
    Case("bag_offsets", bag_by_offsets, (3,), **TOKENS, vmap=False, shows="EmbeddingBag, sum, by offsets"),
    Case("tied_embedding", tied_embedding, (3,), whole=6, shows="a table that is the output layer too"),
    Case("lstm", lambda: recurrent(nn.LSTM(2, 3, batch_first=True)), (4, 2), vmap=False, shows="LSTM"),
    Case("lstm_deep", lambda: recurrent(nn.LSTM(2, 2, num_layers=2, bidirectional=True, batch_first=True)), (3, 2), vmap=False,
         shows="LSTM of two layers, both directions"),
    Case("lstm_projected", lambda: settle(recurrent(nn.LSTM(2, 4, proj_size=3, batch_first=True)), 3, 2), (3, 2), vmap=False,
         shows="LSTM with proj_size"),
    Case("gru", lambda: recurrent(nn.GRU(2, 3, bidirectional=True, batch_first=True)), (4, 2), vmap=False,
         shows="GRU, both directions"),
    Case("gru_time_first", time_first, (3, 2), vmap=False, plain={"start": ""}, shows="GRU of two layers, learned first state"),
    Case("rnn", lambda: recurrent(nn.RNN(2, 6, num_layers=2, nonlinearity="relu", batch_first=True)), (4, 2), vmap=False,
         shows="RNN with ReLU, two layers"),
    Case("rnn_tanh", lambda: recurrent(nn.RNN(2, 3, bias=False, batch_first=True)), (4, 2), vmap=False, shows="RNN, no bias"),
    Case("lstm_cell", lambda: cell(nn.LSTMCell(2, 3)), (3, 2), vmap=False, shows="LSTMCell in a loop of its own"),
    Case("gru_cell", lambda: cell(nn.GRUCell(2, 3)), (3, 2), vmap=False, shows="GRUCell in a loop of its own"),
)  # fmt: skip
