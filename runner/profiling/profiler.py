"""Profile a few updates: operators, modules and synchronizations, each in separate updates.

One instrument slows down what another one measures, so they run one after the other: first warm-up updates, then some
that are only timed, then those with an instrument. A profile does not change the results of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch.profiler import record_function

from runner.base.accelerator import get_accelerator
from runner.base.values import Count, PositiveInt, Range
from runner.profiling.instruments import (
    PROFILER_WAIT,
    HiddenWaits,
    Modules,
    Operators,
    ProfiledUpdates,
    Subject,
    TraceOptions,
)
from runner.profiling.profile_report import NO_INSTRUMENT, Findings, format_profile, make_files

WriteFile = Callable[[str, bytes], Path]  # (name, content) -> path of the file in the run directory


class Profiler:
    """Called at the start of each phase and after every update; this base class does nothing.

    limit   number of updates after which the phase ends
    only    the run is for the profile alone: it neither evaluates nor saves
    note    a line for the end of the run, "" if nothing was profiled
    report  text of the report
    """

    limit: float = math.inf
    only = False
    note = ""
    report = ""

    def begin(self, subject: Subject, batches: Iterator[Any], total: int) -> Iterator[Any]:
        """Start a phase of `total` more updates; return its batches, which a subclass may wrap."""
        return batches

    def __call__(self, update: int) -> None:
        """End an update."""

    def exclude(self) -> AbstractContextManager[object]:
        """Return a context that is not part of an update, such as an evaluation or a save."""
        return nullcontext()

    def close(self) -> None:
        """End the phase, complete or not, and write the results."""


class OtherRankProfiler(Profiler):
    """Ends each phase after the same update as rank 0, which records."""

    def __init__(self, limit: float) -> None:
        self.limit, self.only = limit, limit < math.inf


class Trace(Profiler):
    """Runs the instruments one after the other in the updates of a phase, and writes the results."""

    def __init__(self, write: WriteFile, options: TraceOptions) -> None:
        self.write, self.options, self.only = write, options, options.only
        self.limit = options.num_updates if options.only else math.inf
        self._open: Session | None = None
        self.note = self.report = ""

    def begin(self, subject: Subject, batches: Iterator[Any], total: int) -> Iterator[Any]:
        options = self.options.fit_to(total)
        self._open = Session(subject, options, shortened=options != self.options)
        return self._open.iterate(batches)

    def __call__(self, update: int) -> None:
        if self._open is not None and self._open.update():
            self.close()

    def exclude(self) -> AbstractContextManager[object]:
        return nullcontext() if self._open is None else self._open.exclude()

    def close(self) -> None:
        if self._open is None:
            return
        session, self._open = self._open, None
        findings = session.close()
        if findings is None:
            return
        folder = session.subject.folder
        for name, content in make_files(findings).items():
            path = self.write(f"{folder}{name}", content)
        text = format_profile(findings, path.parent)
        self.write(f"{folder}report.txt", text.encode())
        self.report = f"{self.report}\n\n{text}" if self.report else text
        self.note = f"profile: {path.parent}/report.txt; trace.json.gz there opens in ui.perfetto.dev"


class Session:
    """The profile of one phase.

    shortened  the phase has too few updates, so each instrument records fewer than requested
    """

    def __init__(self, subject: Subject, options: TraceOptions, *, shortened: bool) -> None:
        self.subject, self.options, self.shortened = subject, options, shortened
        self.parts = [
            ProfiledUpdates("skipped", options.skip),
            ProfiledUpdates(NO_INSTRUMENT, options.updates),
            Operators(subject, options),
            Modules(subject, options),
            *([HiddenWaits(subject)] if subject.device.type == "cuda" else []),
        ]
        self._index = -1
        self._num_updates, self._since = 0, 0.0
        self._is_excluded = False
        self._start_next_part()

    def iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, each fetched by the current instrument."""
        return iter(lambda: self.part.fetch(batches), None)  # not a generator, which would end at the first error

    @property
    def part(self) -> ProfiledUpdates:
        return self.parts[self._index] if self._index < len(self.parts) else _NO_PART

    def update(self) -> bool:
        """Record the end of an update; return whether it was the last one to profile."""
        part = self.part
        self._num_updates += 1
        is_last = self._num_updates == part.num_warm_up + part.num
        if self._num_updates == part.num_warm_up:  # so that no kernel of a warm-up update is recorded
            self._synchronize()
        if is_last:  # before `part.update`, in which the instrument may spend time on its data
            self._record_time()
            # A collective that is still running when torch's profiler stops writes into freed memory (torch 2.13).
            with record_function(PROFILER_WAIT):
                self.subject.settle()
        part.update()
        if self._num_updates == part.num_warm_up:
            self._since = time.perf_counter()
        if is_last:
            part.stop()
            self._start_next_part()
        return is_last and self.part is _NO_PART

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude the context from the updates; contexts may be nested, as for a save in an evaluation."""
        if self._is_excluded:
            yield
            return
        self._is_excluded, began = True, self._synchronize()
        try:
            with self.part.exclude():
                yield
                ended = self._synchronize()
        finally:
            self._is_excluded = False
        self._since += ended - began

    def close(self) -> Findings | None:
        """Return the findings, or None if no update was measured."""
        if self.part is not _NO_PART:
            self._record_time()
            self.part.stop()
            self._index = len(self.parts)
        if not any(part.seconds for part in self.parts[1:]):
            return None
        subject = self.subject
        findings = Findings(
            phase=subject.phase,
            device=get_accelerator(subject.device).name() or subject.device.type,
            ranks=subject.ranks,
            skipped=self.parts[0].num,
            update_ms={part.name: 1e3 * part.seconds for part in self.parts[1:] if part.seconds},
            num_updates={part.name: part.num for part in self.parts[1:] if part.seconds},
        )
        if self.shortened:
            findings.notes.append(
                "the phase has too few updates, so each part of the profile recorded fewer updates than requested"
            )
        if any(part.seconds is None for part in self.parts[1:]):
            missing = [part.name for part in self.parts[1:] if part.seconds is None]
            findings.notes.append(f"incomplete: no {', '.join(missing)}")
        if any(module._compiled_call_impl is not None for module in subject.model.modules()):
            findings.notes.append("compiled: modules inside a graph are not distinguished; their time is the graph's")
        for part in self.parts:
            part.add_to_findings(findings)
        return findings

    def _start_next_part(self) -> None:
        self._index += 1
        while self.part is not _NO_PART and self.part.num == 0:
            self._index += 1
        self._num_updates = 0
        self.part.start()
        self._since = self._synchronize()

    def _record_time(self) -> None:
        """Record the time of this part from its completed updates, which may be fewer than requested."""
        part, counted = self.part, self._num_updates - self.part.num_warm_up
        if counted > 0:
            part.seconds = (self._synchronize() - self._since) / counted
            part.num = counted

    def _synchronize(self) -> float:
        """Wait for the device and return the time; not called in measured updates, except around excluded contexts."""
        if self.subject.device.type == "cuda":
            with record_function(PROFILER_WAIT):
                torch.accelerator.synchronize(self.subject.device)
        return time.perf_counter()


_NO_PART = ProfiledUpdates("", 0)


def off(write: WriteFile | None) -> Profiler:
    """No profiling."""
    return Profiler()


def trace(
    write: WriteFile | None,
    *,
    skip: Count = 5,
    updates: Annotated[int, Range("an integer from 1 to 500", low=1, high=500)] = 10,
    depth: PositiveInt = 3,
    sort_by: Literal["self", "total", "calls"] = "self",
    with_stack: bool = False,
    record_shapes: bool = False,
    only: bool = False,
) -> Profiler:
    """Profile operators, modules and waits in a few updates of each phase; write results to profile/ in the run folder.

    skip           warm-up updates that are not recorded
    updates        number of updates in each stage: timed without a profiler, recorded by operator, recorded by module;
                   on a GPU, the search for lines that wait for the device takes 2 more
    depth          modules nested deeper than this count toward their parent
    sort_by        sort operators by self time, total time (including children) or calls
    with_stack     record the line of task code that called each operator (slower, larger files)
    record_shapes  separate operators by input shapes
    only           end each phase after its profile; nothing is evaluated or saved
    """
    options = TraceOptions(skip, updates, depth, sort_by, with_stack, record_shapes, only)
    if write is None:
        return OtherRankProfiler(options.num_updates if only else math.inf)
    return Trace(write, options)


PROFILERS: Mapping[str, Callable[..., Profiler]] = {"off": off, "trace": trace}
