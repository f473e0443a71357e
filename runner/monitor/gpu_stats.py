"""Monitor GPUs and the machine around any Python code, in a script or a notebook.

from runner import GPUStats

with GPUStats(log_dir="gpu_logs") as stats:
    train()
print(stats.get_summary()["whole"]["metrics"]["gpu0/util"])
stats.plot_stats()
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.base.accelerator import torch_uuids
from runner.base.errors import ConfigError, InputMissing, Problem
from runner.monitor.gpu_driver import open_driver
from runner.monitor.monitor_thread import MachineSamples, Monitor, read_samples
from runner.monitor.nvml import Nvml, bare_uuid, visible


class GPUStats:
    """Samples GPUs, CPU, memory and disk in a thread while it is open; nothing of it raises into the code it watches.

    log_dir     a folder for gpu.csv and monitor.json, made where it is missing; a folder that has a gpu.csv keeps it,
                and the new one is called gpu-2.csv. One that cannot be written to is warned about, and the samples
                still count for `get_summary`
    interval_s  seconds between samples, 0.01 to 3600
    devices     GPUs by number, as CUDA counts them, or by UUID, one or several, which become gpu0, gpu1 and so on in
                this order; None: all that CUDA_VISIBLE_DEVICES shows

    Works without a GPU, where it watches the rest and `notes` says what is missing, and without torch. Raises
    ConfigError for an interval or a device that cannot be. May be started again after it was stopped: in files of
    its own.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "gpu_logs",
        interval_s: float = 1.0,
        devices: Sequence[int | str] | int | str | None = None,
    ) -> None:
        self.log_dir = Path(log_dir)
        self._interval_s = interval_s
        self._uuids = None if devices is None else _uuids_of(devices)
        self._monitor = Monitor(None, interval_s, uuids=self._uuids)
        self._number = 1
        self._pid = 0  # PID of the monitoring process

    @property
    def path_csv(self) -> Path:
        """Path of the file with the samples."""
        return self.log_dir / self._named("gpu", ".csv")

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not monitored and why, and other events: slowed GPUs, other processes, errors."""
        return self._monitor.notes

    def start_monitoring(self) -> None:
        """Start monitoring; a second call while running does nothing."""
        self._begin()

    def stop_monitoring(self) -> None:
        """Stop monitoring and write monitor.json; a second call, or one in a forked child, does nothing."""
        self._end()

    def latest(self) -> Mapping[str, float]:
        """Return the latest sample by metric: `gpu0/util`, `gpu0/memory_gib`, `cpu/percent`, ..."""
        return self._monitor.latest()

    def get_summary(self) -> dict[str, Any]:
        """Return time-weighted mean, minimum and maximum of each metric so far, energy, and notes.

        The same as monitor.json: `whole` and `phases`, each with `metrics`, `energy_j`, `slowed`; `devices`; `notes`.
        """
        return self._monitor.summary().to_json()

    def samples(self) -> MachineSamples:
        """Return the samples as arrays over time. Raises InputMissing if nothing was written."""
        if not self.path_csv.exists():
            fix = "it is written while this watches, in a `with` block or after start_monitoring()"
            raise InputMissing("there is no such file", where=str(self.path_csv), fix=fix)
        return read_samples(self.path_csv)

    def plot_stats(self) -> list[Path]:
        """Write plots of the samples so far to `plots` in log_dir; return their paths.

        After a second start in `plots-2`, and so on. Raises InputMissing where no samples were written, OSError.
        """
        from runner.monitor.machine_plots import pictures  # imported here: matplotlib is slow to import

        samples = self.samples()
        folder = self.log_dir / self._named("plots", "")
        folder.mkdir(mode=0o700, exist_ok=True)
        return [_replace(folder / name, content) for name, content in pictures(samples).items()]

    def __enter__(self) -> GPUStats:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        if self._pid:
            return
        self._pid = os.getpid()
        path = self._free_place()
        self._monitor = Monitor(path, self._interval_s, uuids=self._uuids or _in_torchs_order())
        self._monitor.start()

    def _end(self) -> None:
        if self._pid != os.getpid():
            return
        self._pid = 0
        self._monitor.stop()
        text = json.dumps(self.get_summary(), indent=2) + "\n"
        if self._monitor.path_csv is not None:
            try:
                _replace(self.log_dir / self._named("monitor", ".json"), text.encode())
            except OSError as error:
                _warn(4, f"{self.log_dir} is not written: {error.strerror}")

    def _named(self, stem: str, suffix: str) -> str:
        return f"{stem}{suffix}" if self._number == 1 else f"{stem}-{self._number}{suffix}"

    def _free_place(self) -> Path | None:
        """Reserve the first free file name, so that concurrent monitors do not share a file; None if there is none."""
        self._number = 1
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    if not os.path.lexists(self.log_dir / self._named("monitor", ".json")):  # whose gpu.csv was moved
                        self.path_csv.touch(mode=0o600, exist_ok=False)
                        return self.path_csv
                except FileExistsError:
                    pass
                self._number += 1
        except OSError as error:
            _warn(5, f"{self.log_dir} cannot be written to: {error.strerror}; samples are kept in memory only")
            return None


def _replace(path: Path, content: bytes) -> Path:
    """Write `path` atomically, readable only by its owner; does not follow links. Returns the path.

    Not `durable.files.atomic_write`, which waits for the disk: nothing resumes from this file, and the end of a `with`
    block should not wait.
    """
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return path


def _warn(depth: int, text: str) -> None:
    """Warn, pointing at the user's line `depth` calls above."""
    warnings.warn(text, RuntimeWarning, stacklevel=depth)


def _uuids_of(devices: Sequence[int | str] | int | str) -> list[str]:
    """Return the UUIDs of the requested GPUs. Raises ConfigError listing all missing ones."""
    asked = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
    if not asked:
        raise _wrong("must name a GPU, but is empty")
    with open_driver() as nvml:
        shown = visible(nvml.gpus).gpus
        in_order = [gpu.uuid for gpu in shown]
        known = _in_torchs_order()
        in_order = in_order if known is None else [uuid for uuid in known if nvml.find(uuid)]
        chosen = [(device, _uuid_of(device, in_order, nvml)) for device in asked]
    if missing := [str(device) for device, uuid in chosen if uuid is None]:
        there = ", ".join(f"{index} ({uuid})" for index, uuid in enumerate(in_order)) or nvml.why_not or "none"
        raise _wrong(f"no such GPU: {', '.join(missing)}; there are: {there}")
    found = [bare_uuid(uuid or "") for _, uuid in chosen]
    if twice := [str(device) for (device, _), uuid in zip(chosen, found, strict=True) if found.count(uuid) > 1]:
        raise _wrong(f"must name each GPU once, but {', '.join(twice)} are the same")
    return [uuid for _, uuid in chosen if uuid]


def _uuid_of(device: object, in_order: Sequence[str], nvml: Nvml) -> str | None:
    if isinstance(device, str):
        gpu = nvml.find(device)
        return None if gpu is None else gpu.uuid
    try:
        index = operator.index(device)  # type: ignore[arg-type]
    except TypeError:  # neither a number nor a string
        return None
    return in_order[index] if 0 <= index < len(in_order) and not isinstance(device, bool) else None


def _wrong(what: str) -> ConfigError:
    return ConfigError(Problem(what, where="devices", fix="None takes all"))


def _in_torchs_order() -> list[str] | None:
    """Return the UUIDs in torch's device order, or None if torch has not initialized CUDA."""
    found = torch_uuids()
    return None if found is None else [f"GPU-{bare_uuid(uuid)}" for uuid in found]
