"""A page of the report, and its HTML, in which all texts of a run are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2

from runner.monitor.health_rules import HealthVerdict
from runner.tools.report.chart_parts import Chart, MissingPart
from runner.version import __version__

GENERATOR_TAG = '<meta name="generator" content="accel-run '  # in pages of every version


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
    """The content of the page, in order.

    first    tables before the charts
    tables   tables after the charts
    repeat   commands that run, resume or repeat what the page is about
    missing  charts and data that are missing, with the reasons
    """

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
    """Return the page as HTML.

    refresh_s  interval in seconds at which a browser reloads the page; None: never
    """
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
