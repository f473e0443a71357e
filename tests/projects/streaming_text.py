"""Text files that are streamed in order, tokenized, and packed into blocks."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {"updates": 6, "global_batch_size": 6, "optimizer.lr": 0.01, "scheduler": "wsd", "data.shards": 2}
FILES = ["".join(chr(97 + (i * i * number) % 26) for i in range(300 + 40 * number)) for number in range(1, 6)]


def build(*, block: int = 12, width: int = 16) -> Task:
    return Text(Recurrent(width), block)


class Packed:
    """Blocks of consecutive text, which may span the end of one file and the beginning of the next."""

    def __init__(self, files, block):
        self.files, self.block = files, block

    def __iter__(self):
        rest = []
        for file in self.files:
            rest += [ord(character) - 97 for character in file]
            while len(rest) > self.block:
                yield torch.tensor(rest[: self.block + 1])
                rest = rest[self.block :]


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(26, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 26)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


class Text(Task):
    item = "token"

    def __init__(self, model, block):
        self.model, self.block, self.items_per_sample = model, block, block

    def stream(self, split, shard, num_shards):
        return Packed(FILES[shard::num_shards], self.block)

    def dataset(self, split):
        return list(Packed(["abcdefghij" * 10], self.block))

    def loss(self, model, tokens):
        targets = tokens[:, 1:].flatten()
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, reduction="sum"), len(targets)
