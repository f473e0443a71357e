"""Synchronize buffers at the end of each update that changes them, never during an evaluation or a save.

A rank sees only its own samples, so a buffer that a forward pass changes, such as a moving average, a codebook or a
counter, diverges between ranks. Synchronizing only at checkpoints would make the result of training depend on when
they are written. So buffers that changed in an update are synchronized at its end: running statistics of norms are
averaged over the ranks, all others are broadcast from one rank, as in DistributedDataParallel.

No buffer is sent if none has changed. Because a collective that only some ranks join would deadlock, the ranks first
agree on which buffers have changed, by flags attached to a message that they exchange anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.base.text import abbreviate
from runner.distributed.agreement import find_unequal
from runner.distributed.world import World
from runner.tensors.bitwise import bitwise_equal, is_dense, view_bytes
from runner.tensors.module_buffers import BufferRef, TensorVersion, buffers_of, is_writable, list_buffers


class BufferSync:
    """Synchronize the buffers of a model that changed on any rank.

    source    rank whose buffers are broadcast
    averages  average the running statistics of norms over the ranks; False: broadcast them like all other buffers,
              because only `source` computes them
    others    modules to skip, because only some ranks have them
    modules   modules whose buffers are synchronized

    Per update, call `begin_update`, run forward passes, all-reduce `flags` over the ranks, and call `apply`.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        source: int = 0,
        others: Collection[nn.Module] = frozenset(),
        *,
        averages: bool = True,
    ) -> None:
        self.model, self.world, self.source, self.others, self.averages = model, world, source, others, averages
        self._is_first = True
        self._before: list[Tensor | None] = []  # copies, during the first update
        self._unversioned: set[str] = set()  # buffers that change without a version increment
        self._track(self._list_buffers())

    def begin_phase(self) -> None:
        """Start a phase, which may change different buffers than the previous one."""
        self._is_first = True

    @contextmanager
    def update(self) -> Iterator[None]:
        """On exit, synchronize the buffers that changed inside the context; a separate message sends the flags."""
        self.begin_update()
        yield
        self.apply(self.world.sum(self.flags()))

    def begin_update(self) -> None:
        """Prepare for the forward passes of an update; in the first update of a phase, copy all buffers to compare."""
        if self._is_first:
            self._record()
            self._before = [_copy_to_host(ref.tensor) for ref in self._refs]

    def flags(self) -> Tensor:
        """Return a change flag (0 or 1) per buffer of this rank, then one for buffers added, removed or resized."""
        if self._is_first:
            # Writes through .data, by a norm's kernel or by compiled code increment no version, so bits are compared.
            pairs = zip(self._refs, self._before, strict=True)
            self._unversioned |= {ref.name for ref, before in pairs if not _is_unchanged(ref.tensor, before)}
        return torch.tensor([*map(float, self._changed_flags()), float(self._needs_rebuild())])

    def apply(self, flags: Tensor) -> None:
        """Synchronize the buffers that have changed on any rank; `flags` are the sums of the flags over the ranks.

        Raises TaskFault, on every rank, if the buffers in checkpoints differ between ranks in names or shapes.
        """
        # Set here and not earlier, because a discarded update never gets here: it may have ended before a buffer
        # changed, so the next update must compare all buffers again.
        self._is_first, self._before = False, []
        total = flags.tolist()
        if total[-1]:
            self._rebuild()
            total = self.world.sum(torch.tensor([*map(float, self._changed_flags()), 0.0])).tolist()
        # Not strict: the last number is the flag of a rebuild.
        refs = [ref for ref, changed in zip(self._refs, total, strict=False) if changed and _is_plain(ref)]
        if refs:
            with torch.no_grad():
                _average([ref for ref in refs if self._is_averaged(ref)], self.world)
                _broadcast([ref for ref in refs if not self._is_averaged(ref)], self.source, self.world)
            self._record()

    def check(self) -> None:
        """Raise TaskFault, on every rank, if a buffer that checkpoints include differs between ranks.

        The buffer is not repaired: evaluations and saves call this method, and training must not depend on when they
        run.
        """
        refs = [ref for ref in self._refs if ref.is_saved and _is_plain(ref)]
        different = torch.zeros(len(refs))
        for group in _by_device(refs):
            mine = torch.cat([view_bytes(_tensor(ref)) for ref in group])
            theirs = mine.clone()
            self.world.broadcast_tensor(theirs, self.source)
            if not torch.equal(theirs, mine):
                sizes = [_tensor(ref).nbytes for ref in group]
                for ref, one, other in zip(group, torch.split(mine, sizes), torch.split(theirs, sizes), strict=True):
                    different[refs.index(ref)] = float(not torch.equal(one, other))
        # A buffer that has a recorded change since the last update, for example by a task's begin_update, may differ
        # here: the next update synchronizes it.
        seen = {ref.name for ref, changed in zip(self._refs, self._changed_flags(), strict=True) if not changed}
        different *= torch.tensor([float(ref.name in seen) for ref in refs])
        is_different_anywhere = self.world.max(different).tolist()
        names = [ref.name for ref, is_different in zip(refs, is_different_anywhere, strict=True) if is_different]
        if names:
            raise TaskFault(
                f"buffers differ between ranks, although torch recorded no change: {abbreviate(names)}",
                fix="change a buffer in place with buffer.copy_(new), not through buffer.data or NumPy",
            )

    def _is_averaged(self, ref: BufferRef) -> bool:
        return self.averages and _is_statistic(ref)

    # ------------------------------------------------------------ detecting changes on this rank

    def _list_buffers(self) -> list[BufferRef]:
        return [ref for ref in list_buffers(self.model) if ref.module not in self.others]

    def _track(self, refs: Sequence[BufferRef]) -> None:
        self._refs = refs
        self.modules = [module for module in self.model.modules() if module not in self.others]
        self._num_entries = self._count()
        self._record()

    def _record(self) -> None:
        self._recorded = [TensorVersion.of(ref.tensor) for ref in self._refs]

    def _count(self) -> int:
        return sum(len(buffers_of(module)) for module in self.modules)

    def _changed_flags(self) -> list[bool]:
        flags = [
            ref.name in self._unversioned or seen.is_changed(ref.tensor)
            for ref, seen in zip(self._refs, self._recorded, strict=True)
        ]
        # torch increments the version of num_batches_tracked, but not those of the running statistics
        norms = {ref.module for ref, changed in zip(self._refs, flags, strict=True) if changed and _is_statistic(ref)}
        return [changed or ref.module in norms for ref, changed in zip(self._refs, flags, strict=True)]

    def _needs_rebuild(self) -> bool:
        if self._count() != self._num_entries:
            return True
        pairs = zip(self._refs, self._recorded, strict=True)
        return any(ref.tensor is not seen.tensor and not _same_shape(ref.tensor, seen.tensor) for ref, seen in pairs)

    def _rebuild(self) -> None:
        """Track only buffers with the same shape on all ranks, because a non-persistent cache may differ."""
        seen = {ref.name: seen for ref, seen in zip(self._refs, self._recorded, strict=True)}
        refs = {ref.name: ref for ref in self._list_buffers()}
        of_ranks = self.world.gather({name: _kind(ref.tensor) for name, ref in refs.items()})
        alike = [name for name, kind in of_ranks[0].items() if all(there.get(name) == kind for there in of_ranks)]
        saved = [name for there in self.world.gather([name for name in refs if refs[name].is_saved]) for name in there]
        other = sorted(set(saved) - set(alike))
        if other:
            raise TaskFault(
                "buffers must have the same names, shapes and types on all ranks, but these differ:"
                f" {abbreviate(other)}",
                fix="give them their final shape when the model is built, or register them with persistent=False",
            )
        self._track([refs[name] for name in alike])
        self._recorded = [seen.get(name, TensorVersion.of(None)) for name in alike]


