"""The axes of `accel-run tune`: settings that change how fast updates are, and not what they compute."""

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
from runner.tools.measure.candidates import Candidate
from runner.tools.measure.facts import Facts
from runner.tools.measure.rules import BUSY, cache, worker_counts
from runner.tools.measure.statistics import NEGLIGIBLE

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Offer:
    """The candidates of an axis, and what is not tried: an axis or a setting -> why."""

    candidates: tuple[Candidate, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)


def reason_of(error: AccelRunError) -> str:
    return " ".join(str(error).split())


@dataclass(frozen=True)
class TuneTarget:
    """The training that is tuned, and the machine.

    asked    the configuration as requested
    phase    whose updates are measured
    attends  the model calls torch's attention
    """

    request: Request
    asked: Configuration
    inventory: Inventory
    facts: Facts
    phase: str
    attends: bool

    def offers(self, name: str) -> Callable[[Overrides], Offer]:
        """Return a function from settings already found to the candidates of an axis."""
        propose = AXES[name][0]

        def offer(overrides: Overrides) -> Offer:
            before = self.values(overrides)
            proposed = propose(TuneState(self, before))
            if isinstance(proposed, str):
                return Offer(left={name: proposed})
            left, candidates = dict[str, str](), []
            for candidate in map(Candidate, proposed):
                why_not = self._why_not(candidate, overrides, before)
                if why_not:
                    left[candidate.name] = why_not
                else:
                    candidates.append(candidate)
            return Offer(tuple(candidates[:MOST]), left)

        return offer

    def values(self, overrides: Overrides) -> Mapping[str, Any]:
        """Return every value of the plan with these overrides. Raises ConfigError if they are impossible."""
        merged = merge_overrides(self.request.overrides, overrides)
        return make_plan(compose(dataclasses.replace(self.request, overrides=merged)), self.inventory).values()

    def _why_not(self, candidate: Candidate, overrides: Overrides, before: Mapping[str, Any]) -> str:
        """Return why a candidate is not tried; empty if it is."""
        for word in candidate.overrides:
            key, _, value = word.partition("=")
            for given, source in self.asked.sources.items():
                touched = given == key or (given.startswith(f"{key}.") and str(before.get(key)) != value)
                if touched and source == "command line":
                    return f"{given} is set on the {source}: it is not changed"
        try:
            after = self.values(merge_overrides(overrides, candidate.overrides))
        except AccelRunError as error:
            return reason_of(error)
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        if not changed:
            return "the plan is the same with it here"
        others = sorted(key for key in changed if not is_mechanics(key))
        return f"would change {', '.join(others)}, which is not for speed alone" if others else ""


@dataclass(frozen=True)
class TuneState:
    """What proposals are based on: the training, and the values of the plan with what was found so far."""

    place: TuneTarget
    values: Mapping[str, Any]

    @property
    def facts(self) -> Facts:
        """What was measured with the current settings."""
        return self.place.facts

    @property
    def on_gpu(self) -> bool:
        """True where a CUDA device trains."""
        return self.facts.gpu is not None and self.facts.gpu.kind == "cuda"

    def key(self, name: str) -> str:
        """Return the key of a setting, that of the measured phase if phases set it."""
        of_phase = f"phase.{self.place.phase}.{name}"
        return of_phase if of_phase in self.values else name

    def get(self, name: str) -> Any:
        """Return the value of a setting; None: it does not exist."""
        return self.values.get(self.key(name))

    def options(self, group: str) -> list[str]:
        """Return the options of a group that are not in use."""
        here = list_options(group, self.place.request.config_dir)
        return [name for name in here if name not in ("auto", self.get(group))]

    def choices(self, group: str) -> list[Overrides]:
        """Return an override for each of these options."""
        return [(f"{group}={name}",) for name in self.options(group)]

    def literals(self, group: str, key: str) -> list[str]:
        """Return the other values of a key of the chosen option by its type, without `auto`."""
        signature = find_signature(group, str(self.get(group)))
        known = get_args(signature.keys[key].type) if signature and key in signature.keys else ()
        return [value for value in known if value not in ("auto", self.get(f"{group}.{key}"))]


Proposed = Iterable[Overrides] | str


def is_mechanics(key: str) -> bool:
    """Return whether a key decides how fast updates are, and not what they compute."""
    own = key.split(".", 2)[2] if key.startswith("phase.") else key
    return own in MECHANICS or own.partition(".")[0] in MECHANIC_GROUPS


def _kept_samples(state: TuneState) -> Proposed:
    """Cache samples, if that changes nothing."""
    if not cache(state.facts)[0]:
        return "samples are read once, are not known to be the same each time, or do not fit into memory"
    return [
        (f"dataloader.cache={where}",)
        for where in state.literals("dataloader", "cache")
        if state.on_gpu or where != "device"
    ]


def _readers(state: TuneState) -> Proposed:
    """Other numbers of worker processes, or other loaders."""
    if state.get("dataloader.cache") != "none":
        return "samples are cached: nothing is read"
    loader, share = state.get("dataloader"), state.facts.share("data")
    workers = 1 if loader == "thread" else state.get("dataloader.num_workers")
    if workers == 0 and share is not None and share < NEGLIGIBLE:
        return f"updates wait for data {share:.1%} of the time"
    counts = worker_counts(state.facts.cpu.logical_cores, reads_wait=state.facts.probe.get("sample_busy", 1.0) < BUSY)
    proposed: list[Overrides] = []
    for option in (loader, *state.options("dataloader")):
        if option == "thread":  # without a cache it is one worker process, which is among the numbers
            continue
        signature, chosen = find_signature("dataloader", option), (f"dataloader={option}",)
        own: Overrides = () if option == loader else chosen
        if signature is not None and "num_workers" in signature.keys:
            is_as_now = not own or loader == "thread"
            others = [num for num in (*counts, 0) if not (is_as_now and num == workers)]
            proposed += [(*own, f"dataloader.num_workers={num}") for num in others]
        elif own:
            proposed.append(own)
    return proposed


