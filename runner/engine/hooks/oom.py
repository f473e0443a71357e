"""Out of memory: shrink micro-batches and retry, or end the run and say what would help."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from runner.base.errors import AccelRunError, DeviceMemoryError, HostMemoryError, Problem, RankLost, TaskFault
from runner.base.oom_errors import BETWEEN, OomCause, halved, shortage_of
from runner.engine import oom_history
from runner.engine.evaluate import Sizes
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.oom_history import ReducedMicroBatch
from runner.engine.oom_report import MemoryAccount, account, hints, summary
from runner.engine.watchdog import EVALUATION, SUMMARY


class OutOfMemory(Hook):
    """Knows the memory of a phase, and guides `Redo`.

    rows  what the run remembers, of all phases and ranks
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.run, self.world = phase.run_, phase.run_.parts.world
        self.is_on = self.run.plan.settings.on_oom == "retry"
        rows = [dataclasses.asdict(row) for row in oom_history.remembered(self.run.directory.path)]
        self.rows = [ReducedMicroBatch(**row) for row in self.world.from_first(rows)]
        self.found: MemoryAccount | None = None  # of the last shortage on this rank,
        self.told: Problem | None = None  # and what was said of it
        self.sizes = Sizes(phase.planned.batch.micro_batch_size, self._evaluation_failed if self.is_on else None)
        for row in self._mine("evaluation"):
            self.sizes.now = min(self.sizes.now, row.size)

    @property
    def smaller(self) -> tuple[tuple[int, int], ...]:
        """From which update on passes of this rank have at most how many samples, as `Order` takes it."""
        return tuple((row.update, row.size) for row in self._mine("training"))

    def begin(self) -> None:
        for text in () if self.phase.is_over else self._said_first():
            self.run.observers.screen.say(f"{self.phase.name}: {text}")

    def _said_first(self) -> list[str]:
        """Return what to say of micro-batches that are smaller than requested."""
        asked = self.phase.planned.batch.micro_batch_size
        smallest: dict[tuple[int, int | None], int] = {}  # by update and rank: the last one is the smallest
        for row in self.rows:
            if self._holds(row) and row.use == "training":
                smallest[row.update, row.rank] = row.size
        return [
            f"passes{'' if rank is None or self.world.world_size == 1 else f' of rank {rank}'} have {size} samples"
            f" instead of {asked} from update {update + 1} on: memory ran out there before; to try the larger ones"
            f" again, remove {self.run.directory.shown / oom_history.FILE}"
            for (update, rank), size in smallest.items()
        ]

    # ------------------------------------------------------------ in an update

    def note(self, shortage: OomCause, error: BaseException) -> None:
        """Who holds the memory is written down while all is still held; of the error only its words are kept."""
        phase, parts = self.phase, self.run.parts
        shown = phase.in_words(error)
        self.told = shown.problems[0] if isinstance(shown, (DeviceMemoryError, HostMemoryError)) else None
        shape = phase.feed.shape
        samples = (
            0 if shortage.place in ("optimizer", BETWEEN) else self.sizes.now if self._is_evaluating else self._size()
        )
        shape_text = str(tuple(shape)) if isinstance(shape, tuple) and samples and not self._is_evaluating else ""
        rank = self.run.plan.ranks[self.world.rank]
        self.found = MemoryAccount(shortage, samples, shape_text, None, None, None)
        with suppress(Exception):  # there may be no memory for it; the run is what counts
            self.found = account(shortage, self.world.device, rank.uuid, samples, shape_text)
            optimizer = getattr(getattr(phase.work, "training", None), "optimizer", None)
            self.run.directory.write(self._file, summary(self.found, parts.bare, optimizer, self.world.device))

    def go_on(self, shortage: OomCause | None, obstacle: str) -> None:
        """All ranks learn who has how much less; the samples of the update come again."""
        size, mine = self._size(), None
        if shortage is not None:
            assert self.found is not None, "it was noted"
            mine = [size, halved(size), shortage.place, str(self.found), shortage.side]
        told = self.world.gather([mine, obstacle])
        stuck = [(rank, there) for rank, (there, what) in enumerate(told) if what or (there and there[1] is None)]
        if stuck:
            obstacle = next((what for _, what in told if what), "")
            if shortage is not None:
                raise self._end(shortage, obstacle)
            rank = next(rank for rank, (there, _) in enumerate(told) if there)
            raise RankLost(f"rank {rank} cannot go on: its memory is used up", where=self._where(shortage))
        for rank, (there, _) in enumerate(told):
            if there:
                self._shrink(rank, *there)
        self.phase.begin_again(self.smaller)

    def say_applied(self, shortage: OomCause) -> None:
        """The step of the optimizer was made at the second try."""
        self._say(
            f"memory ran out in the optimizer's step of {self._where(shortage)}, before it had changed anything: what"
            " was cached is given back, and the step was made"
        )

    def _shrink(self, rank: int, before: int, size: int, place: str, numbers: str, side: str) -> None:
        phase = self.phase
        samples = phase.order.samples_of_ranks(phase.position.update, phase.shares.of(phase.position.update))
        share = samples[rank if len(samples) > 1 else 0]
        update = phase.position.update
        self._remember(
            ReducedMicroBatch(phase.name, update, rank, size, self._asked("training"), self.world.world_size)
        )
        whose = f" of rank {rank}" if self.world.world_size > 1 else ""
        file = self._name_of(rank)
        self._say(
            f"{'the GPU' if side == 'device' else 'the machine'}'s memory ran out in update {update + 1}{whose}"
            f" ({place}): {numbers}. The update is made again with the same samples in {-(-share // size)} passes of"
            f" {size} instead of {-(-share // before)} of {before}, and so are those that follow; {file} has who holds"
            " what"
        )
        self.run.observers.screen.event(
            "out of memory", update=update + 1, phase=phase.name, rank=rank, place=place, before=before, size=size,
            text=numbers,
        )  # fmt: skip

    def _size(self) -> int:
        """Return the most samples of a pass of this rank in the update under way."""
        phase = self.phase
        update = phase.position.update
        micros = phase.order.micros(update, phase.shares.of(update))
        return max((len(micro.indices) for micro in micros), default=1) or 1

    # ------------------------------------------------------------ in an evaluation

    def _evaluation_failed(self, error: Exception, size: int) -> int:
        """Return how many samples a batch has from now on; raises the error where memory is not the reason."""
        shortage = shortage_of(error)
        less = halved(size)
        if shortage is None or less is None:
            raise error
        self.note(shortage, error)
        return less

    def after_batches(self) -> None:
        """Remember smaller batches; every rank knows those of all, before the evaluation and after it."""
        for rank, (old, new) in enumerate(self.sizes.of_ranks):
            if new < old:
                self._remember(
                    ReducedMicroBatch(
                        self.phase.name, self.phase.position.update, rank, new, self._asked("evaluation"),
                        self.world.world_size, "evaluation",
                    )
                )  # fmt: skip
                whose = f" of rank {rank}" if self.world.world_size > 1 else ""
                self._say(
                    f"memory ran out in the evaluation{whose} after update {self.phase.position.update}: its batches"
                    f" have {new} samples instead of {old} from now on"
                )

    # ------------------------------------------------------------ where there is no way to go on in place

    def on_error(self, error: BaseException) -> AccelRunError | None:
        """Return the error for the end of the phase; where smaller micro-batches may help, the run remembers them.

        It then resumes from its last checkpoint, at once where it was started here, else with the same command.
        """
        found = self.phase.in_words(error)
        return None if found is None else self._explained(error, found)

    def _explained(self, error: BaseException, found: AccelRunError) -> AccelRunError:
        shortage = shortage_of(error)
        if shortage is None and isinstance(found, TaskFault) and self.found is not None and self._is_made_again():
            # What smaller passes cannot do, as a batch norm one of one sample, is not what the update failed of.
            ended = self._end(self.found.shortage, "", is_vain=True)
            ended.add_note(f"passes of {self._size()} samples were tried: {found.problems[0].what}")
            return ended
        if shortage is None or not isinstance(found, (DeviceMemoryError, HostMemoryError)):
            return found
        if self.found is None or self.found.shortage != shortage:
            with suppress(Exception):
                self.note(shortage, error)
        return self._told(shortage, found, "")

    @property
    def _is_evaluating(self) -> bool:
        return self.phase.pulse.now[0] in (EVALUATION, SUMMARY)

    def _is_made_again(self) -> bool:
        """Tell whether the update under way is one in which memory has run out on this rank."""
        now = (self.phase.name, self.phase.position.update, self.world.rank)
        return any((row.phase, row.update, row.rank) == now and row.use == "training" for row in self.rows)

    def _end(self, shortage: OomCause, obstacle: str, *, is_vain: bool = False) -> AccelRunError:
        kind = DeviceMemoryError if shortage.side == "device" else HostMemoryError
        whose = "the GPU's" if shortage.side == "device" else "the machine's"
        own = self.told.fix if self.told is not None else ""
        found = kind(f"{whose} memory is used up: {shortage.text}", where=self._where(shortage), fix=own)
        return self._told(shortage, found, obstacle, is_vain=is_vain)

    def _told(self, shortage: OomCause, found: AccelRunError, obstacle: str, *, is_vain: bool = False) -> AccelRunError:
        phase = self.phase
        size = self.sizes.now if self._is_evaluating else self._size()
        less = None if is_vain else halved(size)
        (problem,) = found.problems
        of_pass = size if shortage.place != BETWEEN else 0
        lines = [f"{number}. {line}" for number, line in enumerate(hints(self.run.plan, self.found, of_pass), 1)]
        own = problem.fix.split("\n")[1:]  # the line of the task that asked for it
        kept, way_out = self.rows, ""
        if shortage.place == BETWEEN or not self.is_on or self.run.stop.requested is not None:
            pass
        elif less is not None:
            use: oom_history.Use = "evaluation" if self._is_evaluating else "training"
            rank = None if self.run.parts.parallel.in_step else self.world.rank
            asked, world_size = self._asked(use), self.world.world_size
            row = ReducedMicroBatch(
                phase.name, phase.position.update, rank, less, asked, world_size, use, in_place=False
            )
            kept = [*self.rows, row]
            why = f" ({obstacle} could not be put back)" if obstacle else ""
            way_out = f"goes on from the last checkpoint with {less} samples in a pass{why}; else:"
        else:  # all was in vain: what is mended shall go on as it began
            kept = [row for row in self.rows if (row.phase, row.update) != (phase.name, phase.position.update)]
        if kept != self.rows:
            self.rows = kept
            with suppress(AccelRunError):  # a full disk: nobody would know of smaller passes
                oom_history.remember(self.run.directory, self.rows)
                lines[:0] = [way_out] if way_out else []
        what = problem.what if self.found is None else f"{problem.what.partition(': ')[0]}: {self.found}"
        found.problems = (
            dataclasses.replace(problem, what=what, fix="\n".join(["what would help, most first:", *lines, *own])),
        )
        found.args = (str(found.problems[0]),)
        found.place = {**found.place, "place": shortage.place, "micro_batch_size": size, "memory": self._file}
        return found

    # ------------------------------------------------------------ what is remembered and said

    def _remember(self, row: ReducedMicroBatch) -> None:
        self.rows.append(row)
        if self.world.is_first:
            with suppress(AccelRunError):  # a full disk: this process knows it all the same
                oom_history.remember(self.run.directory, self.rows)

    def _mine(self, use: oom_history.Use) -> list[ReducedMicroBatch]:
        in_step = self.run.parts.parallel.in_step  # then ranks make as many passes as the one with the smallest
        mine = [row for row in self.rows if row.use == use and self._holds(row)]
        return [row for row in mine if in_step or row.is_of(self.world.rank)]

    def _holds(self, row: ReducedMicroBatch) -> bool:
        """Tell whether a row was made under the settings of this phase."""
        same = (row.phase, row.world_size) == (self.phase.name, self.world.world_size)
        return same and row.asked == self._asked(row.use)

    def _asked(self, use: oom_history.Use) -> int:
        batch = self.phase.planned.batch
        return batch.largest_pass if use == "training" else batch.micro_batch_size

    def _where(self, shortage: OomCause | None) -> str:
        place = f", {shortage.place}" if shortage is not None else ""
        return f"update {self.phase.position.update + 1} of phase {self.phase.name}{place}"

    def _name_of(self, rank: int) -> str:
        return f"memory-rank{rank}.txt" if self.world.world_size > 1 else "memory.txt"

    @property
    def _file(self) -> str:
        return self._name_of(self.world.rank)

    def _say(self, text: str) -> None:
        self.run.observers.screen.warn(text)