def check_copies(model: nn.Module, copied: Collection[nn.Module], world: World) -> None:
    """Raise TaskFault, on every rank, if the copies of these modules differ in buffers that checkpoints include.

    Only the copy of the first rank is saved, so a resume would change the buffers of the other copies.
    """
    if not copied:
        return
    refs = [ref for ref in list_buffers(model) if ref.module in copied and ref.is_saved and _is_plain(ref)]
    names = find_unequal({ref.name: _tensor(ref) for ref in refs}, world)
    if names:
        raise TaskFault(
            f"buffers differ between stages of the pipeline that share a module: {abbreviate(names)}",
            fix="give each layer its own module, put layers that share it into one stage with parallelism.split, or"
            " use parallelism=ddp",
        )


def _is_statistic(ref: BufferRef) -> bool:
    """Return whether a buffer is a running statistic of a norm, which each rank computes from its own samples."""
    return isinstance(ref.module, nn.modules.batchnorm._NormBase)


def _same_shape(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _kind(tensor: Tensor | None) -> list[Any] | None:
    return None if tensor is None else [list(tensor.shape), str(tensor.dtype)]


def _is_plain(ref: BufferRef) -> bool:
    return ref.tensor is not None and is_dense(ref.tensor)


def _copy_to_host(tensor: Tensor | None) -> Tensor | None:
    """Return a copy on the host, because device memory may be full."""
    return None if tensor is None or not is_dense(tensor) else tensor.detach().to("cpu", copy=True)


def _is_unchanged(tensor: Tensor | None, before: Tensor | None) -> bool:
    if tensor is None or before is None or not is_dense(tensor):
        return tensor is before or (tensor is not None and not is_dense(tensor))
    return bitwise_equal(tensor, before)


# ---------------------------------------------------------------- communication


def _average(refs: Sequence[BufferRef], world: World) -> None:
    """All-reduce statistics to their mean over the ranks, in the widest dtype, and batch counts to their maximum."""
    for group in _by_device([ref for ref in refs if _tensor(ref).is_floating_point()]):
        flat = torch.cat([_tensor(ref).detach().reshape(-1) for ref in group]).to(world.widest)
        world.sum(flat)
        flat.div_(world.world_size)  # one kernel for all, because one per buffer would take longer than the message
        _write_back(group, torch.split(flat, [_tensor(ref).numel() for ref in group]))
    for group in _by_device([ref for ref in refs if not _tensor(ref).is_floating_point()]):
        flat = torch.cat([_tensor(ref).detach().reshape(-1) for ref in group]).to(torch.int64)
        world.max(flat)
        _write_back(group, torch.split(flat, [_tensor(ref).numel() for ref in group]))


def _broadcast(refs: Sequence[BufferRef], source: int, world: World) -> None:
    for group in _by_device(refs):
        content = torch.cat([view_bytes(_tensor(ref)) for ref in group])
        world.broadcast_tensor(content, source)
        if world.rank != source:
            parts = torch.split(content, [_tensor(ref).nbytes for ref in group])
            # Cloned, because a slice may start at any offset, but a view with a wider dtype must be aligned.
            _write_back(group, [part.clone().view(_tensor(ref).dtype) for ref, part in zip(group, parts, strict=True)])


def _by_device(refs: Sequence[BufferRef]) -> list[list[BufferRef]]:
    """Group the buffers by device, so that those of a group can be sent in one message."""
    devices = dict.fromkeys(_tensor(ref).device for ref in refs)
    return [[ref for ref in refs if _tensor(ref).device == device] for device in devices]


def _write_back(refs: Sequence[BufferRef], parts: Sequence[Tensor]) -> None:
    for ref, part in zip(refs, parts, strict=True):
        buffer = _tensor(ref)
        value = part.view(buffer.shape)
        if is_writable(buffer):
            buffer.copy_(value)
        else:
            buffers_of(ref.module)[ref.key] = value.to(buffer.dtype).clone()


def _tensor(ref: BufferRef) -> Tensor:
    assert ref.tensor is not None
    return ref.tensor
