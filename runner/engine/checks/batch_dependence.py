"""Name the modules that make an update depend on how it is divided into micro-batches and among ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from runner.base.text import abbreviate
from runner.distributed.batch_norm import training_modules
from runner.workload.division import Batch


def describe_dependence(model: nn.Module, batch: Batch, *, is_sync_norm: bool) -> str:
    """Return a note that names these modules for the start report; empty if the batch is not divided or there are none.

    Dropout draws a mask for each micro-batch, and batch norm normalizes over each micro-batch. Functions such as
    F.dropout are known only after the first forward pass: see `describe_calls`.

    is_sync_norm  batch norms normalize over the simultaneous micro-batches of all ranks
    """
    is_accumulated, is_shared = batch.accumulation_steps > 1, batch.num_shares > 1
    if not is_accumulated and not is_shared:  # before calling `model.train()`, which may have side effects
        return ""
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    depends_on_ranks = False
    for name, module in training_modules(model):
        is_norm = isinstance(module, _BatchNorm)
        depends = is_shared and not (is_norm and is_sync_norm)
        if (is_norm or _draws(module)) and (is_accumulated or depends):
            kind = next(
                kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules")
            )
            first.setdefault(kind, name)
            counts[kind] = counts.get(kind, 0) + 1
            depends_on_ranks |= depends
    if not counts:
        return ""
    named = ", ".join(f"{kind} ({_with_others(first[kind], count)})" for kind, count in counts.items())
    return _note(named, is_accumulated, depends_on_ranks)


def describe_calls(calls: Mapping[str, str], batch: Batch) -> str:
    """Return a note on calls that depend on how the batch is divided; empty if it is not divided or there are none.

    calls  file:line -> what is called there, see `BatchDependentCalls`
    """
    is_accumulated, is_shared = batch.accumulation_steps > 1, batch.num_shares > 1
    if not calls or not (is_accumulated or is_shared):
        return ""
    kinds = dict.fromkeys(calls.values())
    named = (f"{kind} ({abbreviate([place for place in calls if calls[place] == kind])})" for kind in kinds)
    # It is not known whether a random number affects the loss, or was seeded for its sample.
    return _note(", ".join(named), is_accumulated, is_shared, verb="may depend")


def _note(named: str, is_accumulated: bool, is_shared: bool, verb: str = "depends") -> str:
    parts = [part for part, applies in (("micro-batches", is_accumulated), ("ranks", is_shared)) if applies]
    division = f"its division into {' and '.join(parts)}"
    return f"the result of an update {verb} on {division}, because of {named}; see docs/unequal.md"


def _draws(module: nn.Module) -> bool:
    """Return True if the module draws random numbers from the device's generator in training."""
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout > 0 and module.num_layers > 1)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    return isinstance(module, _DropoutNd) and module.p > 0


def _with_others(name: str, count: int) -> str:
    return (name or "the model") + (f" and {count - 1} more" if count > 1 else "")
