"""Call a function with a timeout, for calls that have none themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_with_timeout(limit_s: float, call: Callable[[], Result]) -> Result:
    """Call a function and return its result, or raise TimeoutError after `limit_s` seconds.

    The call runs in a separate thread, which is abandoned if it does not return. For example, torch's store waits
    forever for a reply if another program listens on its port.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # not joined at exit
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return results[0]
