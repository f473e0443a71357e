"""Plots for plots/: matplotlib figures without pyplot's global state, encoded as PNG."""

from __future__ import annotations

import io
from typing import Any

# Okabe and Ito, Color Universal Design, 2008: distinguishable with color vision deficiency
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")


def new_figure(width: float = 8.0, height: float = 4.5) -> Any:
    """Return an empty matplotlib Figure; width and height in inches."""
    from matplotlib.figure import Figure  # slow to import

    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def notebook_figure() -> Any:
    """Return an empty matplotlib Figure that a notebook shows, without pyplot's global state."""
    figure = new_figure()
    figure._repr_png_ = lambda: encode_png(figure)
    return figure


def encode_png(figure: Any) -> bytes:
    """Encode the figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
