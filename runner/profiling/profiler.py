"""Profile a few updates: operators, modules and synchronizations, each in separate updates.

One instrument slows down what another one measures, so they run one after the other: first warm-up updates, then some
that are only timed, then those with an instrument. Nothing here changes a number of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.profiler import record_function

from runner.base.accelerator import get_accelerator
from runner.base.values import Count, PositiveInt, Range
from runner.profiling import trace_file
from runner.profiling.instruments import (
    HiddenWaits,
    Modules,
    Operators,
    ProfiledUpdates,
    Subject,
    TraceOptions,
)
from runner.profiling.profile_report import AS_IT_IS, Findings, files, report

Keep = Callable[
    [str, bytes], Path
]  # the file of this name is in the run directory, with this content; returns its path


class Profiler:
    """Receives the start of each phase and every update; this one does nothing.

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


# ---------------------------------------------------------------- the instruments


class Session:
    """One phase that is being profiled."""

    def __init__(self, subject: Subject, options: TraceOptions, *, shortened: bool) -> None:
        self.subject, self.options, self.shortened = subject, options, shortened
        self.parts = [
            ProfiledUpdates("skipped", options.skip),
            ProfiledUpdates(AS_IT_IS, options.updates),
            Operators(subject, options),
            Modules(subject, options),
            *([HiddenWaits(subject)] if subject.device.type == "cuda" else []),
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
        """Record the end of an update; return whether it was the last one to profile."""
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


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def _name(device: torch.device) -> str:
    return get_accelerator(device).name() or device.type


_NOTHING = ProfiledUpdates("", 0)


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
    """Profile operators, modules and waits in a few updates of each phase; writes to profile/ of the run.

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
