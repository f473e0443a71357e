"""A task with values that are non-finite by design and, from a chosen update on, one that is non-finite by mistake."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Task

SETTINGS = {"updates": 12, "global_batch_size": 4, "checkpoint.every": 5, "optimizer.lr": 0.01, "evaluate.every": 0}


def build(*, mode: str = "none", at: int = 7) -> Task:
    return Masks(mode, at)


class Rows(torch.utils.data.Dataset):
    def __init__(self, mode):
        self.mode = mode

    def __len__(self):
        return 64

    def __getitem__(self, index):
        is_missing = self.mode == "missing labels" and index % 3 == 0
        y = torch.tensor(math.nan if is_missing else float(index % 2))
        mask = torch.zeros(3, 3)
        if self.mode == "mask in the batch":
            mask = torch.triu(torch.full((3, 3), -math.inf), 1)
        return torch.full((3, 8), index / 64), y, mask


class Blow(nn.Module):
    """Returns infinities if switched on."""

    on = False

    def forward(self, x):
        return x * math.inf if self.on else x


class Logits(nn.Module):
    """Masks one class."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x).masked_fill(torch.tensor([0, 0, 0, 1]).bool(), -math.inf)


@dataclass
class Answer:
    hidden: Tensor


class Answering(nn.Module):
    """Returns a dataclass."""

    on = False

    def forward(self, x):
        return Answer(x / torch.zeros_like(x) * 0 if self.on else x)


class Model(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode, self.is_bad = mode, False
        self.body, self.logits, self.head = nn.Linear(8, 8), Logits(), nn.Linear(8, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.blow, self.answering = Blow(), Answering()

    def forward(self, x):
        hidden = self.body(x)
        if self.mode == "rows of a mask":
            mask = torch.full((3, 3), -math.inf)
            hidden = hidden + self.attention(hidden, hidden, hidden, attn_mask=mask if self.is_bad else mask.triu(1))[0]
        self.answering.on = self.is_bad and self.mode == "a dataclass"
        hidden = self.answering(hidden).hidden
        hidden = hidden + self.logits(hidden).softmax(-1).sum(-1, keepdim=True)
        self.blow.on = self.is_bad and self.mode in ("missing labels", "mask in the batch", "logits")
        return self.head(self.blow(hidden)).mean((1, 2))


class Masks(Task):
    def __init__(self, mode, at):
        self.model, self.mode, self.at, self.update = Model(mode), mode, at, 0

    def begin_update(self, progress):
        self.update = progress.update + 1

    def dataset(self, split):
        return Rows(self.mode)

    def loss(self, model, batch):
        x, y, _ = batch
        model.is_bad = self.update >= self.at
        out = model(x)
        known = ~torch.isnan(y)
        total = F.mse_loss(out[known], y[known], reduction="sum") if known.any() else out.sum() * 0
        if self.mode == "a large norm" and model.is_bad:
            total = total * 1e25
        if self.mode == "gradients" and model.is_bad:
            total = total + torch.sqrt((out * 0).abs()).sum()
        return total, torch.tensor(len(y))
