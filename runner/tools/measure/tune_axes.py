"""The axes of `accel-run tune`, each a group of alternative settings of the mechanics.

Mechanics are settings of how an update is computed, such as the number of data workers. They change its speed, and its
result by rounding at most; all other settings belong to the mathematics of training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from runner.base.errors import AccelRunError
from runner.config.configuration import Configuration, compose
from runner.config.options import find_signature, list_options
from runner.config.request import Request, merge_overrides
from runner.plan.inventory import Inventory
from runner.plan.planner import make_plan
from runner.tools.measure.facts import Facts
from runner.tools.measure.rules import CPU_BOUND_SHARE, cache_override, suggest_worker_counts
from runner.tools.measure.selection import Candidate
from runner.tools.measure.statistics import NEGLIGIBLE

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Offer:
    """The candidates of an axis.

    skipped  axis or setting that is not tried -> reason
    """

    candidates: tuple[Candidate, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneTarget:
    """The training run that is tuned, and the machine.

    configuration  configuration before tuning
    phase          phase whose updates are measured
    has_attention  whether the model calls torch's attention
    """

    request: Request
    configuration: Configuration
    inventory: Inventory
    facts: Facts
    phase: str
    has_attention: bool

    def offers(self, name: str) -> Callable[[Overrides], Offer]:
        """Return a function from the adopted settings to the candidates of an axis."""
        propose = AXES[name][0]

        def offer(overrides: Overrides) -> Offer:
            before = self.values(overrides)
            proposed = propose(TuneState(self, before))
            if isinstance(proposed, str):
                return Offer(skipped={name: proposed})
            skipped, candidates = dict[str, str](), []
            for candidate in map(Candidate, proposed):
                why_not = self._why_not(candidate, overrides, before)
                if why_not:
                    skipped[candidate.name] = why_not
                else:
                    candidates.append(candidate)
            return Offer(tuple(candidates[:MAX_CANDIDATES]), skipped)

        return offer

    def values(self, overrides: Overrides) -> Mapping[str, Any]:
        """Return all values of the plan with these overrides. Raises ConfigError if they are invalid."""
        merged = merge_overrides(self.request.overrides, overrides)
        return make_plan(compose(dataclasses.replace(self.request, overrides=merged)), self.inventory).values()

    def _why_not(self, candidate: Candidate, overrides: Overrides, before: Mapping[str, Any]) -> str:
        """Return the reason for skipping a candidate; empty to try it."""
        for override in candidate.overrides:
            key, _, value = override.partition("=")
            for set_key, source in self.configuration.sources.items():
                is_affected = set_key == key or (set_key.startswith(f"{key}.") and str(before.get(key)) != value)
                if is_affected and source == "command line":
                    return f"{set_key} is set on the {source}: it is not changed"
        try:
            after = self.values(merge_overrides(overrides, candidate.overrides))
        except AccelRunError as error:
            return error.problems[0].what  # without its fix, because other candidates are tried
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        if not changed:
            return "it does not change the plan on this machine"
        others = sorted(key for key in changed if not is_mechanics(key))
        return f"would change {', '.join(others)}, which affects more than speed" if others else ""


@dataclass(frozen=True)
class TuneState:
    """The input of proposals: the training, and the values of its plan with the settings adopted so far."""

    target: TuneTarget
    values: Mapping[str, Any]

    @property
    def facts(self) -> Facts:
        """Measurements of the original settings."""
        return self.target.facts

    @property
    def on_gpu(self) -> bool:
        """True if the training runs on a CUDA device."""
        return self.facts.gpu is not None and self.facts.gpu.kind == "cuda"

    def key(self, name: str) -> str:
        """Return `phase.PHASE.NAME` if the measured phase has this setting, otherwise NAME."""
        phase_key = f"phase.{self.target.phase}.{name}"
        return phase_key if phase_key in self.values else name

    def get(self, name: str) -> Any:
        """Return the value of a setting; None if it does not exist."""
        return self.values.get(self.key(name))

    def options(self, group: str) -> list[str]:
        """Return the options of a group that are not in use."""
        available = list_options(group, self.target.request.config_dir)
        return [name for name in available if name not in ("auto", self.get(group))]

    def choices(self, group: str) -> list[Overrides]:
        """Return an override for each option of a group that is not in use."""
        return [(f"{group}={name}",) for name in self.options(group)]

    def literals(self, group: str, key: str) -> list[str]:
        """Return the values, besides the current one and `auto`, that a Literal key of the current option may have."""
        signature = find_signature(group, str(self.get(group)))
        values = get_args(signature.keys[key].type) if signature and key in signature.keys else ()
        return [value for value in values if value not in ("auto", self.get(f"{group}.{key}"))]


Proposed = Iterable[Overrides] | str


def is_mechanics(key: str) -> bool:
    """Return whether a key belongs to the mechanics. Comparisons check the losses, too."""
    name = key.split(".", 2)[2] if key.startswith("phase.") else key
    return name in MECHANICS or name.partition(".")[0] in MECHANICS_GROUPS


def _propose_caches(state: TuneState) -> Proposed:
    """Propose to cache samples, if reading them again gives the same samples."""
    if not cache_override(state.facts)[0]:
        return "samples are read once, are not known to be the same each time, or do not fit into memory"
    return [
        (f"dataloader.cache={cache}",)
        for cache in state.literals("dataloader", "cache")
        if state.on_gpu or cache != "device"
    ]


def _propose_loaders(state: TuneState) -> Proposed:
    """Propose other numbers of worker processes, and other loaders."""
    if state.get("dataloader.cache") != "none":
        return "samples are cached: nothing is read"
    loader, share = state.get("dataloader"), state.facts.share("data")
    workers = 1 if loader == "thread" else state.get("dataloader.num_workers")
    if workers == 0 and share is not None and share < NEGLIGIBLE:
        return f"updates wait for data {share:.1%} of the time"
    is_io_bound = state.facts.probe.get("sample_busy", 1.0) < CPU_BOUND_SHARE
    counts = suggest_worker_counts(state.facts.cpu.logical_cores, is_io_bound=is_io_bound)
    proposed: list[Overrides] = []
    for option in (loader, *state.options("dataloader")):
        if option == "thread":  # without a cache, it is equivalent to one worker process
            continue
        signature = find_signature("dataloader", option)
        overrides: Overrides = () if option == loader else (f"dataloader={option}",)
        if signature is not None and "num_workers" in signature.keys:
            is_current = not overrides or loader == "thread"
            others = [num for num in (*counts, 0) if not (is_current and num == workers)]
            proposed += [(*overrides, f"dataloader.num_workers={num}") for num in others]
        elif overrides:
            proposed.append(overrides)
    return proposed


def _propose_prefetching(state: TuneState) -> Proposed:
    key = "dataloader.prefetch_factor" if state.get("dataloader.num_workers") else "dataloader.depth"
    current = state.get(key)
    return "nothing is prefetched" if current is None else [(f"{key}={2 * current}",), (f"{key}={4 * current}",)]


def _propose_copies(state: TuneState) -> Proposed:
    """Propose to copy to the GPU from page-locked memory or on a separate stream, or to stop doing so."""
    if not state.on_gpu:
        return "no GPU"
    pinned = str(not state.get("dataloader.pin_memory")).lower()
    return [*state.choices("prefetch"), (f"dataloader.pin_memory={pinned}",)]


def _propose_threads(state: TuneState) -> Proposed:
    if not state.facts.on_cpu():
        return "the run computes on a GPU"
    cpu, current = state.facts.cpu, state.facts.evidence.num_threads
    counts = {1, max(1, cpu.logical_cores // 2), min(cpu.physical_cores, cpu.logical_cores), cpu.logical_cores}
    return [(f"backend.threads={num}",) for num in sorted(counts - {current}, reverse=True)]


def _propose_precisions(state: TuneState) -> Proposed:
    """Propose number formats; on a CPU, only those that it supports natively.

    A format whose losses differ by more than its tolerance is rejected after it is measured.
    """
    if state.facts.on_cpu():
        native = {"fp32", "bf16"} if state.facts.cpu.native_bf16 else {"fp32"}
        formats = [overrides for overrides in state.choices("precision") if overrides[0].partition("=")[2] in native]
        return formats or "this CPU supports only float32 natively"
    return state.choices("precision")


def _propose_micro_batches(state: TuneState) -> Proposed:
    evidence = state.facts.evidence
    micro, steps, total = evidence.micro_batch_size, evidence.accumulation_steps, evidence.global_batch_size
    if state.facts.probe.get("has_batch_norm"):
        return "the statistics of batch norms depend on the micro-batch: a different size changes the results"
    if not micro or not steps or not total:
        return "the micro-batch size is unknown"
    share = min(total, micro * steps)
    sizes = [share >> shift for shift in range(share.bit_length()) if share % (share >> shift) == 0]
    near = sorted((size for size in sizes if size != micro), key=lambda size: (abs(math.log2(size / micro)), -size))
    return [(f"{state.key('micro_batch_size')}={size}",) for size in near]


def _propose_optimizer_kernels(state: TuneState) -> Proposed:
    return [(f"{state.key('optimizer.kernel')}={name}",) for name in state.literals("optimizer", "kernel")]


def _propose_attention(state: TuneState) -> Proposed:
    may_attend = (
        state.target.has_attention or state.facts.values.get("compile") != "off"
    )  # compiled models hide the calls
    return state.choices("attention") if may_attend else "the model does not call torch's attention"


def _propose_kernel_search(state: TuneState) -> Proposed:
    if not state.on_gpu:
        return "cuDNN runs only on GPUs"
    if state.get("backend") == DETERMINISTIC:
        return "deterministic kernels are requested"
    return [overrides for overrides in state.choices("backend") if overrides != (f"backend={DETERMINISTIC}",)]


def _propose_keeping_activations(state: TuneState) -> Proposed:
    """Propose to keep activations instead of recomputing them; if they do not fit in memory, the candidate fails."""
    return "activations are not recomputed" if state.get("memory") == "none" else state.choices("memory")


def _propose_compile_modes(state: TuneState) -> Proposed:
    """Propose other compile modes, or none. The mode that compiles longest comes last."""
    return sorted(state.choices("compile"), key=lambda overrides: overrides == (f"compile={SLOWEST}",))


MAX_CANDIDATES = 7  # maximum number of candidates of an axis
DETERMINISTIC, SLOWEST = "deterministic", "max-autotune"
# The mechanics: only these settings may change.
MECHANICS_GROUPS = ("precision", "prefetch", "compile", "attention", "memory", "backend")
MECHANICS = (
    "micro_batch_size", "accumulation_steps", "optimizer.kernel", "dataloader", "dataloader.num_workers",
    "dataloader.workers_above_ms", "dataloader.pin_memory", "dataloader.prefetch_factor",
    "dataloader.start_method", "dataloader.depth", "dataloader.cache",
)  # fmt: skip


# name -> proposals, weight of its share of the time budget, whether one of its variants may fill the memory.
# Compilation comes last, because every axis after it would compile again.
AXES: Mapping[str, tuple[Callable[[TuneState], Proposed], float, bool]] = {
    "kept samples": (_propose_caches, 1.0, False),
    "readers": (_propose_loaders, 2.0, False),
    "read ahead": (_propose_prefetching, 1.0, False),
    "copies": (_propose_copies, 1.0, False),
    "threads": (_propose_threads, 1.0, False),
    "precision": (_propose_precisions, 1.0, False),
    "kept activations": (_propose_keeping_activations, 1.0, True),
    "micro-batch": (_propose_micro_batches, 2.0, True),
    "optimizer kernels": (_propose_optimizer_kernels, 1.0, False),
    "attention": (_propose_attention, 1.0, False),
    "kernel search": (_propose_kernel_search, 1.0, False),
    "compile": (_propose_compile_modes, 3.0, False),
}
