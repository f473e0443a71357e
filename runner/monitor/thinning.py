"""Reduce samples to a limited number of groups, piece by piece: a chart of ten days does not need a million points."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runner.monitor.sample_columns import PIECE_SAMPLES, SampleReader, add_samples, open_reader
from runner.monitor.samples import MachineSamples, SampleTally, Summary, rename_device

Floats = NDArray[np.float64]

MAX_GROUPS = 1 << 12  # several per pixel of a chart


@dataclass(frozen=True)
class ThinnedSamples(MachineSamples):
    """Groups of consecutive samples, with no gap or phase change within a group; `values` are means over each group.

    times_s and spans_s are those of the first sample of each group.

    ends_s   (G,) time of the last sample
    counts   (G,) number of samples
    ranges   metric -> (3, G) number of readings, lowest and highest reading; 0, NaN and NaN if there are none
    summary  summary of all samples, if they were read from a file
    """

    ends_s: Floats = field(default_factory=lambda: np.empty(0))
    counts: Floats = field(default_factory=lambda: np.empty(0))
    ranges: Mapping[str, Floats] = field(default_factory=dict)
    summary: Summary = field(default_factory=Summary)

    def lowest(self) -> MachineSamples:
        """Return the lowest readings as `values`."""
        return replace(self, values={name: ranges[1] for name, ranges in self.ranges.items()})

    def highest(self) -> MachineSamples:
        """Return the highest readings as `values`."""
        return replace(self, values={name: ranges[2] for name, ranges in self.ranges.items()})

    def mean(self, name: str) -> float:
        """Return the mean of all readings of a metric."""
        known = self.ranges[name][0]
        return float(np.nansum(self.values[name] * known) / known.sum())

    def _before_s(self) -> Floats:
        first = self.times_s[:1] if self.previous_s is None else np.array([self.previous_s])
        return np.concatenate([first, self.ends_s[:-1]])


def read_thinned(path: Path, metrics: Collection[str]) -> ThinnedSamples:
    """Return the samples of a gpu.csv in about MAX_GROUPS groups, or more if gaps and phase changes require it.

    The memory usage does not depend on the size of the file. Raises the same errors as `read_samples`.
    """
    with open_reader(path, metrics) as reader:
        return _thin(reader)


def _thin(reader: SampleReader) -> ThinnedSamples:
    tally, parts = SampleTally(), list[ThinnedSamples]()
    size, limit = 1, MAX_GROUPS  # samples per group, doubled whenever there are more groups than the limit
    for piece in reader.pieces():
        add_samples(tally, piece)
        parts.append(_merge(as_groups(piece), size))
        if (num := sum(map(len, parts))) > limit:
            merged = _merge(_join(parts), 2)
            if len(merged) > 0.75 * num:  # most neighbors are separated by a gap or a phase change
                limit = 2 * num
            else:
                size, parts = min(2 * size, PIECE_SAMPLES), [merged]
    groups = _join(parts)
    return replace(
        groups,
        values={rename_device(name, reader.names): column for name, column in groups.values.items()},
        ranges={rename_device(name, reader.names): column for name, column in groups.ranges.items()},
        devices=reader.devices,
        notes=tuple(reader.notes),
        summary=tally.summary(reader.devices, reader.notes, reader.names),
    )


def as_groups(samples: MachineSamples) -> ThinnedSamples:
    """Return one group per sample; samples that are already grouped are returned unchanged."""
    if isinstance(samples, ThinnedSamples):
        return samples
    ranges = {name: np.stack([np.isfinite(column), column, column]) for name, column in samples.values.items()}
    return ThinnedSamples(
        samples.times_s, samples.spans_s, samples.phases, samples.values, samples.devices, samples.notes,
        samples.previous_s, samples.times_s, np.ones(len(samples)), ranges,
    )  # fmt: skip


def _merge(groups: ThinnedSamples, size: int) -> ThinnedSamples:
    """Merge every `size` consecutive groups, but not across a gap or a phase change."""
    if size == 1 or not len(groups):
        return groups
    phases = np.array(groups.phases, dtype=object)
    is_begin = groups.gaps() | np.append(np.array([False]), phases[1:] != phases[:-1])
    places = np.arange(len(groups))
    starts = np.flatnonzero((places - np.maximum.accumulate(np.where(is_begin, places, 0))) % size == 0)
    values, ranges = {}, {}
    for name, (known, low, high) in groups.ranges.items():
        num = np.add.reduceat(known, starts)
        total = np.add.reduceat(np.where(known > 0, groups.values[name] * known, 0.0), starts)
        values[name] = np.where(num > 0, total / np.maximum(num, 1), math.nan)
        ranges[name] = np.stack([num, np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts)])
    return replace(
        groups,
        times_s=groups.times_s[starts],
        spans_s=groups.spans_s[starts],
        ends_s=groups.ends_s[np.append(starts[1:], len(groups)) - 1],
        counts=np.add.reduceat(groups.counts, starts),
        phases=tuple(phases[starts].tolist()),
        values=values,
        ranges=ranges,
    )


def _join(parts: Sequence[ThinnedSamples]) -> ThinnedSamples:
    names = dict.fromkeys(name for part in parts for name in part.values)
    missing = {len(part): np.full((4, len(part)), math.nan) for part in parts}
    for unknown in missing.values():
        unknown[0] = 0.0
    return replace(
        parts[0],
        times_s=np.concatenate([part.times_s for part in parts]),
        spans_s=np.concatenate([part.spans_s for part in parts]),
        ends_s=np.concatenate([part.ends_s for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        phases=tuple(phase for part in parts for phase in part.phases),
        values={
            name: np.concatenate([part.values.get(name, missing[len(part)][3]) for part in parts]) for name in names
        },
        ranges={
            name: np.concatenate([part.ranges.get(name, missing[len(part)][:3]) for part in parts], axis=1)
            for name in names
        },
    )
