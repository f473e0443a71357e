"""From a chosen option to the function behind it: closed tables, and the signature as the check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Made = TypeVar("Made")


def make(table: Mapping[str, Callable[..., Made]], option: str, *given: Any, **keys: Any) -> Made:
    """Call the function that `table` holds for `option` with what the runner gives and the user's keys."""
    assert option in table, f"{option} is not in the table {sorted(table)}"
    return table[option](*given, **keys)
