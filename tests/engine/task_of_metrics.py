"""A test task whose evaluation has several kinds of metrics."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Gather, Task

SETTINGS = {"optimizer": "sgd", "scheduler": "constant", "evaluate.every": 1}


def build(*, gathered: bool = False, summarized: bool = False, val: bool = True, late: int = 0) -> Task:
    """Build the task.

    gathered    the evaluation also has a metric that is not a sum
    summarized  `summarize` renames the accuracy
    val         there is validation data
    late        first update whose evaluation has the metric `late`, which decreases; 0: never
    """
    task = (Summarized if summarized else Measured)(gathered, val)
    task.late = late
    return task


class Measured(Task):
    def __init__(self, gathered, val):
        self.model, self.gathered, self.val, self.num_calls = nn.Linear(2, 2), gathered, val, 0

    def dataset(self, split):
        if split == "val" and not self.val:
            raise NotImplementedError
        x = torch.rand(16, 2, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x[:, 0] > 0.5).long())

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def begin_update(self, progress):
        self.update = progress.update

    def evaluate(self, model, batch):
        scores, labels = model(batch[0]), batch[1]
        right = scores.argmax(1) == labels
        of_class = nn.functional.one_hot(labels, 2)
        result = {
            "accuracy": (right.sum(), len(labels)),
            "recall": ((of_class * right[:, None]).sum(0), of_class.sum(0)),
        }
        if self.late and self.update >= self.late:
            result["late"] = (len(labels) / self.update, len(labels))
        return {**result, "spread": scores} if self.gathered else result

    def metrics(self, split):
        return {"spread": Gather(lambda scores: {"std": scores.std(), "max": scores.max()})} if self.gathered else {}


class Summarized(Measured):
    def summarize(self, metrics):
        spread = {"spread": metrics["spread.std"]} if self.gathered else {}
        return {"error": 1 - metrics["accuracy"], **spread}
