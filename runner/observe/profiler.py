"""Profile a few updates: operators, modules, memory and synchronizations, each in separate updates.

One instrument slows down what another one measures, so they take turns: first updates that nobody looks at, then some
that are only timed, then those with an instrument. Nothing here changes a number of the run.
"""

from __future__ import annotations

import gzip
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, record_function
from torch.utils._pytree import tree_leaves

from runner.base.accelerator import accelerator_of
from runner.base.scratch import shared_folder
from runner.base.values import Count, PositiveInt, Range
from runner.observe import trace_file
from runner.observe.device_waits import IsOfTask, Waits, waits
from runner.observe.module_times import ModuleTimes, tensors_in
from runner.observe.profile_report import AS_IT_IS, Findings, Kernel, Operator, files, report
from runner.observe.trace_file import TraceFile

Keep = Callable[
    [str, bytes], Path
]  # the file of this name is in the run directory, with this content; returns its path


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    folder      of its files in profile/, ending with a slash; "" for the only phase
    ranks       how many there are; this is the first
    is_of_task  tells of a file whether it is the task's
    settle      waits until no word to the other ranks is under way
    """

    phase: str
    folder: str
    model: nn.Module
    device: torch.device
    ranks: int
    is_of_task: IsOfTask
    settle: Callable[[], None]


class Profiler:
    """Is told when a phase begins and of each update; this one does nothing.

    limit   updates after which the phase ends
    only    the run is for the profile alone: it neither evaluates nor saves
    note    a line for the end of the run, "" where nothing was profiled
    report  what was found, to be read
    """

    limit: float = math.inf
    only = False
    note = ""
    report = ""

    def begin(self, subject: Subject, batches: Iterator[Any], total: int) -> Iterator[Any]:
        """A phase of `total` more updates begins; return its batches, which may be looked at on their way."""
        return batches

    def __call__(self, update: int) -> None:
        """Note that an update is done."""

    def aside(self) -> AbstractContextManager[object]:
        """Return a context that is no part of an update: an evaluation or a save."""
        return nullcontext()

    def close(self) -> None:
        """The phase is over, or broken off: write what was recorded."""


class OtherRank(Profiler):
    """Ends each phase together with the rank that records."""

    def __init__(self, limit: float) -> None:
        self.limit, self.only = limit, limit < math.inf


class Trace(Profiler):
    """Takes its instruments through the updates of a phase, one after the other, and then writes what they say."""

    def __init__(self, keep: Keep, options: TraceOptions) -> None:
        self.keep, self.options, self.only = keep, options, options.only
        self.limit = options.num_updates if options.only else math.inf
        self._open: Session | None = None
        self.note = self.report = ""

    def begin(self, subject: Subject, batches: Iterator[Any], total: int) -> Iterator[Any]:
        options = self.options.fitted(total)
        self._open = Session(subject, options, shortened=options != self.options)
        return self._open.fed(batches)

    def __call__(self, update: int) -> None:
        if self._open is not None and self._open.update():
            self.close()

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._open is None else self._open.aside()

    def close(self) -> None:
        if self._open is None:
            return
        session, self._open = self._open, None
        skipped = session.num_skipped
        findings = session.close()
        if findings is None:
            self.report = self.report or (f"nothing was profiled: broken off after {skipped}" if skipped else "")
            return
        folder = session.subject.folder
        for name, content in files(findings).items():
            path = self.keep(f"{folder}{name}", content)
        text = report(findings, path.parent)
        self.keep(f"{folder}report.txt", text.encode())
        self.report = f"{self.report}\n\n{text}" if self.report else text
        self.note = f"profile: {path.parent}/report.txt; trace.json.gz there opens in ui.perfetto.dev"


@dataclass(frozen=True)
class TraceOptions:
    """The keys of `profiler=trace`."""

    skip: int
    updates: int
    depth: int
    sort_by: str
    with_stack: bool
    record_shapes: bool
    only: bool

    @property
    def num_updates(self) -> int:
        """Updates that all of it takes."""
        return self.skip + 3 * self.updates + _FEW

    def fitted(self, total: int) -> TraceOptions:
        """Return options that `total` updates are enough for, where there is any way."""
        if self.num_updates <= total:
            return self
        skip = min(self.skip, total // 4)
        return TraceOptions(**{**vars(self), "skip": skip, "updates": max(1, (total - skip - _FEW) // 3)})


# ---------------------------------------------------------------- the instruments


class ProfiledUpdates:
    """Some updates with one instrument, or with none.

    name   what is done in them
    lead   updates at the beginning that do not count
    num    updates that count
    seconds  of one of those, None before the first is over
    """

    def __init__(self, name: str, num: int, lead: int = 0) -> None:
        self.name, self.num, self.lead = name, num, lead
        self.seconds: float | None = None

    def start(self) -> None:
        """The next update is the first."""

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch."""
        return next(batches)

    def update(self) -> None:
        """An update is over."""

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which nothing counts; the device has nothing to do at both ends."""
        return nullcontext()

    def stop(self) -> None:
        """Nothing is measured any more."""

    def tell(self, findings: Findings) -> None:
        """Add what was found."""


class Operators(ProfiledUpdates):
    """torch's profiler, for operators, the trace and the shares of the time."""

    def __init__(self, subject: Subject, options: TraceOptions) -> None:
        super().__init__("operators recorded", options.updates, lead=1)
        self.subject, self.options = subject, options
        self.profile = _recorder(
            subject.device, self.num, with_stack=options.with_stack, record_shapes=options.record_shapes
        )
        self._known: dict[str, bool] = {}  # file -> whether it is the task's

    def start(self) -> None:
        self.profile.start()

    def fetch(self, batches: Iterator[Any]) -> Any:
        with record_function(trace_file.DATA):
            return next(batches)

    def update(self) -> None:
        self.profile.step()

    def aside(self) -> AbstractContextManager[object]:
        return record_function(trace_file.ASIDE)

    def stop(self) -> None:
        self.profile.stop()

    def tell(self, findings: Findings) -> None:
        if not self.seconds:
            return
        content = _exported(self.profile)
        trace = TraceFile(content)
        findings.trace = gzip.compress(content, compresslevel=5, mtime=0)
        num = len(trace.updates)
        if not num:
            return
        findings.num_recorded = num
        findings.shares, findings.data_share = trace.shares(), trace.data_share()
        findings.device_calls = trace.device_waits()
        averages = recorded(self.profile.events()).key_averages(
            group_by_input_shapes=self.options.record_shapes,
            group_by_stack_n=_STACK if self.options.with_stack else 0,
        )
        self.tell_rows(findings, averages, num)
        by = "self_device_time_total" if findings.kernels else "self_cpu_time_total"
        findings.table = averages.table(sort_by=by, row_limit=100)

    def tell_rows(self, findings: Findings, averages: Iterable[Any], num: int) -> None:
        """Add the operators and the kernels of `num` updates: torch has the time of a kernel in both rows."""
        named = [row for row in averages if _is_named_by_torch(row)]
        findings.kernels = _kernels([row for row in named if row.device_type != DeviceType.CPU], num)
        rows = _added(self._operator(row, num) for row in named if row.device_type == DeviceType.CPU)
        key = partial(_key, self.options.sort_by, bool(findings.kernels))
        findings.operators = sorted(rows, key=key, reverse=True)

    def _operator(self, row: Any, num: int) -> Operator:
        place = next(filter(self._is_of_task, row.stack or ()), "")
        return Operator(
            name=row.key,
            calls=row.count / num,
            self_cpu_ms=row.self_cpu_time_total / 1e3 / num,
            cpu_ms=row.cpu_time_total / 1e3 / num,
            self_device_ms=row.self_device_time_total / 1e3 / num,
            device_ms=row.device_time_total / 1e3 / num,
            shapes=str(row.input_shapes) if self.options.record_shapes and row.input_shapes else "",
            place=place,
        )

    def _is_of_task(self, line: str) -> bool:
        """Tell whether a line of a stack is the task's; torch leaves the folder out where Python imports from it."""
        file = line.partition("(")[0]
        if file not in self._known:
            paths = [Path(folder, file) for folder in ("", *sys.path)]
            self._known[file] = any(self.subject.is_of_task(str(path)) and path.is_file() for path in paths)
        return self._known[file]


