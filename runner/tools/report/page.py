"""A page of the report and its HTML, in which nothing of a run is taken for markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from runner.monitor.health_rules import HealthVerdict
from runner.tools.report.chart_parts import Chart, Missing
from runner.tools.report.run_data import cut
from runner.version import __version__

MARK = '<meta name="generator" content="accel-run '  # of a page of any version
MOST_BYTES = 500_000
Item = TypeVar("Item")


@dataclass(frozen=True)
class Tile:
    """A figure that is looked at first."""

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
    """A picture that the run has left, as a data URI."""

    name: str
    source: str
    width: int
    height: int


@dataclass(frozen=True)
class Text:
    """The beginning of a text that the run has left."""

    name: str
    content: str


@dataclass(frozen=True)
class Step:
    """A line to be pasted."""

    words: str
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
    """What limited the run: a sentence, and what supports it."""

    sentence: str = ""
    time: Sequence[Chart] = ()
    parts: Sequence[str] = ()
    verdicts: Sequence[HealthVerdict] = ()
    advice: str = ""


@dataclass(frozen=True)
class PredictedFiles:
    """What the run has predicted."""

    pictures: Sequence[Picture] = ()
    texts: Sequence[Text] = ()
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of the page, from the top."""

    head: PageHead = PageHead()
    problems: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    limits: Limits = Limits()
    first: Sequence[PageTable] = ()
    charts: Sequence[Chart] = ()
    predicted: PredictedFiles = PredictedFiles()
    tables: Sequence[PageTable] = ()
    repeat: Sequence[Step] = ()
    missing: Sequence[Missing] = ()


def html_of(page: Page, refresh_s: float | None = None) -> str:
    """Return the page as HTML of less than MOST_BYTES; what has no room is left out, and the page says so.

    refresh_s  interval in seconds at which a browser reloads the page; None: never
    """
    while True:
        html = _rendered(page, refresh_s)
        if len(html.encode()) < MOST_BYTES:
            return html
        page = _smaller(page)


def _smaller(page: Page) -> Page:
    """Return the page without its largest table, picture or chart, or with half of that table, or of every list."""
    parts: list[tuple[int, PageTable | Picture | Chart]] = [
        (_letters(each), each) for each in (*page.first, *page.tables)
    ]
    parts += [(len(picture.source), picture) for picture in page.predicted.pictures]
    parts += [(len(chart.svg), chart) for chart in page.charts[1:]]  # the first one is the most important
    size, largest = max(parts, key=lambda part: part[0], default=(0, None))
    if largest is None or size < _SMALL:
        return replace(
            page,
            problems=_half(page.problems),
            repeat=_half(page.repeat),
            missing=_half(page.missing),
            limits=replace(page.limits, verdicts=_half(page.limits.verdicts)),
        )
    if isinstance(largest, PageTable):
        rows = [[cut(cell, _MAX_CELL) for cell in row[:_MAX_COLUMNS]] for row in _half(largest.rows)]
        head = [cut(cell, _MAX_CELL) for cell in largest.head[:_MAX_COLUMNS]]
        shorter = replace(largest, head=head, rows=rows, note="the rest is omitted")
        first, tables = ([shorter if each is largest else each for each in kind] for kind in (page.first, page.tables))
        return replace(page, first=first, tables=tables)
    name = largest.name if isinstance(largest, Picture) else largest.title
    pictures = [picture for picture in page.predicted.pictures if picture is not largest]
    return replace(
        page,
        charts=[chart for chart in page.charts if chart is not largest],
        predicted=replace(page.predicted, pictures=pictures),
        missing=[*page.missing, Missing(name, "the page would exceed 500 KB")],
    )


def _half(items: Sequence[Item]) -> Sequence[Item]:
    return items[: len(items) // 2]


def _letters(table: PageTable) -> int:
    return sum(len(cell) for row in (table.head, *table.rows) for cell in row)


def _rendered(page: Page, refresh_s: float | None) -> str:
    import jinja2

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


_SMALL = 1000  # letters of a part, below which dropping it gains little
_MAX_CELL, _MAX_COLUMNS = 240, 16  # letters, cells; of a table that is shortened
