"""Select parameters by prefixes of their names. A shared parameter has several names, and each of them selects it.

Optimizers and checkpoints use the first name of each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from runner.config.module_names import longest_prefix, module_prefixes
from runner.tensors.shared_names import names_of_parameters


def select_parameters(
    model: nn.Module, prefixes: Collection[str] | None, *, with_frozen: bool = False
) -> dict[str, nn.Parameter]:
    """Return the parameters under the prefixes by their first names.

    prefixes     None: all parameters
    with_frozen  also return parameters that do not require a gradient
    """
    aliases = {names[0]: names for names in names_of_parameters(model)}
    return {
        name: weight
        for name, weight in model.named_parameters()
        if (with_frozen or weight.requires_grad)
        and (prefixes is None or longest_prefix(aliases[name], prefixes) is not None)
    }


def resolve_names(
    options: Mapping[str, Any], model: nn.Module, trained: Collection[str], owned: Collection[str]
) -> dict[str, Any]:
    """Return options of an optimizer whose names refer to the parameters that it receives.

    A prefix that selects a shared parameter by another name is completed by the first name. Names of parameters that
    only other stages of a pipeline own are omitted.

    trained  first names of the parameters that the phase trains, on any rank
    owned    first names of the parameters that the optimizer receives
    """
    aliases = [names for names in names_of_parameters(model) if names[0] in trained]
    elsewhere = {*module_prefixes([name for names in aliases for name in names])} - {*module_prefixes([*owned])}

    def is_known(prefix: str) -> bool:
        return prefix.removesuffix(".") not in elsewhere

    def first_names(prefixes: Collection[str]) -> dict[str, str]:
        """Return the longest matching prefix of each shared parameter."""
        longest = ((names[0], longest_prefix(names, prefixes)) for names in aliases if len(names) > 1)
        return {name: prefix for name, prefix in longest if prefix is not None}

    resolved = dict(options)
    if isinstance(scales := options.get("lr_scales"), Mapping):
        scales = {**scales, **{name: scales[prefix] for name, prefix in first_names(scales).items()}}
        resolved["lr_scales"] = {name: scale for name, scale in scales.items() if is_known(name)}
    if isinstance(names := options.get("adamw_for"), list):
        resolved["adamw_for"] = [name for name in (*names, *first_names(names)) if is_known(name)]
    return resolved
