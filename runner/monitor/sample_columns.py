"""Summarize samples by columns: a run of ten days has a million, too many for a loop over rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runner.monitor.nvml import decode_throttle_reasons
from runner.monitor.samples import COUNTERS, MachineSamples, PhaseSums, SampleTally, Summary

Floats = NDArray[np.float64]


def summarize_samples(samples: MachineSamples) -> Summary:
    """Return the summary that `SampleTally.add` for each sample leads to."""
    tally = SampleTally()
    phases = np.array(samples.phases, dtype=object)
    segments = np.cumsum(samples.gaps(), dtype=np.intp)  # a number for the samples between two gaps
    increases = {
        name: _find_increases(column, segments)
        for name, column in samples.values.items()
        if name.rpartition("/")[2] in COUNTERS
    }
    for phase in dict.fromkeys(samples.phases):
        _add_columns(tally.of_phase(phase), samples, phases == phase, increases)
    return tally.summary(samples.devices, samples.notes)


def _find_increases(column: Floats, segments: NDArray[np.intp]) -> Floats:
    """Return the increase of a counter at each sample, NaN if unknown: the first of a segment, or after a reset."""
    increases = np.full(len(column), math.nan)
    known = np.flatnonzero(~np.isnan(column))
    changes = np.diff(column[known])
    is_known = (np.diff(segments[known]) == 0) & (changes >= 0)
    increases[known[1:][is_known]] = changes[is_known]
    return increases


def _add_columns(
    sums: PhaseSums, samples: MachineSamples, selected: NDArray[np.bool_], increases: Mapping[str, Floats]
) -> None:
    """Add the selected samples, (N,), to the sums of their phase.

    increases  counter -> (N,) its increase at each sample
    """
    sums.seconds += float(samples.spans_s[selected].sum())
    sums.samples += int(selected.sum())
    for name, column in samples.values.items():
        device, _, metric = name.partition("/")
        rows = np.flatnonzero(selected & ~np.isnan(column))
        spans, values = samples.spans_s[rows], column[rows]
        if not len(rows):
            continue
        if metric in COUNTERS:
            known = increases[name][rows]
            if metric != "energy_j" or not np.isnan(known).all():
                sums.increases[name] += float(np.nansum(known))
        elif metric == "throttle_reasons":
            sums.known_s[device] += float(spans.sum())
            for bits in np.unique(values).tolist():
                for reason in decode_throttle_reasons(bits):
                    sums.slowed_s[device, reason] += float(spans[values == bits].sum())
        else:
            total = float((spans * values).sum())
            sums.add_value(name, float(spans.sum()), total, float(values.min()), float(values.max()))
