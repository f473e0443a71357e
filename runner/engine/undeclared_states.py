"""Find attributes of a metric that its update changes but that are not declared as states.

Ranks merge declared states only, so a value computed from other attributes would be that of a part of the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from runner.engine.training_identity import hash_content

# Attributes that torchmetrics 1.5 to 1.9 changes itself.
_INTERNAL = frozenset(
    {
        "_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync",
        "_groups", "_groups_checked", "_state_is_copy", "_device", "_dtype_convert", "update", "compute", "training",
        *vars(nn.Module()),
    }
)  # fmt: skip


class AttributeWatch:
    """Watches the attributes and buffers of a metric, and of its parts, that are not its states.

    grown  those that the second update has changed again: they accumulate values
    """

    def __init__(self, metric: nn.Module) -> None:
        self._metric = metric
        self._start = self._digest()
        self._after_first: dict[str, str] | None = None
        self.grown: frozenset[str] | None = None

    def observe_update(self) -> None:
        """Compare the attributes after each update; only the first two are compared."""
        if self._after_first is None:
            self._after_first = self._digest()
        elif self.grown is None:
            self.grown = frozenset(_differences(self._after_first, self._digest()))

    def changed(self) -> dict[str, str]:
        """Return name -> digest of the attributes that have changed since the start."""
        return _differences(self._start, self._digest())

    def find_kept(self, later: AttributeWatch) -> list[str]:
        """Return accumulating attributes whose values were not reset before `later` started to watch."""
        return sorted((self.grown or frozenset()) & _differences(self._start, later._start).keys())

    def _digest(self) -> dict[str, str]:
        """Return name -> digest; values that cannot be compared, such as functions, all have the same one."""
        return {
            f"{path}.{name}".lstrip("."): _hash_attribute(value)
            for path, part in self._metric.named_modules()
            for name, value in _attributes(part)
        }


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in now.items() if before.get(name) != digest}


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    states = getattr(part, "_defaults", {})  # private: torchmetrics 1.5 to 1.9
    yield from ((name, value) for name, value in vars(part).items() if name not in _INTERNAL and name not in states)
    yield from part.named_buffers(recurse=False)


def _hash_attribute(value: Any) -> str:
    try:
        return hash_content(value)
    except RecursionError:  # an object that refers to itself
        return ""
