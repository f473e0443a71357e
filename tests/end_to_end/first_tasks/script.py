"""A typical training script converted to a task: the comments show what replaces each line.

    accel-run train --task ./own_script.py task.hidden=64

The script was:

    model = Net(64).to("cuda")                                # build; accel-run selects the device
    model = DDP(model)                                        # parallelism=ddp
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=4)     # dataset; global_batch_size, dataloader
    optimizer = AdamW(model.parameters(), lr=3e-3)            # SETTINGS, or optimizer.lr=... on the command line
    schedule = CosineAnnealingLR(optimizer, 10)               # SETTINGS: scheduler
    scaler = GradScaler()                                     # precision=fp16
    for epoch in range(10):                                   # SETTINGS: epochs
        for x, y in loader:
            with autocast("cuda"):                            # precision
                loss = F.mse_loss(model(x.cuda()), y.cuda())  # loss: sum and count; divided once per update
            scaler.scale(loss / 4).backward()                 # accumulation follows from micro_batch_size
            clip_grad_norm_(model.parameters(), 1.0)          # max_grad_norm
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
        validate(model); torch.save(model.state_dict(), "last.pt")    # evaluate, checkpoint.every
"""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task

SETTINGS = {"epochs": 10, "global_batch_size": 64, "optimizer.lr": 0.003, "scheduler": "cosine", "max_grad_norm": 1.0}


class Net(nn.Module):  # unchanged
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


class Data(torch.utils.data.Dataset):  # unchanged
    def __init__(self, length, seed):
        self.x = torch.randn(length, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].norm()


def build(*, hidden: int = 64) -> Task:
    return Script(Net(hidden))


class Script(Task):
    def __init__(self, model):
        self.model = model

    def dataset(self, split):
        return Data(2048, seed=0) if split == "train" else Data(256, seed=1)

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y, reduction="sum"), len(y)