class Modules(ProfiledUpdates):
    """Marks at the borders of modules."""

    def __init__(self, subject: Subject, options: TraceOptions) -> None:
        super().__init__("modules timed", options.updates)
        self.times = ModuleTimes(subject.model, subject.device, depth=options.depth, ranks=subject.ranks)
        self.start, self.update, self.stop = self.times.start, self.times.update, self.times.stop  # type: ignore[method-assign]
        self.fetch, self.aside = self.times.fetch, self.times.aside  # type: ignore[method-assign]

    def tell(self, findings: Findings) -> None:
        findings.modules = self.times.table()


class MemoryOverTime(ProfiledUpdates):
    """torch's profiler again, for each allocation of one update."""

    def __init__(self, subject: Subject) -> None:
        super().__init__("memory recorded", 1, lead=1)
        self.model, self.device = subject.model, subject.device
        self.profile = _recorder(subject.device, self.num, profile_memory=True)
        self.marked: list[tuple[str, list[int]]] = []
        self.lasting: dict[int, tuple[str, int]] = {}
        self._hooks: list[Any] = []
        self._inputs: list[dict[int, int]] = []  # address -> bytes, for each pass of the recorded update
        self._made = 0

    def start(self) -> None:
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._has_gradient)  # type: ignore[no-untyped-call]
            for weight in self.model.parameters()
            if weight.requires_grad and weight.is_leaf
        ]
        self._hooks.append(register_optimizer_step_post_hook(self._has_stepped))
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._lasts("parameters", tensor)
        self.profile.start()

    def fetch(self, batches: Iterator[Any]) -> Any:
        with record_function(trace_file.DATA):
            batch = next(batches)
        given = [tensor for tensor in tensors_in(tuple(batch)) if tensor.device.type == self.device.type]
        self._mark("inputs", given)
        self._inputs.append({at: tensor.untyped_storage().nbytes() for tensor in given for at in _addresses(tensor)})
        return batch

    def update(self) -> None:
        self.profile.step()
        if self._made == 0:
            self._inputs.clear()
        self._made += 1

    def aside(self) -> AbstractContextManager[object]:
        return record_function(trace_file.ASIDE)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.profile.stop()

    def tell(self, findings: Findings) -> None:
        if self.seconds:
            trace = TraceFile(_exported(self.profile))
            # What numpy or a data worker has allocated is no allocation of torch.
            allocated = trace.addresses()
            foreign = [sum(size for at, size in given.items() if at not in allocated) for given in self._inputs]
            self.lasting[0] = ("inputs", max(foreign, default=0))
            is_on_gpu = self.device.type == "cuda"
            gpu = accelerator_of(self.device).index()
            findings.memory = trace_file.memory(trace, is_on_gpu, self.lasting, self.marked, gpu)

    def _has_gradient(self, weight: torch.Tensor) -> None:
        self._mark("gradients", [weight.grad])

    def _has_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        state = tree_leaves([list(of_one.values()) for of_one in optimizer.state.values()])
        self._mark("optimizer state", state)
        for tensor in state:
            if isinstance(tensor, torch.Tensor):
                self._lasts("optimizer state", tensor)

    def _mark(self, kind: str, values: list[Any]) -> None:
        """What these tensors lie in is of this kind; the mark tells when that is known."""
        addresses = [at for value in values if isinstance(value, torch.Tensor) for at in _addresses(value)]
        with record_function(f"{trace_file.MARK}{len(self.marked)}"):
            self.marked.append((kind, addresses))

    def _lasts(self, kind: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != self.device.type:
            return
        for local in _local(tensor):
            storage = local.untyped_storage()
            self.lasting.setdefault(storage.data_ptr(), (kind, storage.nbytes()))


class HiddenWaits(ProfiledUpdates):
    """Lines that make the host wait for the device."""

    def __init__(self, subject: Subject) -> None:
        super().__init__("waits searched", 2)
        self.waits: Waits = waits(subject.model, subject.device, subject.is_of_task)
        self._is_real = subject.device.type == "cuda"
        self._made = 0
        # A compiled model is not watched on a CPU: torch.compile and a dispatch mode do not go together.
        self._may = self._is_real or not _is_compiled(subject.model)

    def start(self) -> None:
        if self._may:
            self.waits.start()

    def fetch(self, batches: Iterator[Any]) -> Any:
        return self.waits.batch(next(batches))

    def update(self) -> None:
        self._made += 1
        self.waits.update()

    def aside(self) -> AbstractContextManager[object]:
        return self.waits.aside()

    def stop(self) -> None:
        self.waits.stop()

    def tell(self, findings: Findings) -> None:
        if not self._made:
            return
        if self._may:
            findings.waits, findings.waits_are_real = self.waits.table(), self._is_real
        else:
            findings.notes.append("device waits were not searched: on a CPU that needs compile=off")


class Session:
    """One phase that is being profiled."""

    def __init__(self, subject: Subject, options: TraceOptions, *, shortened: bool) -> None:
        self.subject, self.options, self.shortened = subject, options, shortened
        self.parts = [
            ProfiledUpdates("skipped", options.skip),
            ProfiledUpdates(AS_IT_IS, options.updates),
            Operators(subject, options),
            Modules(subject, options),
            MemoryOverTime(subject),
            HiddenWaits(subject),
        ]
        self._index = -1
        self._made, self._since = 0, 0.0
        self._is_aside = False
        self._next()

    def fed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, each fetched by the instrument whose turn it is."""
        return iter(lambda: self.part.fetch(batches), None)  # no generator: that would end with the first error

    @property
    def part(self) -> ProfiledUpdates:
        return self.parts[self._index] if self._index < len(self.parts) else _NOTHING

    @property
    def num_skipped(self) -> str:
        """How many of the updates to skip were made, in words; "" where none was."""
        part = self.parts[0]
        made = self._made if self.part is part else part.num
        return f"{made} of the {part.num} updates that are skipped" if made else ""

    def update(self) -> bool:
        """An update is over; tell whether it was the last that is looked at."""
        part = self.part
        self._made += 1
        is_last = self._made == part.lead + part.num
        if self._made == part.lead:  # what was given to the device before is not recorded
            self._now()
        if is_last:  # before the instrument looks at what it has
            self._time()
            # A collective that ends after torch's profiler does writes into memory that is gone (torch 2.13).
            with record_function(trace_file.OWN):
                self.subject.settle()
        part.update()
        if self._made == part.lead:
            self._since = time.perf_counter()
        if is_last:
            part.stop()
            self._next()
        return is_last and self.part is _NOTHING

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens is no part of an update; a save may be made in an evaluation."""
        if self._is_aside:
            yield
            return
        self._is_aside, began = True, self._now()
        try:
            with self.part.aside():
                yield
                ended = self._now()
        finally:
            self._is_aside = False
        self._since += ended - began

    def close(self) -> Findings | None:
        """Return what was found; None where no update was looked at."""
        if self.part is not _NOTHING:
            self._time()
            self.part.stop()
            self._index = len(self.parts)
        if not any(part.seconds for part in self.parts[1:]):
            return None
        subject = self.subject
        findings = Findings(
            phase=subject.phase,
            device=_name(subject.device),
            ranks=subject.ranks,
            skipped=self.parts[0].num,
            update_ms={part.name: 1e3 * part.seconds for part in self.parts[1:] if part.seconds},
            num_updates={part.name: part.num for part in self.parts[1:] if part.seconds},
            sort_by=self.options.sort_by,
        )
        if self.shortened:
            findings.notes.append("the phase has too few updates for all that was asked for: each part has fewer")
        if any(part.seconds is None for part in self.parts[1:]):
            missing = [part.name for part in self.parts[1:] if part.seconds is None]
            findings.notes.append(f"broken off: no {', '.join(missing)}")
        if _is_compiled(subject.model):
            findings.notes.append("compiled: what is inside a graph is not told apart; its time is that of the graph")
        for part in self.parts:
            part.tell(findings)
        return findings

    def _next(self) -> None:
        """Let the next part begin that has updates to make."""
        self._index += 1
        while self.part is not _NOTHING and self.part.num == 0:
            self._index += 1
        self._made = 0
        self.part.start()
        self._since = self._now()

    def _time(self) -> None:
        """The updates of this part that were made are all that count, and their time is known."""
        part, counted = self.part, self._made - self.part.lead
        if counted > 0:
            part.seconds = (self._now() - self._since) / counted
            part.num = counted

    def _now(self) -> float:
        """Return the time at which all is done that the device was given: between parts, and only there."""
        if self.subject.device.type == "cuda":
            with record_function(trace_file.OWN):
                torch.accelerator.synchronize(self.subject.device)
        return time.perf_counter()


# ---------------------------------------------------------------- torch's profiler


def _recorder(device: torch.device, updates: int, **what: Any) -> Any:
    """Return torch's profiler for so many updates after one that does not count, for it starts slowly."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write its stages to standard error
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    if what.get("with_stack"):  # without it no operator has its stack
        what["experimental_config"] = torch._C._profiler._ExperimentalConfig(verbose=True)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=updates, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True, **what)


def _exported(profile: Any) -> bytes:
    # torch writes to a path, and follows links: so it writes where nobody else does.
    with TemporaryDirectory(prefix="profile-", dir=shared_folder()) as made:
        draft = Path(made) / "trace.json"
        profile.export_chrome_trace(str(draft))
        return draft.read_bytes()


def recorded(events: Any) -> Any:
    """Return the events of torch's profiler less Python functions and calls of CUDA, whose time is their caller's.

    What was set aside is left out: the device has nothing to do at both ends of that.
    """
    spans = [event.time_range for event in events if event.name == trace_file.ASIDE]

    def counts(event: Any) -> bool:
        is_aside = any(span.start <= event.time_range.start < span.end for span in spans)
        return not (is_aside or event.is_python_function or event.activity_type in _CALLS_OF_CUDA)

    kept: Any = EventList(list(filter(counts, events)), use_device=events._use_device)  # type: ignore[no-untyped-call]
    for event in kept:
        event.cpu_children, event.cpu_parent = [], None
    kept._build_tree()
    return kept


def _kernels(rows: Iterable[Any], num: int) -> list[Kernel]:
    """Return what the device did, the longest first; rows of one kernel are added up."""
    found: dict[str, Kernel] = {}
    for row in rows:
        before = found.get(row.key, Kernel(row.key, 0.0, 0.0))
        more = row.self_device_time_total / 1e3 / num
        found[row.key] = Kernel(row.key, before.calls + row.count / num, before.ms + more)
    return sorted(found.values(), key=lambda kernel: -kernel.ms)


def _is_named_by_torch(row: Any) -> bool:
    """Tell whether a row is of an operator or kernel, and not of a span that somebody has named."""
    return not row.is_user_annotation and not row.key.startswith(("ProfilerStep", "[memory]", "accel-run: "))


def _added(rows: Iterable[Operator]) -> list[Operator]:
    """Return the rows with those of one operator, shape and line added up: stacks differ above the line of the task."""
    found: dict[tuple[str, str, str], Operator] = {}
    for row in rows:
        key = (row.name, row.shapes, row.place)
        before = vars(found[key]) if key in found else {}
        sums = {name: value + vars(row)[name] for name, value in before.items() if name not in _WORDS}
        found[key] = replace(row, **sums)
    return list(found.values())


def _key(sort_by: str, is_of_device: bool, row: Operator) -> float:
    if sort_by == "calls":
        return row.calls
    if sort_by == "total":
        return row.device_ms if is_of_device else row.cpu_ms
    return row.self_device_ms if is_of_device else row.self_cpu_ms


def _local(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of which this one is made, on this rank."""
    local = getattr(tensor, "_local_tensor", tensor)
    return [local] if local.layout is torch.strided else []


def _addresses(tensor: torch.Tensor) -> list[int]:
    return [local.untyped_storage().data_ptr() for local in _local(tensor)]


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def _name(device: torch.device) -> str:
    return accelerator_of(device).name() or device.type


_NOTHING = ProfiledUpdates("", 0)
_FEW = 5  # updates besides those that are asked for: one to settle, two for memory, two for waits
_CALLS_OF_CUDA = ("cuda_runtime", "cuda_driver")
_WORDS = ("name", "shapes", "place")
_STACK = 32  # lines of Python above an operator that are kept


# ---------------------------------------------------------------- the options


def off(keep: Keep | None) -> Profiler:
    """No profiling."""
    return Profiler()


def trace(
    keep: Keep | None,
    *,
    skip: Count = 5,
    updates: Annotated[int, Range("a whole number from 1 to 500", low=1, high=500)] = 10,
    depth: PositiveInt = 3,
    sort_by: Literal["self", "total", "calls"] = "self",
    with_stack: bool = False,
    record_shapes: bool = False,
    only: bool = False,
) -> Profiler:
    """Profile operators, modules, memory and waits in a few updates of each phase; writes to profile/ of the run.

    skip           warm-up updates that are not recorded
    updates        updates timed without instruments; then as many with operators and as many with modules
    depth          modules nested deeper than this count toward their parent
    sort_by        sort operators by self time, total time (including children) or calls
    with_stack     record the line of the task for each operator (slower, larger files)
    record_shapes  separate operators by input shapes
    only           end each phase after its profile; nothing is evaluated or saved
    """
    options = TraceOptions(skip, updates, depth, sort_by, with_stack, record_shapes, only)
    if keep is None:
        return OtherRank(options.num_updates if only else math.inf)
    return Trace(keep, options)


PROFILERS: Mapping[str, Callable[..., Profiler]] = {"off": off, "trace": trace}
