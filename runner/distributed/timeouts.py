"""Call a function with a timeout, for calls that have none themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


def call_with_timeout(limit_s: float, call: Callable[[], Made]) -> Made:
    """Call a function and return its result, or raise TimeoutError after `limit_s` seconds.

    The call runs in a separate thread, which is abandoned if it does not return: torch's store waits forever
    for a reply from a port at which another program listens.
    """
    made: list[Made] = []
    raised: list[BaseException] = []

    def make() -> None:
        try:
            made.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=make, daemon=True)  # not joined at exit
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not made:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return made[0]
