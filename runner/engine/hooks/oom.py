"""Out of memory: reduce the micro-batch size and retry, or end the run and suggest what helps."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from runner.base.errors import AccelRunError, DeviceMemoryError, HostMemoryError, Problem, RankLost, TaskFault
from runner.base.oom_errors import BETWEEN, OomCause, find_oom_cause, halve
from runner.engine.checkpoints import oom_history
from runner.engine.checkpoints.oom_history import ReducedMicroBatch
from runner.engine.evaluation.evaluate import BatchSizes
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.update.oom_report import MemoryAccount, format_report, measure_memory, suggest_settings


class OutOfMemory(Hook):
    """Policy of `OomRetry` for a phase: choose micro-batch sizes and report.

    rows    all reductions of micro-batches in this run, in all phases and on all ranks
    memory  usage at the last out-of-memory error on this rank; None: there was none; `last_problem`: its message
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.run, self.world = phase.run, phase.run.parts.world
        self.is_on = self.run.plan.settings.on_oom == "retry"
        rows = [dataclasses.asdict(row) for row in oom_history.read_reductions(self.run.directory.path)]
        self.rows = [ReducedMicroBatch(**row) for row in self.world.broadcast(rows)]
        self.memory: MemoryAccount | None = None
        self.last_problem: Problem | None = None
        batch = phase.planned.batch
        failed = self._reduce_evaluation_batch if self.is_on else None
        self.sizes = BatchSizes(batch.micro_batch_size, batch.global_batch_size, failed)
        for row in self._rows_for("evaluation"):
            self.sizes.current = min(self.sizes.current, row.size)

    @property
    def smaller(self) -> tuple[tuple[int, int], ...]:
        """Pairs (update, maximum micro-batch size from then on) of this rank, as in `Order.smaller`."""
        return tuple((row.update, row.size) for row in self._rows_for("training"))

    def begin(self) -> None:
        for text in () if self.phase.is_over else self._start_messages():
            self.run.observers.screen.info(f"{self.phase.name}: {text}")

    def _start_messages(self) -> list[str]:
        requested = self.phase.planned.batch.micro_batch_size
        smallest: dict[tuple[int, int | None], int] = {}  # by update and rank: the last one is the smallest
        for row in self.rows:
            if self._has_current_settings(row) and row.use == "training":
                smallest[row.update, row.rank] = row.size
        return [
            f"micro-batches{'' if rank is None or self.world.world_size == 1 else f' of rank {rank}'} have {size}"
            f" samples instead of {requested} from update {update + 1} on, after an earlier out-of-memory error;"
            f" to try larger ones again, remove {self.run.directory.shown / oom_history.FILE}"
            for (update, rank), size in smallest.items()
        ]

    # ------------------------------------------------------------ in an update

    def record_usage(self, cause: OomCause, error: BaseException) -> None:
        """Record memory usage before anything is freed; keep only the message of the error: its frames hold tensors."""
        phase, parts = self.phase, self.run.parts
        translated = phase.explain_error(error)
        self.last_problem = None
        if isinstance(translated, DeviceMemoryError | HostMemoryError):
            self.last_problem = translated.problems[0]
        shape = phase.feed.shape
        if cause.place in ("optimizer", BETWEEN):
            samples = 0
        else:
            samples = self.sizes.current if self.phase.is_evaluating else self._size()
        shape_text = str(tuple(shape)) if isinstance(shape, tuple) and samples and not self.phase.is_evaluating else ""
        rank = self.run.plan.ranks[self.world.rank]
        self.memory = MemoryAccount(cause, samples, shape_text, None, None, None)
        with suppress(Exception):  # there may be no memory for the report
            self.memory = measure_memory(cause, self.world.device, rank.uuid, samples, shape_text)
            optimizer = getattr(getattr(phase.work, "training", None), "optimizer", None)
            self.run.directory.write(
                self._report_name(self.world.rank), format_report(self.memory, parts.bare, optimizer, self.world.device)
            )

    def reduce(self, cause: OomCause | None, obstacle: str) -> None:
        """Agree with all ranks on smaller micro-batches, and restart the update; see `RetryPolicy.reduce`."""
        size, reduction = self._size(), None
        if cause is not None:
            assert self.memory is not None, "record_usage is called first"
            reduction = [size, halve(size), cause.place, str(self.memory), cause.side]
        gathered = self.world.gather([reduction, obstacle])
        is_stuck = any(obstacle or (reduction and reduction[1] is None) for reduction, obstacle in gathered)
        if is_stuck:
            if cause is not None:
                raise self._make_error(cause, next(filter(None, (obstacle for _, obstacle in gathered)), ""))
            rank = next(rank for rank, (reduction, _) in enumerate(gathered) if reduction)
            raise RankLost(f"rank {rank} is out of memory", where=self._describe_location(cause))
        for rank, (reduction, _) in enumerate(gathered):
            if reduction:
                self._apply_reduction(rank, *reduction)
        self.phase.restart_update(self.smaller)
        self.phase.stopwatch.lap("hooks")  # else this time counts as waiting for data

    def report_step_retry(self, cause: OomCause) -> None:
        """Report an optimizer step that succeeded at the second attempt."""
        self._warn(
            f"out of memory in the optimizer step of {self._describe_location(cause)}, before it changed anything: the"
            " step was retried successfully after releasing cached memory"
        )

    def _apply_reduction(self, rank: int, before: int, size: int, place: str, numbers: str, side: str) -> None:
        phase = self.phase
        update = phase.position.update
        samples = phase.order.samples_per_rank(update, phase.shares.of(update))
        share = samples[rank if len(samples) > 1 else 0]
        self._add_row(
            ReducedMicroBatch(phase.name, update, rank, size, self._requested_size("training"), self.world.world_size)
        )
        whose = f" of rank {rank}" if self.world.world_size > 1 else ""
        file = self._report_name(rank)
        self._warn(
            f"{'the GPU' if side == 'device' else 'the machine'} is out of memory in update {update + 1}{whose}"
            f" ({place}): {numbers}. From now on, updates run in {-(-share // size)} micro-batches of"
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
        micros = phase.order.micro_batches(update, phase.shares.of(update))
        return max((len(micro.indices) for micro in micros), default=1) or 1

    # ------------------------------------------------------------ in an evaluation

    def _reduce_evaluation_batch(self, error: Exception, size: int) -> int:
        """Return half of the batch size; raise the error if memory is not its cause, or for a batch of one sample."""
        cause = find_oom_cause(error)
        reduced = halve(size)
        if cause is None or reduced is None:
            raise error
        self.record_usage(cause, error)
        return reduced

    def report_evaluation_reductions(self) -> None:
        """Record and report reduced batch sizes; all ranks know the sizes before and after the evaluation."""
        for rank, (old, new) in enumerate(self.sizes.by_rank):
            if new < old:
                self._add_row(
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

    def record_error(self, error: BaseException) -> None:
        """Record the memory usage before the phase is closed, if it ended with an out-of-memory error."""
        cause = find_oom_cause(error)
        if cause is not None and isinstance(self.phase.explain_error(error), (DeviceMemoryError, HostMemoryError)):
            self._record_once(cause, error)

    def _record_once(self, cause: OomCause, error: BaseException) -> None:
        if self.memory is None or self.memory.shortage != cause:
            with suppress(Exception):
                self.record_usage(cause, error)

    def on_error(self, error: BaseException) -> AccelRunError | None:
        """Return the error that ends the phase; record smaller micro-batches if they may help.

        The run then resumes from its last checkpoint: automatically if accel-run started the ranks, otherwise when the
        command is run again.
        """
        translated = self.phase.explain_error(error)
        return None if translated is None else self._add_advice(error, translated)

    def _add_advice(self, error: BaseException, translated: AccelRunError) -> AccelRunError:
        cause = find_oom_cause(error)
        if cause is None and isinstance(translated, TaskFault) and self.memory is not None and self._is_retried():
            # Smaller micro-batches can cause other errors: batch norm raises for one sample. Report the OOM instead.
            final = self._make_error(self.memory.shortage, "", is_final=True)
            final.add_note(f"micro-batches of {self._size()} samples were tried: {translated.problems[0].what}")
            return final
        if cause is None or not isinstance(translated, (DeviceMemoryError, HostMemoryError)):
            return translated
        self._record_once(cause, error)
        return self._complete_error(cause, translated, "")

    def _is_retried(self) -> bool:
        """Return whether this rank has run out of memory in the current update."""
        now = (self.phase.name, self.phase.position.update, self.world.rank)
        return any((row.phase, row.update, row.rank) == now and row.use == "training" for row in self.rows)

    def _make_error(self, cause: OomCause, obstacle: str, *, is_final: bool = False) -> AccelRunError:
        error_class = DeviceMemoryError if cause.side == "device" else HostMemoryError
        owner = "the GPU" if cause.side == "device" else "the machine"
        task_line = self.last_problem.fix if self.last_problem is not None else ""
        what = f"{owner} is out of memory: {cause.text}"
        error = error_class(what, where=self._describe_location(cause), fix=task_line)
        return self._complete_error(cause, error, obstacle, is_final=is_final)

    def _complete_error(
        self, cause: OomCause, error: AccelRunError, obstacle: str, *, is_final: bool = False
    ) -> AccelRunError:
        phase = self.phase
        size = self.sizes.current if self.phase.is_evaluating else self._size()
        reduced = None if is_final else halve(size)
        (problem,) = error.problems
        pass_size = size if cause.place != BETWEEN else 0
        lines = [
            f"{number}. {line}"
            for number, line in enumerate(suggest_settings(self.run.plan, self.memory, pass_size), 1)
        ]
        task_lines = problem.fix.split("\n")[1:]  # the line of the task that allocated the memory
        rows, retry_hint = self.rows, ""
        if cause.place == BETWEEN or not self.is_on or self.run.stop.requested is not None:
            pass
        elif reduced is not None:
            use: oom_history.Use = "evaluation" if self.phase.is_evaluating else "training"
            rank = None if self.run.parts.parallel.is_lockstep else self.world.rank
            requested, world_size = self._requested_size(use), self.world.world_size
            row = ReducedMicroBatch(
                phase.name, phase.position.update, rank, reduced, requested, world_size, use, in_place=False
            )
            rows = [*self.rows, row]
            retry_hint = f"the run resumes from the last checkpoint with micro-batches of {reduced}"
            if obstacle:
                retry_hint += f" (the update cannot be retried, because this was not restored: {obstacle})"
            retry_hint += "; if that fails:"
        else:  # no size helped: after a fix, the run starts with the requested size
            rows = [row for row in self.rows if (row.phase, row.update) != (phase.name, phase.position.update)]
        if rows != self.rows:
            self.rows = rows
            with suppress(AccelRunError):  # if the disk is full, the next start cannot read the smaller size
                oom_history.write_reductions(self.run.directory, self.rows)
                lines[:0] = [retry_hint] if retry_hint else []
        what = problem.what if self.memory is None else f"{problem.what.partition(': ')[0]}: {self.memory}"
        fix = "\n".join([_ADVICE_HEADING, *lines, *task_lines])
        error.problems = (dataclasses.replace(problem, what=what, fix=fix),)
        error.args = (str(error.problems[0]),)
        error.place = {
            **error.place,
            "place": cause.place,
            "micro_batch_size": size,
            "memory": self._report_name(self.world.rank),
        }
        return error

    # ------------------------------------------------------------ records and messages

    def _add_row(self, row: ReducedMicroBatch) -> None:
        self.rows.append(row)
        if self.world.is_first:
            with suppress(AccelRunError):  # if the disk is full, this process still has the rows
                oom_history.write_reductions(self.run.directory, self.rows)

    def _rows_for(self, use: oom_history.Use) -> list[ReducedMicroBatch]:
        is_lockstep = self.run.parts.parallel.is_lockstep  # then all ranks use the smallest size
        rows = [row for row in self.rows if row.use == use and self._has_current_settings(row)]
        return [row for row in rows if is_lockstep or row.applies_to(self.world.rank)]

    def _has_current_settings(self, row: ReducedMicroBatch) -> bool:
        is_same_phase = (row.phase, row.world_size) == (self.phase.name, self.world.world_size)
        return is_same_phase and row.asked == self._requested_size(row.use)

    def _requested_size(self, use: oom_history.Use) -> int:
        batch = self.phase.planned.batch
        return batch.max_micro_batch_size if use == "training" else batch.micro_batch_size

    def _describe_location(self, cause: OomCause | None) -> str:
        place = f", {cause.place}" if cause is not None else ""
        return f"update {self.phase.position.update + 1} of phase {self.phase.name}{place}"

    def _report_name(self, rank: int) -> str:
        return f"memory-rank{rank}.txt" if self.world.world_size > 1 else "memory.txt"

    def _warn(self, text: str) -> None:
        self.run.observers.screen.warn(text)


_ADVICE_HEADING = "what would help, most effective first:"
