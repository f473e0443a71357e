"""Resume a run: compare its settings with the checkpoint and load the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from runner.base.errors import IncompatibleResume, Problem
from runner.base.text import abbreviate
from runner.distributed.parallel import Parallel
from runner.durable.checkpoint import LoadedCheckpoint

# Keys that define the mathematics of the run; they must not change.
FIXED_KEYS = (
    "task", "global_batch_size", "seed", "data.path", "data.train_samples", "data.shards", "data.shards_per_update",
    "dataloader.drop_last", "sampler", "trains", "adapter",
)  # fmt: skip
# Keys that change the mathematics from the resume on; they may change if resume_allow names them.
KEYS_ALLOWED_BY_NAME = (
    "updates", "epochs", "optimizer", "scheduler", "max_grad_norm", "precision", "early_stopping", "averaging",
    "sharpness", "hook", "objective",
)  # fmt: skip
# Keys that older checkpoints lack, with the values that describe their behavior.
ADDED_KEYS: Mapping[str, Any] = {
    "adapter": "none",
    "averaging": "none",
    "sampler": "shuffle",
    "sharpness": "none",
    "data.shards": None,
    "data.shards_per_update": None,
    "weights.strict": True,
    "weights.only": [],
    "weights.rename": {},
}
MECHANICS_KEYS = ("optimizer.kernel", "sampler.micro_tokens", "task_file", "phases")


@dataclass(frozen=True)
class Difference:
    """Key whose value differs from the checkpoint."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def compare(
    before: Mapping[str, Any], now: Mapping[str, Any], allowed: Iterable[str], trained: int = 0
) -> list[Difference]:
    """Return the allowed differences. Raises IncompatibleResume listing all others.

    trained  number of updates of the phase in the checkpoint
    """
    differences, problems = [], []
    allowed = tuple(allowed)
    for key in [*now, *(key for key in before if key not in now)]:
        if before.get(key) == now.get(key):
            continue
        difference = Difference(key, before.get(key), now.get(key))
        what = f"was {difference.before} in the checkpoint and is {difference.now} now"
        key_class = _classify(key)
        is_allowed = _is_under(key, allowed) or _is_under(_strip_phase(key), allowed)
        if key_class == "mechanics" or (key_class == "by name" and is_allowed):
            differences.append(difference)
        elif key_class == "by name":
            fix = f"continue anyway with resume_allow=[{key}], or start a new run with another run=NAME"
            if _strip_phase(key) == "updates" and isinstance(difference.now, int) and difference.now < trained:
                fix = f"the run already has {trained} updates: use {key}={trained} or more, or another run=NAME"
            problems.append(Problem(what, key, fix))
        else:
            fix = "restore the old value, or start a new run with another run=NAME"
            problems.append(Problem(f"{what}; a run cannot be resumed with another value", key, fix))
    if problems:
        error = IncompatibleResume(str(problems[0]))
        error.problems = tuple(problems)
        raise error
    return differences


def load_model(
    model: nn.Module, checkpoint: LoadedCheckpoint, parallel: Parallel, omitted: Collection[str] = ()
) -> None:
    """Load the weights; names, shapes and dtypes must match. Raises IncompatibleResume.

    omitted  names that the checkpoint does not contain, because they are frozen
    """
    saved = checkpoint.stored("model")
    current = {name: tensor for name, tensor in model.state_dict().items() if name not in omitted}
    mismatches = [f"{name} is missing" for name in current if name not in saved]
    mismatches += [f"{name} is not in the model" for name in saved if name not in current]
    mismatches += [
        f"{name} is {tuple(saved[name].shape)} {saved[name].dtype}, must be {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in current.items()
        if name in saved and (saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype)
    ]
    if mismatches:
        raise IncompatibleResume(
            f"the checkpoint does not match the model: {abbreviate(mismatches, 3, '; ')}",
            where=str(checkpoint.path),
            fix="use the task options the run was trained with, or start a new run with another run=NAME",
        )
    parallel.load(model, saved)


def _strip_phase(key: str) -> str:
    """Return the key without its phase prefix."""
    return key.split(".", 2)[2] if key.startswith("phase.") else key


def _classify(key: str) -> str:
    key = _strip_phase(key)
    if _is_under(key, MECHANICS_KEYS):
        return "mechanics"
    # The keys of an optimizer may change if resume_allow names them; the optimizer itself may not.
    if key == "optimizer" or _is_under(key, FIXED_KEYS):
        return "fixed"
    return "by name" if _is_under(key, KEYS_ALLOWED_BY_NAME) else "mechanics"


def _is_under(key: str, roots: Iterable[str]) -> bool:
    return any(key == root or key.startswith(root + ".") for root in roots)
