"""Draw PNG files at a low resolution and without layout, because laying out and drawing one takes up to 1 s.

The same artists are drawn. Tests of the plots themselves turn this off (`at_full_resolution`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

DPI = 8


def draw_coarsely() -> None:
    """Replace `Figure.savefig` in this process and its forks."""
    from matplotlib.figure import Figure

    if Figure.savefig is not _savefig_coarsely:
        _full["savefig"] = Figure.savefig
        Figure.savefig = _savefig_coarsely  # type: ignore[method-assign]


@contextmanager
def at_full_resolution() -> Iterator[None]:
    """Draw at full resolution inside the context."""
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", _full.get("savefig", Figure.savefig))
        yield


def _savefig_coarsely(figure: Any, *args: Any, **options: Any) -> None:
    if options.get("format") == "png":
        figure.set_layout_engine("none")
        options["dpi"] = DPI
    _full["savefig"](figure, *args, **options)


_full: dict[str, Any] = {}
