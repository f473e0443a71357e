"""Match module and parameter names in settings with parameters of the model, and suggest names if none match."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from runner.base.errors import Problem
from runner.base.text import abbreviate
from runner.config.schema import did_you_mean


def is_under(name: str, prefix: str) -> bool:
    """Return whether `prefix` is the name or a module that contains it: blocks.1 does not contain blocks.10.weight."""
    return name == prefix or name.startswith(prefix.removesuffix(".") + ".")


def longest_prefix(names: Collection[str], prefixes: Iterable[str]) -> str | None:
    """Return the longest of the prefixes that one of the names is under, None if there is none.

    names  names of one parameter: a shared parameter has several
    """
    return max((each for each in prefixes if any(is_under(name, each) for name in names)), key=len, default=None)


def module_prefixes(names: Sequence[str]) -> list[str]:
    """Return the names of the parameters, and of all modules that contain them."""
    return list({name.rsplit(".", cut)[0]: None for name in names for cut in range(name.count(".") + 1)})


def unmatched_problems(
    prefixes: Iterable[str],
    names: Sequence[str],
    key: str,
    kind: str = "trainable parameter",
    frozen: Sequence[str] = (),
) -> list[Problem]:
    """Return a problem for each prefix that matches no name.

    kind    what the names refer to, for the message
    frozen  names of parameters that do not require a gradient
    """
    problems = []
    for prefix in (each for each in prefixes if not any(is_under(name, each) for name in names)):
        what, fix = f"no {kind} has a name that starts with {prefix}", suggest_module(prefix, names, kind)
        if any(is_under(name, prefix) for name in frozen):
            what = f"all parameters with names that start with {prefix} are frozen"
            fix = f"set requires_grad=True for them; with an adapter, use adapter.train=[{prefix}]"
        problems.append(Problem(what, key, fix))
    return problems


def suggest_module(prefix: str, names: Sequence[str], kind: str = "trainable parameter") -> str:
    """Return what to write instead of `prefix`, which matches no name: a similar name, or the top-level modules."""
    if not names:
        return "all parameters are frozen"
    levels = dict.fromkeys(name.partition(".")[0] for name in names)
    return did_you_mean(prefix, module_prefixes(names)) or f"{kind}s are in {abbreviate([*levels], 8)}"
