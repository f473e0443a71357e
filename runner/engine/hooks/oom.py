"""Out of memory: reduce the micro-batch size and retry, or end the run and suggest what helps."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from runner.base.errors import AccelRunError, DeviceMemoryError, HostMemoryError, Problem, RankLost, TaskFault
from runner.base.oom_errors import BETWEEN, OomCause, find_oom_cause, halve
from runner.engine import oom_history
from runner.engine.evaluate import Sizes
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.oom_history import ReducedMicroBatch
from runner.engine.oom_report import MemoryAccount, account, hints, summary
from runner.engine.watchdog import EVALUATION, SUMMARY


class OutOfMemory(Hook):
    """Policy of `OomRetry` for a phase: choose micro-batch sizes and report.

    rows  all reductions of the run, of all phases and ranks
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.run, self.world = phase.run_, phase.run_.parts.world
        self.is_on = self.run.plan.settings.on_oom == "retry"
        rows = [dataclasses.asdict(row) for row in oom_history.remembered(self.run.directory.path)]
        self.rows = [ReducedMicroBatch(**row) for row in self.world.broadcast(rows)]
        self.found: MemoryAccount | None = None  # for the last out-of-memory error on this rank,
        self.last_problem: Problem | None = None  # and its message
        batch = phase.planned.batch
        failed = self._evaluation_failed if self.is_on else None
        self.sizes = Sizes(batch.micro_batch_size, failed, coupled=batch.global_batch_size)
        for row in self._mine("evaluation"):
            self.sizes.now = min(self.sizes.now, row.size)

    @property
    def smaller(self) -> tuple[tuple[int, int], ...]:
        """Pairs (update, maximum micro-batch size from then on) of this rank, as in `Order.smaller`."""
        return tuple((row.update, row.size) for row in self._mine("training"))

    def begin(self) -> None:
        for text in () if self.phase.is_over else self._start_messages():
            self.run.observers.screen.info(f"{self.phase.name}: {text}")

    def _start_messages(self) -> list[str]:
        """Return messages about micro-batches that are smaller than requested."""
        asked = self.phase.planned.batch.micro_batch_size
        smallest: dict[tuple[int, int | None], int] = {}  # by update and rank: the last one is the smallest
        for row in self.rows:
            if self._applies(row) and row.use == "training":
                smallest[row.update, row.rank] = row.size
        return [
            f"micro-batches{'' if rank is None or self.world.world_size == 1 else f' of rank {rank}'} have {size}"
            f" samples instead of {asked} from update {update + 1} on, after an earlier out-of-memory error;"
            f" to try larger ones again, remove {self.run.directory.shown / oom_history.FILE}"
            for (update, rank), size in smallest.items()
        ]

    # ------------------------------------------------------------ in an update

    def note(self, shortage: OomCause, error: BaseException) -> None:
        """Record memory usage before anything is freed; keep only the message of the error, not its frames."""
        phase, parts = self.phase, self.run.parts
        shown = phase.explain_error(error)
        self.last_problem = shown.problems[0] if isinstance(shown, (DeviceMemoryError, HostMemoryError)) else None
        shape = phase.feed.shape
        samples = (
            0 if shortage.place in ("optimizer", BETWEEN) else self.sizes.now if self._is_evaluating else self._size()
        )
        shape_text = str(tuple(shape)) if isinstance(shape, tuple) and samples and not self._is_evaluating else ""
        rank = self.run.plan.ranks[self.world.rank]
        self.found = MemoryAccount(shortage, samples, shape_text, None, None, None)
        with suppress(Exception):  # there may be no memory for the report
            self.found = account(shortage, self.world.device, rank.uuid, samples, shape_text)
            optimizer = getattr(getattr(phase.work, "training", None), "optimizer", None)
            self.run.directory.write(self._file, summary(self.found, parts.bare, optimizer, self.world.device))

    def reduce(self, shortage: OomCause | None, obstacle: str) -> None:
        """Exchange the new sizes with all ranks, and repeat the samples of the update."""
        size, mine = self._size(), None
        if shortage is not None:
            assert self.found is not None, "note comes first"
            mine = [size, halve(size), shortage.place, str(self.found), shortage.side]
        of_ranks = self.world.gather([mine, obstacle])
        stuck = [(rank, there) for rank, (there, what) in enumerate(of_ranks) if what or (there and there[1] is None)]
        if stuck:
            obstacle = next((what for _, what in of_ranks if what), "")
            if shortage is not None:
                raise self._error(shortage, obstacle)
            rank = next(rank for rank, (there, _) in enumerate(of_ranks) if there)
            raise RankLost(f"rank {rank} is out of memory", where=self._location(shortage))
        for rank, (there, _) in enumerate(of_ranks):
            if there:
                self._shrink(rank, *there)
        self.phase.restart_update(self.smaller)

    def report_step_retry(self, shortage: OomCause) -> None:
        """Report an optimizer step that succeeded at the second attempt."""
        self._warn(
            f"out of memory in the optimizer step of {self._location(shortage)}, before it changed anything: the step"
            " was retried successfully after releasing cached memory"
        )

    def _shrink(self, rank: int, before: int, size: int, place: str, numbers: str, side: str) -> None:
        phase = self.phase
        samples = phase.order.samples_per_rank(phase.position.update, phase.shares.of(phase.position.update))
        share = samples[rank if len(samples) > 1 else 0]
        update = phase.position.update
        self._remember(
            ReducedMicroBatch(phase.name, update, rank, size, self._requested_size("training"), self.world.world_size)
        )
        whose = f" of rank {rank}" if self.world.world_size > 1 else ""
        file = self._report_file(rank)
        self._warn(
            f"{'the GPU' if side == 'device' else 'the machine'} is out of memory in update {update + 1}{whose}"
            f" ({place}): {numbers}. From now on updates run in {-(-share // size)} micro-batches of"
            f" {size} instead of {-(-share // before)} of {before}; this update is retried with the same samples."
            f" {file} lists the memory in use"
        )
        self.run.observers.screen.record_event(
            "out of memory", update=update + 1, phase=phase.name, rank=rank, place=place, before=before, size=size,
            text=numbers,
        )  # fmt: skip

    def _size(self) -> int:
        """Return the largest micro-batch of this rank in the current update."""
        phase = self.phase
        update = phase.position.update
        micros = phase.order.micros(update, phase.shares.of(update))
        return max((len(micro.indices) for micro in micros), default=1) or 1

    # ------------------------------------------------------------ in an evaluation

    def _evaluation_failed(self, error: Exception, size: int) -> int:
        """Return the reduced batch size; raise the error if it is not out of memory."""
        shortage = find_oom_cause(error)
        less = halve(size)
        if shortage is None or less is None:
            raise error
        self.note(shortage, error)
        return less

    def after_batches(self) -> None:
        """Record and report reduced batch sizes; all ranks know the sizes before and after the evaluation."""
        for rank, (old, new) in enumerate(self.sizes.of_ranks):
            if new < old:
                self._remember(
                    ReducedMicroBatch(
                        self.phase.name, self.phase.position.update, rank, new, self._requested_size("evaluation"),
                        self.world.world_size, "evaluation",
                    )
                )  # fmt: skip
                whose = f" of rank {rank}" if self.world.world_size > 1 else ""
                self._warn(
                    f"out of memory in the evaluation{whose} after update {self.phase.position.update}: from now on its"
                    f" batches have {new} samples instead of {old}"
                )

    # ------------------------------------------------------------ errors that end the phase

    def on_error(self, error: BaseException) -> AccelRunError | None:
        """Return the error that ends the phase; record smaller micro-batches if they may help.

        The run then resumes from its last checkpoint: at once if this program started it, else with the same command.
        """
        found = self.phase.explain_error(error)
        return None if found is None else self._with_advice(error, found)

    def _with_advice(self, error: BaseException, found: AccelRunError) -> AccelRunError:
        shortage = find_oom_cause(error)
        if shortage is None and isinstance(found, TaskFault) and self.found is not None and self._is_retried():
            # A batch norm fails with one sample, but the cause to report is the memory that required so few.
            ended = self._error(self.found.shortage, "", is_final=True)
            ended.add_note(f"micro-batches of {self._size()} samples were tried: {found.problems[0].what}")
            return ended
        if shortage is None or not isinstance(found, (DeviceMemoryError, HostMemoryError)):
            return found
        if self.found is None or self.found.shortage != shortage:
            with suppress(Exception):
                self.note(shortage, error)
        return self._complete_error(shortage, found, "")

    @property
    def _is_evaluating(self) -> bool:
        return self.phase.progress_mark.now[0] in (EVALUATION, SUMMARY)

    def _is_retried(self) -> bool:
        """Return whether this rank has run out of memory in the current update."""
        now = (self.phase.name, self.phase.position.update, self.world.rank)
        return any((row.phase, row.update, row.rank) == now and row.use == "training" for row in self.rows)

    def _error(self, shortage: OomCause, obstacle: str, *, is_final: bool = False) -> AccelRunError:
        kind = DeviceMemoryError if shortage.side == "device" else HostMemoryError
        owner = "the GPU" if shortage.side == "device" else "the machine"
        own = self.last_problem.fix if self.last_problem is not None else ""
        found = kind(f"{owner} is out of memory: {shortage.text}", where=self._location(shortage), fix=own)
        return self._complete_error(shortage, found, obstacle, is_final=is_final)

    def _complete_error(
        self, shortage: OomCause, found: AccelRunError, obstacle: str, *, is_final: bool = False
    ) -> AccelRunError:
        phase = self.phase
        size = self.sizes.now if self._is_evaluating else self._size()
        less = None if is_final else halve(size)
        (problem,) = found.problems
        of_pass = size if shortage.place != BETWEEN else 0
        lines = [f"{number}. {line}" for number, line in enumerate(hints(self.run.plan, self.found, of_pass), 1)]
        own = problem.fix.split("\n")[1:]  # the line of the task that allocated
        kept, way_out = self.rows, ""
        if shortage.place == BETWEEN or not self.is_on or self.run.stop.requested is not None:
            pass
        elif less is not None:
            use: oom_history.Use = "evaluation" if self._is_evaluating else "training"
            rank = None if self.run.parts.parallel.in_step else self.world.rank
            asked, world_size = self._requested_size(use), self.world.world_size
            row = ReducedMicroBatch(
                phase.name, phase.position.update, rank, less, asked, world_size, use, in_place=False
            )
            kept = [*self.rows, row]
            why = f" ({obstacle} could not be restored)" if obstacle else ""
            way_out = f"the run resumes from the last checkpoint with micro-batches of {less}{why}; if that fails:"
        else:  # no size helped: after a fix, the run starts with the requested size
            kept = [row for row in self.rows if (row.phase, row.update) != (phase.name, phase.position.update)]
        if kept != self.rows:
            self.rows = kept
            with suppress(AccelRunError):  # a full disk: the next start would not know of the smaller size
                oom_history.remember(self.run.directory, self.rows)
                lines[:0] = [way_out] if way_out else []
        what = problem.what if self.found is None else f"{problem.what.partition(': ')[0]}: {self.found}"
        found.problems = (dataclasses.replace(problem, what=what, fix="\n".join([_ADVICE, *lines, *own])),)
        found.args = (str(found.problems[0]),)
        found.place = {**found.place, "place": shortage.place, "micro_batch_size": size, "memory": self._file}
        return found

    # ------------------------------------------------------------ records and messages

    def _remember(self, row: ReducedMicroBatch) -> None:
        self.rows.append(row)
        if self.world.is_first:
            with suppress(AccelRunError):  # a full disk: this process still knows the rows
                oom_history.remember(self.run.directory, self.rows)

    def _mine(self, use: oom_history.Use) -> list[ReducedMicroBatch]:
        in_step = self.run.parts.parallel.in_step  # then all ranks use the smallest size
        mine = [row for row in self.rows if row.use == use and self._applies(row)]
        return [row for row in mine if in_step or row.applies_to(self.world.rank)]

    def _applies(self, row: ReducedMicroBatch) -> bool:
        """Return whether a row was recorded with the settings of this phase."""
        same = (row.phase, row.world_size) == (self.phase.name, self.world.world_size)
        return same and row.asked == self._requested_size(row.use)

    def _requested_size(self, use: oom_history.Use) -> int:
        batch = self.phase.planned.batch
        return batch.largest_pass if use == "training" else batch.micro_batch_size

    def _location(self, shortage: OomCause | None) -> str:
        place = f", {shortage.place}" if shortage is not None else ""
        return f"update {self.phase.position.update + 1} of phase {self.phase.name}{place}"

    def _report_file(self, rank: int) -> str:
        return f"memory-rank{rank}.txt" if self.world.world_size > 1 else "memory.txt"

    @property
    def _file(self) -> str:
        return self._report_file(self.world.rank)

    def _warn(self, text: str) -> None:
        self.run.observers.screen.warn(text)


_ADVICE = "what would help, most effective first:"
