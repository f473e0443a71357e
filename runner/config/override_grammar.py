"""Parse single overrides with Hydra's grammar; importing this module loads Hydra."""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from runner.config.request import format_override

INVALID = (HydraException, RecursionError, ValueError)  # ValueError: a number of 5,000 digits
_PARSER = OverridesParser.create()


def parse_override(argument: str) -> Override:
    """Parse an override. Unlike in Hydra, non-ASCII letters and `=` need no quotes, because paths contain them.

    Raises an exception of INVALID if the argument cannot be parsed or has the form `key==value`.
    """
    key, _, value = argument.partition("=")
    is_plain = value.isascii() and "=" not in value
    if is_plain or value.startswith("=") or set(value) & set("'\"[]{}(),$"):
        return _PARSER.parse_override(argument)
    override = _PARSER.parse_override(format_override(key, value))
    override.input_line = argument
    return override
