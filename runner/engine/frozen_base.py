"""Save and load models with an adapter, whose checkpoints may leave out the frozen weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from runner.base.errors import IncompatibleResume
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.adapter import make_adapter
from runner.engine.assemble import Parts
from runner.engine.resumption import load_model
from runner.engine.weights import load_initial_weights

DIGEST = "frozen_weights"  # key in the state of a checkpoint


def select_saved_state(parts: Parts) -> dict[str, Tensor]:
    """Return the tensors of the model for a checkpoint: all, or all but the frozen weights of an adapter."""
    return _select_saved(parts, parts.bare.state_dict())


def _select_saved(parts: Parts, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parameters = dict(parts.bare.named_parameters(remove_duplicate=False))
    return make_adapter(parts.plan.choices["adapter"]).select_saved(tensors, parameters)


def frozen_digest(parts: Parts) -> str | None:
    """Return a hash of the weights that checkpoints leave out, on rank 0; None if they contain all. A collective."""
    parameters = dict(parts.bare.named_parameters(remove_duplicate=False))
    left_out = sorted(parameters.keys() - _select_saved(parts, parameters).keys())
    if not left_out:  # before the call of state_dict, which may be slow
        return None
    state = parts.bare.state_dict()
    digest = hashlib.sha256()
    for name in left_out:  # one at a time, because all of them may not fit in host memory
        for tensor in parts.parallel.gather_full({name: state[name]}).values():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_weights(parts: Parts, start: LoadedCheckpoint) -> None:
    """Load the model of a checkpoint; frozen weights that it leaves out come from `weights`, or from the seed.

    Raises IncompatibleResume if the model or its frozen weights differ from those of the training, InputMissing if
    the source of the weights no longer exists.
    """
    adapter, settings = make_adapter(parts.plan.choices["adapter"]), parts.plan.settings
    state = parts.bare.state_dict()
    left_out = state.keys() - _select_saved(parts, state).keys()
    if left_out:
        if settings.weights.source:
            load_initial_weights(settings, parts.bare, parts.parallel, adapter)
        _check_frozen(parts, start.state)
    load_model(parts.bare, start, parts.parallel, omitted=left_out)


def _check_frozen(parts: Parts, state: Mapping[str, object]) -> None:
    is_same = parts.world.broadcast(frozen_digest(parts) == state.get(DIGEST))
    if not is_same:
        source = parts.plan.settings.weights.source
        fix = f"restore the file of weights={source}" if source else "use the seed and the task options of the run"
        raise IncompatibleResume(
            "the frozen weights of the model are not those that the adapter was trained with",
            where="adapter.checkpoint=adapter",
            fix=f"{fix}; adapter.checkpoint=all stores them in each checkpoint",
        )
