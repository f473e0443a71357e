"""Rules: what was measured suggests what may be faster. None of them speaks where its evidence is missing.

A finding is no advice yet: its candidates are tried first (runner/tools/measure/advisor.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.console.bottleneck import IDLE_PERCENT, spent_on
from runner.engine.save_policy import AT_RISK_S, COST, SHORTEST_S, parse_every
from runner.tools.measure.facts import Facts

# Shares of the time of updates from which on a part is worth a look. They decide what is tried, not what is said.
WAIT = 0.10
PART = 0.05
EVALUATION = 0.20
LINE = 0.03
ROOM_LEFT = 0.6  # share of the GPU's memory below which there is room for larger passes
SMALL_UPDATE_MS = 5.0  # below which a GPU may wait for its launches most of the time
THROTTLED = 0.05  # share of the time
CACHE_SHARE = 0.25  # of the machine's memory that kept samples may take
LONGER_APART = 1.5  # times as far apart saves would be, to be worth a word
SEVERAL = 3  # saves or evaluations: those at the end are no habit
BUSY = 0.5  # share of the time of reading a sample in which the processor is needed
MANY_SHAPES = 3  # the usual one, and two at the end of an epoch


@dataclass(frozen=True)
class Candidate:
    """Overrides that may help: mechanics only, which change nothing of the result but its rounding."""

    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The overrides as they are typed."""
        return " ".join(self.overrides)


@dataclass(frozen=True)
class RuleFinding:
    """What a rule has seen.

    evidence    a sentence with the numbers
    candidates  what may help, to be tried
    by_hand     what to do where no setting helps, with the line of the code, or where one changes more than the speed
    at_most     how many times as fast updates would be if what was seen cost nothing; None: not known
    """

    rule: str
    evidence: str
    candidates: tuple[Candidate, ...] = ()
    by_hand: str = ""
    at_most: float | None = None


Rule = Callable[[Facts], RuleFinding | None]


def findings(facts: Facts) -> list[RuleFinding]:
    """Return what the rules see, the largest possible gain first; those that cannot tell come last."""
    found = [finding for rule in RULES.values() if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: -(finding.at_most or 0.0))


# ---------------------------------------------------------------- data


def data_wait(facts: Facts) -> RuleFinding | None:
    """Updates wait for data: other readers, or none at all."""
    share, cores = facts.share("data"), facts.cpu.logical_cores
    if share is None or share < WAIT:
        return None
    loader, workers = facts.values.get("dataloader"), facts.values.get("dataloader.num_workers")
    counts = worker_counts(cores, reads_wait=facts.probe.get("sample_busy", 1.0) < BUSY)
    candidates: list[tuple[str, ...]]
    is_kept = facts.values.get("dataloader.cache") != "none"
    if loader == "thread":  # without a cache it is one worker process
        who = "a thread reads" if is_kept else "1 worker reads (dataloader=thread)"
        candidates = [("dataloader=default", f"dataloader.num_workers={n}") for n in counts if is_kept or n > 1]
    elif workers is None:
        return None
    elif workers == 0:
        candidates = [(f"dataloader.num_workers={n}",) for n in counts]
        if is_kept:
            candidates.append(("dataloader=thread",))
        who = "nobody reads ahead (dataloader.num_workers=0)"
    else:
        candidates = [(f"dataloader.num_workers={n}",) for n in counts if n > workers]
        candidates.append((f"dataloader.prefetch_factor={2 * int(facts.values.get('dataloader.prefetch_factor', 2))}",))
        who = f"{workers} workers read" if workers > 1 else "1 worker reads"
    cached = cache(facts)
    return RuleFinding(
        "data wait",
        f"{spent_on('data', share)}; {who}, {_cores(cores)}{cached[1]}",
        tuple(map(Candidate, [*cached[0], *candidates])),
        at_most=_without(share),
    )


def slow_transform(facts: Facts) -> RuleFinding | None:
    """One line of the task takes most of what reading a sample takes."""
    share, line, sample_ms = facts.share("data"), facts.probe.get("slow_line"), facts.probe.get("sample_ms")
    if share is None or share < WAIT or not line or not sample_ms or line["ms"] < sample_ms / 2:
        return None
    update_ms, samples = facts.update_ms(), facts.evidence.global_batch_size
    if update_ms is None or samples is None or line["ms"] * samples < WAIT * update_ms:
        return None
    where, part = place(line), min(1.0, line["ms"] / sample_ms)
    waits = facts.probe.get("sample_busy", 1.0) < BUSY  # enough readers hide that: what they leave is not known
    return RuleFinding(
        "slow transform",
        f"reading a sample takes {sample_ms:.3g} ms, {part:.0%} of it in {where}",
        by_hand=f"make {where} faster, or do its work once: prepare the data before training",
        at_most=None if waits else _without(share * part),
    )


