"""Measure, after the last update of a run on a CPU, what bfloat16 would gain."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from runner.base import noise
from runner.base.batch import MicroBatch
from runner.base.global_rng import random_state, restore_random_state
from runner.base.module_buffers import restore_buffers
from runner.engine.gradients import clear
from runner.engine.hooks.hook import Hook
from runner.engine.phase_kinds import GradientPhase

BUDGET_SHARE, MAX_BUDGET_S = 0.02, 20.0  # of the time of the phase; seconds
ROUNDS = 5
WORTH_SAYING = 0.9  # of the time of the passes in float32


class PrecisionTrial(Hook):
    """Times a few forward and backward passes in float32 and in bfloat16, and says so if bfloat16 is faster.

    On a CPU the gain depends on the model, so `precision=auto` cannot know it, and bfloat16 changes the results, so
    it is only proposed. Everything is saved by then, and the model is not used afterwards: it is the last phase.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def end(self) -> None:
        if self._is_possible():
            with suppress(Exception):  # the training run is complete; bfloat16 may lack an operation of the model
                self._measure()

    def _is_possible(self) -> bool:
        phase, run = self.phase, self.phase.run
        plan, choices = run.plan, run.plan.choices
        is_last = phase.is_over and phase.planned == plan.selected[-1] and run.stop.requested is None
        is_automatic = choices["precision"].function == "fp32" and plan.reason("precision").startswith("auto")
        return (
            is_last
            and is_automatic
            and phase.parts.world.device.type == "cpu"
            and phase.has_one_rank
            and type(phase.work) is GradientPhase  # one objective
            and phase.work.is_additive  # whose loss is that of a micro-batch alone
            and choices["compile"].function == "off"
            and not phase.loader.fetcher.is_sequential
            and not run.observers.profiler.only
        )

    def _measure(self) -> None:
        phase, parts = self.phase, self.phase.parts
        budget_s = min(MAX_BUDGET_S, BUDGET_SHARE * phase.record.seconds)
        phase.loader.close()  # its processes would compete for the cores
        began = self.clock()
        micro = phase.loader.fetcher[next(phase.order.micro_batches(0))]
        formats: list[AbstractContextManager[Any]] = [nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)]
        seconds: tuple[list[float], list[float]] = ([], [])
        saved = random_state(parts.world.device)
        try:
            with restore_buffers(parts.bare.modules()):
                for number in range(ROUNDS + 1):
                    for context, of_format in zip(formats, seconds, strict=True):
                        pass_s = self._run_pass(context, micro)
                        if number:  # the first one warms up
                            of_format.append(pass_s)
                        elif self.clock() - began + 2 * ROUNDS * pass_s > budget_s:
                            return
                        if phase.run.stop.requested is not None:
                            return
        finally:
            noise.start_pass(None)
            restore_random_state(*saved, parts.world.device)
        ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
        if ratio < WORTH_SAYING:
            phase.run.observers.screen.info(
                f"precision=bf16 would take {ratio:.2f} of the time for forward and backward passes (measured in"
                f" {self.clock() - began:.1f} s after the last update); it changes the results"
            )

    def _run_pass(self, context: AbstractContextManager[Any], micro: MicroBatch) -> float:
        """Return the seconds of a forward and backward pass; its gradients are dropped."""
        work = self.phase.work
        assert isinstance(work, GradientPhase)
        noise.start_pass(micro.samples)
        began = self.clock()
        with context:
            loss = work.task_loss(self.phase.parts.bare, micro.batch)[0]
        self.phase.parts.precision.backward(loss)
        seconds = self.clock() - began
        clear(work.training.parameters)
        return seconds
