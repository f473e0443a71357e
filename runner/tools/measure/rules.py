"""Rules that derive candidate settings from the evidence of a run. A rule without evidence finds nothing.

A finding is not yet advice: its candidates are measured first (runner/tools/measure/advisor.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.text import format_bytes
from runner.console.bottleneck import IDLE_PERCENT, describe_share
from runner.engine.checkpoints.save_policy import MAX_AT_RISK_S, MAX_OVERHEAD, MIN_INTERVAL_S, parse_every
from runner.tools.measure.facts import Facts
from runner.tools.measure.selection import Candidate

# Thresholds, mostly shares of the time of updates. They select candidates; measurements decide.
MIN_DATA_WAIT = 0.10
MIN_PART_SHARE = 0.05
MIN_EVALUATION_SHARE = 0.20
MAX_MEMORY_SHARE = 0.6  # share of the GPU's memory below which activations need not be recomputed
SMALL_UPDATE_MS = 5.0  # shorter updates may mostly wait for kernel launches
MIN_THROTTLED_SHARE = 0.05
CACHE_SHARE = 0.25  # share of the machine's memory that cached samples may use
MIN_INTERVAL_RATIO = 1.5  # minimum ratio of a recommended interval between checkpoints to the current one
MIN_EVENTS = 3  # minimum number of checkpoints or evaluations; fewer may all come from the ends of phases
CPU_BOUND_SHARE = 0.5  # CPU share of the time of reading a sample, below which reading is I/O-bound
MAX_SHAPES = 3  # the usual shape, and two at the end of an epoch


@dataclass(frozen=True)
class RuleFinding:
    """The finding of a rule.

    evidence    sentence with the numbers
    candidates  settings to try
    by_hand     manual change, if no setting helps or the setting would change more than the speed
    at_most     relative speed of updates without the problem, the largest possible gain; None: unknown
    """

    rule: str
    evidence: str
    candidates: tuple[Candidate, ...] = ()
    by_hand: str = ""
    at_most: float | None = None


Rule = Callable[[Facts], RuleFinding | None]


def findings(facts: Facts) -> list[RuleFinding]:
    """Apply all rules; return the findings by decreasing possible gain, unknown gains last."""
    found = {name: finding for name, rule in RULES.items() if (finding := rule(facts)) is not None}
    named = [dataclasses.replace(finding, rule=name) for name, finding in found.items()]
    return sorted(named, key=lambda finding: -(finding.at_most or 0.0))


def _make_finding(evidence: str, *tries: str, by_hand: str = "", at_most: float | None = None) -> RuleFinding:
    """Make a finding; each item of `tries` has the overrides of one candidate, separated by spaces."""
    candidates = tuple(Candidate(tuple(overrides.split())) for overrides in tries)
    return RuleFinding("", evidence, candidates, by_hand, at_most)


# ---------------------------------------------------------------- data


def data_wait(facts: Facts) -> RuleFinding | None:
    """Updates wait for data."""
    share, cores, values = facts.share("data"), facts.cpu.logical_cores, facts.values
    if share is None or share < MIN_DATA_WAIT:
        return None
    loader, workers = values.get("dataloader"), _count_workers(facts)
    counts = suggest_worker_counts(cores, is_io_bound=facts.probe.get("sample_busy", 1.0) < CPU_BOUND_SHARE)
    is_cached = values.get("dataloader.cache") != "none"
    if loader == "thread":  # without a cache, this loader is one worker process
        readers = "a thread reads" if is_cached else "1 worker reads (dataloader=thread)"
        tries = [f"dataloader=default dataloader.num_workers={n}" for n in counts if is_cached or n > 1]
    elif workers is None:
        return None
    elif workers == 0:
        tries = [f"dataloader.num_workers={n}" for n in counts] + ["dataloader=thread"] * is_cached
        readers = "no worker prefetches (dataloader.num_workers=0)"
    else:
        tries = [f"dataloader.num_workers={n}" for n in counts if n > workers]
        tries.append(f"dataloader.prefetch_factor={2 * int(values.get('dataloader.prefetch_factor', 2))}")
        readers = f"{workers} workers read" if workers > 1 else "1 worker reads"
    caches, size = cache_override(facts)
    evidence = f"{describe_share('data', share)}; {readers}, {_format_cores(cores)}{size}"
    return _make_finding(evidence, *caches, *tries, at_most=_speedup_without(share))


def _count_workers(facts: Facts) -> Any:
    """Return the number of data workers; 0 if reading was too fast to start them."""
    workers = facts.values.get("dataloader.num_workers")
    return 0 if workers and facts.evidence.num_workers == 0 else workers


def unpinned(facts: Facts) -> RuleFinding | None:
    """Batches are copied to the GPU from pageable memory."""
    if facts.on_cpu() is not False or facts.values.get("dataloader.pin_memory") is not False:
        return None
    if facts.values.get("dataloader.cache") == "device":
        return None
    share = facts.share("transfer")
    cost = "" if share is None else f"; copies took {share:.0%} of the time of updates"
    return _make_finding(
        f"dataloader.pin_memory=false: copies to the GPU cannot overlap with compute{cost}",
        "dataloader.pin_memory=true prefetch=stream",
        "dataloader.pin_memory=true",
        at_most=None if share is None else _speedup_without(share),
    )


def varying_shapes(facts: Facts) -> RuleFinding | None:
    """Kernels are tuned or compiled again for each shape."""
    shapes = max(facts.probe.get("num_shapes") or 0, facts.evidence.num_batch_shapes or 0)
    compiled = facts.values.get("compile", "off")
    tries = ["backend=default"] * (facts.values.get("backend") == "fast" and facts.on_cpu() is False)
    tries += [f"compile={compiled} compile.dynamic=true", "compile=off"] * (compiled != "off")
    if shapes <= MAX_SHAPES or not tries:
        return None
    return _make_finding(
        f"batches have {shapes} shapes, and kernels are tuned or compiled for each new one",
        *tries,
        by_hand="round lengths up to a multiple in collate, so that few shapes remain",
    )


# ---------------------------------------------------------------- between updates


def saves_too_often(facts: Facts) -> RuleFinding | None:
    """Training waits for checkpoints.

    Time-based checkpoints are too rare in the short blocks of a comparison to measure the gain of a longer interval.
    It is computed from the measurements of the run instead.
    """
    share, every = facts.share("saving"), facts.values.get("checkpoint.every")
    saves, seconds = facts.evidence.num_saves, facts.evidence.parts_s.get("saving")
    if share is None or seconds is None or every == "auto" or (saves is not None and saves < MIN_EVENTS):
        return None
    is_by_clock = every is not None and parse_every(every)[1] == "min"
    if is_by_clock and not saves:
        return None
    if saves:  # checkpoints at the end of a phase do not depend on the interval
        share *= max(0, saves - len(facts.evidence.phases)) / saves
    if share < MIN_PART_SHARE:
        return None
    times = f", {saves} checkpoints of {seconds / saves:.2g} s" if saves else ""
    evidence = f"{describe_share('saving', share)} (checkpoint.every={every}{times})"
    if not is_by_clock or not saves:
        return _make_finding(evidence, "checkpoint.every=auto", at_most=_speedup_without(share))
    each_s, apart_s = seconds / saves, (seconds / saves) / share
    auto_s = max(MIN_INTERVAL_S, min(each_s / MAX_OVERHEAD, MAX_AT_RISK_S - each_s))
    if auto_s < MIN_INTERVAL_RATIO * apart_s:  # `auto` limits the work at risk, however long a checkpoint takes
        return None
    change = f"use checkpoint.every=auto: about every {auto_s:.0f} s instead of every {apart_s:.0f} s"
    return _make_finding(evidence, by_hand=change, at_most=1 / ((1 - share) * (1 + each_s / auto_s)))


def logs_too_often(facts: Facts) -> RuleFinding | None:
    """Rows of metrics take a noticeable part of the time."""
    share, every = facts.share("logging"), facts.values.get("log_every")
    if share is None or share < MIN_PART_SHARE or not isinstance(every, int):
        return None
    override = f"log_every={10 * every if every >= 10 else 50}"
    return _make_finding(
        f"{describe_share('logging', share)} (log_every={every})", override, at_most=_speedup_without(share)
    )


def evaluates_too_often(facts: Facts) -> RuleFinding | None:
    """Evaluations take more than a fifth of the time."""
    share, num, updates = facts.share("evaluation"), facts.evidence.num_evaluations, facts.evidence.updates
    if share is None or share < MIN_EVALUATION_SHARE or not updates or num is None or num < MIN_EVENTS:
        return None
    period = max(1, round(updates / num))
    return _make_finding(
        f"{describe_share('evaluation', share)}: {num} evaluations, one every {period} updates",
        by_hand=f"use evaluate.every={5 * period}; it affects which checkpoint is the best one",
        at_most=_speedup_without(share * 0.8),
    )


def slow_hooks(facts: Facts) -> RuleFinding | None:
    """Other work between updates takes a noticeable part of the time."""
    share, has_begin_update = facts.share("hooks"), facts.evidence.has_begin_update
    if share is None or share < MIN_DATA_WAIT or has_begin_update is None:
        return None
    profile = "find out what runs between updates with accel-run profile"
    return _make_finding(
        f"{describe_share('hooks', share)}, not counting metrics, evaluations and checkpoints",
        by_hand="check what begin_update of the task does" if has_begin_update else profile,
        at_most=_speedup_without(share),
    )


# ---------------------------------------------------------------- arithmetic


def tiny_micro_batches(facts: Facts) -> RuleFinding | None:
    """An update has more micro-batches than the memory requires."""
    micro, steps = facts.evidence.micro_batch_size, facts.evidence.accumulation_steps
    total = facts.evidence.global_batch_size
    if not micro or not steps or steps < 2 or not total or facts.probe.get("has_batch_norm"):
        return None  # the statistics of batch norms depend on the micro-batch, so a different size changes the results
    share_of_rank = min(total, micro * steps)
    sizes = [size for size in (2 * micro, 4 * micro, 8 * micro, share_of_rank) if size <= share_of_rank]
    peak, memory = facts.evidence.device_peak_gib, facts.evidence.device_total_gib
    usage = "" if peak is None or memory is None else f"; at most {peak / memory:.0%} of the GPU's memory was in use"
    if peak and memory:
        # only part of the peak depends on the size
        sizes = [size for size in sizes if peak * size / micro < 2 * memory]
    fitting = sorted({size for size in sizes if share_of_rank % size == 0}, reverse=True)
    evidence = f"an update of {total} samples has {steps} micro-batches of {micro}{usage}"
    return _make_finding(evidence, *(f"micro_batch_size={size}" for size in fitting[:3]))


def memory_left(facts: Facts) -> RuleFinding | None:
    """Activations are recomputed although they would fit in memory."""
    peak, total = facts.evidence.device_peak_reserved_gib, facts.evidence.device_total_gib
    option = facts.values.get("memory")
    if not peak or not total or peak / total > MAX_MEMORY_SHARE or option not in ("checkpoint", "selective"):
        return None
    evidence = f"memory={option} recomputes activations, but only {peak / total:.0%} of the GPU's memory was in use"
    return _make_finding(evidence, "memory=none", *(["memory=selective"] if option == "checkpoint" else []))


def precision(facts: Facts) -> RuleFinding | None:
    """The device is faster in another number format."""
    used, gpu = facts.values.get("precision"), facts.gpu
    if facts.on_cpu():
        if used == "fp32" and facts.cpu.native_bf16:
            flags = ", ".join(flag for flag in facts.cpu.flags if "bf16" in flag)
            return _make_finding(
                f"precision=fp32, and this CPU multiplies bfloat16 natively ({flags})", "precision=bf16"
            )
        if used == "fp16" or (used == "bf16" and not facts.cpu.native_bf16):
            return _make_finding(f"precision={used}, which this CPU only emulates", "precision=fp32")
        return None
    if gpu is None or gpu.kind != "cuda" or not (gpu.capability or gpu.architecture):
        return None
    hardware = f"{gpu.name} has {gpu.generation}"
    if used in ("fp32", "tf32") and gpu.native_bf16:
        others = ["precision=tf32"] if used == "fp32" and gpu.formats.tf32 else []
        evidence = f"precision={used}, and {hardware}: its tensor cores support bfloat16"
        return _make_finding(evidence, "precision=bf16", *others)
    if used == "fp32" and gpu.formats.fp16:
        return _make_finding(f"precision=fp32, and {hardware}: its tensor cores support float16", "precision=fp16")
    if used == "bf16" and not gpu.native_bf16:
        return _make_finding(f"precision=bf16, which is emulated: {hardware}", "precision=fp16", "precision=fp32")
    return None


def odd_sizes(facts: Facts) -> RuleFinding | None:
    """Matrices have sizes that prevent the fast kernels."""
    lines = facts.evidence.odd_sizes
    if not lines:
        return None
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return _make_finding(f"{lines[0]}{more}", by_hand="round these sizes up in the model, if you can change it")


def idle_gpu(facts: Facts) -> RuleFinding | None:
    """The GPU idles although data is ready: kernels are small, and the host launches them too slowly."""
    util, wait = facts.monitor.get("gpu0/util"), facts.share("data")
    if (
        facts.on_cpu() is not False
        or util is None
        or util >= IDLE_PERCENT
        or (wait is not None and wait >= MIN_DATA_WAIT)
    ):
        return None
    if facts.values.get("compile", "off") != "off":
        return None
    return _make_finding(
        f"the GPU was busy {util:.0f} % of the time although data was ready: the host launches kernels too slowly",
        *(f"compile={mode}" for mode in ("reduce-overhead", "default", "regional")),
        at_most=100 / max(util, 1.0),
    )


def too_many_threads(facts: Facts) -> RuleFinding | None:
    """There are more compute threads than cores, or updates are too small for several."""
    threads, cores, update_ms = facts.evidence.num_threads, facts.cpu.logical_cores, facts.update_ms()
    if not threads or not facts.on_cpu():
        return None
    is_small = update_ms is not None and update_ms < SMALL_UPDATE_MS and threads > 1
    if threads <= cores and not is_small:
        return None
    fewer = sorted({1, max(1, cores // 2), cores} - {threads}, reverse=True)
    evidence = (
        f"an update takes {update_ms:.2g} ms, which is little work for {threads} threads"
        if threads <= cores
        else f"{threads} threads compute on {_format_cores(cores)}"
    )
    return _make_finding(evidence, *(f"backend.threads={n}" for n in fewer if n < threads))


def small_workload(facts: Facts) -> RuleFinding | None:
    """An update computes so little that the other device may be faster."""
    update_ms, util = facts.update_ms(), facts.monitor.get("gpu0/util")
    if facts.on_cpu() and facts.gpus:
        gpu = facts.gpus[0]
        return _make_finding(f"the run uses the CPU, although {gpu.name} is available", f"device={gpu.torch_name}")
    if facts.on_cpu() is not False or update_ms is None or update_ms > SMALL_UPDATE_MS:
        return None
    if util is not None and util > 30:
        return None
    detail = "" if util is None else f", and the GPU was busy {util:.0f} % of the time"
    return _make_finding(f"an update takes {update_ms:.2g} ms{detail}: a small workload", "device=cpu")


def throttling(facts: Facts) -> RuleFinding | None:
    """The GPU was slowed down by its temperature or its power limit: no setting helps."""
    slowed = {reason: share for reason, share in facts.throttled.items() if share >= MIN_THROTTLED_SHARE}
    if not slowed:
        return None
    shares = ", ".join(f"{share:.0%} of the time by {reason}" for reason, share in slowed.items())
    return _make_finding(f"the GPU was slowed down: {shares}", by_hand="check its cooling or its power limit")


def suggest_worker_counts(cores: int, *, is_io_bound: bool) -> list[int]:
    """Return numbers of data workers to try, the most promising first.

    is_io_bound  reading mostly waits for a disk or a network, so more workers than cores may help
    """
    counts, likely = {1, 2, max(1, cores // 2), min(8, max(1, cores - 1))}, cores
    if is_io_bound:
        counts, likely = counts | {4, 8}, max(4, 2 * cores)
    return sorted(counts, key=lambda num: (abs(math.log2(num / likely)), -num))


def cache_override(facts: Facts) -> tuple[list[str], str]:
    """Return the override that caches samples, and their size as text; empty if they change or do not fit in memory."""
    probe, num, epochs = facts.probe, facts.evidence.num_samples, facts.evidence.epochs
    if epochs is not None and epochs <= 1:  # a cache cannot help
        return [], ""
    if facts.values.get("dataloader.cache") != "none" or not num or not probe.get("same_when_read_again"):
        return [], ""
    nbytes = num * probe.get("sample_bytes", 0)
    if probe.get("changes_with_epoch") or not nbytes or nbytes > CACHE_SHARE * facts.cpu.memory_bytes:
        return [], ""
    return ["dataloader.cache=memory"], f"; all samples take {format_bytes(nbytes)} and do not change"


def _speedup_without(share: float) -> float:
    """Return the relative speed of updates without this share of their time."""
    return 1.0 / max(0.01, 1.0 - share)


def _format_cores(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"


RULES: Mapping[str, Rule] = {
    "data wait": data_wait,
    "unpinned": unpinned,
    "varying shapes": varying_shapes,
    "checkpoints too often": saves_too_often,
    "logs too often": logs_too_often,
    "evaluates too often": evaluates_too_often,
    "slow hooks": slow_hooks,
    "tiny micro-batches": tiny_micro_batches,
    "memory left": memory_left,
    "precision": precision,
    "odd sizes": odd_sizes,
    "idle GPU": idle_gpu,
    "too many threads": too_many_threads,
    "device": small_workload,
    "throttling": throttling,
}
