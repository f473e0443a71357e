"""The screen of `accel-run monitor` fits any terminal, counts what it omits, and shows no missing readings."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import signal
from collections.abc import Callable

import pytest
from rich.console import Console

from runner.monitor.machine_display import FullScreen, SampleLines, make_display, to_json_object
from runner.monitor.machine_sample import GpuUser
from runner.monitor.machine_screen import MAX_SAMPLES, WAITING, View, machine_screen, sparkline
from runner.monitor.monitor_thread import format_line
from runner.monitor.samples import SampledGpu
from tests.console.test_progress_display import plain, terminal

T4 = {
    "gpu0/util": 85.0, "gpu0/memory_gib": 8.0, "gpu0/memory_total_gib": 15.0, "gpu0/temperature_c": 61.0,
    "gpu0/power_w": 54.3, "gpu0/power_limit_w": 70.0, "gpu0/clock_mhz": 1590.0, "gpu0/throttle_reasons": 4.0,
    "cpu/percent": 45.3, "ram/percent": 67.2, "disk/free_gib": 120.0, "disk/read_mb_s": 1.5,
}  # fmt: skip
USERS = {"gpu0": [GpuUser(4242, "python", "ada", 1.0, None), GpuUser(77, "", "", None, None)]}


def view_of(*samples: dict[str, float], gpus: int = 1, **values: object) -> View:
    names = ["Tesla T4", *["NVIDIA H100 80GB HBM3"] * (gpus - 1)][:gpus]
    view = View(gpus={f"gpu{n}": SampledGpu(name, "") for n, name in enumerate(names)}, **values)  # type: ignore[arg-type]
    for sample in samples:
        view.add(sample)
    return view


def eight(**values: float) -> View:
    one = {name.partition("/")[2]: value for name, value in T4.items() if name.startswith("gpu0/")}
    sample = {f"gpu{gpu}/{name}": value for gpu in range(8) for name, value in one.items()}
    sample |= {f"gpu{gpu}/throttle_reasons": 0.0 for gpu in range(8) if gpu != 5}
    sample |= {"cpu/percent": 10.0, "ram/percent": 20.0} | {f"{name}/throttle_reasons": v for name, v in values.items()}
    users = {f"gpu{gpu}": [GpuUser(1000 + gpu, "python", "ada", 1.0, None)] for gpu in range(8)}
    return view_of(*[sample] * 50, gpus=8, users=users)


def render(view: View, columns: int = 100, rows: int = 40) -> list[str]:
    console = Console(width=columns, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(machine_screen(view, columns, rows))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_sparklines_have_eight_heights_and_gaps() -> None:
    assert sparkline([0, 12.5, 25, 37.5, 50, 62.5, 75, 87.5, 100], 9) == "▁▂▃▄▅▆▇██"
    assert sparkline([50, math.nan, 50], 9) == "▅ ▅"
    assert sparkline([1, 2, 100], 2) == "▁█", "the newest readings must be shown"
    assert sparkline([0, 100, 101], 9) == "▁██"
    assert sparkline([1], 0) == sparkline([], 5) == ""


def test_the_screen_shows_readings_and_processes_of_a_t4(screen: Callable[..., None]) -> None:
    lines = render(view_of(*[T4] * 3, users=USERS, seconds=12.4))
    screen("\n".join(lines))


def test_missing_readings_are_question_marks_or_absent_never_0() -> None:
    text = "\n".join(render(view_of({"cpu/percent": 5.0, "gpu0/memory_gib": 2.0})))
    assert re.search(r"Tesla T4 +\? +2\.0 GiB +\?", text)
    assert not any(word in text for word in (" W", "MHz", "°C", "slowed", "RAM", "disk", " 0%"))


def test_readings_that_stop_or_start_late_leave_gaps() -> None:
    view = view_of({"cpu/percent": 100.0}, {}, {"cpu/percent": 100.0, "ram/percent": 1.0})
    assert any(line.endswith("█ █") for line in render(view))
    assert any(line.endswith("  ▁") for line in render(view))
    assert {len(values) for values in view.history.values()} == {3}


def test_the_history_of_a_lost_gpu_stays_on_the_screen() -> None:
    line = render(view_of(T4, T4, {"cpu/percent": 1.0}))[1]
    assert line.split() == ["GPU", "0", "Tesla", "T4", "?", "▇▇", "?", "▅▅"]


def test_the_history_has_a_maximum_length() -> None:
    view = view_of(*[T4] * (MAX_SAMPLES + 50))
    assert {len(values) for values in view.history.values()} == {MAX_SAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 5, 12, 20, 30, 49, 60, 79, 120, 300])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    for view in (view_of(T4, users=USERS), eight(), view_of({}, gpus=0, missing=["no GPU " * 20])):
        assert all(len(line) <= columns for line in render(view, columns, 24))


def test_omitted_processes_are_counted() -> None:
    for rows in (16, 17, 20):
        lines = render(eight(), 80, rows)
        left_out = int(re.search(r"(\d+) more processes", lines[-1])[1])  # type: ignore[index]
        assert len(lines) == rows
        assert sum(line.split()[-1:] == ["python"] for line in lines) == 8 - left_out
    assert not any("more processes" in line for line in render(eight(), 80, 100))


def test_an_error_names_the_affected_gpus(screen: Callable[..., None]) -> None:
    """Each GPU has a line."""
    lines = render(eight(gpu5=64.0, gpu6=64.0), 100)
    gpus = [line for line in lines if line.startswith("GPU ") and "%" in line]
    assert {line.index("8.0/15.0 GiB") for line in gpus} == {gpus[0].index("8.0/15.0 GiB")}
    assert all("61 °C  54/70 W  1590 MHz" in line for line in gpus)
    screen("\n".join(lines))


def test_only_errors_are_red() -> None:
    def is_red(bits: float) -> bool:
        console = Console(width=100, color_system="standard", force_terminal=True)
        with console.capture() as captured:
            console.print(machine_screen(view_of(T4 | {"gpu0/throttle_reasons": bits}), 100, 40))
        return "\x1b[31m" in captured.get()

    assert not is_red(4.0 + 16 + 512)
    assert is_red(4.0 + 64)


def test_without_a_gpu_the_reason_is_shown() -> None:
    reason = "GPUs are not monitored: no driver"
    lines = render(view_of({"cpu/percent": 5.0}, gpus=0, missing=[reason], is_waiting=True))
    assert reason in lines
    assert WAITING in lines
    assert not any("process" in line for line in lines)


def test_no_processes_and_unknown_processes_are_distinguished() -> None:
    assert render(view_of(T4, users=None))[-1] != render(view_of(T4, users={"gpu0": []}))[-1]


def test_the_terminal_is_restored_and_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with terminal(80) as (stream, seen):
        display = make_display(stream, io.StringIO(), as_json=False)
        assert type(display) is FullScreen
        display.sample(view_of(T4, users=USERS))
        assert not display.is_resized()
        display.close()
        display.close()
        text = seen()
    assert "\x1b[?1049h" in text
    assert text.rindex("\x1b[?1049l") > text.rindex("Tesla T4")
    assert "throttled: power limit" in plain(text)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", text)


def test_the_screen_adapts_to_resized_and_lost_terminals() -> None:
    import fcntl
    import os
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    display = FullScreen(stream)
    display.sample(view_of(T4))
    assert not display.is_resized()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    assert display.is_resized()
    display.draw(view_of(T4))
    assert not display.is_resized()
    os.close(ours)
    for _ in range(3):
        display.sample(view_of(T4))
    assert display.is_gone
    display.close()
    with contextlib.suppress(OSError):
        stream.close()


def test_a_background_job_prints_lines_instead_of_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A background job of a script is in the process group of the script, and ignores SIGINT."""
    monkeypatch.setenv("TERM", "xterm")
    before = signal.getsignal(signal.SIGINT)
    try:
        with terminal(80) as (stream, _):
            for handler, display in ((signal.default_int_handler, FullScreen), (signal.SIG_IGN, SampleLines)):
                signal.signal(signal.SIGINT, handler)
                assert type(make_display(stream, io.StringIO(), as_json=False)) is display
    finally:
        signal.signal(signal.SIGINT, before)


