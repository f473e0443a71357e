"""State which differences between runs may be noise, estimated between seeds for metrics and between rows for times."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.base.text import abbreviate
from runner.tools.measure.statistics import student_quantile
from runner.tools.report.run_data import RunData

Groups = Sequence[Sequence[int]]  # numbers of runs that differ in their seed only


def describe_noise(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    """Return which differences are within noise, or how to measure the noise; empty if nothing is known."""
    return "; ".join((*_describe_metrics(runs, labels), *_describe_times(runs, labels)))


def _describe_metrics(runs: Sequence[RunData], labels: Sequence[str]) -> Iterator[str]:
    """Yield a statement for each metric that all runs have.

    The noise of a metric is its standard deviation over seeds, pooled over all groups of runs that differ in nothing
    else. A difference is within noise if Student's t-test at 95 % does not reject that it is 0; of 20 pairs without a
    real difference, one is rejected by chance on average. Nothing is stated if a run is not finished, because its
    metrics are not final.
    """
    metrics = [
        {name: value for name, value in run.metrics.items() if value is not None and math.isfinite(value)}
        for run in runs
    ]
    names = [name for name in metrics[0] if all(name in of_run for of_run in metrics)]
    groups = _group_by_settings(runs)
    seeds = [[str(runs[number].settings.get("seed")) for number in group] for group in groups]
    freedom = sum(len(set(of_group)) - 1 for of_group in seeds)
    if not names or not groups or any(run.state.word != "finished" for run in runs):
        return
    if len(groups) == 1:
        if len(set(seeds[0])) == len(runs):
            yield "the settings differ only in the seed: with the same code and data, the metrics differ only by noise"
        return
    if freedom < _MIN_FREEDOM:
        unused = next(seed for seed in itertools.count(1) if str(seed) not in seeds[0])
        script = shlex.quote(str(runs[0].path / "command.sh"))
        advice = f"sh {script} run={runs[0].name}-seed{unused} seed={unused}"
        yield f"differences of metrics may be noise; to measure it, repeat runs with two other seeds: {advice}"
        return
    for name in names:
        values = [
            _average_by_seed([metrics[number][name] for number in group], of_group)
            for group, of_group in zip(groups, seeds, strict=True)
        ]
        squares = sum(sum((value - statistics.fmean(each)) ** 2 for value in each) for each in values)
        sigma = math.sqrt(squares / freedom)
        pairs = []
        for (one, first), (other, second) in itertools.combinations(zip(groups, values, strict=True), 2):
            limit = student_quantile(freedom) * sigma * math.sqrt(1 / len(first) + 1 / len(second))
            if abs(statistics.fmean(first) - statistics.fmean(second)) <= limit:
                pairs.append(f"{_name_group(one, labels)} and {_name_group(other, labels)}")
        scale = f"standard deviation over seeds: {sigma:.2g}"
        yield (
            f"{name}: within noise ({scale}): {abbreviate(pairs)}"
            if pairs
            else f"{name}: all differences exceed the noise ({scale})"
        )


def _describe_times(runs: Sequence[RunData], labels: Sequence[str]) -> Iterator[str]:
    """Yield the pairs of runs whose median update times are each within the range of most rows of the other."""
    pairs = [
        f"{labels[one]} and {labels[other]}"
        for one, other in itertools.combinations(range(len(runs)), 2)
        if _includes(runs[one], runs[other]) and _includes(runs[other], runs[one])
    ]
    if pairs:
        yield f"update time: differences are within the variation over the run: {abbreviate(pairs)}"


def _includes(run: RunData, other: RunData) -> bool:
    if run.evidence is None or other.evidence is None:
        return False
    low, high, median = run.evidence.step_time_low_ms, run.evidence.step_time_high_ms, other.evidence.step_time_ms
    return low is not None and high is not None and median is not None and low <= median <= high


def _group_by_settings(runs: Sequence[RunData]) -> Groups:
    """Return the groups of runs whose task and settings differ only in the seed; empty if settings are unknown."""
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        if not run.settings:
            return []
        settings = {key: value for key, value in run.settings.items() if key not in _IGNORED_KEYS}
        origin = run.record.origin
        task = str(Path(origin.folder or "") / origin.task_file) if origin.task_file else origin.task
        groups.setdefault(json.dumps([task, settings], sort_keys=True, default=str), []).append(number)
    return list(groups.values())


def _average_by_seed(values: Sequence[float], seeds: Sequence[str]) -> list[float]:
    """Return one value per seed, because repetitions with the same seed show no noise."""
    by_seed: dict[str, list[float]] = {}
    for value, seed in zip(values, seeds, strict=True):
        by_seed.setdefault(seed, []).append(value)
    return [statistics.fmean(each) for each in by_seed.values()]


def _name_group(group: Sequence[int], labels: Sequence[str]) -> str:
    return labels[group[0]] if len(group) == 1 else f"the mean of {abbreviate([labels[number] for number in group])}"


_MIN_FREEDOM = 2  # with one repetition, almost any difference would be within noise
_IGNORED_KEYS = ("seed", "run", "output_root", "resume", "resume_allow")
