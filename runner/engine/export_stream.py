"""Export the weights of a checkpoint in parts to one file, without holding the model in memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from runner.base.errors import DataError
from runner.base.global_rng import seed_everything
from runner.base.stored_tensor import StoredTensor
from runner.distributed.deferred_init import DeferredInit
from runner.durable import files
from runner.durable.checkpoint import FORMAT_OF_PARTS, LoadedCheckpoint, load
from runner.durable.stored_tensors import open_tensors
from runner.durable.tensors import serialize_header, stream_tensors, view_bytes
from runner.durable.weight_source import averaged_stem
from runner.engine.checkpoint_state import check_state
from runner.engine.hooks.averaging import expand_shared_names
from runner.engine.task_loading import load_task
from runner.engine.trained_run import ModelSource
from runner.plan.planner import plan_this_process
from runner.plan.run_plan import Plan


def find_streamable(source: ModelSource) -> LoadedCheckpoint | None:
    """Return the checkpoint if it is in parts and holds the weights of the model itself, without an adapter."""
    if source.checkpoint is None or source.configuration.choices["adapter"].function != "none":
        return None
    checkpoint = load(source.checkpoint)
    return checkpoint if checkpoint.manifest["format_version"] == FORMAT_OF_PARTS else None


def export_weights(source: ModelSource, checkpoint: LoadedCheckpoint, folder: Path, file_name: str) -> Path:
    """Write the weights to `folder`, in a file that `safetensors.torch.load_model` loads; return its path.

    Memory holds some rows of one tensor. The file is read again and compared with the checkpoint, bit for bit.
    Raises DataError if it differs.
    """
    check_state(checkpoint)
    model = _build_without_memory(plan_this_process(source.configuration)[0])
    tensors = dict(checkpoint.stored("model"))
    stem = averaged_stem(checkpoint)
    if stem:
        tensors |= expand_shared_names(model, checkpoint.stored(stem))
    replaced_by = _shared_names(model)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in replaced_by}
    draft = folder / f"{files.TEMPORARY}{file_name}-{secrets.token_hex(4)}"
    files.write_stream(draft, _file_content(tensors, replaced_by))
    try:
        _compare(tensors, draft)
        files.rename(draft, folder / file_name)
        files.fsync_directory(folder)
    except BaseException:
        files.remove(draft)
        raise
    return folder / file_name


def _build_without_memory(plan: Plan) -> nn.Module:
    """Return the task's model, of which only names and shared parameters are used."""
    seed_everything(plan.settings.seed)
    try:
        with DeferredInit():
            return load_task(plan).model
    except Exception:  # it needs the values of its tensors; another error is raised again
        seed_everything(plan.settings.seed)
        return load_task(plan).model


def _shared_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a shared parameter to the first one, which safetensors stores."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return {other: first for first, *others in map(sorted, names.values()) for other in others}


def _file_content(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield serialize_header(tensors, metadata)
    for _, _, rows in stream_tensors(tensors):
        yield view_bytes(rows)


def _compare(tensors: Mapping[str, StoredTensor], file: Path) -> None:
    """Raise DataError unless the file holds the same bytes as the checkpoint."""
    written = open_tensors(file)
    is_same = written.keys() == tensors.keys() and all(
        torch.equal(
            rows.reshape(-1).view(torch.uint8),
            written[name].read(start, start + len(rows) if rows.dim() else None).reshape(-1).view(torch.uint8),
        )
        for name, start, rows in stream_tensors(tensors)
    )
    if not is_same:
        raise DataError("the exported file differs from the checkpoint", where=str(file), fix="export it again")
