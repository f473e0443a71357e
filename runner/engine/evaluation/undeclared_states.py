"""Find undeclared states of a metric: attributes that its update changes and on which its result depends.

Ranks merge declared states only, so a value computed from other attributes would cover only the samples of one rank.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from runner.base.sample_rng import seeded_generators
from runner.engine.sources.training_identity import hash_content

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
    """Compares the attributes and buffers of a metric and its parts, except its states, with those before any update.

    compute  computes the numbers of a copy of the metric
    """

    def __init__(self, metric: nn.Module, compute: Callable[[nn.Module], Numbers]) -> None:
        self._metric, self._compute = metric, compute
        self._start = _hash_attributes(metric)
        self._start_values = {name: _copy_attribute(value) for name, value in _attributes(metric)}

    def changed(self) -> dict[str, str]:
        """Return name -> digest of the attributes that have changed since the start."""
        return _differences(self._start, _hash_attributes(self._metric))

    def find_undeclared(self, unequal: Collection[str], update: Callable[[nn.Module], object]) -> list[str]:
        """Return the changed attributes that cannot be merged over ranks and that the result depends on.

        An attribute can be merged if it is equal on all ranks and does not accumulate values.

        unequal  attributes that differ between ranks
        update   repeats an update on a copy of the metric; attributes that it changes again accumulate values
        """
        changed = self.changed()
        if not changed:  # the usual case; avoids a copy of the states, which may be large
            return []
        try:
            repeated = copy.deepcopy(self._metric)
        except Exception:  # without a copy, nothing can be tested, so each may be a state
            return sorted(changed)
        with _undisturbed():
            update(repeated)
        accumulating = _differences(_hash_attributes(self._metric), _hash_attributes(repeated))
        names = sorted(name for name in changed if name in unequal or name in accumulating)
        values = dict(_attributes(repeated))
        values = self._start_values | {name: values[name] for name in names if name in accumulating and name in values}
        if not names or not self._is_used(names, values, update):
            return []
        return [name for name in names if self._is_used([name], values, update)] or names

    def _is_used(
        self, names: Collection[str], values: Mapping[str, Any], update: Callable[[nn.Module], object]
    ) -> bool:
        """Return whether the result changes if these attributes have `values`, now or after another update."""
        results = []
        for other in (False, True):
            metric = copy.deepcopy(self._metric)
            try:
                for name in names if other else ():
                    path, _, attribute = name.rpartition(".")
                    part = metric.get_submodule(path)
                    if name not in values:
                        delattr(part, attribute)
                    elif values[name] is _UNKNOWN:
                        raise ValueError(f"the previous value of {name} is not known")
                    else:
                        setattr(part, attribute, copy.deepcopy(values[name]))
                with _undisturbed():
                    results.append(self._compute(metric))
                    update(metric)
                    results.append(self._compute(metric))
            except Exception:  # the attribute is needed, or the result cannot be computed from so few samples
                return True
        return not (are_equal_numbers(results[0], results[2]) and are_equal_numbers(results[1], results[3]))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Compute without warnings and without an effect on the random generators."""
    with seeded_generators(0, "metric"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def are_equal_numbers(one: Numbers, other: Numbers) -> bool:
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
    """Return name -> digest, which is empty for a value that cannot be hashed, such as one that contains itself."""
    memo: dict[int, tuple[Any, str]] = {}
    return {name: _hash_attribute(value, memo) for name, value in _attributes(metric)}


def _hash_attribute(value: Any, memo: dict[int, tuple[Any, str]]) -> str:
    try:
        return hash_content(value, memo)
    except Exception:  # an object that refers to itself, a meta tensor, any object of a library
        return ""


def _copy_attribute(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # such as an open file
        return _UNKNOWN


_UNKNOWN = object()
