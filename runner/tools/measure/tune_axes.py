"""What tune tries on each axis: settings that change how fast updates are, and not what they compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from runner.base.errors import AccelRunError
from runner.config.configuration import Configuration, compose
from runner.config.options import function_of, options_of
from runner.config.request import Request, merge_overrides
from runner.plan.inventory import Inventory
from runner.plan.planner import make_plan
from runner.tools.measure.facts import Facts
from runner.tools.measure.rules import BUSY, Candidate, cache, worker_counts
from runner.tools.measure.statistics import NEGLIGIBLE

Words = tuple[str, ...]


@dataclass(frozen=True)
class TuneCandidate:
    """What an axis has to try, and what it leaves: an axis or a setting -> why."""

    candidates: tuple[Candidate, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)


def reason_of(error: AccelRunError) -> str:
    return " ".join(str(error).split())


@dataclass(frozen=True)
class TuneTarget:
    """The training that is tuned, and where.

    asked    the configuration as it was asked for, whose words are not touched
    phase    whose updates are measured
    attends  the model calls torch's attention
    """

    request: Request
    asked: Configuration
    inventory: Inventory
    facts: Facts
    phase: str
    attends: bool

    def offers(self, name: str) -> Callable[[Words], TuneCandidate]:
        """Return what the axis of that name offers beside settings already found."""
        propose = AXES[name][0]

        def offer(words: Words) -> TuneCandidate:
            before = self.values(words)
            proposed = propose(TuneBaseline(self, before))
            if isinstance(proposed, str):
                return TuneCandidate(left={name: proposed})
            left, candidates = dict[str, str](), []
            for candidate in map(Candidate, proposed):
                why_not = self._why_not(candidate, words, before)
                if why_not:
                    left[candidate.name] = why_not
                else:
                    candidates.append(candidate)
            return TuneCandidate(tuple(candidates[:MOST]), left)

        return offer

    def values(self, words: Words) -> Mapping[str, Any]:
        """Return every key that the plan decides with these words. Raises ConfigError where they cannot be."""
        overrides = merge_overrides(self.request.overrides, words)
        return make_plan(compose(dataclasses.replace(self.request, overrides=overrides)), self.inventory).values()

    def _why_not(self, candidate: Candidate, words: Words, before: Mapping[str, Any]) -> str:
        """Return why it is not to be tried; empty where it is."""
        for word in candidate.overrides:
            key, _, value = word.partition("=")
            for said, source in self.asked.sources.items():
                touched = said == key or (said.startswith(f"{key}.") and str(before.get(key)) != value)
                if touched and source == "command line":
                    return f"{said} was said by the {source}: it stays"
        try:
            after = self.values(merge_overrides(words, candidate.overrides))
        except AccelRunError as error:
            return reason_of(error)
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        if not changed:
            return "the plan makes the same of it here"
        others = sorted(key for key in changed if not is_mechanics(key))
        return f"would change {', '.join(others)}, which is not for speed alone" if others else ""


@dataclass(frozen=True)
class TuneBaseline:
    """What proposals follow from: the place, and every key of the plan with what was found so far."""

    place: TuneTarget
    values: Mapping[str, Any]

    @property
    def facts(self) -> Facts:
        """What was measured of the settings as they are."""
        return self.place.facts

    @property
    def on_gpu(self) -> bool:
        """True where a CUDA device trains."""
        return self.facts.gpu is not None and self.facts.gpu.kind == "cuda"

    def key(self, name: str) -> str:
        """Return the whole key of a setting: that of the measured phase where phases have their own."""
        of_phase = f"phase.{self.place.phase}.{name}"
        return of_phase if of_phase in self.values else name

    def get(self, name: str) -> Any:
        """Return the value of a setting, that of the measured phase where it has its own; None: there is none."""
        return self.values.get(self.key(name))

    def options(self, group: str) -> list[str]:
        """Return the options of a group that are not in use; what `auto` stands for is."""
        here = options_of(group, self.place.request.config_dir)
        return [name for name in here if name not in ("auto", self.get(group))]

    def choices(self, group: str) -> list[Words]:
        """Return a proposal for each of these options."""
        return [(f"{group}={name}",) for name in self.options(group)]

    def literals(self, group: str, key: str) -> list[str]:
        """Return the values that a key of the chosen option can have by its type, `auto` and the one in use aside."""
        signature = function_of(group, str(self.get(group)))
        known = get_args(signature.keys[key].type) if signature and key in signature.keys else ()
        return [value for value in known if value not in ("auto", self.get(f"{group}.{key}"))]


Proposed = Iterable[Words] | str


def is_mechanics(key: str) -> bool:
    """Tell whether a key of the plan decides how fast updates are made and not what they compute."""
    own = key.split(".", 2)[2] if key.startswith("phase.") else key
    return own in MECHANICS or own.partition(".")[0] in MECHANIC_GROUPS


def _kept_samples(ground: TuneBaseline) -> Proposed:
    """Samples are kept once they are read, where that changes nothing."""
    if not cache(ground.facts)[0]:
        return "samples are read once, are not known to be the same each time, or do not fit into memory"
    return [
        (f"dataloader.cache={where}",)
        for where in ground.literals("dataloader", "cache")
        if ground.on_gpu or where != "device"
    ]


def _readers(ground: TuneBaseline) -> Proposed:
    """Worker processes in other numbers, or other options of the loader."""
    if ground.get("dataloader.cache") != "none":
        return "samples are kept: nobody reads"
    loader, share = ground.get("dataloader"), ground.facts.share("data")
    workers = 1 if loader == "thread" else ground.get("dataloader.num_workers")
    if workers == 0 and share is not None and share < NEGLIGIBLE:
        return f"updates wait for data {share:.1%} of the time"
    counts = worker_counts(ground.facts.cpu.logical_cores, reads_wait=ground.facts.probe.get("sample_busy", 1.0) < BUSY)
    proposed: list[Words] = []
    for option in (loader, *ground.options("dataloader")):
        if option == "thread":  # without a cache it is one worker process, which is among the numbers
            continue
        signature, chosen = function_of("dataloader", option), (f"dataloader={option}",)
        own: Words = () if option == loader else chosen
        if signature is not None and "num_workers" in signature.keys:
            is_as_now = not own or loader == "thread"
            others = [num for num in (*counts, 0) if not (is_as_now and num == workers)]
            proposed += [(*own, f"dataloader.num_workers={num}") for num in others]
        elif own:
            proposed.append(own)
    return proposed


def _read_ahead(ground: TuneBaseline) -> Proposed:
    """More batches read ahead by those who read."""
    key = "dataloader.prefetch_factor" if ground.get("dataloader.num_workers") else "dataloader.depth"
    now = ground.get(key)
    return "nobody reads ahead" if now is None else [(f"{key}={2 * now}",), (f"{key}={4 * now}",)]


def _copies(ground: TuneBaseline) -> Proposed:
    """Copies to the GPU from page-locked memory, on a stream of their own, or neither."""
    if not ground.on_gpu:
        return "no GPU"
    pinned = str(not ground.get("dataloader.pin_memory")).lower()
    return [*ground.choices("prefetch"), (f"dataloader.pin_memory={pinned}",)]


def _threads(ground: TuneBaseline) -> Proposed:
    """Fewer or more threads that compute."""
    if not ground.facts.on_cpu():
        return "the GPU computes"
    cpu, now = ground.facts.cpu, ground.facts.evidence.num_threads
    counts = {1, max(1, cpu.logical_cores // 2), min(cpu.physical_cores, cpu.logical_cores), cpu.logical_cores}
    return [(f"backend.threads={num}",) for num in sorted(counts - {now}, reverse=True)]


def _precision(ground: TuneBaseline) -> Proposed:
    """Formats that the device computes in itself; where losses do not agree, none is adopted."""
    if ground.facts.on_cpu():
        native = {"fp32", "bf16"} if ground.facts.cpu.native_bf16 else {"fp32"}
        found = [words for words in ground.choices("precision") if words[0].partition("=")[2] in native]
        return found or "this CPU multiplies float32 alone"
    return ground.choices("precision")


def _passes(ground: TuneBaseline) -> Proposed:
    """An update cut into more or fewer passes."""
    evidence = ground.facts.evidence
    micro, passes, whole = evidence.micro_batch_size, evidence.accumulation_steps, evidence.global_batch_size
    if ground.facts.probe.get("has_batch_norm"):
        return "batch norms take their statistics from a pass: another size computes something else"
    if not micro or not passes or not whole:
        return "the size of a pass is not known"
    share = min(whole, micro * passes)
    sizes = [share >> shift for shift in range(share.bit_length()) if share % (share >> shift) == 0]
    near = sorted((size for size in sizes if size != micro), key=lambda size: (abs(math.log2(size / micro)), -size))
    return [(f"{ground.key('micro_batch_size')}={size}",) for size in near]


def _optimizer_kernels(ground: TuneBaseline) -> Proposed:
    """Other kernels of the same optimizer: the rule of the update stays."""
    return [(f"{ground.key('optimizer.kernel')}={name}",) for name in ground.literals("optimizer", "kernel")]


def _attention(ground: TuneBaseline) -> Proposed:
    """Other kernels of attention."""
    is_seen = ground.place.attends or ground.facts.values.get("compile") != "off"
    return ground.choices("attention") if is_seen else "the model calls no attention of torch"


def _kernel_search(ground: TuneBaseline) -> Proposed:
    """Whether cuDNN searches for kernels."""
    if not ground.on_gpu:
        return "cuDNN runs on GPUs alone"
    if ground.get("backend") == DETERMINISTIC:
        return "deterministic kernels were asked for: they stay"
    return [words for words in ground.choices("backend") if words != (f"backend={DETERMINISTIC}",)]


def _kept_activations(ground: TuneBaseline) -> Proposed:
    """Activations are kept instead of computed again, where the memory holds them."""
    return "every activation is kept already" if ground.get("memory") == "none" else ground.choices("memory")


def _compiled(ground: TuneBaseline) -> Proposed:
    """The model compiled in other ways, or not; what takes minutes to begin comes last."""
    return sorted(ground.choices("compile"), key=lambda words: words == (f"compile={SLOWEST}",))


MOST = 7  # candidates of an axis: as many rungs as there are starts worth making


DETERMINISTIC, SLOWEST = "deterministic", "max-autotune"


# What may change: the rest is the mathematics, and promises of another kind.
MECHANIC_GROUPS = ("precision", "prefetch", "compile", "attention", "memory", "backend")


MECHANICS = (
    "micro_batch_size", "accumulation_steps", "optimizer.kernel", "dataloader", "dataloader.num_workers",
    "dataloader.pin_memory", "dataloader.prefetch_factor", "dataloader.start_method", "dataloader.depth",
    "dataloader.cache",
)  # fmt: skip


# name -> what it proposes, the weight of its share of the time, whether one of its cells may fill the memory.
# Compiling comes last: it takes long to begin, and each axis after it would pay that again.
AXES: Mapping[str, tuple[Callable[[TuneBaseline], Proposed], float, bool]] = {
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
