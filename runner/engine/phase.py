"""Run one phase of a run: read its data, run its updates, and call hooks between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runner.axes.precision import NotFinite
from runner.base import noise
from runner.base.batch import MicroBatch
from runner.base.errors import AccelRunError
from runner.base.order import rank_seed
from runner.base.task import Progress, Task
from runner.distributed.world import World
from runner.durable import checkpoint as checkpoints
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.checkpoints.checkpoint_state import convert_state_errors
from runner.engine.checkpoints.resumption import check_trained_names
from runner.engine.contract.contract_checks import call_begin_update
from runner.engine.contract.error_diagnosis import explain
from runner.engine.feed import Feed
from runner.engine.hooks import HOOKS
from runner.engine.hooks.checkpointing import Checkpointing, hook_state
from runner.engine.hooks.custom import build_hooks
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.oom import OutOfMemory
from runner.engine.hooks.stream_position import StreamPosition
from runner.engine.parts.frozen_base import load_weights
from runner.engine.parts.objective_phase import make_phase_kind
from runner.engine.parts.phase_kinds import BeforeStep, no_hooks
from runner.engine.parts.train_order import make_order
from runner.engine.process.watchdog import FINISH, UPDATE
from runner.engine.run import TrainingRun
from runner.engine.update.balance import make_shares
from runner.engine.update.loop import Position, StepInfo
from runner.loading.loaders import Loader
from runner.plan.run_plan import PhasePlan
from runner.records.phase_record import PhaseRecord, SampleCounts
from runner.tensors.global_rng import restore_random_state, seed_everything


class Phase(PhaseView):
    """Runs the updates of a phase, and its hooks between them."""

    kinds_of_hooks: Sequence[type[Hook]] = HOOKS

    def __init__(self, run: TrainingRun, planned: PhasePlan, start: LoadedCheckpoint | None) -> None:
        self.run, self.name, self.planned, self.start = run, planned.name, planned, start
        parts = run.parts
        self.stopwatch, self.progress_mark = parts.parallel.stopwatch, run.progress_mark
        self.stopwatch.begin()
        run.tally.clock.begin()
        self.began = time.perf_counter()
        self.progress_mark.begin(self.name)
        parts.task.begin_phase(self.name)
        fetcher = self.fetcher = parts.splits.fetcher("train")
        fetcher.may_be_empty = not parts.parallel.is_lockstep
        self.order = make_order(parts, planned, fetcher, start)
        batch, num_samples = self.planned.batch, self.order.num_samples
        if batch.global_batch_size > num_samples:
            self.run.observers.screen.warn(
                f"global_batch_size={batch.global_batch_size} is more than the {num_samples} training samples:"
                " every update is a whole epoch"
            )
        self.shares = make_shares(run.plan.choices["parallelism"].options.get("shares"), self.order)
        self.loader: Loader = parts.splits.loader(fetcher)
        self.position = Position(self.name, skipped_before=parts.precision.num_skipped())
        self.feed = Feed(iter(()), self.progress_mark, self.position, run.tally.batch_shapes)
        self.record = run.progress.records.setdefault(self.name, PhaseRecord(planned.kind, self.name))
        self.record.samples = self._samples(len(fetcher))
        self.hooks = build_hooks(self, self.kinds_of_hooks)
        oom = self.hook(OutOfMemory)
        self.order = replace(self.order, smaller=oom.smaller)
        retry_policy, before_step = oom if oom.is_on else None, self._before_step()
        self.work = make_phase_kind(planned, parts, self.order, self.position, retry_policy, before_step)
        self.total = self.record.total = self.work.total
        if start:
            with convert_state_errors(start):
                self._restore(start)
        self.total = int(min(self.total, self.position.update + run.observers.profiler.limit))

    def _before_step(self) -> BeforeStep:
        """Return a function that calls the hooks that act before an optimizer step."""
        hooks = self.hooks_with("before_step")

        @torch.no_grad()
        def call_hooks(parameters: Mapping[str, nn.Parameter], objective: str) -> None:
            for hook in hooks:
                hook.before_step(parameters, objective)

        return call_hooks if hooks else no_hooks

    def _samples(self, num_samples: int) -> SampleCounts:
        batch = self.planned.batch
        return SampleCounts(
            num_samples=num_samples,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            accumulation_steps=batch.accumulation_steps,
        )

    def _restore(self, start: LoadedCheckpoint) -> None:
        """Restore the state of a checkpoint. If the checkpoint has all requested updates or more, the phase is over."""
        parts, state = self.parts, start.state
        load_weights(parts, start)
        check_trained_names(start, self.work.trained_names)
        self.work.load(start)
        parts.precision.load(state["precision"])
        self.position.update = int(state["phase_update"])
        # If the precision differs from that of the checkpoint, the count of skipped steps starts from 0.
        self.position.skipped_before = min(int(state["skipped_before"]), parts.precision.num_skipped())
        for hook in self.hooks:
            if hook.name:
                hook.load_state_dict(hook_state(hook.name, start))
        # Restored last, because constructing the parts also draws from the generators.
        restore_rank_random_state(parts.world, start, self.run.plan.settings.seed)
        done = self.position.update
        if done > self.total:
            self.run.observers.screen.warn(
                f"nothing is trained: {self.name} already has {done} updates in {start.path.name}, but only"
                f" {self.total} were requested"
            )
            self.total = self.record.total = done
        # If settings of hooks or the requested length have changed, the hooks decide again when the phase ends.
        before, now = (
            {k: v for k, v in of.items() if "hook." in k} for of in (state["values"], self.run.plan.values())
        )
        is_same = before == now and state["total"] == self.total
        self.is_ended = self.was_ended = state.get("ended", False) and is_same
        self.closed = bool(state["closed"]) and self.is_over  # more updates may be requested than before

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        noise.start_pass(None)
        suppressed = suppress(Exception) if error else nullcontext()  # the first error is the cause
        with ExitStack() as stack:  # an error of one hook must not prevent closing the others
            # The last callback runs first: the feed is closed, then the hooks in reverse order, then the work.
            stack.callback(self.work.release)
            for hook in self.hooks:
                stack.callback(hook.close, error)
            stack.callback(self.feed.close)
            with suppressed:
                # Before anything is freed, because memory.txt lists what the phase held.
                if error is not None:
                    self.hook(OutOfMemory).record_error(error)
            with suppressed:
                self.loader.close()

    @property
    def place(self) -> dict[str, Any]:
        """Position of the run, for error reports."""
        return {"rank": self.parts.world.rank, "phase": self.name, "update": self.position.update}

    def translate_error(self, error: BaseException) -> BaseException:
        """Return the error to report if `error` ended this phase: `error` itself if no hook knows its cause."""
        for hook in self.hooks:
            reported = hook.on_error(error)
            if reported is not None:
                return reported
        return error

    def explain_error(self, error: BaseException) -> AccelRunError | None:
        done = self.position.update
        where = f"update {done + 1} of phase {self.name}" if done < self.total else f"the end of phase {self.name}"
        if self.is_evaluating:
            where = f"the evaluation after update {done} of phase {self.name}"
        return explain(error, self.parts.source, where, self.planned.batch.micro_batch_size)

    def run_updates(self) -> str | None:
        """Run the remaining updates; return the signal that stopped them, or None.

        Raises NumericError with the module in which an update became non-finite; that update is not saved.
        """
        try:
            for _ in self.updates():
                if self.must_stop or self.is_over:
                    break
            self.close()
        except NotFinite as error:
            raise self.translate_error(error) from error
        if self.record.finished and not self.hook(Checkpointing).is_unsaved:
            return None
        name = self.run.stop.requested
        # The launcher may forward a different signal than the user sent.
        return "as requested" if name is None or self.parts.world.is_supervised else name

    def close(self) -> None:
        """End the phase: run a due evaluation, save, and wait until everything is on disk."""
        if self.is_ended and not self.was_ended and self.position.update < self.total:
            text = f"{self.name} ends at update {self.position.update} of {self.total}: a hook called stop()"
            self.run.observers.screen.info(text)
        for hook in self.hooks:
            hook.end()

    def updates(self) -> Iterator[int]:
        """Run the updates, and the hooks between them; yield the numbers of the updates."""
        run, parts, done = self.run, self.parts, self.position.update
        if done >= self.total or (self.is_ended and self.is_over):
            length = "updates" if self.planned.updates is not None else "epochs"
            how = f"a hook ended it at update {done}" if done < self.total else f"{done} updates are done"
            run.observers.screen.info(
                f"{self.name} is finished: {how}; to train longer, use {length}=N resume_allow=[{length}]"
            )
        for text in () if done or self.is_over else self.work.start_lines():
            run.observers.screen.info(f"{self.name} {text}")
        self.feed.batches = self._read_batches()
        self.batches = self.feed
        parts.bare.train()
        self.stopwatch.lap("starting")
        self._report_progress()
        for hook in self.hooks:
            hook.begin()
        self._after_update = self.hooks_with("after_update")
        since: float | None = None  # the first update is not representative
        # `must_stop` is equal on all ranks here: it is only set if a stop request has ended an evaluation in `begin`.
        for step in () if self.is_over or self.must_stop else self.work.updates(self.batches):
            self.update_s = None if since is None else time.perf_counter() - since
            self._run_hooks(step, is_first=since is None)
            yield step.update
            since = time.perf_counter()

    def _run_hooks(self, step: StepInfo, *, is_first: bool) -> None:
        self.progress_mark.num_updates.value = self.number
        self._report_progress()
        # After the first update, hooks run checks and start components: no later update repeats this work.
        with self.stopwatch.during("starting") if is_first else nullcontext():
            for hook in self._after_update:
                hook.after_update(step)
        self.progress_mark.completed_kinds.add(UPDATE)

    def _report_progress(self) -> None:
        update = self.position.update
        progress = Progress(self.name, update, self.total, update / self.order.updates_per_epoch)
        task = self.parts.task
        if update == 1 and type(task).begin_update is not Task.begin_update:
            # checked only now, because the weights must have changed
            call_begin_update(task, self.parts.bare, progress, self.parts.source)
        else:
            task.begin_update(progress)

    def restart_update(self, smaller: tuple[tuple[int, int], ...]) -> None:
        self.order = replace(self.order, smaller=smaller)
        self.reread()
        self._report_progress()

    def reread(self) -> None:
        self.loader.close()
        self.feed.batches = self._read_batches()

    def _read_batches(self) -> Iterator[MicroBatch]:
        self.hook(StreamPosition).seek()
        keys = self.order.from_update(self.position.update, self.shares.of)
        return self.parts.prefetch(iter(self.loader.batches(keys)), self.stopwatch.lap)

    def finish_work(self) -> None:
        if not self.is_over or self.closed:
            return
        with self.progress_mark.doing(FINISH, self.position.update):
            metrics = {f"{self.planned.kind}/{name}": value for name, value in self.work.close().items()}
        self.closed = True
        if metrics:
            self.record.metrics |= metrics
            self.write_row(metrics)
            self.run.observers.screen.show_metrics(self.position.update, metrics)


def restore_rank_random_state(world: World, start: LoadedCheckpoint, seed: int) -> None:
    """Restore the random generators of this rank; a rank that is not in the checkpoint gets a new seed."""
    stem, rest = "random", start.state["random"]
    if not world.is_first:
        stem, there = checkpoints.rank_stem("random", world.rank), start.state.get("random_of_ranks", [])
        if stem not in start.stems:
            seed_everything(rank_seed(seed, world.rank, start.update))
            return
        rest = there[world.rank - 1]
    restore_random_state(start.tensors(stem), rest, world.device)
