"""Call a generator with a timeout, and return None if it does not answer in time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class TimeoutCall(Generic[Answer]):
    """Run a generator in a daemon thread; each call to `ask` requests one item.

    A hanging request is not repeated: a later call returns its answer if it arrives.
    """

    def __init__(self, answers: Callable[[], Generator[Answer]], name: str) -> None:
        self._answers = answers
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._is_asked = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, patience_s: float) -> Answer | None:
        """Return the next item, or None on timeout. Raises what the generator raises."""
        if not self._is_asked:
            self._is_asked = True
            self._questions.put(True)
        try:
            found = self._found.get(timeout=patience_s) if patience_s > 0 else self._found.get_nowait()
        except queue.Empty:
            return None
        self._is_asked = False
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Stop requesting items; the generator is closed after the pending request."""
        self._questions.put(False)

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, up to `timeout` seconds."""
        self._thread.join(timeout)

    def _work(self) -> None:
        answers = self._answers()
        try:
            while self._questions.get():
                try:
                    self._found.put(next(answers))
                except Exception as error:  # raised again in the caller of `ask`
                    self._found.put(error)
        finally:
            answers.close()
