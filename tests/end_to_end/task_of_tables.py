"""A task that defines options of every open table, for test_own_tables.py."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from runner import Task

SETTINGS = {
    "updates": 7, "global_batch_size": 16, "optimizer": "adam", "optimizer.lr": 0.01, "evaluate.every": 3,
    "checkpoint.every": 2,
}  # fmt: skip
TECHNIQUES = {
    "small": ["micro_batch_size=4"],
    "threads2": {"overrides": ["backend.threads=2"], "needs": {"optimizer": "adam"}},
}


def plain(read, requests):
    """Read in this process."""
    return map(read, requests)


def workers(read, requests, *, number: int = 2):
    """Read in torch's worker processes.

    number  worker processes
    """
    loader = DataLoader(read, batch_size=None, sampler=requests, num_workers=number)
    yield from loader


def threads(read, requests, *, ahead: int = 3):
    """Read in threads, ahead of training.

    ahead  number of batches that are read ahead
    """

    def load(request):
        return read.fill(request, read.collate([read.dataset[index] for index in read.indices(request)]))

    pending = []
    with ThreadPoolExecutor(2) as pool:
        for request in requests:
            pending.append(pool.submit(load, request))
            if len(pending) > ahead:
                yield pending.pop(0).result()
        for each in pending:
            yield each.result()


def swapped(read, requests):
    """Yield two batches in the wrong order."""
    for request in requests:
        following = next(requests, None)
        yield from (read(each) for each in (following, request) if each is not None)


def short(read, requests):
    """End too early."""
    yield read(next(requests))


def bare(read, requests):
    """Yield batches without their requests."""
    for request in requests:
        yield read(request).batch


def in_threads(read, requests):
    """Read with per-sample random numbers in a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield from (pool.submit(read, request).result() for request in requests)


def fails(read, requests):
    """Raise an error."""
    raise ValueError("no more files")


def nothing(read, requests):
    """Return no batches."""


DATALOADERS = {
    "plain": plain, "workers": workers, "threads": threads, "swapped": swapped, "short": short, "bare": bare,
    "in_threads": in_threads, "fails": fails, "nothing": nothing,
}  # fmt: skip


def rounded(model, *, bits: int = 8):
    """Round the weights in each forward pass.

    bits number of bits of the mantissa
    """

    class Rounding(nn.Module):
        def forward(self, weight):
            scale = 2.0**bits
            return weight + ((weight.detach() * scale).round() / scale - weight.detach())

    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        nn.utils.parametrize.register_parametrization(module, "weight", Rounding())


def noted(model):
    """Enter a context in each forward pass."""

    @contextlib.contextmanager
    def context():
        handle = model.register_forward_hook(lambda module, args, output: output * 2)
        try:
            yield
        finally:
            handle.remove()

    return context


def unchanged(model):
    """Compute like the extended option."""


def returned(model):
    """Return the model, as functions that change a model often do."""
    return model


def another(model):
    """Return a different model."""
    return nn.Linear(2, 2)


def wrong_result(model):
    """Return something that is not a model."""
    return 8


def replaced(model):
    """Replace the linear layers."""
    for index, module in enumerate(model):
        if isinstance(module, nn.Linear):
            model[index] = nn.Linear(module.in_features, module.out_features)


def unstored(model):
    """Add a state that a checkpoint cannot store."""

    class Own(nn.Linear):
        def get_extra_state(self):
            return 8

        def set_extra_state(self, state):
            pass

    model[0] = Own(2, 16)


def no_context(model):
    """Return a function that returns no context."""
    return lambda: 8


def takes_batch(model):
    """Return a function that cannot be called without arguments."""
    return lambda batch: contextlib.nullcontext()


PRECISIONS = {
    "rounded": ("bf16", rounded), "noted": ("fp32", noted), "same32": ("fp32", unchanged),
    "same16": ("fp16", unchanged), "wrong": ("fp32", wrong_result),
    "replaced": ("fp32", replaced), "unstored": ("fp32", unstored), "no_context": ("fp32", no_context),
    "returned": ("fp32", returned), "another": ("fp32", another), "takes_batch": ("fp32", takes_batch),
}  # fmt: skip


def exact(gradients):
    """Sum in the format of the gradients."""
    return dist.all_reduce(gradients, async_op=True)


def compressed(gradients, *, dtype: str = "bfloat16"):
    """Sum in a format of fewer bits.

    dtype  of the sum
    """
    small = gradients.to(getattr(torch, dtype))
    dist.all_reduce(small)
    gradients.copy_(small)


def mean(gradients):
    """Compute a mean instead of a sum."""
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()


def unequal(gradients):
    """Return a different sum on each rank."""
    dist.all_reduce(gradients)
    gradients *= 1 + 1e-3 * dist.get_rank()


def returns(gradients):
    """Return the sum."""
    dist.all_reduce(gradients)
    return gradients


PARALLELISMS = {
    "exact": ("ddp", exact), "compressed": ("ddp", compressed), "mean": ("ddp", mean), "unequal": ("ddp", unequal),
    "returns": ("ddp", returns),
}  # fmt: skip


class SharedState(torch.optim.Optimizer):
    """Gradient descent with a decaying learning rate, stored in state that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        shared = self.state["shared"]
        shared["factor"] = shared.get("factor", torch.ones(3)) * 0.8
        shared["steps"] = shared.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                rate = group["lr"] * float(shared["factor"][0]) / shared["steps"]
                parameter.sub_(parameter.grad, alpha=rate)


def shared_state(parameters, *, lr: float = 0.1):
    """Decay the learning rate of all parameters together."""
    return SharedState([parameter for _, parameter in parameters], {"lr": lr})


OPTIMIZERS = {"shared_state": shared_state}


def build(*, draws: bool = True, dropout: float = 0.0) -> Task:
    """A perceptron.

    draws    add noise to the samples
    dropout  of the hidden units
    """
    return Mine(draws, dropout)


class Points(Dataset):
    def __init__(self, count, draws):
        self.points = torch.rand(count, 2, generator=torch.Generator().manual_seed(count)) * 2 - 1
        self.draws = draws

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        label = (point.norm() < 0.7).long()
        return point + 0.1 * torch.randn(2) if self.draws else point, label


class Mine(Task):
    def __init__(self, draws, dropout):
        self.model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
        self.draws = draws

    def dataset(self, split):
        return Points(72 if split == "train" else 24, self.draws and split == "train")

    def blocks(self):
        return [module for module in self.model if isinstance(module, nn.Linear)]

    def loss(self, model, batch):
        points, labels = batch
        return nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(points)

    def begin_update(self, progress):
        from tests.faults.ending import reached

        reached("update", progress.update + 1)
