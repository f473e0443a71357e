"""How the machine fares while it works: a thread that samples GPUs, CPU and memory into gpu.csv and one line of text.

Nothing here raises into the run or makes it wait; what goes wrong is a note.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil  # type: ignore[import-untyped]

from runner.base.values import Positive
from runner.observe.nvml import Gpu, Nvml, open_nvml, visible

GIB = 2**30
COLUMNS = (
    "timestamp", "phase", "device", "uuid", "util_percent", "memory_used_gib", "memory_total_gib", "temperature_c",
    "power_w", "clock_mhz", "cpu_percent", "ram_percent",
)  # fmt: skip

Readings = Mapping[str, float]


class NoMonitor:
    """Watches nothing; the verbs of every monitor.

    notes  what is not watched, and why
    """

    notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin to watch; starting twice is harmless."""

    def stop(self) -> None:
        """Stop watching within two seconds; stopping twice is harmless."""

    def enter_phase(self, phase: str) -> None:
        """Mark the samples from now on with this phase."""

    def latest(self) -> Readings:
        """Return the last sample by metric name (`gpu0/util`, `ram/percent`, ...), without what nobody could read."""
        return MappingProxyType({})

    def line(self) -> str:
        """Return the last sample as a person reads it, empty before the first."""
        return ""

    def __enter__(self) -> NoMonitor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Monitor(NoMonitor):
    """Samples every `interval_s` seconds, on the monotonic clock, in a thread of its own.

    path_csv    a row per sample and GPU is added here (without a GPU, one of the CPU); an unknown value is an empty
                cell. None: kept in memory only. About 100 bytes a row, 9 MB a day and GPU at one second
    interval_s  seconds between samples
    uuids       the GPUs to watch, gpu0 first: pass torch's order. None: what CUDA_VISIBLE_DEVICES shows
    """

    def __init__(self, path_csv: Path | None, interval_s: float = 1.0, *, uuids: Sequence[str] | None = None) -> None:
        self.path_csv, self.interval_s = path_csv, interval_s
        self._uuids = uuids
        self._phase = ""
        self._latest: Readings = MappingProxyType({})
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch. Returns at once: NVML is opened in the thread, because a sick driver takes its time."""
        if self._thread is not None:
            return
        self._stopping = threading.Event()  # a new one: a thread left behind in stop() must stay stopped
        self._thread = threading.Thread(
            target=self._watch, args=[self._stopping], name="accel-run monitor", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._thread = None
            self._note(f"monitor: {error}")

    def stop(self) -> None:
        """Stop watching. A driver that does not answer is left behind after two seconds; the thread is a daemon."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None

    def enter_phase(self, phase: str) -> None:
        """Mark the samples from now on with this phase."""
        self._phase = phase

    def latest(self) -> Readings:
        """Return the last sample: percent, GiB, degrees Celsius, watts and MHz, as the names say."""
        return self._latest

    def line(self) -> str:
        """Return `GPU: 8.2/16.0GB (51%) | Util: 85% | CPU: 45.3% | RAM: 67.2%`, without what is unknown.

        GB are the GiB that nvidia-smi counts. Several GPUs are numbered: `GPU0: ...`, `GPU1: ...`.
        """
        return as_line(self._latest)

    def _watch(self, stopping: threading.Event) -> None:
        try:
            with open_nvml() as nvml:
                self._sample_until(stopping, _Sampler(nvml, self._choose(nvml)))
        except Exception as error:  # a monitor that fails ends, and the run goes on
            self._note(f"monitor stopped: {type(error).__name__}: {error}")

    def _sample_until(self, stopping: threading.Event, sampler: _Sampler) -> None:
        file = self._open_csv()
        wall, due = time.time() - time.monotonic(), time.monotonic()
        # The CPU's load is a mean since the look before, so the first sample needs a moment to have passed.
        delay = min(0.1, self.interval_s)
        try:
            stopped = False
            while not stopped:
                stopped = stopping.wait(delay)
                if stopped and self._latest:  # even the shortest run leaves one sample
                    break
                now = time.monotonic()
                sample = sampler.sample()
                self._latest = MappingProxyType(sample)
                file = self._append(file, sampler.rows(sample, wall + now, self._phase))
                due += self.interval_s
                if due <= now:  # the machine slept or the driver dawdled: skip what was missed
                    due = now + self.interval_s
                delay = max(0.0, due - time.monotonic())
        finally:
            if file is not None:
                os.close(file)

    def _choose(self, nvml: Nvml) -> tuple[Gpu, ...]:
        for note in (*nvml.notes, *([nvml.why_not] if nvml.why_not else [])):
            self._note(note)
        if self._uuids is not None:
            missing = [uuid for uuid in self._uuids if nvml.find(uuid) is None]
            if missing and nvml.gpus:
                self._note(f"monitor: NVML does not show {', '.join(missing)}")
            return tuple(gpu for uuid in self._uuids if (gpu := nvml.find(uuid)))
        shown = visible(nvml.gpus)
        if shown.note:
            self._note(shown.note)
        return shown.gpus

    def _open_csv(self) -> int | None:
        if self.path_csv is None:
            return None
        try:
            file = os.open(self.path_csv, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._note(f"{self.path_csv} is not written: {error.strerror}")
            return None
        size = os.fstat(file).st_size
        if size == 0:
            return self._append(file, ",".join(COLUMNS) + "\n")
        torn = os.pread(file, 1, size - 1) != b"\n"  # a run that was killed while it wrote
        return self._append(file, "\n" if torn else "")

    def _append(self, file: int | None, text: str) -> int | None:
        """Write, and return the file; None after the first error, which is noted once."""
        if file is None:
            return None
        try:
            os.write(file, text.encode())
        except OSError as error:
            self._note(f"{self.path_csv} is no longer written: {error.strerror}")
            os.close(file)
            return None
        return file

    def _note(self, note: str) -> None:
        self.notes = (*self.notes, note)


class _Sampler:
    """Reads GPUs, CPU and this process with its children once per call."""

    REFRESH = 10  # samples between two searches for children: a search reads all of /proc and holds the interpreter

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu]) -> None:
        self.nvml, self.gpus = nvml, tuple(gpus)
        self._own = psutil.Process()
        self._family: dict[int, psutil.Process] = {}
        self._count = 0
        psutil.cpu_percent(None)  # begins the interval of the first sample
        self._find_family()

    def sample(self) -> dict[str, float]:
        """Return metric name -> value, without what could not be read."""
        found: dict[str, float | None] = {}
        for index, gpu in enumerate(self.gpus):
            reading = self.nvml.read(gpu)
            found |= {
                f"gpu{index}/util": reading["util_percent"],
                f"gpu{index}/memory_gib": _gib(reading["memory_used_bytes"]),
                f"gpu{index}/memory_total_gib": _gib(reading["memory_total_bytes"]),
                f"gpu{index}/temperature_c": reading["temperature_c"],
                f"gpu{index}/power_w": reading["power_w"],
                f"gpu{index}/clock_mhz": reading["sm_clock_mhz"],
                f"gpu{index}/throttle_reasons": reading["throttle_reasons"],
            }
        found["cpu/percent"] = psutil.cpu_percent(None)
        found["ram/percent"] = psutil.virtual_memory().percent
        self._count += 1
        if self._count % self.REFRESH == 0:
            self._find_family()
        found["process/cpu_percent"], found["process/memory_gib"] = self._family_load()
        return {name: float(value) for name, value in found.items() if value is not None}

    def rows(self, sample: Readings, timestamp: float, phase: str) -> str:
        """Return the lines of gpu.csv for this sample."""
        machine = (sample.get("cpu/percent"), sample.get("ram/percent"))
        rows = [
            (gpu.uuid, *(sample.get(f"gpu{index}/{name}") for name in _GPU_COLUMNS))
            for index, gpu in enumerate(self.gpus)
        ]
        names = [f"gpu{index}" for index in range(len(rows))] or ["cpu"]
        rows = rows or [("", *(None for _ in _GPU_COLUMNS))]
        return "".join(
            ",".join((f"{timestamp:.3f}", _word(phase), name, *map(_cell, (*row, *machine)))) + "\n"
            for name, row in zip(names, rows, strict=True)
        )

    def _find_family(self) -> None:
        found = [self._own]
        with contextlib.suppress(psutil.Error):
            found += self._own.children(recursive=True)
        new = {each.pid: each for each in found if each != self._family.get(each.pid)}
        # Who is known stays the same object, which remembers its last look; the new are looked at for the first time.
        self._family = {each.pid: new.get(each.pid) or self._family[each.pid] for each in found}
        for each in new.values():
            _alive(each.cpu_percent)

    def _family_load(self) -> tuple[float, float]:
        """Return CPU percent (100 is one thread) and GiB of this process and its children; the dead count nothing."""
        percent = sum(_alive(each.cpu_percent) or 0.0 for each in self._family.values())
        memory = [_alive(each.memory_info) for each in self._family.values()]
        return percent, sum(each.rss for each in memory if each) / GIB


