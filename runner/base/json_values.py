"""Read and write JSON values that may be missing, damaged, or not finite."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Replace every float that is infinite or NaN by None, which json.dumps writes as null."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nan_for_none(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Convert metrics read from JSON back to floats: None becomes NaN."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


def to_json(content: Any, indent: int | None = 2) -> str:
    """Return the content of a JSON file; non-finite numbers become null."""
    return json.dumps(finite(content), indent=indent, allow_nan=False) + "\n"


def object_in(content: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object in the text; None if it is damaged or another value."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def mapped(value: object) -> dict[str, Any]:
    """Return `value` if it is a mapping, else an empty one; for untrusted files."""
    return value if isinstance(value, dict) else {}


def listed(value: object) -> list[Any]:
    """Return `value` if it is a list, else an empty one; for untrusted files."""
    return value if isinstance(value, list) else []


def is_number(value: object) -> bool:
    """Return whether the value can be formatted as a number; not an integer of 400 digits, nor True."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