def too_many_workers(facts: Facts) -> RuleFinding | None:
    """There are more data workers than cores, and nobody waits for them."""
    workers, cores = facts.values.get("dataloader.num_workers"), facts.cpu.logical_cores
    if not isinstance(workers, int) or workers <= cores:
        return None
    fewer = sorted({max(1, cores - 1), max(1, cores // 2)}, reverse=True)
    candidates = tuple(Candidate((f"dataloader.num_workers={n}",)) for n in fewer)
    return RuleFinding("too many workers", f"{workers} data workers share {_cores(cores)}", candidates)


def unpinned(facts: Facts) -> RuleFinding | None:
    """Batches are copied to the GPU from memory that the system may move."""
    if facts.on_cpu() is not False or facts.values.get("dataloader.pin_memory") is not False:
        return None
    if facts.values.get("dataloader.cache") == "device":
        return None
    share = facts.share("transfer")
    seen = "" if share is None else f"; copies took {share:.0%} of the time of updates"
    return RuleFinding(
        "unpinned",
        f"dataloader.pin_memory=false: copies to the GPU cannot overlap with compute{seen}",
        (Candidate(("dataloader.pin_memory=true", "prefetch=stream")), Candidate(("dataloader.pin_memory=true",))),
        at_most=None if share is None else _without(share),
    )


def varying_shapes(facts: Facts) -> RuleFinding | None:
    """Kernels are searched for, or compiled, anew for each shape."""
    shapes = max(facts.probe.get("num_shapes") or 0, facts.evidence.num_batch_shapes or 0)
    if shapes <= MANY_SHAPES:
        return None
    candidates = []
    if facts.values.get("backend") == "fast" and facts.on_cpu() is False:
        candidates.append(Candidate(("backend=default",)))
    compiled = facts.values.get("compile", "off")
    if compiled != "off":
        candidates += [Candidate((f"compile={compiled}", "compile.dynamic=true")), Candidate(("compile=off",))]
    if not candidates:
        return None
    return RuleFinding(
        "varying shapes",
        f"batches came in {shapes} shapes, and for each new one kernels are searched for or compiled",
        tuple(candidates),
        by_hand="let collate round lengths up to a multiple, so that few shapes are left",
    )


# ---------------------------------------------------------------- between updates


def saves_too_often(facts: Facts) -> RuleFinding | None:
    """Training waits for checkpoints.

    Saves by the clock come in no trial as often as in training: what a run has measured of them is all that is known.
    """
    share, every = facts.share("saving"), facts.values.get("checkpoint.every")
    saves, seconds = facts.evidence.num_saves, facts.evidence.parts_s.get("saving")
    if share is None or seconds is None or every == "auto" or (saves is not None and saves < SEVERAL):
        return None
    by_the_clock = every is not None and parse_every(every)[1] == "min"
    if by_the_clock and not saves:
        return None
    if saves:  # those at the end of a phase are made however seldom others are
        share *= max(0, saves - len(facts.evidence.phases)) / saves
    if share < PART:
        return None
    told = f", {saves} saves of {seconds / saves:.2g} s" if saves else ""
    evidence = f"{spent_on('saving', share)} (checkpoint.every={every}{told})"
    if by_the_clock and saves:
        each_s, apart_s = seconds / saves, (seconds / saves) / share
        auto_s = max(SHORTEST_S, min(each_s / COST, AT_RISK_S - each_s))
        if auto_s < LONGER_APART * apart_s:  # it risks no more than ten minutes of work, however long a save takes
            return None
        what = f"use checkpoint.every=auto: it would save every {auto_s:.0f} s or so, and not every {apart_s:.0f} s"
        return RuleFinding(
            "checkpoints too often", evidence, by_hand=what, at_most=1 / ((1 - share) * (1 + each_s / auto_s))
        )
    candidates = (Candidate(("checkpoint.every=auto",)),)
    return RuleFinding("checkpoints too often", evidence, candidates, at_most=_without(share))


def logs_too_often(facts: Facts) -> RuleFinding | None:
    """Rows of metrics take a noticeable part of the time."""
    share, every = facts.share("logging"), facts.values.get("log_every")
    if share is None or share < PART or not isinstance(every, int):
        return None
    return RuleFinding(
        "logs too often",
        f"{spent_on('logging', share)} (log_every={every})",
        (Candidate((f"log_every={10 * every if every >= 10 else 50}",)),),
        at_most=_without(share),
    )


def evaluates_too_often(facts: Facts) -> RuleFinding | None:
    """Evaluations take more time than a fifth."""
    share, every = facts.share("evaluation"), facts.evidence.num_evaluations
    updates = facts.evidence.updates
    if share is None or share < EVALUATION or not updates or every is None or every < SEVERAL:
        return None
    apart = max(1, round(updates / every))
    return RuleFinding(
        "evaluates too often",
        f"{spent_on('evaluation', share)}: {every} of them, one every {apart} updates",
        by_hand=f"use evaluate.every={5 * apart}; it decides which checkpoints the best one is chosen from",
        at_most=_without(share * 0.8),
    )


def slow_hooks(facts: Facts) -> RuleFinding | None:
    """Something between updates that is none of the runner's takes a noticeable part of the time."""
    share, of_the_task = facts.share("hooks"), facts.evidence.has_begin_update
    if share is None or share < WAIT or of_the_task is None:
        return None
    return RuleFinding(
        "slow hooks",
        f"{spent_on('hooks', share)}, apart from metrics, evaluations and checkpoints",
        by_hand="look at what begin_update of the task does"
        if of_the_task
        else "see what runs between updates: accel-run profile shows it",
        at_most=_without(share),
    )


def hidden_waits(facts: Facts) -> RuleFinding | None:
    """The task reads values of tensors in every update: each time the host waits for the GPU."""
    waits = [wait for wait in facts.probe.get("waits") or () if wait["times"] >= 1]
    if not waits:
        return None
    where = place(max(waits, key=lambda wait: wait["times"]))
    num = sum(wait["times"] for wait in waits)
    times = "once" if num == 1 else f"{num:,.0f} times"
    return RuleFinding(
        "hidden device waits",
        f"{where} reads values of tensors {times} in an update: the host waits there until the GPU is idle",
        by_hand=f"keep it a tensor in {where}: sum on the device, and read it once in many updates",
        at_most=_if_never_idle(facts),
    )


# ---------------------------------------------------------------- arithmetic


def tiny_passes(facts: Facts) -> RuleFinding | None:
    """An update is cut into more passes than the memory asks for."""
    micro, passes = facts.evidence.micro_batch_size, facts.evidence.accumulation_steps
    whole = facts.evidence.global_batch_size
    if not micro or not passes or passes < 2 or not whole or facts.probe.get("has_batch_norm"):
        return None  # batch norms take their statistics from a pass: another size computes something else
    share_of_rank = min(whole, micro * passes)
    sizes = [size for size in (2 * micro, 4 * micro, 8 * micro, share_of_rank) if size <= share_of_rank]
    peak, total = facts.evidence.device_peak_gib, facts.evidence.device_total_gib
    beside = "" if peak is None or total is None else f"; at most {peak / total:.0%} of the GPU's memory was in use"
    if peak and total:
        sizes = [size for size in sizes if peak * size / micro < 2 * total]  # not all of it grows with the batch
    fitting = sorted({size for size in sizes if share_of_rank % size == 0}, reverse=True)
    return RuleFinding(
        "tiny micro-batches",
        f"an update of {whole} samples is made in {passes} passes of {micro}{beside}",
        tuple(Candidate((f"micro_batch_size={size}",)) for size in fitting[:3]),
    )


def memory_left(facts: Facts) -> RuleFinding | None:
    """Activations are computed twice although the memory would hold them."""
    peak, total = facts.evidence.device_peak_reserved_gib, facts.evidence.device_total_gib
    kept = facts.values.get("memory")
    if not peak or not total or peak / total > ROOM_LEFT or kept not in ("checkpoint", "selective"):
        return None
    less = [Candidate(("memory=selective",))] if kept == "checkpoint" else []
    return RuleFinding(
        "memory left",
        f"memory={kept} computes activations again, but only {peak / total:.0%} of the GPU's memory was in use",
        (Candidate(("memory=none",)), *less),
    )


def allocator_retries(facts: Facts) -> RuleFinding | None:
    """The GPU's memory is so full or so scattered that the allocator had to begin anew."""
    retries, micro = facts.evidence.num_alloc_retries, facts.evidence.micro_batch_size
    if not retries:
        return None
    scattered = facts.evidence.fragmentation
    beside = "" if scattered is None else f"; {scattered:.0%} of what is reserved lies in pieces that cannot be used"
    may_be_less = micro and micro % 2 == 0 and not facts.probe.get("has_batch_norm")
    smaller = [Candidate((f"micro_batch_size={micro // 2}",))] if micro and may_be_less else []
    return RuleFinding(
        "allocator retries",
        f"torch's allocator gave everything back and asked the driver again {retries} times{beside}",
        (Candidate(("memory.allocator=expandable_segments:True",)), *smaller),
    )


def precision(facts: Facts) -> RuleFinding | None:
    """The device computes faster in another format than the one in use."""
    used, gpu = facts.values.get("precision"), facts.gpu
    if facts.on_cpu():
        if used == "fp32" and facts.cpu.native_bf16:
            flags = ", ".join(flag for flag in facts.cpu.flags if "bf16" in flag)
            return RuleFinding(
                "precision", f"precision=fp32, and this CPU multiplies bfloat16 itself ({flags})", _options("bf16")
            )
        if used in ("bf16", "fp16") and not (used == "bf16" and facts.cpu.native_bf16):
            return RuleFinding("precision", f"precision={used}, which this CPU only emulates", _options("fp32"))
        return None
    if gpu is None or gpu.kind != "cuda" or not (gpu.capability or gpu.architecture):
        return None
    able = f"{gpu.name} has {gpu.generation}"
    if used in ("fp32", "tf32") and gpu.native_bf16:
        others = ("bf16", "tf32") if used == "fp32" and gpu.native_tf32 else ("bf16",)
        return RuleFinding(
            "precision", f"precision={used}, and {able}: its tensor cores take bfloat16", _options(*others)
        )
    if used == "fp32" and gpu.fp16_tensor_cores:
        return RuleFinding("precision", f"precision=fp32, and {able}: its tensor cores take float16", _options("fp16"))
    if used == "bf16" and not gpu.native_bf16:
        return RuleFinding("precision", f"precision=bf16, which is emulated: {able}", _options("fp16", "fp32"))
    return None


def odd_sizes(facts: Facts) -> RuleFinding | None:
    """Matrices have sizes that miss the fast kernels."""
    lines = facts.evidence.odd_sizes
    if not lines:
        return None
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return RuleFinding("odd sizes", f"{lines[0]}{more}", by_hand="round these sizes up in the model, where it is yours")


def idle_gpu(facts: Facts) -> RuleFinding | None:
    """The GPU has little to do although data is there: its kernels are small, and the host launches them too slowly."""
    util, wait = facts.monitor.get("gpu0/util"), facts.share("data")
    if facts.on_cpu() is not False or util is None or util >= IDLE_PERCENT or (wait is not None and wait >= WAIT):
        return None
    if facts.values.get("compile", "off") != "off":
        return None
    return RuleFinding(
        "idle GPU",
        f"the GPU was busy {util:.0f} % of the time, and data was there: the host is behind with its launches",
        (Candidate(("compile=reduce-overhead",)), Candidate(("compile=default",)), Candidate(("compile=regional",))),
        at_most=100 / max(util, 1.0),
    )


def too_many_threads(facts: Facts) -> RuleFinding | None:
    """More threads compute than there are cores, or so little is computed that they get in each other's way."""
    threads, cores, update_ms = facts.evidence.num_threads, facts.cpu.logical_cores, facts.update_ms()
    if not threads or not facts.on_cpu():
        return None
    is_small = update_ms is not None and update_ms < SMALL_UPDATE_MS and threads > 1
    if threads <= cores and not is_small:
        return None
    fewer = sorted({1, max(1, cores // 2), cores} - {threads})
    why = f"an update takes {update_ms:.2g} ms" if threads <= cores else f"there are {_cores(cores)}"
    return RuleFinding(
        "too many threads",
        f"{threads} threads compute, and {why}",
        tuple(Candidate((f"backend.threads={n}",)) for n in reversed(fewer) if n < threads),
    )


def small_workload(facts: Facts) -> RuleFinding | None:
    """There is so little to compute in an update that the other device may be faster."""
    update_ms, util = facts.update_ms(), facts.monitor.get("gpu0/util")
    if facts.on_cpu() and facts.gpus:
        return RuleFinding(
            "device",
            f"the CPU trains, and {facts.gpus[0].name} is here",
            (Candidate((f"device={facts.gpus[0].torch_name}",)),),
        )
    if facts.on_cpu() is not False or update_ms is None or update_ms > SMALL_UPDATE_MS:
        return None
    if util is not None and util > 30:
        return None
    beside = "" if util is None else f", and the GPU was busy {util:.0f} % of the time"
    return RuleFinding(
        "device", f"an update takes {update_ms:.2g} ms{beside}: a small workload", (Candidate(("device=cpu",)),)
    )


def throttling(facts: Facts) -> RuleFinding | None:
    """The GPU was slowed down by its temperature or its power limit: no setting helps."""
    slowed = {reason: share for reason, share in facts.throttled.items() if share >= THROTTLED}
    if not slowed:
        return None
    told = ", ".join(f"{reason} in {share:.0%}" for reason, share in slowed.items())
    return RuleFinding(
        "throttling", f"the GPU was slowed down: {told} of the time", by_hand="see to its cooling or its power limit"
    )


# ---------------------------------------------------------------- helpers


def place(line: Mapping[str, Any]) -> str:
    """Return a line of a file as editors take it, from the folder where the command was given where it is below it."""
    file = Path(line["file"])
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{line['line']}"


def worker_counts(cores: int, *, reads_wait: bool) -> list[int]:
    """Return numbers of data workers worth trying, the most promising first.

    reads_wait  who reads waits for a disk or a network most of the time: more workers than cores can do so
    """
    usual = {1, 2, max(1, cores // 2), min(8, max(1, cores - 1))}
    wanted, likely = (usual | {4, 8}, max(4, 2 * cores)) if reads_wait else (usual, cores)
    return sorted(wanted, key=lambda num: (abs(math.log2(num / likely)), -num))


def cache(facts: Facts) -> tuple[list[tuple[str, ...]], str]:
    """Return the override that keeps samples in memory, where they are the same each time and fit, and words for it."""
    probe, num, epochs = facts.probe, facts.evidence.num_samples, facts.evidence.epochs
    if epochs is not None and epochs <= 1:  # each sample is read once: kept ones are never asked for
        return [], ""
    if facts.values.get("dataloader.cache") != "none" or not num or not probe.get("same_when_read_again"):
        return [], ""
    nbytes = num * probe.get("sample_bytes", 0)
    if probe.get("changes_with_epoch") or not nbytes or nbytes > CACHE_SHARE * facts.cpu.memory_bytes:
        return [], ""
    return [("dataloader.cache=memory",)], f"; all samples are {nbytes / 2**20:,.1f} MiB, and the same each time"


def _options(*names: str) -> tuple[Candidate, ...]:
    return tuple(Candidate((f"precision={name}",)) for name in names)


def _if_never_idle(facts: Facts) -> float | None:
    """Return how many times as fast updates would be on a GPU that is always busy; None where nobody has looked.

    While the host waits for the GPU, the GPU computes what must be computed anyway: only where it idles is time lost.
    """
    util = facts.monitor.get("gpu0/util")
    return None if util is None else 100 / max(util, 1.0)


def _without(share: float) -> float:
    """Return how many times as fast it would be without this share of the time."""
    return 1.0 / max(0.01, 1.0 - share)


def _cores(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"


RULES: Mapping[str, Rule] = {
    "data wait": data_wait,
    "slow transform": slow_transform,
    "too many workers": too_many_workers,
    "unpinned": unpinned,
    "varying shapes": varying_shapes,
    "checkpoints too often": saves_too_often,
    "logs too often": logs_too_often,
    "evaluates too often": evaluates_too_often,
    "slow hooks": slow_hooks,
    "hidden device waits": hidden_waits,
    "tiny micro-batches": tiny_passes,
    "memory left": memory_left,
    "allocator retries": allocator_retries,
    "precision": precision,
    "odd sizes": odd_sizes,
    "idle GPU": idle_gpu,
    "too many threads": too_many_threads,
    "device": small_workload,
    "throttling": throttling,
}
