"""Run a pass in which all samples get the same random numbers, and which must not change parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class ChangesWeights(Exception):
    """The loss changes weights, such as those of a teacher, so it must not be called unnecessarily."""


@dataclass
class Draws:
    """The random numbers of one comparison. Operations are identified by their name and their position in the pass.

    first_draws      operation -> its numeric arguments, and the first element that it drew in the first pass
    selects_samples  True if an operation draws indices of samples: randperm, or one whose arguments depend on the size
                     of the batch
    """

    first_draws: dict[tuple[int, str], tuple[tuple[float, ...], Tensor]] = field(default_factory=dict)
    selects_samples: bool = False


class ControlledPass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Give all samples the same random numbers, and raise before an operation changes a model parameter.

    Every element of a tensor of random numbers is replaced with the first one. In the passes over the two halves, it is
    the first one of the pass over the whole batch. Otherwise, the numbers of a sample would depend on the size of its
    batch. Operations that draw sample indices are unchanged, because an index of the whole batch may not exist in a
    half. Fused kernels run without dropout.
    """

    def __init__(self, model: nn.Module, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {_storage_id(weight) for weight in model.parameters()}
        self.draws, self.num_draws = draws, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch must not wrap `__torch_dispatch__` in `disable`, which would import the compiler."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            named = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
            for argument in function._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = list_tensors({**named, **kwargs}.get(argument.name))
                    if any(_storage_id(tensor) in self.storages for tensor in written):
                        raise ChangesWeights
        if torch.Tag.nondeterministic_seeded in function.tags and len(function._schema.returns) > 1:
            args, kwargs = _without_dropout(function, args, kwargs)
        result = function(*args, **kwargs)
        if function._schema.name in _DRAWING and result.numel():
            numbers = tuple(value for value in args if isinstance(value, int | float))
            if function._schema.name == "aten::multinomial":
                numbers = (args[0].shape[-1],)
            operation = self.num_draws, function._schema.name
            self.num_draws += 1
            first_numbers, first = self.draws.first_draws.setdefault(operation, (numbers, result.flatten()[0].clone()))
            if function._schema.name == "aten::randperm" or numbers != first_numbers:
                self.draws.selects_samples = True
            else:
                result.fill_(first)
        return result


def _without_dropout(function: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a fused kernel with a dropout probability of 0."""
    args, kwargs = list(args), dict(kwargs)
    for position, argument in enumerate(function._schema.arguments):
        if argument.name in ("p", "dropout_p"):
            if position < len(args):
                args[position] = 0.0
            elif argument.name in kwargs:
                kwargs[argument.name] = 0.0
    return args, kwargs


def _storage_id(tensor: Tensor) -> int:
    # The address of the storage (private), not of its data: views at other offsets have other data pointers.
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage()._cdata)


_DRAWING = {  # operations whose result consists of random numbers
    f"aten::{name}{ending}"
    for name in ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "random", "randperm",
                 "multinomial", "bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "normal",
                 "poisson", "uniform", "_standard_gamma")
    for ending in ("", "_")
}  # fmt: skip


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a batch without rebuilding it, which fails for a packed sequence."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in list_tensors(part)]
