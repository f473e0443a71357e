"""Convert numbers for JSON (no infinities or NaN) and format metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Replace every float that is infinite or NaN by None, which json.dumps writes as null."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def metric_text(value: float | None, digits: int = 4) -> str:
    """Format the value of a metric for display.

    None (as in files) and NaN mean a metric without items. Other non-finite values are null in files, too.
    """
    return NOT_MEASURED if value is None or math.isnan(value) else f"{value:.{digits}g}"


def nan_for_none(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Convert metrics read from JSON back to floats: None becomes NaN."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


NOT_MEASURED = "not measured"
