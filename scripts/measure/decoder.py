"""A decoder-only transformer of any size, for `update_time.py`: models whose speed on GPUs has been published.

MPT and GPT-2 have layer norms, learned positions and an MLP with GELU; `is_llama` selects
RMS norms, rotary positions, a gated MLP and a separate output layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.base.task import Sum, Task
from runner.base.values import PositiveInt

SETTINGS = {"updates": 10, "optimizer.kernel": "fused"}


def build(
    *,
    num_layers: PositiveInt = 12,
    width: PositiveInt = 768,
    num_heads: PositiveInt = 12,
    num_kv_heads: PositiveInt = 12,
    hidden: PositiveInt = 3072,
    vocab_size: PositiveInt = 50304,
    num_tokens: PositiveInt = 1024,
    is_llama: bool = False,
) -> Task:
    """A decoder.

    num_layers    number of blocks
    width         embedding dimension
    num_heads     attention heads
    num_kv_heads  heads of keys and values
    hidden        width of the MLP
    vocab_size    number of different tokens
    num_tokens    tokens of a sample
    is_llama      architecture of Llama 2 and 3 instead of GPT-2
    """
    return DecoderTask(Decoder(num_layers, width, num_heads, num_kv_heads, hidden, vocab_size, num_tokens, is_llama))


class DecoderTask(Task):
    item = "token"
    model: Decoder

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.items_per_sample = float(model.num_tokens)

    def dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.zeros(1, 1, dtype=torch.long).expand(4096, self.model.num_tokens + 1))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Sum:
        (tokens,) = batch
        logits = model(tokens[:, :-1]).float()
        labels = tokens[:, 1:].reshape(-1)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels, reduction="sum"), labels.numel()

    def blocks(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def layers(self) -> list[nn.Module]:
        return [Input(self.model), *self.model.blocks, Output(self.model)]

    def example(self) -> tuple[Tensor]:
        return (torch.zeros(1, self.model.num_tokens, dtype=torch.long),)


class Decoder(nn.Module):
    """Map tokens (B, T) to logits (B, T, V)."""

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        hidden: int,
        vocab_size: int,
        num_tokens: int,
        is_llama: bool,
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = None if is_llama else nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, num_kv_heads, hidden, num_tokens, is_llama) for _ in range(num_layers)
        )
        self.norm = make_norm(width, is_llama)
        self.output = nn.Linear(width, vocab_size, bias=False) if is_llama else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.positions is None else x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        weight = self.embedding.weight if self.output is None else self.output.weight
        return F.linear(self.norm(x), weight)


class Input(nn.Module):
    """Map tokens (B, T) to the input of the first block (B, T, C)."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.embedding, self.positions = model.embedding, model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        return x if self.positions is None else x + self.positions.weight[: tokens.shape[1]]


class Output(nn.Module):
    """Map the output of the last block (B, T, C) to logits (B, T, V)."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.norm, self.output = model.norm, model.embedding if model.output is None else model.output

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.output.weight)


class Block(nn.Module):
    """Self-attention and an MLP, each preceded by a norm."""

    def __init__(
        self, width: int, num_heads: int, num_kv_heads: int, hidden: int, num_tokens: int, is_llama: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.is_llama = num_heads, num_kv_heads, is_llama
        self.head_dim = width // num_heads
        self.attention_norm, self.mlp_norm = make_norm(width, is_llama), make_norm(width, is_llama)
        bias = not is_llama
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if is_llama else None
        self.down = nn.Linear(hidden, width, bias=bias)
        angles = torch.outer(torch.arange(num_tokens), 500_000.0 ** -torch.linspace(0, 1, self.head_dim // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        h = self.mlp_norm(x)
        hidden = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(hidden)

    def attend(self, x: Tensor) -> Tensor:
        """Return the result of causal attention for x (B, T, C)."""
        B, T, C = x.shape
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        parts = self.qkv(x).view(B, T, sum(sizes), self.head_dim).transpose(1, 2).split(sizes, dim=1)
        q, k, v = parts
        if self.is_llama:
            q, k = self.rotate(q), self.rotate(k)
            repeats = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(B, T, C))

    def rotate(self, x: Tensor) -> Tensor:
        """Apply rotary positions to x (B, H, T, D)."""
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def make_norm(width: int, is_llama: bool) -> nn.Module:
    """Return the norm of the architecture."""
    return nn.RMSNorm(width) if is_llama else nn.LayerNorm(width)
