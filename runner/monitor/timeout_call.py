"""Request items of a generator with a timeout."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TimeoutCall(Generic[Item]):
    """Run a generator in a daemon thread; each call to `next_item` requests one item.

    A hanging request is not repeated: a later call returns its item if it arrives.
    """

    def __init__(self, items: Callable[[], Generator[Item]], name: str) -> None:
        self._make_items = items
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Item | Exception] = queue.SimpleQueue()
        self._is_pending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def next_item(self, timeout_s: float) -> Item | None:
        """Return the next item, or None on timeout. Raises what the generator raises."""
        if not self._is_pending:
            self._is_pending = True
            self._requests.put(True)
        try:
            result = self._results.get(timeout=timeout_s) if timeout_s > 0 else self._results.get_nowait()
        except queue.Empty:
            return None
        self._is_pending = False
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Stop requesting items; the generator is closed after the pending request."""
        self._requests.put(False)

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, up to `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        items = self._make_items()
        try:
            while self._requests.get():
                try:
                    self._results.put(next(items))
                except Exception as error:  # raised again in the caller of `next_item`
                    self._results.put(error)
        finally:
            items.close()
