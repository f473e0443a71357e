"""Define the record of a phase, in each checkpoint and in run.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from runner.base.json_converter import INLINE


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """Number of training samples, and how an update divides them; None if unknown.

    num_samples  size of the training data
    epochs       passes over the training data so far
    """

    num_samples: int | None = None
    epochs: float | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None


@dataclass
class PhaseRecord:
    """Progress and cost of a phase, over all processes that worked on it.

    A resumed process starts from the times of its predecessor if that process ended right after the checkpoint.
    Otherwise, it starts from the times in the checkpoint, which do not include the time after it, nor the time to
    write it.

    updates, total     completed and requested updates; fewer are completed if the phase stopped early
    finished           whether the phase is complete
    seconds            time from its start to its last checkpoint, evaluations included
    parts_s            part -> seconds: starting, first_update, parts of updates, and parts between updates
    peak_host_gib      peak resident memory; at the end of the phase, of the rank with the highest peak
    peak_device_gib    peak memory that torch allocated on the GPU
    peak_reserved_gib  peak memory that torch reserved on the GPU
    metrics            metrics of the last evaluation, and results of a phase of kind fit; None if there were no items
                       or the value is not finite
    """

    kind: str = ""
    name: str = ""
    updates: int = 0
    total: int = 0
    finished: bool = False
    seconds: float = 0.0
    peak_host_gib: float = 0.0
    peak_device_gib: float | None = None
    peak_reserved_gib: float | None = None
    parts_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    samples: SampleCounts = field(default_factory=SampleCounts, metadata=INLINE)

    def reached(self, updates: int) -> None:
        """Record the number of completed updates."""
        self.updates, counts = updates, self.samples
        if counts.num_samples and counts.global_batch_size:
            self.samples = replace(counts, epochs=updates * counts.global_batch_size / counts.num_samples)
