"""Send nested tuples, lists and mappings of tensors to ranks that do not know the number or shapes of the tensors.

send_object_list of torch.distributed is not used: its receiver unpickles, and so executes, what another process sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runner.base.errors import TaskFault
from runner.base.text import dtype_name
from runner.distributed.world import World
from runner.tensors.bitwise import view_bytes


class RemoteFailure(NamedTuple):
    """Sent instead of a value that could not be computed or sent; `text` describes the error."""

    text: str


def send(value: Any, rank: int, world: World, device: torch.device) -> None:
    """Send a value to a rank, which must call `receive`. Tensors are moved to `device` first."""
    header, tensors = _pack(value)
    for message in (torch.tensor([len(header)]), header, *(view_bytes(tensor.to(device)) for tensor in tensors)):
        dist.send(message, group=world.group, group_dst=rank)


def receive(rank: int, world: World, device: torch.device) -> Any:
    """Receive a value from a rank, with its tensors on `device`."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, group=world.group, group_src=rank)
    header = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(header, group=world.group, group_src=rank)
    tensors, structure = _allocate(header, device)
    for tensor in tensors:
        dist.recv(view_bytes(tensor), group=world.group, group_src=rank)
    return _unpack(structure, tensors)


def broadcast(value: Any, source: int, world: World) -> Any:
    """Return the value of rank `source` on all ranks; values of other ranks are ignored."""
    header, tensors = _pack(value if world.rank == source else None)
    size = torch.tensor([len(header)])
    world.broadcast_tensor(size, source)
    header = header if world.rank == source else torch.empty(int(size), dtype=torch.uint8)
    world.broadcast_tensor(header, source)
    if world.rank == source:
        for tensor in tensors:
            world.broadcast_tensor(view_bytes(tensor.to(world.device)), source)
        return value
    tensors, structure = _allocate(header, world.device)
    for tensor in tensors:
        world.broadcast_tensor(view_bytes(tensor), source)
    return _unpack(structure, tensors)


def check_sendable(value: Any) -> None:
    """Raise TaskFault if a value cannot be sent."""
    _pack(value)


def _pack(value: Any) -> tuple[Tensor, list[Tensor]]:
    tensors: list[Tensor] = []
    structure = _structure(value, tensors)
    shapes = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in tensors]
    content = json.dumps([structure, shapes]).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), tensors


def _structure(value: Any, tensors: list[Tensor]) -> list[Any]:
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, RemoteFailure):
        return ["failed", value.text]
    if type(value) is tuple or type(value) is list:
        return [type(value).__name__, [_structure(part, tensors) for part in value]]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return ["dict", {key: _structure(part, tensors) for key, part in value.items()}]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    raise TaskFault(
        "the model's output is sent between ranks, so it must consist of tensors and plain values in tuples,"
        f" lists, and dicts with string keys, but it contains a {type(value).__name__}",
        where="parallelism=pipeline",
    )


def _allocate(header: Tensor, device: torch.device) -> tuple[list[Tensor], list[Any]]:
    structure, shapes = json.loads(header.numpy().tobytes())
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in shapes], structure


def _unpack(structure: list[Any], tensors: list[Tensor]) -> Any:
    kind, content = structure
    if kind == "tensor":
        return tensors[content]
    if kind == "failed":
        return RemoteFailure(content)
    if kind == "dict":
        return {key: _unpack(part, tensors) for key, part in content.items()}
    if kind == "plain":
        return content
    parts = [_unpack(part, tensors) for part in content]
    return tuple(parts) if kind == "tuple" else parts
