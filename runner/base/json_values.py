"""Read and write JSON values that may be missing, damaged, or not finite."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def replace_nonfinite(value: Any) -> Any:
    """Replace every float that is infinite or NaN by None, which json.dumps writes as null."""
    if isinstance(value, float):  # first, because most values are numbers
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    return [replace_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


def none_to_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Convert metrics read from JSON back to floats: None becomes NaN."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def to_json(content: Any, indent: int | None = 2) -> str:
    """Return the content of a JSON file; non-finite numbers become null."""
    return json.dumps(replace_nonfinite(content), indent=indent, allow_nan=False) + "\n"


def parse_object(content: bytes | str) -> dict[str, Any] | None:
    """Parse a JSON object; return None if the text is damaged or has another type."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_dict(value: object) -> dict[str, Any]:
    """Return `value` if it is a dict, else an empty one; for untrusted files."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return `value` if it is a list, else an empty one; for untrusted files."""
    return value if isinstance(value, list) else []


def is_number(value: object) -> bool:
    """Return whether the value can be formatted as a number; False for booleans and integers beyond float64."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
