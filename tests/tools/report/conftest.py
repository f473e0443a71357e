"""Fixtures for tests of reports."""

from __future__ import annotations

from xml.sax.saxutils import escape

import pytest

from runner.tools.report import svg
from runner.tools.report.chart_parts import Drawing


def describe(drawing: Drawing, name: str, title: str) -> str:
    """Return a chart that has only a title and a description."""
    title, description = escape(title), escape(drawing.description)
    texts = f'<title id="{name}-title">{title}</title><desc id="{name}-desc">{description}</desc>'
    return f'<svg id="{name}" role="img" aria-labelledby="{name}-title {name}-desc">{texts}</svg>'


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not draw charts, which would take two seconds per page, in tests of other parts of the page."""
    monkeypatch.setattr(svg, "render_svg", describe)
