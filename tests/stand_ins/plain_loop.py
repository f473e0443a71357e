"""A plain training loop with the model and data of `task_that_fails`, as a baseline for accel-run.

python -m tests.stand_ins.plain_loop UPDATES
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from tests.stand_ins.task_that_fails import build

BATCH = 16


def main(updates: int) -> None:
    """Train for `updates` updates."""
    device = torch.device("cuda")
    task = build(rank=-1)
    model = task.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    dataset: Any = task.dataset("train")
    inputs, targets = dataset.tensors
    inputs, targets = inputs.pin_memory(), targets.pin_memory()
    for update in range(updates):
        part = slice(update * BATCH % len(inputs), update * BATCH % len(inputs) + BATCH)
        there = [each[part].to(device, non_blocking=True) for each in (inputs, targets)]
        loss = F.cross_entropy(model(there[0]), there[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