def as_line(sample: Readings) -> str:
    """Return a sample as one line of text, `GPU: 8.2/16.0GB (51%) | Util: 85% | CPU: 45.3% | RAM: 67.2%`."""
    gpus = sorted({int(name[3:].split("/")[0]) for name in sample if name.startswith("gpu")})
    parts = []
    for index in gpus:
        used, total = sample.get(f"gpu{index}/memory_gib"), sample.get(f"gpu{index}/memory_total_gib")
        label = f"GPU{index}" if len(gpus) > 1 else "GPU"
        if used is not None and total:
            parts.append(f"{label}: {used:.1f}/{total:.1f}GB ({used / total:.0%})")
        if (util := sample.get(f"gpu{index}/util")) is not None:
            parts.append(f"Util: {util:.0f}%" if used is not None else f"{label} Util: {util:.0f}%")
    for name, label in {"cpu/percent": "CPU", "ram/percent": "RAM"}.items():
        if (percent := sample.get(name)) is not None:
            parts.append(f"{label}: {percent:.1f}%")
    return " | ".join(parts)


def on(path_csv: Path | None, uuids: Sequence[str] | None = None, *, interval_s: Positive = 1.0) -> Monitor:
    """Watch GPUs, CPU and memory, and write them to gpu.csv.

    interval_s  seconds between samples
    """
    return Monitor(path_csv, interval_s, uuids=uuids)


def off(path_csv: Path | None = None, uuids: Sequence[str] | None = None) -> NoMonitor:
    """Watch nothing."""
    return NoMonitor()


def _alive(query: Callable[[], Any]) -> Any:
    """Return what a process answers, None when it has ended."""
    try:
        return query()
    except psutil.Error:
        return None


def _gib(value: float | None) -> float | None:
    return None if value is None else value / GIB


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".")


def _word(text: str) -> str:
    return text.replace(",", " ").replace("\n", " ")


_GPU_COLUMNS = ("util", "memory_gib", "memory_total_gib", "temperature_c", "power_w", "clock_mhz")

MONITORS: Mapping[str, Callable[..., NoMonitor]] = {"on": on, "off": off}
