"""Measurements of `accel-run plan --probe` on this machine, stored in the user's cache for later plans."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.json_converter import decode, encode
from runner.base.json_values import mapped
from runner.base.paths import cache_folder
from runner.durable import files
from runner.durable.files import read_object
from runner.plan.rank_devices import RankDevice

FILE = "corrections.json"
MARGIN = 1.02  # margin of a measured ratio of tensors, because it is applied to other tasks, too


@dataclass(frozen=True)
class Correction:
    """Measurements of three real updates on a device of this machine.

    device       its name
    task, date   task and date of the measurement
    libraries    bytes of the process besides its tensors; None if not measured
    tensors      bytes of tensors with allocator overhead, measured / predicted without a margin for kernels
    flops_per_s  precision -> operations of the updates per second of the updates
    """

    device: str
    task: str
    date: str
    libraries: int | None = None
    tensors: float = 1.0
    flops_per_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of(self, rank: RankDevice) -> RankDevice:
        """Return the device with estimates replaced by measurements."""
        libraries = rank.overhead_bytes if self.libraries is None else self.libraries
        # never below the estimate: another task may use kernels that this one did not
        unseen = max(0.0, self.tensors * MARGIN - 1) if rank.is_gpu else rank.unseen
        return dataclasses.replace(rank, overhead_bytes=libraries, unseen=unseen)

    def __str__(self) -> str:
        """Return one line that names the measurement."""
        return f"Corrected by three updates of {self.task} on this {self.device}, {self.date} (plan --probe)"


def corrections() -> dict[str, Correction]:
    """Return device -> measurements on this machine; unreadable entries are ignored."""
    found = {}
    for name, fields in _here(read_object(cache_folder() / FILE)).items():
        if correction := _read(name, fields):
            found[name] = correction
    return found


def keep(correction: Correction) -> str:
    """Store the correction with those of other devices; return the file.

    Measurements in other precisions are kept. Raises StorageError if the file cannot be written.
    """
    folder = cache_folder()
    files.make_directory(folder)
    known = read_object(folder / FILE)
    here = _here(known)
    before = _read(correction.device, here.get(correction.device))
    rates = {**(before.flops_per_s if before else {}), **correction.flops_per_s}
    here[correction.device] = encode(dataclasses.replace(correction, flops_per_s=rates))
    text = json.dumps({**known, _machine(): here}, indent=1) + "\n"
    files.atomic_write(folder / FILE, text)
    return str(folder / FILE)


def _here(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored corrections of this machine's devices."""
    found = known.get(_machine())
    return dict(found) if isinstance(found, dict) else {}


def _read(name: str, fields: object) -> Correction | None:
    found = decode(Correction, {"task": "", "date": "", **mapped(fields), "device": name})
    rates = (found.value.tensors, *found.value.flops_per_s.values())
    is_valid = not found.wrong and (found.value.libraries or 0) >= 0 and min(rates) > 0
    return found.value if isinstance(fields, dict) and is_valid else None


def _machine() -> str:
    return platform.node() or "this machine"
