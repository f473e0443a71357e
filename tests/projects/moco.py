"""MoCo: compare each image with the momentum encoder's code of its other view, and with a queue of earlier codes."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from runner import Hook, Task

SETTINGS = {
    "updates": 6,
    "global_batch_size": 8,
    "optimizer": "sgd",
    "optimizer.lr": 0.1,
    "optimizer.weight_decay": 0.0,
    "scheduler": "constant",
    "max_grad_norm": None,
}


class MoveKeys(Hook):
    """Update the momentum encoder from the encoder."""

    def after_update(self, step):
        self.phase.model.move_keys()


HOOKS = [MoveKeys]


def build(*, width: int = 8, queued: int = 32, momentum: float = 0.9) -> Task:
    return Views(MoCo(width, queued, momentum))


class MoCo(nn.Module):
    def __init__(self, width, queued, momentum):
        super().__init__()
        self.momentum = momentum
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, width))
        self.keys = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queued, width), dim=1))
        self.register_buffer("next", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def move_keys(self):
        for key, weight in zip(self.keys.parameters(), self.encoder.parameters(), strict=True):
            key.lerp_(weight, 1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, codes):
        places = (self.next + torch.arange(len(codes), device=codes.device)) % len(self.queue)
        self.queue[places] = codes
        self.next.add_(len(codes)).remainder_(len(self.queue))


class Views(Task):
    def __init__(self, model):
        self.model = model

    def dataset(self, split):
        number, seed = (24, 0) if split == "train" else (8, 1)
        images = torch.rand(number, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        return torch.utils.data.TensorDataset(images, images.flip(3))

    def embed(self, model, batch):
        with torch.no_grad():
            keys = F.normalize(model.keys(batch[1]), dim=1)
        return F.normalize(model.encoder(batch[0]), dim=1), keys

    def couple(self, embeddings):  # called once per update on every rank, with the codes of all ranks
        queries, keys = embeddings
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.model.queue.clone().T], dim=1)
        if self.model.training:
            self.model.enqueue(keys)
        own = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
        return F.cross_entropy(logits / 0.2, own, reduction="sum"), len(queries)
