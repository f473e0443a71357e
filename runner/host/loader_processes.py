"""Worker processes of data loaders: how they start, report errors, and end with the run."""

from __future__ import annotations

import copy
import errno
import io
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, get_context, parent_process, queues, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from runner.base.errors import Exit, TaskFault
from runner.base.text import RemoteError, describe_exception, error_message, first_line
from runner.host.output import make_streams_nonblocking
from runner.host.parent_death import die_with_parent
from runner.host.scratch import shared_folder
from runner.host.stacks import dump_on_signal
from runner.host.thread_start import limit_thread_starts


class PicklerWithoutModel(ForkingPickler):
    """Pickler that replaces the model with a placeholder, so that spawned workers do not receive a copy of it."""

    def __init__(self, file: io.BytesIO, model: nn.Module | None) -> None:
        super().__init__(file)
        self.modules = set(model.modules()) if model is not None else set()

    def reducer_override(self, value: object) -> Any:
        return (_NoModel, ()) if isinstance(value, nn.Module) and value in self.modules else NotImplemented


class _NoModel:
    """Placeholder for the model in a spawned worker."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"spawned data workers have no copy of the model, but its attribute {name} was accessed")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("spawned data workers have no copy of the model, but it was called")


class _Queue(queues.Queue):  # type: ignore[type-arg]  # not subscriptable in Python 3.11
    """Result queue of a worker that sends an error instead of an item that cannot be sent, so that the run cannot hang.

    A thread of the worker sends batches as file descriptors of shared memory, and a second thread passes the
    descriptors to the receiver. Either may fail, because a thread cannot be started or too many files are open. Python
    only prints the error, and later batches need the same second thread. So after the first failure, this queue
    sends only errors, without these threads. Checked on Python 3.11 to 3.13.
    """

    _error: RemoteError | TaskFault | None = None

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if parent_process() is None:  # in the main process, this is a queue of indices for a worker
            super().put(obj, block, timeout)
            return
        try:
            if self._error is None:
                super().put(obj, block, timeout)
        except RuntimeError as error:  # thread creation failed
            self._error = RemoteError(describe_exception(error))
        if self._error is not None:
            self._send(obj[0], self._error)

    def _on_queue_feeder_error(self, error: Exception, obj: Any) -> None:
        info = describe_exception(error)
        self._error = RemoteError(info)
        if not {"PicklingError", "TypeError", "AttributeError"}.isdisjoint(info.bases):
            self._error = TaskFault(
                f"a batch cannot be sent from a data worker: {first_line(error_message(error))}",
                fix="return only tensors, numbers and text from collate, or use dataloader.num_workers=0",
            )
        lost = [obj, *self._buffer]  # type: ignore[attr-defined]
        self._buffer.clear()  # type: ignore[attr-defined]
        for item in lost:
            if item is not None:  # None requests the end of the feeder thread; the worker is then killed
                self._send(item[0], self._error)

    def _send(self, number: int, error: RemoteError | TaskFault) -> None:
        self._sem.acquire(block=False)  # type: ignore[attr-defined]  # the reader releases it
        with self._wlock:  # type: ignore[attr-defined]
            self._writer.send_bytes(ForkingPickler.dumps((number, error)))  # type: ignore[attr-defined]


def worker_context(start_method: str) -> BaseContext:
    """Return multiprocessing's context for a start method, with queues that report what cannot be sent."""
    context = copy.copy(get_context(start_method))
    context.Queue = partial(_Queue, ctx=context)  # type: ignore[method-assign]
    return context


def kill_workers(workers: Sequence[BaseProcess]) -> None:
    """Kill the workers, including hanging ones. They ignore SIGTERM, which torch would send."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()


@contextmanager
def kill_on_partial_start() -> Iterator[None]:
    """Kill the workers started in this context if one cannot start: at exit, Python would wait for them forever.

    Python sends workers SIGTERM, which they ignore, and torch kills them only if its iterator is complete. The
    destructor of an incomplete iterator accesses attributes that are set late, and prints a traceback if one is missing
    (torch 2.13).
    """
    # Defaults for the destructor of an incomplete iterator: nothing to shut down, and no worker to notify.
    _MultiProcessingDataLoaderIter._shutdown = True
    _MultiProcessingDataLoaderIter._workers_status = defaultdict(bool)  # type: ignore[assignment]
    before = set(active_children())
    try:
        yield
    except BaseException:
        for worker in set(active_children()) - before:
            worker.kill()
            worker.join()
        raise


@contextmanager
def stop_signals_blocked(start_method: str) -> Iterator[None]:
    """Block stop signals, so that processes start with them blocked; this process handles pending ones on exit."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    if start_method == "spawn":
        # multiprocessing's resource tracker unblocks two of the signals when it starts, so start it first, then block
        # again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def init_worker(parent_pid: int, worker: int) -> None:
    """Initialize a worker: it ignores stop signals, so that the run can save, and ends with its parent.

    torch's workers check only every 5 s whether their parent is alive. A worker that starts while its parent dies
    would mistake the process that adopts it for its parent.
    """
    die_with_parent(parent_pid)
    limit_thread_starts()
    make_streams_nonblocking()
    sys.excepthook = _print_unexpected_error
    ignore_stop_signals()
    folder = shared_folder()
    if folder is not None:  # the worker writes its stacks there if something hangs
        with suppress(OSError):
            dump_on_signal(folder)


def ignore_stop_signals() -> None:
    """Ignore stop signals in this process, including those that were blocked at its start."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _print_unexpected_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        os._exit(Exit.SYSTEM)  # the thread that passes descriptors failed: otherwise the run would wait forever
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # as in durable/signals.py