def _read_ahead(state: TuneState) -> Proposed:
    """Prefetch more batches."""
    key = "dataloader.prefetch_factor" if state.get("dataloader.num_workers") else "dataloader.depth"
    now = state.get(key)
    return "nothing is prefetched" if now is None else [(f"{key}={2 * now}",), (f"{key}={4 * now}",)]


def _copies(state: TuneState) -> Proposed:
    """Copy to the GPU from page-locked memory, on a separate stream, or neither."""
    if not state.on_gpu:
        return "no GPU"
    pinned = str(not state.get("dataloader.pin_memory")).lower()
    return [*state.choices("prefetch"), (f"dataloader.pin_memory={pinned}",)]


def _threads(state: TuneState) -> Proposed:
    """Fewer or more compute threads."""
    if not state.facts.on_cpu():
        return "the GPU computes"
    cpu, now = state.facts.cpu, state.facts.evidence.num_threads
    counts = {1, max(1, cpu.logical_cores // 2), min(cpu.physical_cores, cpu.logical_cores), cpu.logical_cores}
    return [(f"backend.threads={num}",) for num in sorted(counts - {now}, reverse=True)]


def _precision(state: TuneState) -> Proposed:
    """Number formats that the device supports natively; one whose losses do not agree is not adopted."""
    if state.facts.on_cpu():
        native = {"fp32", "bf16"} if state.facts.cpu.native_bf16 else {"fp32"}
        found = [overrides for overrides in state.choices("precision") if overrides[0].partition("=")[2] in native]
        return found or "this CPU supports only float32 natively"
    return state.choices("precision")


def _passes(state: TuneState) -> Proposed:
    """More or fewer micro-batches."""
    evidence = state.facts.evidence
    micro, passes, whole = evidence.micro_batch_size, evidence.accumulation_steps, evidence.global_batch_size
    if state.facts.probe.get("has_batch_norm"):
        return "the statistics of batch norms depend on the micro-batch: another size computes something else"
    if not micro or not passes or not whole:
        return "the micro-batch size is unknown"
    share = min(whole, micro * passes)
    sizes = [share >> shift for shift in range(share.bit_length()) if share % (share >> shift) == 0]
    near = sorted((size for size in sizes if size != micro), key=lambda size: (abs(math.log2(size / micro)), -size))
    return [(f"{state.key('micro_batch_size')}={size}",) for size in near]


def _optimizer_kernels(state: TuneState) -> Proposed:
    """Other kernels of the same optimizer."""
    return [(f"{state.key('optimizer.kernel')}={name}",) for name in state.literals("optimizer", "kernel")]


def _attention(state: TuneState) -> Proposed:
    """Other attention kernels."""
    is_seen = state.place.attends or state.facts.values.get("compile") != "off"
    return state.choices("attention") if is_seen else "the model does not call torch's attention"


def _kernel_search(state: TuneState) -> Proposed:
    """Let cuDNN search for kernels."""
    if not state.on_gpu:
        return "cuDNN runs only on GPUs"
    if state.get("backend") == DETERMINISTIC:
        return "deterministic kernels are requested: they stay"
    return [overrides for overrides in state.choices("backend") if overrides != (f"backend={DETERMINISTIC}",)]


def _kept_activations(state: TuneState) -> Proposed:
    """Keep activations instead of recomputing them, if they fit in memory."""
    return "every activation is kept already" if state.get("memory") == "none" else state.choices("memory")


def _compiled(state: TuneState) -> Proposed:
    """Other compile modes, or none; the slowest one comes last."""
    return sorted(state.choices("compile"), key=lambda overrides: overrides == (f"compile={SLOWEST}",))


MOST = 7  # candidates of an axis
DETERMINISTIC, SLOWEST = "deterministic", "max-autotune"
# What may change; everything else is mathematics.
MECHANIC_GROUPS = ("precision", "prefetch", "compile", "attention", "memory", "backend")
MECHANICS = (
    "micro_batch_size", "accumulation_steps", "optimizer.kernel", "dataloader", "dataloader.num_workers",
    "dataloader.pin_memory", "dataloader.prefetch_factor", "dataloader.start_method", "dataloader.depth",
    "dataloader.cache",
)  # fmt: skip


# name -> proposals, weight of its share of the time, whether one of its variants may fill the memory.
# Compiling comes last: its start takes long, and each axis after it would pay that again.
AXES: Mapping[str, tuple[Callable[[TuneState], Proposed], float, bool]] = {
    "kept samples": (_kept_samples, 1.0, False),
    "readers": (_readers, 2.0, False),
    "read ahead": (_read_ahead, 1.0, False),
    "copies": (_copies, 1.0, False),
    "threads": (_threads, 1.0, False),
    "precision": (_precision, 1.0, False),
    "kept activations": (_kept_activations, 1.0, True),
    "micro-batch": (_passes, 2.0, True),
    "optimizer kernels": (_optimizer_kernels, 1.0, False),
    "attention": (_attention, 1.0, False),
    "kernel search": (_kernel_search, 1.0, False),
    "compile": (_compiled, 3.0, False),
}
