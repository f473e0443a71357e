"""Define the measurements that a run stores in run.json for performance analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from runner.records.phase_record import PhaseRecord, SampleCounts


@dataclass(frozen=True, kw_only=True)
class SetupEvidence:
    """The task, the device and the options of the run."""

    task: str | None = None
    device: str | None = None
    device_name: str | None = None
    capability: tuple[int, ...] | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    precision: str | None = None
    world_size: int | None = None
    num_cores: int | None = None
    num_threads: int | None = None
    num_workers: int | None = None
    num_parameters: int | None = None
    num_trainable: int | None = None


@dataclass(frozen=True, kw_only=True)
class TimeEvidence:
    """Where the time went, on rank 0 unless stated otherwise.

    updates        number of updates timed: all of this process except the first
    seconds        total run time of this process
    parts_s        part -> seconds; they add up to `seconds`, except for unattributed time. The parts are starting and
                   first_update; in the other updates: data, transfer, forward, backward, optimizer, wait (for other
                   ranks); between updates: hooks, logging, drawing, evaluation, saving
    ranks_s        part -> seconds for each rank, only for parts in updates; empty for one process
    step_time_ms   median of the rows of the last phase; low and high are the 10th and the 90th percentile
    items_per_s    throughput of the last phase: items of its updates over their time, evaluations and checkpoints
                   between them included, and the first update of the process excluded
    data_wait      share of update time spent waiting for data; `transfer`: spent on copies to the device
    """

    updates: int | None = None
    seconds: float | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    ranks_s: tuple[Mapping[str, float], ...] = ()
    step_time_ms: float | None = None
    step_time_low_ms: float | None = None
    step_time_high_ms: float | None = None
    items_per_s: float | None = None
    items_per_update: float | None = None
    data_wait: float | None = None
    transfer: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryEvidence:
    """Memory of the host and of the device.

    host_peak_gib      peak resident memory of this process; once the run has ended, of the rank with the highest peak
    num_alloc_retries  times that torch's allocator freed its cache and retried the allocation
    fragmentation      share of reserved device memory that is free but split into blocks that cannot be released
    """

    host_peak_gib: float | None = None
    host_total_gib: float | None = None
    device_total_gib: float | None = None
    device_allocated_gib: float | None = None
    device_reserved_gib: float | None = None
    device_peak_gib: float | None = None
    device_peak_reserved_gib: float | None = None
    num_alloc_retries: int | None = None
    fragmentation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence(SetupEvidence, SampleCounts, TimeEvidence, MemoryEvidence):
    """Measurements of one process of a run; None or missing means unknown, never 0.

    The newest process is used, unless an earlier one ran far more updates with the same settings. Counts of samples are
    those of the last phase.

    attempt           `started` of the last process that the measurements cover
    num_batch_shapes  number of different shapes that the first tensor of a batch had
    odd_sizes         a line for each weight matrix whose sizes prevent the use of tensor cores
    has_begin_update  whether the task defines a hook before each update
    monitor           name of the monitor summary file in the run directory
    unfinished        True if the process failed: measurements up to the failure
    """

    attempt: str | None = None
    num_saves: int | None = None
    num_evaluations: int | None = None
    num_rows: int | None = None
    num_batch_shapes: int | None = None
    odd_sizes: tuple[str, ...] | None = None
    has_begin_update: bool | None = None
    monitor: str | None = None
    unfinished: bool | None = None
    phases: tuple[PhaseRecord, ...] = ()

    @property
    def host_label(self) -> str:
        """Label of `host_peak_gib` that states which rank it belongs to, such as "host, highest of 2 ranks".

        Earlier versions, which did not record the attempt, measured rank 0 only. After a failure, the peaks of some
        phases are of rank 0, and the peaks of other phases are of the rank with the highest one.
        """
        if (self.world_size or 1) == 1:
            return "host"
        if self.attempt is None:
            return "host, rank 0"
        return f"host, {'one' if self.unfinished else 'highest'} of {self.world_size} ranks"


def choose_evidence(earlier: Evidence | None, newest: Evidence) -> Evidence:
    """Return the newest measurements, or earlier ones of a process that ran far more updates.

    earlier  measurements of an earlier process; used only if it trained with the same settings
    """
    if earlier is None or (earlier.updates or 0) <= MIN_UPDATE_RATIO * (newest.updates or 0):
        return newest
    new_values, old_values = vars(newest), vars(earlier)
    is_same = all(new_values[name] in (None, old_values[name]) for name in _COMPARED_SETTINGS)
    return replace(earlier, phases=newest.phases or earlier.phases, unfinished=newest.unfinished) if is_same else newest


MIN_UPDATE_RATIO = 10  # ratio of update counts above which older but longer measurements are preferred
_COMPARED_SETTINGS = (
    "task", "device", "device_name", "choices", "world_size", "num_threads", "num_workers", "global_batch_size",
    "micro_batch_size", "accumulation_steps",
)  # fmt: skip
