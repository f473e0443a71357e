"""Minimal misuses of a GPU, each with the kind that the stand-in must report. They run on two simulated devices.

The kind `None` means that the function must raise an error, as with CUDA. A context on a device that the process does
not use is not an error in CUDA: the stand-in lists the contexts, and `_run` reports the misuse.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

SIZE = 64 * 1024  # number of elements, which take 256 KiB, a multiple of the page size

PLANTED: dict[str, tuple[str | None, Callable[[], Any]]] = {}


def planted(kind: str | None) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        PLANTED[function.__name__] = (kind, function)
        return function

    return add


def on_device(value: float = 1.0) -> torch.Tensor:
    return torch.full((SIZE,), value, device="cuda")


def page_locked(value: float = 1.0) -> torch.Tensor:
    return torch.full((SIZE,), value).pin_memory()


@planted("read-after-write")
def copy_ahead_without_wait() -> Any:
    """Copy on a side stream, for which the consumer does not wait."""
    with torch.cuda.stream(torch.cuda.Stream()):
        batch = page_locked().to("cuda", non_blocking=True)
    return batch * 2


@planted("read-after-write")
def side_stream_reads_without_wait() -> None:
    """Read on a side stream what the current stream computes."""
    result = on_device() * 2
    with torch.cuda.stream(torch.cuda.Stream()):
        result.sum()


@planted("write-after-write")
def two_streams_write_one_tensor() -> None:
    target = on_device()
    with torch.cuda.stream(torch.cuda.Stream()):
        target.zero_()


@planted("write-after-read")
def gradient_cleared_while_it_is_read() -> None:
    gradient, side = on_device(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradient.sum()
    gradient.zero_()


@planted("missing-record-stream")
def memory_of_a_side_stream_freed_early() -> None:
    """The allocator may reuse the memory on the side stream while the current stream still reads it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch = page_locked().to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    batch.sum()
    del batch
    with torch.cuda.stream(side):
        page_locked().to("cuda", non_blocking=True)


@planted("read-after-write")
def event_recorded_too_early() -> None:
    side, ready = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        ready.record()
        batch = page_locked().to("cuda", non_blocking=True)
    ready.wait(torch.cuda.current_stream())
    batch.sum()


@planted("read-after-write")
def event_of_another_stream() -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch = page_locked().to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(other)
    batch.sum()


@planted("read-after-write")
def event_that_another_stream_waits_for() -> None:
    side, other, ready = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        batch = page_locked().to("cuda", non_blocking=True)
        ready.record()
    other.wait_event(ready)
    batch.sum()


