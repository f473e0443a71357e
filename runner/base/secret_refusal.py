"""Refuse secrets in arguments and configuration files, without printing them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.base.secret import find_secrets, find_secrets_in_arguments


def refuse_secrets(arguments: Iterable[str], options: Callable[[], Collection[str]] = tuple) -> None:
    """Raise ConfigError if arguments contain a secret; see `find_secrets_in_arguments`."""
    names = find_secrets_in_arguments(arguments, options)
    if names:
        raise ConfigError(Problem(_WHAT, name, _FIX_OF_ARGUMENTS) for name in names)


def secret_problems(tree: Any, where: str) -> list[Problem]:
    """Return a problem for each secret in the tree of the file `where`."""
    return [Problem(_WHAT, f"{where}: {name}", _FIX) for name in dict.fromkeys(find_secrets(tree))]


_WHAT = "looks like a secret; secrets are not allowed in arguments, configuration files or task files"
_FIX = "remove it, and use an environment variable: wandb reads WANDB_API_KEY (or ~/.netrc), a task can read any other"
_FIX_OF_ARGUMENTS = f"{_FIX}; then revoke it, because the shell history contains it"
