"""What `accel-run plan --probe` has measured on this machine, kept for later plans in the user's cache."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.paths import cache_folder
from runner.durable import files
from runner.durable.files import read_object
from runner.plan.rank_devices import RankDevice

FILE = "corrections.json"
MARGIN = 1.02  # of a measured ratio of tensors: another task is not the one that was measured


@dataclass(frozen=True)
class Correction:
    """What three real updates have shown of a device of this machine.

    device       its name
    task, date   what was trained, and when
    libraries    bytes that the process held beside its tensors; None where that was not seen
    tensors      bytes of tensors with what the allocator took, measured / predicted without a margin for kernels
    flops_per_s  precision -> operations of the updates per second of the updates
    """

    device: str
    task: str
    date: str
    libraries: int | None = None
    tensors: float = 1.0
    flops_per_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of(self, rank: RankDevice) -> RankDevice:
        """Return the device with what was measured in the place of estimates."""
        libraries = rank.overhead_bytes if self.libraries is None else self.libraries
        # never below: another task may have what this one lacked
        unseen = max(0.0, self.tensors * MARGIN - 1) if rank.is_gpu else rank.unseen
        return dataclasses.replace(rank, overhead_bytes=libraries, unseen=unseen)

    def __str__(self) -> str:
        """Return in a line whose measurement it is."""
        return f"Corrected by three updates of {self.task} on this {self.device}, {self.date} (plan --probe)"


def corrections() -> dict[str, Correction]:
    """Return device -> what was measured on this machine; what cannot be read counts as not measured."""
    found = {}
    for name, fields in _here(read_object(cache_folder() / FILE)).items():
        if correction := _read(name, fields):
            found[name] = correction
    return found


def keep(correction: Correction) -> str:
    """The correction is on disk, beside those of other devices; return its file.

    What was measured in other precisions stays. Raises StorageError where nothing can be written there.
    """
    folder = cache_folder()
    files.make_directory(folder)
    known = read_object(folder / FILE)
    here = _here(known)
    before = _read(correction.device, here.get(correction.device))
    rates = {**(before.flops_per_s if before else {}), **correction.flops_per_s}
    here[correction.device] = dataclasses.asdict(dataclasses.replace(correction, flops_per_s=rates))
    text = json.dumps({**known, _machine(): here}, indent=1) + "\n"
    files.atomic_write(folder / FILE, text)
    return str(folder / FILE)


def _here(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of the devices of this machine."""
    found = known.get(_machine())
    return dict(found) if isinstance(found, dict) else {}


def _read(name: str, fields: object) -> Correction | None:
    if not isinstance(fields, dict):
        return None
    libraries, tensors = fields.get("libraries"), fields.get("tensors", 1.0)
    rates: Any = fields.get("flops_per_s", {})
    if not (libraries is None or (type(libraries) is int and libraries >= 0)) or not _is_rate(tensors):
        return None
    if not isinstance(rates, dict) or not all(_is_rate(rate) for rate in rates.values()):
        return None
    return Correction(name, str(fields.get("task")), str(fields.get("date")), libraries, float(tensors), rates)


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _machine() -> str:
    return platform.node() or "this machine"
