"""A page of the report, and its HTML, in which all texts of a run are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import jinja2

from runner.monitor.health_rules import HealthVerdict
from runner.tools.report.chart_parts import Chart, MissingPart
from runner.version import __version__

GENERATOR_TAG = '<meta name="generator" content="accel-run '  # of a page of any version
MAX_BYTES = 500_000


@dataclass(frozen=True)
class Tile:
    """A key figure at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class PageTable:
    """Rows of text; `folded` is shown instead of the rows until the reader expands them."""

    id: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture from the run, as a data URI."""

    name: str
    source: str
    width: int
    height: int


@dataclass(frozen=True)
class Text:
    """The beginning of a text from the run."""

    name: str
    content: str


@dataclass(frozen=True)
class Step:
    """A command to paste, with its description."""

    description: str
    line: str


@dataclass(frozen=True)
class PageHead:
    """The top of the page."""

    name: str = ""
    title: str = ""
    badge: str = ""
    lines: Sequence[str] = ()
    command: str = ""


@dataclass(frozen=True)
class Limits:
    """The bottleneck of the run: a sentence and its evidence."""

    sentence: str = ""
    parts: Sequence[str] = ()
    verdicts: Sequence[HealthVerdict] = ()
    advice: str = ""


@dataclass(frozen=True)
class PredictedFiles:
    """Predictions of the run."""

    pictures: Sequence[Picture] = ()
    texts: Sequence[Text] = ()
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of the page, in order."""

    head: PageHead = PageHead()
    problems: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    limits: Limits = Limits()
    first: Sequence[PageTable] = ()
    charts: Sequence[Chart] = ()
    predicted: PredictedFiles = PredictedFiles()
    tables: Sequence[PageTable] = ()
    repeat: Sequence[Step] = ()
    missing: Sequence[MissingPart] = ()


def render_html(page: Page, refresh_s: float | None = None) -> str:
    """Return the page as HTML of less than MAX_BYTES; the page lists the parts that were dropped.

    refresh_s  interval in seconds at which a browser reloads the page; None: never
    """
    while True:
        html = _render(page, refresh_s)
        if len(html.encode()) < MAX_BYTES:
            return html
        page = _shrink(page)


def _shrink(page: Page) -> Page:
    """Omit half of the rows of the largest table, or the largest picture or chart."""
    parts: list[tuple[int, PageTable | Picture | Chart]] = [
        (_count_letters(table), table) for table in (*page.first, *page.tables)
    ]
    parts += [(len(picture.source), picture) for picture in page.predicted.pictures]
    parts += [(len(chart.svg), chart) for chart in page.charts[1:]]  # the first one is the most important
    size, largest = max(parts, key=lambda part: part[0])
    assert size, "all other texts are truncated when they are read"
    if isinstance(largest, PageTable):
        rows = largest.rows[: len(largest.rows) // 2]
        shorter = replace(largest, head=largest.head if rows else (), rows=rows, note="the rest is omitted")
        first, tables = (
            [shorter if table is largest else table for table in section] for section in (page.first, page.tables)
        )
        return replace(page, first=first, tables=tables)
    name = largest.name if isinstance(largest, Picture) else largest.title
    pictures = [picture for picture in page.predicted.pictures if picture is not largest]
    return replace(
        page,
        charts=[chart for chart in page.charts if chart is not largest],
        predicted=replace(page.predicted, pictures=pictures),
        missing=[*page.missing, MissingPart(name, "the page would exceed 500 KB")],
    )


def _count_letters(table: PageTable) -> int:
    return sum(len(cell) for row in (table.head, *table.rows) for cell in row)


def _render(page: Page, refresh_s: float | None) -> str:
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(folder),
        keep_trailing_newline=True,
    )
    style = (folder / "page.css").read_text(encoding="utf-8")
    made = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}"
    template = environment.get_template("page.html.jinja")
    return template.render(page=page, style=style, version=__version__, made=made, refresh_s=refresh_s)
