"""A task for the attacks: small, with an example, a prediction and random numbers."""

import torch
import torch.nn.functional as F
from torch import nn

from runner import Prediction, Task

SETTINGS = {"updates": 6, "global_batch_size": 8, "optimizer.lr": 0.01}


def build(*, hidden: int = 8) -> Task:
    return Target(hidden)


class Target(Task):
    def __init__(self, hidden):
        self.model = nn.Sequential(nn.Linear(4, hidden), nn.Dropout(0.1), nn.ReLU(), nn.Linear(hidden, 2))

    def dataset(self, split):
        points = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(points, (points.sum(1) > 2).long())

    def loss(self, model, batch):
        points, wanted = batch
        return F.cross_entropy(model(points), wanted, reduction="sum"), len(points)

    def example(self):
        return (torch.zeros(2, 4),)

    def predict(self, model, generator, *, samples: int = 2):
        for number in range(samples):
            answer = model(torch.randn(1, 4, generator=generator, device=generator.device))
            yield Prediction({f"answer-{number}.npy": answer.cpu().numpy()}, items=1)
