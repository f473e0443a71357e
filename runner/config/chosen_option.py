"""Call the function of a chosen option: from a shipped table, a task file or a package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from runner.config.configuration import Choice
from runner.config.custom_options import own_keys
from runner.config.option_table import Result, call_option


def make_chosen(table: Mapping[str, Callable[..., Result]], choice: Choice, *args: Any) -> Result:
    """Return the result of the chosen function of the table, called with the settings of the choice."""
    extended = own_keys(choice.extension)
    options = {key: value for key, value in choice.options.items() if key not in extended}
    return call_option(table, choice.function, *args, **options)


def own_function(choice: Choice) -> Callable[..., Any]:
    """Return the function of a task file or a package, with its settings bound."""
    options = {key: choice.options[key] for key in own_keys(choice.reference)}
    return partial(call_option, {}, choice.reference, **options)
