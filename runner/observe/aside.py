"""Ask what may never answer, and go on without it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Aside(Generic[Answer]):
    """Takes the answers of a generator in a daemon thread of its own, one each time it is asked.

    A question that hangs is asked once: its answer is there for a later call, if it ever comes.
    """

    def __init__(self, answers: Callable[[], Generator[Answer]], name: str) -> None:
        self._answers = answers
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._is_asked = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, patience_s: float) -> Answer | None:
        """Return the next answer, None where it does not come in time. Raises what the generator raises."""
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
        """No more is asked; the generator is closed once it has answered what it was asked last."""
        self._questions.put(False)

    def join(self, timeout: float) -> None:
        """Wait for its end, no longer than this."""
        self._thread.join(timeout)

    def _work(self) -> None:
        answers = self._answers()
        try:
            while self._questions.get():
                try:
                    self._found.put(next(answers))
                except Exception as error:  # raised where it was asked
                    self._found.put(error)
        finally:
            answers.close()
