"""Pictures for plots/: matplotlib's figures without its global state, and their bytes."""

from __future__ import annotations

import io
from typing import Any

# Okabe and Ito, Color Universal Design, 2008: told apart by colour-blind readers too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")


def new_figure(width: float = 8.0, height: float = 4.5) -> Any:
    """Return an empty matplotlib Figure of that size in inches."""
    from matplotlib.figure import Figure  # here: it takes its time

    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def png(figure: Any) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
