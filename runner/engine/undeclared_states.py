"""Find attributes of a metric that its update changes, that are not declared as states, and that its result depends on.

Ranks merge declared states only, so a value computed from other attributes would be that of a part of the samples.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from runner.base.sample_rng import seeded_generators
from runner.engine.training_identity import hash_content

# Attributes that torchmetrics 1.5 to 1.9 changes itself.
_INTERNAL = frozenset(
    {
        "_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync",
        "_groups", "_groups_checked", "_state_is_copy", "_device", "_dtype_convert", "update", "compute", "training",
        *vars(nn.Module()),
    }
)  # fmt: skip

Numbers = Mapping[str, float]


class AttributeWatch:
    """Watches the attributes and buffers of a metric, and of its parts, that are not its states.

    compute  computes the numbers of a copy of the metric
    grown    attributes that the second update has changed again and that the result depends on: they accumulate values
    """

    def __init__(self, metric: nn.Module, compute: Callable[[nn.Module], Numbers]) -> None:
        self._metric, self._compute = metric, compute
        self._start = _hash_attributes(metric)
        self._start_values = _copy_attributes(metric, self._start)
        self._after_first: dict[str, str] | None = None
        self._first_values: dict[str, Any] = {}
        self.grown: frozenset[str] | None = None

    def observe_update(self, update: Callable[[nn.Module], object]) -> None:
        """Compare the attributes after each update; only the first two are compared.

        update  repeats this update on a copy of the metric
        """
        if self._after_first is None:
            self._after_first = _hash_attributes(self._metric)
            changed = _copy_attributes(self._metric, _differences(self._start, self._after_first))
            self._first_values = self._start_values | changed
        elif self.grown is None:
            grown = _differences(self._after_first, _hash_attributes(self._metric))
            # An attribute is suspicious if no result can be computed without its new value.
            self.grown = frozenset(self._find_used(grown, self._first_values, update, if_unknown=True))

    def changed(self) -> dict[str, str]:
        """Return name -> digest of the attributes that have changed since the start."""
        return _differences(self._start, _hash_attributes(self._metric))

    def find_used(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` without whose changes since the start the metric computes another result."""
        return self._find_used(names, self._start_values, None, if_unknown=False)

    def find_kept(self, later: AttributeWatch) -> list[str]:
        """Return accumulating attributes whose values were not reset before `later` started to watch."""
        return sorted((self.grown or frozenset()) & _differences(self._start, later._start).keys())

    def _find_used(
        self,
        names: Iterable[str],
        values: Mapping[str, Any],
        update: Callable[[nn.Module], object] | None,
        *,
        if_unknown: bool,
    ) -> list[str]:
        """Return those of `names` whose value the result depends on, at once or after another update."""

        def is_used(names: Iterable[str]) -> bool:
            try:
                now, other = (copy.deepcopy(self._metric) for _ in range(2))
                for name in names:
                    _set_attribute(other, name, values)
                return not all(map(equal_numbers, self._compute_twice(now, update), self._compute_twice(other, update)))
            except Exception:  # some metrics cannot be copied, or computed from few samples
                return if_unknown

        together = sorted(names)
        if not together or not is_used(together):
            return []
        return [name for name in together if is_used([name])] or together

    def _compute_twice(self, metric: nn.Module, update: Callable[[nn.Module], object] | None) -> list[Numbers]:
        """Compute the metric, and again after `update`."""
        with seeded_generators(0, "metric"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [self._compute(metric)]
            if update is not None:
                update(metric)
                results.append(self._compute(metric))
        return results


def equal_numbers(one: Numbers, other: Numbers) -> bool:
    """Return whether two results are equal, except for rounding: reductions on a GPU may not be deterministic."""
    return one.keys() == other.keys() and all(
        math.isclose(value, other[name], rel_tol=1e-5) or (math.isnan(value) and math.isnan(other[name]))
        for name, value in one.items()
    )


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in now.items() if before.get(name) != digest}


def _attributes(metric: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the attributes and buffers of a metric and its parts that are not states."""
    for path, part in metric.named_modules():
        states = getattr(part, "_defaults", {})  # private: torchmetrics 1.5 to 1.9
        own = ((name, value) for name, value in vars(part).items() if name not in _INTERNAL and name not in states)
        for name, value in (*own, *part.named_buffers(recurse=False)):
            yield f"{path}.{name}".lstrip("."), value


def _hash_attributes(metric: nn.Module) -> dict[str, str]:
    """Return name -> digest; values that cannot be compared, such as functions, all have the same one."""
    memo: dict[int, tuple[Any, str]] = {}
    return {name: _hash_attribute(value, memo) for name, value in _attributes(metric)}


def _hash_attribute(value: Any, memo: dict[int, tuple[Any, str]]) -> str:
    try:
        return hash_content(value, memo)
    except Exception:  # an object that refers to itself, a tensor without content, any object of a library
        return ""


def _copy_attributes(metric: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    selected = set(names)
    return {name: _copy_attribute(value) for name, value in _attributes(metric) if name in selected}


def _copy_attribute(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # such as an open file
        return _UNKNOWN


def _set_attribute(metric: nn.Module, name: str, values: Mapping[str, Any]) -> None:
    """Set an attribute to its value in `values`, or delete it if it has none."""
    path, _, attribute = name.rpartition(".")
    part = metric.get_submodule(path)
    if name not in values:
        delattr(part, attribute)
    elif values[name] is _UNKNOWN:
        raise ValueError(f"the previous value of {name} is not known")
    else:
        setattr(part, attribute, copy.deepcopy(values[name]))


_UNKNOWN = object()