@planted("write-after-read")
def device_buffer_refilled_while_it_is_read() -> None:
    """A side stream copies the next batch into a buffer that the current stream is still reading."""
    buffer, side = on_device(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    buffer.sum()
    with torch.cuda.stream(side):
        buffer.copy_(page_locked(), non_blocking=True)


@planted("write-after-read")
def weights_updated_during_a_snapshot() -> None:
    """A checkpoint copies weights on a side stream, for which the next update does not wait."""
    weights, snapshot, side = on_device(), page_locked(0.0), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        snapshot.copy_(weights, non_blocking=True)
    weights.add_(1.0)


@planted("read-after-write")
def event_that_was_never_recorded() -> None:
    side, ready = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        batch = page_locked().to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_event(ready)
    batch.sum()


@planted("early-host-access")
def host_reads_a_snapshot_before_it_is_there() -> None:
    snapshot = page_locked(0.0)
    snapshot.copy_(on_device(), non_blocking=True)
    snapshot.sum()
    torch.cuda.synchronize()


@planted("early-host-access")
def host_reads_a_loss_before_it_is_there() -> None:
    """A few bytes do not fill a page."""
    loss = torch.zeros(3).pin_memory()
    loss.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    loss.tolist()
    torch.cuda.synchronize()


@planted("early-host-access")
def host_hashes_a_snapshot_before_it_is_there() -> None:
    import hashlib

    snapshot = page_locked(0.0)
    snapshot.copy_(on_device(), non_blocking=True)
    hashlib.sha256(snapshot.numpy().data).digest()
    torch.cuda.synchronize()


@planted("early-host-access")
def host_writes_where_a_copy_will_arrive() -> None:
    snapshot = page_locked(0.0)
    snapshot.copy_(on_device(), non_blocking=True)
    snapshot.fill_(3.0)
    torch.cuda.synchronize()


@planted("early-host-access")
def wait_for_an_event_of_the_wrong_stream() -> None:
    snapshot, ready = page_locked(0.0), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        ready.record()
    snapshot.copy_(on_device(), non_blocking=True)
    ready.synchronize()
    snapshot.sum()
    torch.cuda.synchronize()


@planted("pinned-reuse")
def staging_buffer_refilled_too_early() -> None:
    buffer, target = page_locked(), torch.empty(SIZE, device="cuda")
    for value in (1.0, 2.0):
        buffer.fill_(value)
        target.copy_(buffer, non_blocking=True)
    torch.cuda.synchronize()


@planted("pinned-reuse")
def staging_buffer_refilled_through_numpy() -> None:
    buffer = page_locked()
    batch = buffer.to("cuda", non_blocking=True)
    buffer.numpy()[:] = 7.0
    torch.cuda.synchronize()
    del batch


@planted("use-after-free")
def storage_used_after_it_was_freed() -> None:
    weights = on_device()
    view = weights[10:]
    weights.untyped_storage().resize_(0)
    view.sum()


@planted("foreign-context")
def thread_that_does_not_choose_its_device() -> None:
    """A thread starts on device 0, whichever device its parent thread has set."""
    torch.cuda.set_device(1)
    on_device()
    thread = threading.Thread(target=on_device)
    thread.start()
    thread.join()


@planted(None)
def cuda_in_the_parent_before_a_fork() -> None:
    """After a process has initialized CUDA, its forked children cannot use CUDA."""
    torch.cuda.current_device()
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            torch.zeros(1, device="cuda")
            os.write(write, b"no error")
        except RuntimeError as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 100).decode()
    os.wait()
    if answer == "RuntimeError":
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


@planted(None)
def tensors_of_two_devices() -> None:
    on_device() + torch.ones(SIZE, device="cuda:1")


@planted(None)
def tensor_left_on_the_host() -> None:
    on_device() + torch.ones(SIZE)


@planted(None)
def generator_of_the_host() -> None:
    torch.empty(SIZE, device="cuda").normal_(generator=torch.Generator())


@planted(None)
def wait_inside_the_loop() -> None:
    """torch raises an error in sync_debug_mode=error."""
    loss = on_device().sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@planted(None)
def error_of_an_earlier_kernel() -> None:
    """The error of a kernel is raised at the next synchronization, not at the launch."""
    import _stand_in

    tensor = on_device()
    _stand_in.fail_after(0, "an illegal memory access was encountered")
    try:
        tensor.zero_()
    except RuntimeError as error:
        raise AssertionError("the launch raised the error") from error
    torch.cuda.synchronize()


@planted("read-after-write")
def result_of_a_collective_without_wait() -> None:
    gradient = on_device()
    work = dist.all_reduce(gradient, async_op=True)
    gradient.sum()
    work.wait()


@planted("write-after-write")
def gradient_changed_during_a_collective() -> None:
    gradient = on_device()
    work = dist.all_reduce(gradient, async_op=True)
    gradient.mul_(0.5)
    work.wait()


@planted("write-after-write")
def weights_changed_while_a_collective_broadcasts_them() -> None:
    weights = on_device()
    work = dist.broadcast(weights, src=0, async_op=True)
    weights.add_(1.0)
    work.wait()


def _run(name: str) -> None:
    """Run one misuse, and print the observations as a line of JSON."""
    if "collective" in name:
        dist.init_process_group("cuda:nccl", store=HashStore(), rank=0, world_size=1)
    raised = ""
    try:
        PLANTED[name][1]()
        torch.cuda.synchronize()
    except Exception as error:
        raised = type(error).__name__
    import _stand_in

    misuses = dict(_stand_in.misuses())
    if not raised:
        foreign = set(_stand_in.contexts()) - {torch.cuda.current_device()}
        misuses |= {f"foreign-context: cuda:{device}": 1 for device in foreign}
    seen = {"name": name, "raised": raised, "misuses": misuses}
    os.write(1, json.dumps(seen).encode() + b"\n")


def main() -> None:
    """Run each misuse in a separate fork, so that torch is imported once and only the children use CUDA."""
    for name in PLANTED:
        child = os.fork()
        if child == 0:
            _run(name)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