def test_pipes_and_dumb_terminals_receive_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal(80) as (stream, _):
        assert type(make_display(stream, io.StringIO(), as_json=False)) is SampleLines
    out, aside = io.StringIO(), io.StringIO()
    lines = make_display(out, aside, as_json=False)
    view = view_of(T4, missing=["no XID"])
    for _ in range(2):
        lines.sample(view)
    lines.draw(view)
    assert out.getvalue() == 2 * f"{format_line(T4)}\n"
    assert aside.getvalue() == "no XID\n", "the line must be shown once"


def test_json_samples_have_every_reading_or_null() -> None:
    out = io.StringIO()
    make_display(out, io.StringIO(), as_json=True).sample(view_of(T4, users=USERS))
    result = json.loads(out.getvalue())
    assert result["readings"] == T4
    assert result["gpus"] == [
        {
            "name": "Tesla T4",
            "uuid": None,
            "processes": [
                {"pid": 4242, "memory_gib": 1.0, "user": "ada", "name": "python"},
                {"pid": 77, "memory_gib": None, "user": None, "name": None},
            ],
        }
    ]
    assert to_json_object(view_of(T4))["gpus"][0]["processes"] is None


def test_a_closed_pipe_is_detected() -> None:
    import os

    ours, theirs = os.pipe()
    os.close(ours)
    stream = os.fdopen(theirs, "w")
    lines = make_display(stream, io.StringIO(), as_json=True)
    lines.sample(view_of(T4))
    assert lines.is_gone
    with pytest.raises(BrokenPipeError):
        stream.close()
