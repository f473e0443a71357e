"""Snapshots of what users read: one text file per screen, in `__snapshots__` beside the test.

    def test_help(screen, capsys):
        main(["train", "--help"])
        screen(capsys.readouterr().out)

Only snapshots test wording. After a deliberate change, run `pytest FILE --snapshot-update` and review the diff.
Text that differs between machines and runs is replaced before the comparison.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

ROOT = Path(__file__).resolve().parents[1]


class Screens(SingleFileSnapshotExtension):
    """One .txt file per screen."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


def normalized(text: str, replace: Mapping[str, str] | None = None) -> str:
    """Replace what differs between machines: the checkout, the home folder, dates, times of day, trailing blanks.

    replace  regular expression -> replacement, for details of this screen
    """
    for pattern, instead in (replace or {}).items():
        text = re.sub(pattern, instead, text)
    text = text.replace(str(ROOT), "<checkout>").replace(str(Path.home()), "~")
    text = re.sub(r"\d{4}-\d\d-\d\d([T _-]\d\d[:-]?\d\d([:-]?\d\d(\.\d+)?)?)?", "<date>", text)
    text = re.sub(r"\b\d\d:\d\d:\d\d\b", "<time>", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def screen_of(snapshot: Any, folder: Path) -> Callable[..., None]:
    """Return a function that compares a text with the snapshot of this test; `folder` is its temporary folder."""
    screens = snapshot.use_extension(Screens)

    def compare(text: str, name: str | None = None, replace: Mapping[str, str] | None = None) -> None:
        result = normalized(text.replace(str(folder), "<folder>"), replace)
        assert result == (screens(name=name) if name else screens)

    return compare
