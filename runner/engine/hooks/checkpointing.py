"""Save checkpoints of a phase: periodically, when a metric is among the best, before a stop, and at the end."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import StorageError, TaskFault
from runner.base.text import abbreviate
from runner.config.chosen_option import make_chosen
from runner.durable import checkpoint as checkpoints
from runner.durable.checkpoint import LoadedCheckpoint, Snapshot
from runner.durable.checkpoint_choice import find_best_checkpoints
from runner.durable.checkpoint_parts import CheckpointPart
from runner.durable.checkpoint_writer import CheckpointWriter, NoWriter, PartWriter
from runner.engine.checkpoints.checkpoint_saver import Saver
from runner.engine.checkpoints.save_policy import CHECKPOINTS
from runner.engine.evaluation.evaluate import EvaluationResult
from runner.engine.hooks.bad_samples import BadSamples
from runner.engine.hooks.custom import check_hook_states
from runner.engine.hooks.hook import Hook, PhaseView, Wants
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.hooks.timekeeping import Timekeeping
from runner.engine.parts.frozen_base import DIGEST, frozen_digest, select_saved_state
from runner.engine.process.watchdog import CHECKPOINT
from runner.engine.update import non_finite
from runner.engine.update.loop import StepInfo
from runner.tensors.global_rng import random_state
from runner.tensors.module_buffers import list_buffers
from runner.version import __version__


class Checkpointing(Hook):
    """Decides when to save, collects the state of all hooks, and passes it to the writer.

    saved_at    update of the last checkpoint; -1: none yet
    is_unsaved  the last update could not be saved before the kill deadline
    """

    name = "saving"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.saved_at = -1
        self.is_unsaved = False
        self._has_reported_best = False  # True once the metric `checkpoint.best` was found or reported missing
        self._is_saved_finished = False  # the checkpoint of `saved_at` marks the phase as finished
        self._finite_buffers: list[str] = []
        self._shapes: Mapping[str, torch.Size] = {}  # shapes of saved buffers in a newly built model
        start = phase.start
        self._resumes_own_checkpoint = start is not None and start.path.parent == phase.run.directory.checkpoints
        self.saver = self._make_saver(start if self._resumes_own_checkpoint else None)
        phase.progress_mark.write_progress = self._write_progress

    def _make_saver(self, start: LoadedCheckpoint | None) -> Saver:
        run, choice = self.phase.run, self.phase.run.plan.choices["checkpoint"]
        policy, screen = make_chosen(CHECKPOINTS, choice), run.observers.screen
        best = self.phase.planned.best
        policy.best, policy.best_is = best.metric, best.best_is
        writer: CheckpointWriter | NoWriter = NoWriter()
        if 0 < run.parts.world.rank < run.parts.parallel.num_parts:
            writer = PartWriter(run.directory.checkpoints, check=self._check_finite)
        elif run.parts.world.is_first:
            writer = CheckpointWriter(
                run.directory.checkpoints,
                keep_last=max(2, policy.keep),
                on_retry=lambda error: screen.warn(f"saving the checkpoint failed, and is retried: {error}"),
                on_failure=lambda error: screen.warn(f"the checkpoint was not saved: {error}"),
                sync_first=run.observers.metrics.sync,
                check=self._check_finite,
                on_saved=run.mirror.notify,
                in_use=run.mirror.in_use,
            )
        on_disk, bests = (start.update, find_best_checkpoints(start, policy.ranking)) if start else (None, [])
        return Saver(policy, writer, run.save_cost, run.host_buffers, screen, on_disk=on_disk, bests=bests)

    def begin(self) -> None:
        if not self.phase.position.update:
            check_hook_states(self.phase)  # here, because `begin` of a hook may create its state
        work = self.phase.work
        self._finite_buffers = non_finite.finite_buffers(self.phase.parts.bare) if work.trained_names else []
        buffers = [(ref.name, ref.tensor) for ref in list_buffers(self.phase.parts.bare) if ref.is_saved]
        self._shapes = {name: tensor.shape for name, tensor in buffers if tensor is not None}

    @cached_property
    def _frozen_digest(self) -> str | None:
        """Hash of the weights that checkpoints leave out; computed once, because they do not change."""
        return frozen_digest(self.phase.parts)

    def prepare(self) -> None:
        """Reserve host memory for a copy of the state."""
        parts = self.phase.parts
        model_bytes = parts.parallel.checkpoint_bytes(select_saved_state(parts).values())
        # Each tensor is padded to a cache line: less than 1 % in total.
        nbytes = int(1.01 * (model_bytes + self.phase.work.state_bytes()[0]))
        self.saver.prepare(nbytes, parts.world.device)

    def wants(self) -> Wants:
        if self.phase.update_s is not None:
            self.saver.record_update(self.phase.update_s)
        return Wants(save=self.phase.parts.world.is_first and self.saver.is_due_by_time())

    def after_update(self, step: StepInfo) -> None:
        phase, sync = self.phase, self.phase.hook(RankSync)
        # The request may be one update old, and a checkpoint may have been saved since.
        is_late = sync.agreed.save and sync.agreed_at > self.saved_at
        is_due = is_late or self.saver.policy.is_due(step.update, phase.order.updates_per_epoch)
        if is_due and self._has_next_update():  # `end` saves the last update
            too_late = self.save()
            # A stop was requested after the ranks exchanged their requests, and too little time is left to save this
            # update or a later one.
            if too_late:
                phase.interrupt()

    def after_evaluation(self, result: EvaluationResult) -> None:
        self.phase.finish_work()  # so that a best checkpoint of the last update is marked as finished
        self.save_if_best(result.metrics)

    def state_dict(self) -> list[dict[str, float]]:
        return self.phase.run.save_cost.state()

    def load_state_dict(self, state: Any) -> None:
        self.phase.run.save_cost.load(state or [])
        self.saver.adapt()
        if self._resumes_own_checkpoint and self.phase.start is not None:  # otherwise this run has no checkpoint yet
            self.saved_at = self.phase.position.update
            self._is_saved_finished = bool(self.phase.start.state["records"][self.phase.name]["finished"])

    def end(self) -> None:
        """Save the last update if it is not saved yet, and wait until it is on disk."""
        phase, observers = self.phase, self.phase.run.observers
        phase.hook(Timekeeping).update_record()
        if observers.profiler.only:
            observers.metrics.sync()
            return
        self._write_held_best()
        too_late = self.save()
        if too_late:
            self.is_unsaved = True
            self._report_newest(too_late)
        # The watchdog applies the timeout for checkpoints until the phase is closed.
        phase.progress_mark.advance(CHECKPOINT, phase.position.update)
        with phase.stopwatch.during("saving"):
            observers.metrics.sync()
            if self.saver.newest_number() != phase.number and not too_late:
                raise self.saver.writer.failures[-1]

    def close(self, error: BaseException | None) -> None:
        try:
            if not isinstance(error, StorageError) and (error is None or isinstance(error, Exception)):
                # A failing run keeps its best checkpoint; errors here must not hide the cause.
                with suppress(Exception):
                    self._write_held_best()
        finally:
            with self._marked():
                self.saver.writer.close()

    @property
    def newest_number(self) -> int | None:
        """The number of the newest checkpoint of this run, or None if there is none."""
        newest = self.saver.newest_number()
        return max(self.phase.run.progress.kept, default=None) if newest is None else newest

    # ------------------------------------------------------------ deciding when to save

    def save_if_best(self, metrics: Mapping[str, float]) -> None:
        """Save the state of this update, or hold it in memory, if its value of `checkpoint.best` is among the best."""
        name, broadcast = self.saver.policy.best, self.phase.parts.world.broadcast
        if name is None:
            return
        if name not in metrics:
            # A later evaluation may have the metric. If the user chose it, another hook has already warned.
            is_reported, self._has_reported_best = self._has_reported_best, True
            best = self.phase.planned.best
            if not is_reported and not (best.is_chosen or best.stops):
                text = f"no best checkpoint is kept: the evaluation has no {name}"
                example = next(iter(metrics), None)
                fix = f"; use another metric, such as checkpoint.best={example}" if example else ""
                self.phase.run.observers.screen.info(text + fix)
            return
        self._has_reported_best = True
        value = metrics[name]
        if not broadcast(self.saver.is_best(value)):  # only rank 0 knows which saves failed
            return
        if self.saved_at == self.phase.position.update:  # the run was stopped during this evaluation
            self.saver.add_best(value, self.phase.number)
        elif self._can_hold() and broadcast(self.saver.has_no_budget()):
            with self.phase.stopwatch.during("saving"), self.phase.run.observers.profiler.exclude(), self._marked():
                self.phase.hook(BadSamples).flush()
                if self.phase.parts.world.is_first:
                    self.saver.hold(self.phase.number, self.snapshot, value=value, kept=self._kept_checkpoints)
                else:  # a collective: all ranks gather the state
                    self.saver.buffer.clear()
                    self.snapshot()
        else:
            self.save(value)

    def _can_hold(self) -> bool:
        """Return whether rank 0 can hold a checkpoint in memory: it has the whole state, and more updates follow."""
        return self.phase.parts.parallel.num_parts == 1 and self._has_next_update()

    def save(self, value: float | None = None) -> str | None:
        """Start writing the state of this update; return None, or why it is not written.

        value  value of the metric `checkpoint.best` if this checkpoint is one of the best
        """
        # If the run was stopped during its last evaluation, the checkpoint of this update does not mark the phase as
        # finished. Save it again with this mark.
        is_saved = self.saved_at == self.phase.position.update
        overwrite = is_saved and self.phase.record.finished and not self._is_saved_finished
        if is_saved and not overwrite:
            return None
        too_late = self._deadline_problem()
        if too_late:
            return too_late
        with self.phase.stopwatch.during("saving"), self.phase.run.observers.profiler.exclude(), self._marked():
            self._save_now(value, overwrite=overwrite)
        return None

    def _save_now(self, value: float | None, *, overwrite: bool) -> None:
        phase = self.phase
        self.phase.hook(BadSamples).flush()  # a run that resumes here does not read these samples again
        self._check_directory()
        self.saver.save(
            phase.number,
            self.snapshot,
            value=value,
            kept=self._kept_checkpoints,
            counts_as_cost=self._has_next_update(),
            overwrite=overwrite,
        )
        phase.run.tally.num_saves += 1
        self.saved_at, self._is_saved_finished = phase.position.update, phase.record.finished

    def _marked(self) -> AbstractContextManager[None]:
        """Report to the watchdog that a checkpoint is being written."""
        return self.phase.progress_mark.doing(CHECKPOINT, self.phase.position.update)

    def _write_held_best(self) -> None:
        """Write the best checkpoint that is held in memory, unless there is only enough time left for the last save."""
        held = self.saver.held
        if held is None:
            return
        self.saver.poll_writer()
        too_late = self.saver.deadline_problem(self._stop_requested_at, num_saves=2)
        if too_late:
            warn = self.phase.run.observers.screen.warn
            warn(f"the best checkpoint (update {held.number}) was {too_late}")
            self.saver.held = None
            return
        with self._marked():
            self._check_directory()
            with self.phase.stopwatch.during("saving"):
                self.saver.write_held()

    def _has_next_update(self) -> bool:
        """Return whether another update follows; `end` saves the last one."""
        return not self.phase.is_over and not self.phase.must_stop

    @property
    def _stop_requested_at(self) -> float | None:
        """Time of the stop request."""
        return self.phase.run.stop.requested_at or self.phase.hook(RankSync).stop_seen_at

    def _deadline_problem(self) -> str | None:
        """Return why a save cannot finish before the kill deadline, or None if it can; the same on all ranks."""
        if self.saver.policy.grace_s is None:
            return None
        self.saver.poll_writer()
        problem: str | None = self.phase.parts.world.broadcast(self.saver.deadline_problem(self._stop_requested_at))
        return problem

    def _check_directory(self) -> None:
        """Check that the run directory exists and is locked by this run. Raises the errors of `check_location`."""
        if self.phase.parts.world.is_first:
            self.phase.run.directory.check_location(self.phase.run.observers.screen.warn_once)

    def _kept_checkpoints(self) -> tuple[Path, ...]:
        """Return the checkpoints that are kept regardless of age: the best ones, and those of earlier phases."""
        numbers = [*(number for _, number in self.saver.bests), *self.phase.run.progress.kept]
        return tuple(checkpoints.checkpoint_path(self.phase.run.directory.checkpoints, number) for number in numbers)

    def _write_progress(self) -> tuple[int, object] | None:
        """Return the update whose checkpoint is being written, and a counter of disk progress."""
        writing = self.saver.writer.write_progress
        return (writing[0] - self.phase.run.progress.updates_before, writing) if writing else None

    def _report_newest(self, reason: str) -> None:
        newest_number, warn = self.newest_number, self.phase.run.observers.screen.warn
        if newest_number is None:
            warn(f"{reason}; there is no checkpoint yet, so running the same command again starts from update 0")
            return
        name = checkpoints.checkpoint_path(self.phase.run.directory.checkpoints, newest_number).name
        num_repeated = self.phase.number - newest_number
        warn(f"{reason}; the newest checkpoint is {name}, and {num_repeated} updates after it are repeated")

    # ------------------------------------------------------------ collecting the state

    def snapshot(self) -> Snapshot:
        """Return the state of this update in host memory. A collective, which every rank must call.

        Rank 0 gets all of the state; if checkpoints are sharded, each rank gets its own part.
        """
        phase, run, parts = self.phase, self.phase.run, self.phase.parts
        to_host = self.saver.buffer.copy
        parts.precision.num_skipped()  # raises if an update was not finite: such weights are never saved
        hook_states, hook_tensors = self._collect_hook_states()
        work_tensors, numbers = phase.work.state(to_host)
        phase.hook(Timekeeping).update_record()
        random, host_random = random_state(parts.world.device)
        own_state = [{name: tensor.tolist() for name, tensor in random.items()}, host_random]  # 30 KB as JSON
        rank_states = parts.world.gather_on_first(own_state)
        parts.parallel.check_buffers()
        update, values = phase.position.update, run.plan.values()
        state = {
            "phase": phase.name,
            "phase_update": update,
            "epoch": update / phase.order.updates_per_epoch,
            "total": phase.total,
            "trained": sorted(phase.work.trained_names),
            **numbers,
            **hook_states,
            **run.progress.state(),
            "closed": phase.closed,
            "ended": phase.is_ended,
            "precision": parts.precision.state(),
            "random": host_random,
            "random_of_ranks": [values for _, values in rank_states[1:]],
            "bests": self.saver.bests,
            "ranking": {"metric": self.saver.policy.best, "best_is": self.saver.policy.best_is},
            "skipped_before": phase.position.skipped_before,
            "values": values,
            "code": run.provenance.code,
            "changes": run.provenance.changes,
            DIGEST: self._frozen_digest,
        }
        state = copy.deepcopy(state)  # training changes the originals while the copy is written
        manifest = {
            "epoch": update // phase.order.updates_per_epoch,
            "samples": phase.order.samples_before(update),
            "phase": phase.name,
            "world_size": parts.world.world_size,
            "precision": run.plan.choices["precision"].name,
            "versions": {"accel-run": __version__, "torch": torch.__version__, "numpy": np.__version__},
            "config_hash": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(),
            "run_id": run.directory.name,
            "run_uid": run.provenance.uid,
            "wandb_id": run.observers.tracker.id,
            "metrics_bytes": run.observers.metrics.pending_length,  # synced before the checkpoint gets its final name
        }
        tensors = {"model": parts.parallel.checkpoint_tensors(select_saved_state(parts), to_host), **work_tensors}
        tensors |= {name: parts.parallel.checkpoint_tensors(values, to_host) for name, values in hook_tensors.items()}
        part = None
        if parts.parallel.num_parts > 1:
            token = parts.world.broadcast(secrets.token_hex(4))
            part = CheckpointPart(parts.world.rank, parts.parallel.num_parts, token)
            if not parts.world.is_first:
                return Snapshot(phase.number, tensors, state, manifest, part)
        for rank, (generators, _) in enumerate(rank_states):
            stem = checkpoints.rank_stem("random", rank) if rank else "random"
            tensors[stem] = {name: torch.tensor(state, dtype=torch.uint8) for name, state in generators.items()}
        return Snapshot(phase.number, tensors, state, manifest, part)

    def _collect_hook_states(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Return the JSON-serializable states of the hooks by name, and their tensors, for separate files."""
        states = {hook.name: hook.state_dict() for hook in self.phase.hooks if hook.name}
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, state in states.items():
            if isinstance(state, dict):
                tensors[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                states[name] = {key: value for key, value in state.items() if key not in tensors[name]}
        # A stage of a pipeline may have no tensors while others do; all ranks gather them together.
        gathered = self.phase.parts.world.gather([name for name, tensors_ in tensors.items() if tensors_])
        return states, {name: tensors[name] for name in dict.fromkeys(name for names in gathered for name in names)}

    def _check_finite(self, snapshot: Snapshot) -> None:
        """Raise NumericError if learned values are not finite. The loss may be finite, as it need not use all of them.

        Raises TaskFault if the shape of a buffer has changed, because a newly built model could not load it.
        """
        model = snapshot.tensors["model"]
        changed = [name for name, shape in self._shapes.items() if name in model and model[name].shape != shape]
        if changed:
            raise TaskFault(
                f"the shape of buffers has changed, so the checkpoint could not be loaded: {abbreviate(changed)}",
                where=str(self.phase.parts.source),
                fix="register each in __init__ with its final shape, or with persistent=False",
            )
        weights = [
            (name, model[name]) for name in self.phase.work.trained_names if name in model or snapshot.part is None
        ]
        optimizer = snapshot.tensors.get("optimizer", {}).items() if weights else ()
        where = f"phase {self.phase.name}, update {snapshot.state['phase_update']}"
        non_finite.check_finite([*weights, *optimizer], where)
        buffers = [(name, model[name]) for name in self._finite_buffers if name in model]
        non_finite.check_finite(buffers, where, non_finite.STATISTICS_FIX)


def hook_state(name: str, start: LoadedCheckpoint) -> Any:
    """Return the state of the hook of this name in a checkpoint, or None if there is none."""
    state = start.state.get(name)
    return {**(state or {}), **start.tensors(name)} if name in start.stems else state
