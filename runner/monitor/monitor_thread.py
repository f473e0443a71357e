"""Monitor the machine in a thread: sample into gpu.csv, and provide a summary and a status line.

The monitor neither raises exceptions in the run nor blocks it; problems become notes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.values import Interval, Range
from runner.monitor.alerts import Alert, AlertMonitor
from runner.monitor.gpu_driver import open_driver
from runner.monitor.machine_sample import Gpus, GpuUser, Host
from runner.monitor.nvml import Gpu, Nvml, visible
from runner.monitor.samples import Readings, SampledGpu, SampleTally, Summary
from runner.monitor.samples_file import SamplesFile, read_samples

OPEN_TIMEOUT_S = 10.0  # timeout for the first sample: an idle driver must first initialize the GPUs, 1 s each
STALE_S = 5.0  # readings older than this, and than 3 intervals, are stale: a driver or a disk does not respond
RECOVERY_S = 1.0  # stale readings are reported only after this time, so that a process stopped by SIGSTOP can recover
MAX_EARLIER_BYTES = 32 << 20  # a resumed run reads gpu.csv for its summary up to this size: 1.5 days of a GPU, in 2 s
# Minimum time before the last sample, and before the first one unless interval_s is shorter, because CPU utilization is
# the mean since the previous reading.
MIN_SPAN_S = 0.1


class NoMonitor:
    """Monitors nothing, and defines the interface of all monitors.

    notes  what is not monitored and why, and alerts
    """

    notes: tuple[str, ...] = ()
    lost: str = ""  # why samples are missing from path_csv; empty if none are

    def start(self, after_s: float = 0.0) -> None:
        """Start sampling in `after_s` seconds; a second call does nothing."""

    def stop(self) -> None:
        """Stop within two seconds; a second call does nothing."""

    def enter_phase(self, phase: str) -> None:
        """Mark the samples from now on with this phase."""

    def latest(self) -> Readings:
        """Return the last sample by metric name (`gpu0/util`, `ram/percent`, ...), without missing readings."""
        return MappingProxyType({})

    def row(self) -> Readings:
        """Return the readings of the last sample for a row of metrics.jsonl."""
        return MappingProxyType({})

    def line(self) -> str:
        """Return the last sample as one line of text; empty before the first."""
        return ""

    def users(self) -> Mapping[str, tuple[GpuUser, ...]]:
        """Return the compute processes of each GPU, `gpu0` first, without GPUs whose driver does not report them."""
        return MappingProxyType({})

    def devices(self) -> Mapping[str, SampledGpu]:
        """Return the monitored GPUs, `gpu0` first."""
        return MappingProxyType({})

    def new_alerts(self) -> tuple[Alert, ...]:
        """Return the alerts since the last call, each once."""
        return ()

    def summary(self) -> Summary:
        """Summarize the samples so far, in total and by phase."""
        return Summary()

    def __enter__(self) -> NoMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Monitor(NoMonitor):
    """Samples every `interval_s` seconds, on the monotonic clock, in a thread.

    path_csv    file to which each sample adds a row per GPU, or one row if there is no GPU; missing values are empty
                cells. None: no file. About 250 bytes per row, 20 MB per day and GPU at an interval of one second
    interval_s  seconds between samples
    uuids       the GPUs to monitor, gpu0 first: pass torch's order. None: those of CUDA_VISIBLE_DEVICES. Empty: none
    root        process whose descendants, itself included, belong to the run. None: this process

    In a forked child nothing is sampled, and all calls do nothing.
    Raises ConfigError for an invalid interval.
    """

    def __init__(
        self,
        path_csv: Path | None,
        interval_s: float = 1.0,
        *,
        uuids: Sequence[str] | None = None,
        root: int | None = None,
    ) -> None:
        _check_interval(interval_s)
        self.path_csv, self.interval_s = path_csv, interval_s
        self._uuids, self._root = uuids, root
        self._phase = ""
        # The thread replaces these mappings and tuples and never changes them, so that readers need no lock.
        self._latest: Readings = MappingProxyType({})
        self._users: Mapping[str, tuple[GpuUser, ...]] = MappingProxyType({})
        self._devices: Mapping[str, SampledGpu] = MappingProxyType({})
        self._alerts: tuple[Alert, ...] = ()
        self._num_reported = 0
        self._tally, self._lock = SampleTally(), threading.Lock()
        self._num_earlier_bytes = 0  # bytes of gpu.csv written before the run was resumed
        self._taken_s = self._stale_since = 0.0
        self._noted: set[str] = set()
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, after_s: float = 0.0) -> None:
        """Start sampling. Returns immediately: NVML is opened in the thread, because a driver may hang."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        self._stopping = threading.Event()  # a new one: a thread that stop() abandoned must stay stopped
        self._taken_s = time.monotonic() + after_s
        self._thread = threading.Thread(
            target=self._run, args=[self._stopping, after_s], name="accel-run monitor", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started
            self._thread = None
            self._note(f"the monitor does not start: {error}")

    def stop(self) -> None:
        """Stop. A driver that does not respond is abandoned after two seconds; the thread is a daemon."""
        if self._is_in_child():  # the lock of the event may have been held during the fork
            return
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None

    def enter_phase(self, phase: str) -> None:
        self._phase = phase

    def latest(self) -> Readings:
        """Return the last sample, in percent, GiB, degrees Celsius, watts and MHz, as the names indicate.

        Empty if the last sample is stale.
        """
        return _NO_READINGS if self._is_stale() else self._latest

    def row(self) -> Readings:
        """Return the readings of the last sample for a row of metrics.jsonl, without constants and counters."""
        return {name: value for name, value in self.latest().items() if name.rpartition("/")[2] not in _NOT_IN_ROWS}

    def line(self) -> str:
        return format_line(self.latest(), len(self._devices))

    def users(self) -> Mapping[str, tuple[GpuUser, ...]]:
        """Return the compute processes of each GPU, refreshed every ten seconds."""
        return self._users

    def devices(self) -> Mapping[str, SampledGpu]:
        """Return the monitored GPUs; none before NVML has responded."""
        return self._devices

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(alert.text for alert in self._alerts)

    def new_alerts(self) -> tuple[Alert, ...]:
        now = time.monotonic()
        if not self._is_stale():
            self._stale_since = 0.0
        elif not self._stale_since:
            self._stale_since = now
        elif now - self._stale_since > RECOVERY_S:
            self._note_once(
                f"the machine has not been sampled for {now - self._taken_s:.0f} s: a driver or a disk does not respond"
            )
        alerts = self._alerts
        new, self._num_reported = alerts[self._num_reported :], len(alerts)
        return new

    def summary(self) -> Summary:
        """Summarize the samples so far, including those that gpu.csv held at the start."""
        if self._is_in_child():
            return Summary()
        with self._lock:
            summary = self._tally.summary(self._devices, self.notes)
        if not self._num_earlier_bytes or self.path_csv is None:
            return summary
        missing = f"the summary does not include the earlier samples in {self.path_csv}"
        if self.lost or self._num_earlier_bytes > MAX_EARLIER_BYTES:
            return replace(summary, notes=(*summary.notes, missing))
        from runner.monitor.sample_columns import summarize_samples  # numpy

        try:
            whole = summarize_samples(read_samples(self.path_csv))
        except AccelRunError as error:
            return replace(summary, notes=(*summary.notes, f"{missing}: {error}"))
        except Exception as error:  # must not change how the run ends
            self._note_once(f"{missing}: {type(error).__name__}: {error}")
            return replace(summary, notes=self.notes)
        return replace(whole, notes=(*self.notes, *whole.notes))

    def _is_in_child(self) -> bool:
        return os.getpid() != self._pid

    def _is_stale(self) -> bool:
        is_watching = self._thread is not None and not self._stopping.is_set() and not self._is_in_child()
        limit_s = max(STALE_S, 3 * self.interval_s) if self._latest else OPEN_TIMEOUT_S
        return is_watching and time.monotonic() - self._taken_s > limit_s

    def _run(self, stopping: threading.Event, after_s: float) -> None:
        try:
            stopping.wait(after_s)
            host = Host(root=self._root, folder=self.path_csv.parent if self.path_csv else None)
            with open_driver() as nvml:
                self._sample_until(stopping, host, nvml)
        except Exception as error:  # the run continues without the monitor
            self._note(f"the monitor stopped: {type(error).__name__}: {error}")

    def _sample_until(self, stopping: threading.Event, host: Host, nvml: Nvml) -> None:
        chosen = self._choose_gpus(nvml)
        nvml.watch_events(chosen)
        gpus, alert_monitor = Gpus(nvml, chosen, host.process_tree), AlertMonitor(nvml, chosen)
        file = SamplesFile(self.path_csv, self._note, self._record_loss)
        if file.num_earlier_bytes and not self._latest:  # otherwise this monitor wrote the rows before a restart
            self._num_earlier_bytes = file.num_earlier_bytes
        before = due = time.monotonic()
        wall = time.time() - before  # computed once, so that setting the machine's clock does not reorder rows
        delay = min(MIN_SPAN_S, self.interval_s)
        try:
            stopped = False
            while not stopped:
                stopped = stopping.wait(delay)
                now = time.monotonic()
                # Even the shortest run has one sample, and a longer one includes its last moments.
                if stopped and self._latest and now - before < MIN_SPAN_S:
                    break
                readings = gpus.sample()
                self._alerts += tuple(alert_monitor.check(readings, gpus.users, nvml.events()))
                sample = {**readings, **host.sample()}
                file.add(wall + now, now - before, self._phase, self._devices, sample)
                with self._lock:
                    self._tally.add(self._phase, now - before, sample)
                self._latest = MappingProxyType(sample)
                self._taken_s = time.monotonic()
                self._users = MappingProxyType({f"gpu{index}": users for index, users in gpus.users.items()})
                before, due = now, due + self.interval_s
                if due <= now:  # after a suspend or a slow driver: skip the missed samples
                    due = now + self.interval_s
                delay = max(0.0, due - time.monotonic())
        finally:
            file.close()

    def _choose_gpus(self, nvml: Nvml) -> tuple[Gpu, ...]:
        visible_gpus = visible(nvml.gpus)
        found = None if self._uuids is None else {uuid: nvml.find_torch_device(uuid) for uuid in self._uuids}
        gpus = visible_gpus.gpus if found is None else tuple(gpu for gpu in found.values() if gpu is not None)
        # Set before the notes: a caller that reads a note and finds no devices would report that no GPU is monitored.
        self._devices = MappingProxyType({f"gpu{at}": SampledGpu(gpu.name, gpu.uuid) for at, gpu in enumerate(gpus)})
        for note in dict.fromkeys(filter(None, (*nvml.notes, nvml.why_not))):
            self._note(note, "debug")
        missing = [uuid for uuid, gpu in (found or {}).items() if gpu is None]
        if missing and nvml.gpus:
            self._note(f"not monitored, because NVML does not list it: {', '.join(missing)}")
        if visible_gpus.note and found is None:
            self._note(visible_gpus.note, "debug")
        return gpus

    def _record_loss(self, text: str) -> None:
        self.lost = text
        self._note(text)

    def _note_once(self, text: str) -> None:
        what = text.partition(" for ")[0]
        if what not in self._noted:
            self._noted.add(what)
            self._note(text)

    def _note(self, text: str, level: Literal["debug", "info", "warning"] = "warning") -> None:
        self._alerts = (*self._alerts, Alert("unseen", text, level))


def format_line(sample: Readings, num_gpus: int = 1) -> str:
    """Return a sample as one line of text, `GPU: 8.2/16.0GB (51%) | Util: 85% | CPU: 45.3% | RAM: 67.2%`.

    Missing readings are left out. GB are GiB, as in nvidia-smi.

    num_gpus  number of monitored GPUs; several are numbered, even if only one of them responds
    """
    gpus = sorted({int(name[3:].split("/")[0]) for name in sample if name.startswith("gpu")})
    parts = []
    for index in gpus:
        used, total = sample.get(f"gpu{index}/memory_gib"), sample.get(f"gpu{index}/memory_total_gib")
        label = f"GPU{index}" if max(num_gpus, len(gpus)) > 1 else "GPU"
        if used is not None and total:
            parts.append(f"{label}: {used:.1f}/{total:.1f}GB ({used / total:.0%})")
        if (util := sample.get(f"gpu{index}/util")) is not None:
            parts.append(f"Util: {util:.0f}%" if used is not None else f"{label} Util: {util:.0f}%")
    for name, label in {"cpu/percent": "CPU", "ram/percent": "RAM"}.items():
        if (percent := sample.get(name)) is not None:
            parts.append(f"{label}: {percent:.1f}%")
    return " | ".join(parts)


def monitored_gpus(uuids: Sequence[str], device: str) -> list[str] | None:
    """Return the GPUs that a run monitors, for the argument `uuids` of `Monitor`: only those that the run uses.

    device  device type of the run. On `cuda` without a UUID, the GPU of the run is unknown, so all visible GPUs are
            monitored; on other devices, no GPU is
    """
    return list(uuids) or (None if device == "cuda" else [])


def on(
    path_csv: Path | None, uuids: Sequence[str] | None = None, root: int | None = None, *, interval_s: Interval = 1.0
) -> Monitor:
    """Monitor GPUs, CPU, memory and disk, and record them in gpu.csv.

    interval_s  seconds between samples
    """
    return Monitor(path_csv, interval_s, uuids=uuids, root=root)


def off(path_csv: Path | None = None, uuids: Sequence[str] | None = None, root: int | None = None) -> NoMonitor:
    """No monitoring."""
    return NoMonitor()


def _check_interval(interval_s: float) -> None:
    interval: Range = get_args(Interval)[1]
    try:
        is_valid = interval.allows(interval_s)
    except TypeError:  # not a number
        is_valid = False
    if not is_valid:
        raise ConfigError(
            Problem(
                f"must be {interval.description}, but is {interval_s!r}",
                where="interval_s",
                fix="use, for example, interval_s=1.0",
            )
        )


_NO_READINGS: Readings = MappingProxyType({})

# Constants and counters, which gpu.csv has; rows of metrics.jsonl would only repeat them.
_NOT_IN_ROWS = frozenset({
    "memory_reserved_gib", "memory_free_gib", "memory_total_gib", "temperature_limit_c", "power_limit_w", "energy_j",
    "memory_clock_mhz", "pcie_generation", "pcie_width", "ecc_corrected", "ecc_uncorrected", "other_memory_gib",
    "free_gib",
})  # fmt: skip

MONITORS: Mapping[str, Callable[..., NoMonitor]] = {"on": on, "off": off}
