"""A classifier whose predictions are a table of numbers, vectors, strings and booleans."""

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from runner import Task, per_sample_noise

SETTINGS = {"global_batch_size": 8, "updates": 6, "log_every": 2}
TEXTS = ("a\rb", 'a,b "c"\nd', " a", "", "é\u2028", "nul\0", "\udc80")  # the last one: a file name that is not UTF-8
SIZES = {"train": 22, "val": 21, "test": 50}


def build(*, bad: bool = False, returned: str = "", item: str = "sample") -> Task:
    """Build the task.

    bad       some samples cannot be read
    returned  name of the result that predict_batch returns instead of the default columns
    item      unit of the loss
    """
    return Tables(bad, returned, item)


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
    def __init__(self, bad, returned, item):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.bad, self.returned, self.item = bad, returned, item

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
            "no_elements": {"score": scores[:, :0]},
            "two_columns": {"score": scores, "score.1": scores[:, 0]},
            "sparse": {"score": scores.cpu().to_sparse()},
            "float8": {"score": scores.to(torch.float8_e4m3fn)},
            "nested": {"score": [[value.bfloat16() for value in row] for row in scores]},
            "texts": {
                "text": [TEXTS[index % len(TEXTS)] for index in range(len(label))],
                "wide": scores.repeat(1, 500),
                "objects": np.array([*names], dtype=object),
            },
            "secrets": {
                "url": ["http://host"] * len(label),
                "time": ["12:30"] * len(label),
                "mail": ["me@example.org"] * len(label),
                "key": [os.environ.get("MY_TOKEN", "")] * len(label),
            },
            "changing": {f"score{len(label)}": scores[:, 0]},
        }
        return wrong.get(self.returned, columns)
