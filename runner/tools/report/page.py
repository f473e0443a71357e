"""A page of the report and its HTML, in which nothing of a run is taken for markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.monitor.health_rules import HealthVerdict
from runner.tools.report.chart_parts import Chart, Missing
from runner.tools.report.run_data import cut
from runner.version import __version__

MARK = '<meta name="generator" content="accel-run '  # of a page of any version
MOST_BYTES = 500_000


@dataclass(frozen=True)
class Tile:
    """A figure that is looked at first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class PageTable:
    """Rows of words; `folded` are those that stand in the place of the rows until somebody wants to see them."""

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
    rules: Sequence[PageTable] = ()
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


def html_of(page: Page) -> str:
    """Return the page as HTML of less than MOST_BYTES; what has no room is left out, and the page says so."""
    while True:
        html = _rendered(page)
        if len(html.encode()) < MOST_BYTES:
            return html
        page = _smaller(page)


def _smaller(page: Page) -> Page:
    """Return the page with less on it: huge tables first, then pictures, charts, tables and at last the lists."""
    what = "the page would exceed 500 KB"
    if shorter := _with_a_shorter_table(page, _HUGE_TABLE):
        return shorter
    if pictures := page.predicted.pictures:
        largest = max(pictures, key=lambda picture: len(picture.source))
        kept = replace(page.predicted, pictures=[picture for picture in pictures if picture is not largest])
        return replace(page, predicted=kept, missing=[*page.missing, Missing(largest.name, what)])
    if page.charts:
        chart = max(page.charts[1:] or page.charts, key=lambda each: len(each.svg))  # the first one is looked at first
        charts = [each for each in page.charts if each is not chart]
        return replace(page, charts=charts, missing=[*page.missing, Missing(chart.title, what)])
    if shorter := _with_a_shorter_table(page, 2 * _MOST_COLUMNS * _MOST_OF_A_CELL):
        return shorter
    lists: dict[str, Sequence[Any]] = {
        "problems": page.problems,
        "repeat": page.repeat,
        "missing": page.missing,
        "verdicts": page.limits.verdicts,
    }
    name, longest = max(lists.items(), key=lambda each: len(each[1]))
    assert longest, "a page without content is small enough"
    half = longest[: len(longest) // 2]
    if name == "verdicts":
        return replace(page, limits=replace(page.limits, verdicts=half))
    cut_down: dict[str, Any] = {name: half}
    return replace(page, **cut_down)


def _with_a_shorter_table(page: Page, most: int) -> Page | None:
    """Return the page with half the rows of its longest table; None where that has at most so many letters.

    most  at least those of a head and a row of so many cells as are kept
    """
    longest = max((*page.first, *page.tables), key=_letters, default=None)
    if longest is None or _letters(longest) <= most:
        return None
    half = [longest.head, *longest.rows[: max(1, len(longest.rows) // 2)]]
    head, *rows = ([cut(cell, _MOST_OF_A_CELL) for cell in row[:_MOST_COLUMNS]] for row in half)
    shorter = replace(longest, head=head, rows=rows, note="the rest is omitted")
    first, tables = ([shorter if each is longest else each for each in kind] for kind in (page.first, page.tables))
    return replace(page, first=first, tables=tables)


def _letters(table: PageTable) -> int:
    return sum(len(cell) for row in (table.head, *table.rows) for cell in row)


def _rendered(page: Page) -> str:
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
    return template.render(page=page, style=style, version=__version__, made=made)


_HUGE_TABLE, _MOST_OF_A_CELL, _MOST_COLUMNS = 60_000, 240, 16  # letters, letters, cells
