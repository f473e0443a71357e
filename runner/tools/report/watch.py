"""Rewrite a page while training runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.tools.report.page import Page


@dataclass(frozen=True)
class Content:
    """A page, notes on missing data, and whether training is running."""

    page: Page
    notes: Sequence[str]
    is_live: bool


def watch(
    read: Callable[[], Content], write: Callable[..., int], every_s: float, wait: Callable[[float], None] = time.sleep
) -> tuple[Content, int]:
    """Write the page every `every_s` seconds until training has ended or Ctrl-C; return the last page and its size.

    write  writes a page and returns its size in bytes; a browser reloads the page every `refresh_s` seconds

    The last page does not reload. Training has ended if two consecutive reads find nothing running, because nothing
    runs between two trials of a sweep.
    """
    was_live = False
    try:
        while True:
            content = read()
            if not content.is_live and not was_live:
                break
            write(content, refresh_s=every_s)
            was_live = content.is_live
            wait(every_s)
    except KeyboardInterrupt:
        content = read()
    return content, write(content)
