"""A classifier whose predictions are a table: numbers, vectors, texts and truth values."""

import torch
import torch.nn.functional as F
from torch import nn

from runner import Task, per_sample_noise

SETTINGS = {"global_batch_size": 8, "updates": 6, "log_every": 2}
SIZES = {"train": 22, "val": 21, "test": 50}


def build(*, bad: bool = False, returned: str = "") -> Task:
    """Build the task.

    bad       some samples cannot be read
    returned  what predict_batch returns instead
    """
    return Tables(bad, returned)


class Samples:
    def __init__(self, split, bad):
        self.points = torch.randn(SIZES[split], 4, generator=torch.Generator().manual_seed(len(split)))
        self.bad = {3, 17} if bad and split != "train" else set()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"sample {index} cannot be read")
        return self.points[index], int(self.points[index].sum() > 0), f'name, "{index}"'


class Tables(Task):
    def __init__(self, bad, returned):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.bad, self.returned = bad, returned

    def dataset(self, split):
        return Samples(split, self.bad)

    def loss(self, model, batch):
        x, label, _ = batch
        return F.cross_entropy(model(x), label, reduction="sum"), len(label)

    def predict_batch(self, model, batch, *, scale: float = 1.0):
        """Return labels and scores.

        scale  factor of the scores
        """
        x, label, names = batch
        scores = model(x)
        columns = {
            "label": scores.argmax(-1),
            "score": scores * scale,
            "half": scores.amax(-1).bfloat16(),
            "name": names,
            "right": [bool(value) for value in scores.argmax(-1) == label],
            "draw": per_sample_noise(batch, "draws").uniform(),
        }
        wrong = {
            "tensor": scores,
            "nothing": {},
            "short": {"label": scores.argmax(-1)[1:]},
            "index": {"index": scores.argmax(-1)},
            "pictures": {"picture": scores[:, :, None, None]},
            "objects": {"label": [None] * len(label)},
            "ragged": {"score": [[0.0] * (row % 2) for row in range(len(label))]},
            "changing": {f"score{len(label)}": scores[:, 0]},
        }
        return wrong.get(self.returned, columns)
