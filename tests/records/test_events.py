"""Messages and events of a run in the terminal, console.log and events.jsonl."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from runner import cli
from runner.base.errors import ConfigError
from runner.records.events import Console, Events, terminal_log_level

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def test_the_log_level_applies_only_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file contains every event."""
    console = Console(tmp_path / "console.log")
    console.log("debug", "details")
    console.info("device: cpu")
    console.warning("slow")
    console.error("lost")
    console.close()
    out, err = capsys.readouterr()
    assert out == "device: cpu\n"
    assert err.splitlines() == ["warning: slow", "error: lost"]
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert [re.sub(TIME, "T", line) for line in lines] == [
        "T debug   details",
        "T info    device: cpu",
        "T warning slow",
        "T error   lost",
    ]


@pytest.mark.parametrize(
    ("value", "level"), [("", "info"), ("warning", "warning"), ("WARNING", "warning"), ("debug", "debug")]
)
def test_the_environment_sets_the_log_level(value: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_RUN_LOG_LEVEL", value)
    assert terminal_log_level() == level


def test_the_old_variable_name_has_lower_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCEL_RUN_LOG_LEVEL", raising=False)
    monkeypatch.setenv("ACCEL_RUN_SAYS", "error")
    assert terminal_log_level() == "error"
    monkeypatch.setenv("ACCEL_RUN_LOG_LEVEL", "debug")
    assert terminal_log_level() == "debug"


def test_the_old_variable_name_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_RUN_SAYS", "warning")
    assert cli.main(["runs"]) == 0
    assert capsys.readouterr().err.count("ACCEL_RUN_LOG_LEVEL") == 1
    monkeypatch.setenv("ACCEL_RUN_LOG_LEVEL", "warning")
    assert cli.main(["runs"]) == 0
    assert "ACCEL_RUN_LOG_LEVEL" not in capsys.readouterr().err


def test_an_invalid_level_gets_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_RUN_LOG_LEVEL", "quiet")
    with pytest.raises(ConfigError, match="must be one of debug, info, warning, error, but is quiet"):
        terminal_log_level()


def test_a_warning_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    for _ in range(3):
        console.warn_once("no effect")
    assert capsys.readouterr().err == "warning: no effect\n"


def test_ranks_with_a_disabled_console_write_no_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(tmp_path / "console.log", is_enabled=False)
    console.error("same as rank 0")
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "console.log").exists()


def test_messages_are_printed_above_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    console, above = Console(), []
    console.print_through(above.append)
    console.info("saved")
    console.warning("slow")
    console.print_through(None)
    console.info("done")
    assert above == ["saved", "warning: slow"]
    assert capsys.readouterr() == ("done\n", "")


def test_a_resumed_run_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("first", "second"):
        console = Console(tmp_path / "console.log")
        console.info(text)
        console.close()
    assert (tmp_path / "console.log").read_text().count("info") == 2


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    Console(tmp_path / "console.log").close()
    Events(tmp_path / "events.jsonl").close()
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_event_is_one_line_of_json(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    events.record("checkpoint_saved", update=200, path=tmp_path, note="two\nlines")
    events.record("resumed", loss=float("inf"))
    events.close()
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert re.fullmatch(TIME, first.pop("time"))
    assert first == {"kind": "checkpoint_saved", "update": 200, "path": str(tmp_path), "note": "two\nlines"}
    assert second["kind"] == "resumed"
    assert events.num_lost == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_loses_and_counts_rows(capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(Path("/dev/full"))
    events.record("saved")
    events.record("saved")
    assert events.num_lost == 2
    events.close()
    console = Console(Path("/dev/full"))
    console.info("still heard")
    console.close()
    assert capsys.readouterr().out == "still heard\n"


def test_an_incomplete_line_is_ended_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk has cut the line."""
    write, free = os.write, [10, 0, 0, 1 << 20]  # bytes that each call writes; 0 means failure

    def write_limited(descriptor: int, data: bytes) -> int:
        if not (num_free := free.pop(0)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:num_free])

    events = Events(tmp_path / "events.jsonl")
    monkeypatch.setattr(os, "write", write_limited)
    for update in range(4):
        events.record("saved", update=update)
    monkeypatch.undo()
    events.record("saved", update=4)
    assert events.num_lost == 3
    events.close()
    _, *complete = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in complete] == [3, 4]


def test_a_link_instead_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    events = Events(tmp_path / "events.jsonl")
    events.record("saved")
    assert events.num_lost == 1
    assert not (tmp_path / "elsewhere").exists()


def test_a_closed_pipe_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    Console().info("nobody hears")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", b"+ fused - a GPU - 51 ?C\n"), ("latin-1", b"+ fused - a GPU - 51 \xb0C\n")],
)
def test_unsupported_symbols_are_replaced_by_ascii(
    encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoding of the stream lacks these symbols."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    Console().info("✓ fused — a GPU – 51 °C")  # noqa: RUF001 - the symbols of reports
    assert raw.getvalue() == shown
    monkeypatch.undo()


def test_unencodable_characters_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Console().info("51 °C")
    assert raw.getvalue() == b"51 ?C\n"
    monkeypatch.undo()
