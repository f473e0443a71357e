"""A task with three phases whose metrics count tensors that are still in memory although they are no longer needed."""

import gc
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from runner import Fit, Task

PHASES = {"statistics": {"kind": "fit"}, "first": {"updates": 3}, "second": {"updates": 3}}
SETTINGS = {"global_batch_size": 4, "optimizer": "adamw", "averaging": "ema", "evaluate.every": 3}


def state_tensors(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


class Mean(Fit):
    def __init__(self, task):
        self.task = task

    def start(self):
        return {"sum": torch.zeros(3)}

    def add(self, model, state, batch):
        added = {"sum": state["sum"] + batch[0].sum(0)}
        self.task.remember(added["sum"], batch[0])
        return added, len(batch[0])

    def merge(self, one, other):
        return {"sum": one["sum"] + other["sum"]}

    def finish(self, model, state):
        return {}


class Counted(Task):
    def __init__(self):
        self.model = nn.Linear(3, 1)
        self.seen = {}  # phase -> weak references to batches, statistics and states of optimizers
        self.batches = []  # weak references to batches of the current phase
        register_optimizer_step_post_hook(lambda optimizer, *_: self.remember(*state_tensors(optimizer)))

    def remember(self, *values):
        self.seen.setdefault(self.phase, []).extend(map(weakref.ref, values))

    def begin_phase(self, phase):
        super().begin_phase(phase)
        self.batches = []

    @property
    def fits(self):
        return {"statistics": Mean(self)}

    @property
    def losses(self):
        return {"first": self.loss, "second": self.loss}

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.arange(36.0).view(12, 3) / 36)

    def loss(self, model, batch):
        (x,) = batch
        if torch.is_grad_enabled():
            self.remember(x)
            self.batches.append(weakref.ref(x))
        return model(x).square().sum(), len(x)

    def evaluate(self, model, batch):
        earlier = [ref for phase, refs in self.seen.items() if phase != self.phase for ref in refs]
        count, weight = len(batch[0]), self.model.weight
        alike = [value for value in gc.get_objects() if torch.is_tensor(value) and value.shape == weight.shape]
        return {
            "finished_phases": (count * sum(ref() is not None for ref in earlier), count),
            "of_weight_shape": (count * len({value.data_ptr() for value in alike}), count),
            "consumed_batches": (count * sum(ref() is not None for ref in self.batches[:-1]), count),
        }


def build() -> Task:
    return Counted()
