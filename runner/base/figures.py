"""Numbers as JSON knows them, without infinities and NaN, and metrics as they are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Return the value with None in the place of each float that is infinite or NaN; json.dumps writes null for it."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def metric_text(value: float | None, digits: int = 4) -> str:
    """Return the value of a metric as it is shown.

    None, as files have it, and NaN are a metric without items. One that is not finite is null in files too.
    """
    return NOT_MEASURED if value is None or math.isnan(value) else f"{value:.{digits}g}"


def nan_for_none(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return figures that were read from JSON as numbers."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


NOT_MEASURED = "not measured"
