"""Show a run on the terminal, and copy the output to console.log and events.jsonl."""

from __future__ import annotations

import math
import socket
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from runner.axes.attention import Attention
from runner.base.order import Order
from runner.base.text import format_metric
from runner.console.progress_display import ProgressDisplay, make_progress
from runner.console.run_summary import select_metrics
from runner.durable.directory import RunDirectory
from runner.loading.stream_order import ENDLESS
from runner.monitor.alerts import Alert
from runner.records.events import Console, Events, terminal_log_level


class Screen:
    """Shows progress during a phase and messages before and after it; copies the messages to the run directory.

    speaks   False: this rank prints nothing
    machine  on the first rank of a machine without rank 0: the name of the machine, such as `rank8`. This rank reports
             only monitor alerts
    """

    def __init__(self, directory: RunDirectory, *, speaks: bool = True, machine: str = "") -> None:
        self.directory = directory
        self.speaks = speaks
        self._level = terminal_log_level()
        self.console = Console(directory.console, level=self._level, is_enabled=speaks)
        machine_events = directory.path / f"events-{machine}.jsonl" if machine else None
        self.events = Events(directory.events if speaks else machine_events)
        self._alert_console = Console(level="warning") if machine and not speaks else self.console
        self.progress = ProgressDisplay()
        self.has_several_phases = False  # True: the progress display shows the name of the phase
        self._is_due = self.progress.due

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.console.close()
        self.events.close()

    def info(self, text: str) -> None:
        """Print a message."""
        self.console.info(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.console.warning(text)
        self.events.record("warning", text=text)

    def warn_once(self, text: str) -> None:
        """Print a warning unless the same text was printed before."""
        self.console.warn_once(text)

    def record_event(self, kind: str, **fields: Any) -> None:
        """Append a row to events.jsonl; bad samples are also printed, once for all of them."""
        self.events.record(kind, **fields)
        if kind == "bad sample":
            self.console.warn_once("unreadable samples are skipped; events.jsonl lists them")

    def show_alerts(self, alerts: Iterable[Alert]) -> None:
        """Print alerts of the monitor and append them to events.jsonl."""
        for alert in alerts:
            host = "" if self._alert_console is self.console else f"{socket.gethostname()}: "
            self._alert_console.log(alert.level, host + alert.text)
            self.events.record("machine", what=alert.kind, text=alert.text, **alert.facts)

    def begin(self, phase: str, done: int, total: int, order: Order, item: str) -> None:
        """Start the progress display of a phase; `item` is the unit of its throughput."""
        samples = order.num_samples if order.num_samples < ENDLESS else None
        self.record_event("phase", phase=phase, update=done, total=total, samples=samples, item=item)
        epochs = total / order.updates_per_epoch
        left = f"{total - done} of {total}" if done else str(total)
        unit = "epoch" if epochs == 1 else "epochs"
        data = ", from a stream" if samples is None else f" ({_format_epochs(epochs)} {unit} of {samples:,} samples)"
        self.info(f"{phase}: {left} updates, batch {order.global_batch_size}{data}")
        is_terse = self._level not in ("debug", "info")
        draws = self.speaks and (sys.stdout.isatty() or not is_terse)
        self.progress = make_progress(sys.stdout if draws else None, item)
        if is_terse and self.has_several_phases:
            self.progress.note(phase)
        self.console.print_through(self.progress.note if draws else None)
        self.progress.start(total, done)
        self._is_due = self.progress.due

    def show_first_update(
        self, update: int, seconds: float, attention: Attention, calls: Mapping[tuple[str, str], int]
    ) -> None:
        """Report the duration of the first update of this process and the attention kernels it used."""
        self.events.record("first update", update=update, unix_s=time.time(), seconds=seconds)
        if calls:
            ran = ", ".join(f"{number} x {kernel} ({kind})" for (kind, kernel), number in calls.items())
            self.info(f"attention kernels used: {ran}")
            if attention.kernels and not any(attention.name in kernel for _, kernel in calls):
                self.warn(
                    f"attention={attention.name} was requested but did not run"
                    + (f": {attention.reason}" if attention.reason else "")
                )
        if seconds > SLOW_START_S:
            self.info(f"the first update took {seconds:.1f} s, including one-time compilation and autotuning")

    def is_due(self, update: int) -> bool:
        """Return True if `draw` would update the display now."""
        return self._is_due(update)

    def draw(self, update: int, values: Mapping[str, float], monitor: str = "") -> None:
        """Draw the progress with these values."""
        self.progress.update(update, {key: value for key, value in values.items() if not math.isnan(value)}, monitor)

    def show_metrics(
        self, update: int, metrics: Mapping[str, float], empty: Collection[str] = (), first: Iterable[str] = ()
    ) -> None:
        """Print the metrics of an evaluation, unless it has none.

        empty  names of the metrics that had no items
        first  metrics to print first if there are too many to print all
        """
        shown, notes = select_metrics(metrics, first)
        values = {name: format_metric(metrics[name]) if name in empty else f"{metrics[name]:.4g}" for name in shown}
        if values:
            texts = [*(f"{name} {value}" for name, value in values.items()), *notes]
            self.info(f"update {update}: {', '.join(texts)}")

    def end(self) -> None:
        """End the progress display and release the terminal."""
        self.progress.finish()
        self.progress = ProgressDisplay()
        self.console.print_through(None)


SLOW_START_S = 5.0


@contextmanager
def warnings_on(screen: Screen) -> Iterator[None]:
    """Route Python warnings to the screen, without their code location."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: screen.warn(str(message))
        yield


def _format_epochs(epochs: float) -> str:
    if epochs < 0.001:
        return "under 0.001"
    return f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
