"""Call a function with a timeout, for calls that have none themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


def within(limit_s: float, call: Callable[[], Made]) -> Made:
    """Return what `call` returns, or raise what it raises. Raises TimeoutError once `limit_s` seconds are over.

    The call is made by a thread of its own, which is left behind where it does not return: torch's store waits for ever
    for an answer from a port at which somebody else listens.
    """
    made: list[Made] = []
    raised: list[BaseException] = []

    def make() -> None:
        try:
            made.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=make, daemon=True)  # not waited for at exit
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not made:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return made[0]
