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
import os
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, InputMissing, Problem
from runner.base.loaded_torch import torch_uuids
from runner.monitor.gpu_driver import open_driver
from runner.monitor.monitor_thread import Monitor
from runner.monitor.nvml import strip_uuid_prefix, visible
from runner.monitor.samples import MachineSamples
from runner.monitor.samples_file import read_samples


class GPUStats:
    """Samples GPUs, CPU, memory and disk in a thread, between start and stop. Its errors are not raised in user code.

    log_dir     folder for gpu.csv and monitor.json, created if missing; an existing gpu.csv is kept, and the new one
                is named gpu-2.csv. If the folder is not writable, a warning is issued, and samples are only kept for
                `get_summary`
    interval_s  seconds between samples, 0.01 to 3600
    devices     one or several GPUs by CUDA index or UUID, which become gpu0, gpu1 and so on in this order; None: those
                of CUDA_VISIBLE_DEVICES

    Works without torch. Without a GPU, only the machine is monitored, and `notes` has the reason. Raises ConfigError
    for an invalid interval or device. May be started again after it was stopped; then it writes new files.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "gpu_logs",
        interval_s: float = 1.0,
        devices: Sequence[int | str] | int | str | None = None,
    ) -> None:
        self.log_dir = Path(log_dir)
        self._interval_s = interval_s
        self._uuids = None if devices is None else _resolve_devices(devices)
        self._monitor = Monitor(None, interval_s, uuids=self._uuids)
        self._number = 1
        self._pid = 0  # PID of the process that started monitoring; 0 while stopped

    @property
    def path_csv(self) -> Path:
        """Path of the file with the samples."""
        return self.log_dir / self._numbered("gpu", ".csv")

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not monitored and why, and other events: throttled GPUs, other processes, errors."""
        return self._monitor.notes

    def start_monitoring(self) -> None:
        """Start monitoring; a second call while running does nothing."""
        self._start()

    def stop_monitoring(self) -> None:
        """Stop monitoring and write monitor.json; a second call, or one in a forked child, does nothing."""
        self._stop()

    def latest(self) -> Mapping[str, float]:
        """Return the latest sample by metric: `gpu0/util`, `gpu0/memory_gib`, `cpu/percent`, ..."""
        return self._monitor.latest()

    def get_summary(self) -> dict[str, Any]:
        """Return time-weighted mean, minimum and maximum of each metric so far, energy, and notes.

        Content of monitor.json: `whole` and `phases`, each with `metrics`, `energy_j`, `slowed`; `devices`; `notes`.
        """
        return self._monitor.summary().to_json()

    def samples(self) -> MachineSamples:
        """Return the samples as arrays over time. Raises InputMissing if nothing was written."""
        if not self.path_csv.exists():
            fix = "start monitoring first, with a `with` block or start_monitoring()"
            raise InputMissing("there is no such file", where=str(self.path_csv), fix=fix)
        return read_samples(self.path_csv)

    def plot_stats(self) -> list[Path]:
        """Write plots of the samples so far to `plots` in log_dir; return their paths.

        After a second start, the folder is `plots-2`, and so on. Raises InputMissing if there are no samples,
        and OSError if the plots cannot be written.
        """
        from runner.monitor.machine_plots import draw_png_files  # imported here: matplotlib is slow to import

        samples = self.samples()
        folder = self.log_dir / self._numbered("plots", "")
        folder.mkdir(mode=0o700, exist_ok=True)
        return [_replace(folder / name, content) for name, content in draw_png_files(samples).items()]

    def __enter__(self) -> GPUStats:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        if self._pid:
            return
        self._pid = os.getpid()
        path = self._reserve_path()
        self._monitor = Monitor(path, self._interval_s, uuids=self._uuids or _torch_uuids())
        self._monitor.start()

    def _stop(self) -> None:
        if self._pid != os.getpid():
            return
        self._pid = 0
        self._monitor.stop()
        text = json.dumps(self.get_summary(), indent=2) + "\n"
        if self._monitor.path_csv is not None:
            try:
                _replace(self.log_dir / self._numbered("monitor", ".json"), text.encode())
            except OSError as error:
                _warn(4, f"monitor.json cannot be written to {self.log_dir}: {error.strerror}")

    def _numbered(self, stem: str, suffix: str) -> str:
        return f"{stem}{suffix}" if self._number == 1 else f"{stem}-{self._number}{suffix}"

    def _reserve_path(self) -> Path | None:
        """Reserve the first free file name, so that concurrent monitors do not share a file.

        Returns None, with a warning, if the folder cannot be written to.
        """
        self._number = 1
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    # A monitor.json without a gpu.csv also marks the number as used: gpu.csv may have been moved.
                    if not os.path.lexists(self.log_dir / self._numbered("monitor", ".json")):
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

    Does not use `durable.files.atomic_write`, which waits for the disk: nothing resumes from this file, and the end of
    a `with` block should not wait.
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


def _resolve_devices(devices: Iterable[int | str] | int | str) -> list[str]:
    """Return the UUIDs of GPUs that are given by CUDA index or UUID. Raises ConfigError."""
    requested = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
    with open_driver() as nvml:
        torch_order = _torch_uuids()
        shown = [gpu.uuid for gpu in visible(nvml.gpus).gpus] if torch_order is None else torch_order
        uuids = {str(index): uuid for index, uuid in enumerate(shown)}
        gpus = [nvml.find(uuids.get(str(device), str(device))) for device in requested]
    chosen = [gpu.uuid for gpu in gpus if gpu is not None]
    if not chosen or len(set(chosen)) < len(requested):
        available = ", ".join(f"{index} ({uuid})" for index, uuid in uuids.items())
        why_not = f": {nvml.why_not}" if nvml.why_not else ""
        what = f"must name available GPUs, each once, but is {requested}; available: {available or f'no GPU{why_not}'}"
        raise ConfigError(Problem(what, where="devices", fix="use None for all visible GPUs"))
    return chosen


def _torch_uuids() -> list[str] | None:
    """Return the UUIDs in torch's device order, or None if torch has not initialized CUDA."""
    uuids = torch_uuids()
    return None if uuids is None else [f"GPU-{strip_uuid_prefix(uuid)}" for uuid in uuids]
