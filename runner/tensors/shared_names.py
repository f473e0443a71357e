"""Names of the parameters of a model: a shared parameter, such as a tied weight, has several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torch import nn

Value = TypeVar("Value")


def names_of_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [*names.values()]


def expand_shared_names(names: Iterable[Sequence[str]], tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Return the tensors with each shared parameter under all of its names, because loading uses the last one.

    names  names of each parameter, see `names_of_parameters`
    """
    aliases = {name: group for group in names for name in group}
    return {alias: tensor for name, tensor in tensors.items() for alias in aliases.get(name, [name])}
