"""Call the function of a chosen option: closed tables, with the signature as schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Made = TypeVar("Made")


def make(table: Mapping[str, Callable[..., Made]], option: str, *given: Any, **keys: Any) -> Made:
    """Call the function of `option` in `table` with the runner's arguments and the user's settings."""
    assert option in table, f"{option} is not in the table {sorted(table)}"
    return table[option](*given, **keys)
