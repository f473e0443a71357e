"""Save and load models with an adapter; checkpoints may omit the frozen weights of the base model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from torch import Tensor, nn

from runner.base.errors import IncompatibleResume
from runner.base.text import abbreviate
from runner.distributed.parallel import Parallel
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.contract.lora import make_adapter
from runner.engine.parts.assemble import Parts
from runner.engine.parts.weights import load_initial_weights
from runner.tensors.bitwise import view_bytes

DIGEST = "frozen_weights"  # key of the hash in a checkpoint's state


def select_saved_state(parts: Parts) -> dict[str, Tensor]:
    """Return the tensors of the model for a checkpoint: all, or all but the frozen weights of the base model."""
    return _select_saved(parts, parts.bare.state_dict())


def _select_saved(parts: Parts, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parameters = dict(parts.bare.named_parameters(remove_duplicate=False))
    return make_adapter(parts.plan.choices["adapter"]).select_saved(tensors, parameters)


def frozen_digest(parts: Parts) -> str | None:
    """Return a hash of the weights that checkpoints omit, or None if checkpoints omit none.

    Collective: all ranks must call it. The value is valid on rank 0 only.
    """
    parameters = dict(parts.bare.named_parameters(remove_duplicate=False))
    left_out = sorted(parameters.keys() - _select_saved(parts, parameters).keys())
    if not left_out:  # return before state_dict(), which may be slow
        return None
    state = parts.bare.state_dict()
    digest = hashlib.sha256()
    for name in left_out:  # one at a time, because all of them may not fit in host memory
        for tensor in parts.parallel.gather_full({name: state[name]}).values():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(view_bytes(tensor).numpy().data)  # NumPy has no bfloat16
    return digest.hexdigest()


def load_weights(parts: Parts, start: LoadedCheckpoint) -> None:
    """Load the model of a checkpoint.

    Frozen weights that it omits are read from `weights`, or keep their random initialization from the seed.
    Raises IncompatibleResume if the model or its frozen weights differ from those that the run was trained with,
    InputMissing if the source of the weights no longer exists.
    """
    adapter, settings = make_adapter(parts.plan.choices["adapter"]), parts.plan.settings
    state = parts.bare.state_dict()
    left_out = state.keys() - _select_saved(parts, state).keys()
    if left_out:
        if settings.weights.source:
            load_initial_weights(settings, parts.bare, parts.parallel, adapter)
        is_same = parts.world.broadcast(frozen_digest(parts) == start.state.get(DIGEST))
        if not is_same:
            source = parts.plan.settings.weights.source
            fix = (
                f"restore the file {source} (setting weights)"
                if source
                else "use the seed and the task options of the run"
            )
            raise IncompatibleResume(
                "the frozen weights of the model are not those that the adapter was trained with",
                where="adapter.checkpoint=adapter",
                fix=f"{fix}; adapter.checkpoint=all stores them in each checkpoint",
            )
    load_model(parts.bare, start, parts.parallel, omitted=left_out)


def load_model(
    model: nn.Module, checkpoint: LoadedCheckpoint, parallel: Parallel, omitted: Collection[str] = ()
) -> None:
    """Load the weights. Raises IncompatibleResume unless names, shapes and dtypes match.

    omitted  names that the checkpoint does not contain, because they are frozen
    """
    saved = checkpoint.stored("model")
    current = {name: tensor for name, tensor in model.state_dict().items() if name not in omitted}
    mismatches = [f"{name} is missing" for name in current if name not in saved]
    mismatches += [f"{name} is not in the model" for name in saved if name not in current]
    mismatches += [
        f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} instead of {tuple(tensor.shape)} {tensor.dtype}"
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
