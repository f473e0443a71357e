"""A character-level language model like nanoGPT: tied embeddings, weight decay of matrices, warm-up and cosine."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {
    "updates": 6,
    "global_batch_size": 8,
    "optimizer": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.betas": [0.9, 0.99],
    "optimizer.weight_decay": 0.1,
    "scheduler": "cosine",
    "scheduler.warmup": 2,
    "max_grad_norm": 1.0,
}
TEXT = "".join(chr(97 + (7 * i * i + i // 5) % 26) for i in range(1200))


def build(*, block: int = 16, layers: int = 2, heads: int = 2, width: int = 16) -> Task:
    return Characters(GPT(26, block, layers, heads, width), block)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, block, layers, heads, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Characters(Task):
    item = "token"

    def __init__(self, model, block):
        self.model, self.block, self.items_per_sample = model, block, block
        self.text = torch.tensor([ord(character) - 97 for character in TEXT])

    def dataset(self, split):
        text = self.text[:1000] if split == "train" else self.text[1000:]
        return text.unfold(0, self.block + 1, 41)

    def loss(self, model, tokens):
        targets = tokens[:, 1:].flatten()
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, reduction="sum"), len(targets)
