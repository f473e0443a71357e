"""The process of a variant: real training that runs blocks of updates on command.

`python -m runner.tools.measure.variant_process SOCKET PARENT` imports what variants need and computes nothing; each
`fork` on the socket creates a variant, which answers each line of JSON on a separate socket with one line: what was
done and how long it took, or `error`. It synchronizes with the device at the edges of blocks only.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401 - imported once, not by each variant
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from runner.base.accelerator import get_accelerator
from runner.base.batch import map_tensors
from runner.base.errors import ConfigError, Exit, Problem
from runner.base.stopwatch import seconds_between
from runner.base.task import Progress, Task
from runner.base.world import World
from runner.config.configuration import compose
from runner.config.request import Request
from runner.config.schema import did_you_mean
from runner.engine.evaluate import BatchSizes, evaluate
from runner.engine.hooks import HOOKS
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.oom import OutOfMemory
from runner.engine.infer import iterate_predictions
from runner.engine.loop import StepInfo
from runner.engine.opening import open_run
from runner.engine.phase import Phase
from runner.engine.phase_kinds import GradientPhase
from runner.engine.run import TrainingRun
from runner.host.parent_death import die_with_parent
from runner.host.resources import affinity
from runner.monitor.gpu_driver import open_driver
from runner.monitor.nvml import Gpu, Nvml, slowed_by
from runner.plan.run_plan import PhasePlan
from runner.profiling.peak_memory import host_peak_gib
from runner.tools.measure.forked_ranks import as_answer, send, serve_ranks
from runner.tools.measure.probe import batch_of, probe
from runner.tools.measure.run_queue import RunQueueWait
from runner.tools.measure.weight_sketch import sketch

FOREVER = 10**12  # updates: a variant runs until it is ended
FIRST_UPDATES = 8  # whose losses and gradient norms are compared with those of the baseline
MOVED_UPDATES = 3  # after which the weights are compared: every variant runs more before it is timed
TO_CALIBRATE = 10  # updates, to know how long a sample takes
TIMED_UPDATES = 200  # the last ones of a block, timed one by one

Answer = dict[str, Any]


def main(descriptor: int, parent: int, cores: int = 0) -> int:
    """Fork variants and report how they ended, until the socket is closed; on so many cores, 0 for all."""
    die_with_parent(parent)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(affinity())[:cores])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all processes; the parent ends this one
    compose(Request())  # imports Hydra
    gc.freeze()
    with socket.socket(fileno=descriptor) as line:
        line.sendall(b'{"ready": true}\n')
        while True:
            content, given, _, _ = socket.recv_fds(line, 1 << 16, 2)
            if not content:
                return int(Exit.DONE)
            order = json.loads(content)
            if order["do"] == "wait":
                _, status = os.waitpid(order["pid"], 0)
                answer = {"code": os.waitstatus_to_exitcode(status)}
            else:
                us, pid = os.getpid(), os.fork()
                if pid == 0:
                    line.close()
                    os._exit(live(given[0], given[1], us, order["ranks"]))
                for number in given:
                    os.close(number)
                answer = {"pid": pid}
            line.sendall((json.dumps(answer) + "\n").encode())


def live(descriptor: int, errors: int, parent: int, ranks: int) -> int:
    """Answer orders in a forked process until the socket is closed.

    ranks  number of ranks to fork for the variant; 0: this process trains
    """
    os.setsid()
    os.dup2(errors, 2)
    die_with_parent(parent)
    warnings.simplefilter("ignore")
    try:
        with socket.socket(fileno=descriptor) as line, ExitStack() as stack:
            if ranks:
                return serve_ranks(line, ranks, TrainingVariant)
            variant = TrainingVariant(stack)
            send(line, {"ready": True})
            for text in line.makefile("r", encoding="utf-8"):
                try:
                    send(line, variant.execute(json.loads(text)))
                except BaseException as error:
                    send(line, as_answer(error))
                    return int(Exit.SOFTWARE)
    except BaseException:  # the interpreter would continue where it was forked
        traceback.print_exc()
        return int(Exit.SOFTWARE)
    return int(Exit.DONE)


class FirstUpdates(Hook):
    """Keeps the results of the first updates.

    moved  a sketch of how they changed the weights; None: unknown
    draws  they have drawn random numbers, as dropout does
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.first: list[StepInfo] = []
        self.moved: Tensor | None = None
        self.draws = False

    def begin(self) -> None:
        weights = [weight for weight in self.phase.parts.bare.parameters() if weight.requires_grad]
        is_partial = any(weight.is_meta for weight in weights)  # a stage of a pipeline
        self._weights = [] if is_partial else weights
        self._before = sketch(self._weights)
        self._random_before = self._random_state()

    def after_update(self, step: StepInfo) -> None:
        if len(self.first) < FIRST_UPDATES:  # copies: CUDA graphs write the next loss into the same memory
            loss, norm = (None if value is None else value.clone() for value in (step.loss_sum, step.grad_norm))
            self.first.append(step._replace(loss_sum=loss, grad_norm=norm))
        if step.update == MOVED_UPDATES and self._weights and not self.phase.run_.num_skipped:
            self.moved = sketch(self._weights) - self._before
            self.draws = any(
                not torch.equal(*pair) for pair in zip(self._random_before, self._random_state(), strict=True)
            )

    def _random_state(self) -> list[Tensor]:
        of_device = get_accelerator(self.phase.parts.world.device).generator_state()
        return [torch.get_rng_state(), *([] if of_device is None else [of_device])]


class MeasuredPhase(Phase):
    """A phase without an end.

    whole  number of updates of the real phase
    """

    kinds_of_hooks = (FirstUpdates, *HOOKS)

    def __init__(self, run: TrainingRun, planned: PhasePlan, *, evaluates: bool) -> None:
        unlimited = dataclasses.replace(planned.early_stopping, patience=None)
        super().__init__(run, dataclasses.replace(planned, early_stopping=unlimited), None)
        evaluation = self.hook(Evaluation)
        self.whole = self.total
        self.period_of_evaluation = evaluation.every if evaluation.held_out is not None else 0
        self.total = self.work.total = FOREVER
        if not evaluates:
            evaluation.every = 0

    def _tell_progress(self) -> None:
        update = min(self.position.update, self.whole)  # the task may depend on it
        epoch = update / self.order.updates_per_epoch
        self.run_.parts.task.begin_update(Progress(self.name, update, self.whole, epoch))


class BlockClock:
    """Times updates by the host's clock: a CPU has finished its work when an update is over."""

    def __init__(self) -> None:
        self.contention = RunQueueWait()

    def tick(self) -> Any:
        """Return a mark without waiting."""
        return time.perf_counter()

    def between_ms(self, earlier: Any, later: Any) -> float:
        """Return the milliseconds between two marks."""
        return 1e3 * float(later - earlier)

    def joules(self) -> float | None:
        """Return the energy counter of the device; None if it has none."""
        return None

    def throttled(self) -> list[str]:
        """Return the reasons for reduced clocks."""
        return []

    def run_queue_wait(self) -> Callable[[], float]:
        """Return a function for the seconds since now that this thread waited for cores used by other processes."""
        before = self.contention.look(begins=True)
        return lambda: self.contention.behind_others_s(before, self.contention.look(begins=False))


class DeviceBlockClock(BlockClock):
    """Times updates by events on the stream of a GPU, read after the device has passed them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nvml: Nvml = open_driver()
        self.gpu: Gpu | None = self.nvml.find_of_torch(get_accelerator(device).uuid())

    def tick(self) -> Any:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def between_ms(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later))

    def joules(self) -> float | None:
        return self.nvml.read(self.gpu, ["energy_j"])["energy_j"] if self.gpu else None

    def run_queue_wait(self) -> Callable[[], float]:
        """The device continues while the host waits."""
        return lambda: 0.0

    def throttled(self) -> list[str]:
        found = self.nvml.read(self.gpu, ["throttle_reasons"])["throttle_reasons"] if self.gpu else None
        return list(slowed_by(found))


class TrainingVariant:
    """A training run that runs updates on command."""

    run: TrainingRun
    phase: MeasuredPhase
    updates: Iterator[int]

    def __init__(self, stack: ExitStack, world: World | None = None) -> None:
        self.stack, self.world = stack, world
        self.is_open = False

    def execute(self, order: Mapping[str, Any]) -> Answer:
        """Execute an order; return its result. Raises its error, explained as at the end of a run."""
        orders: Mapping[str, Callable[..., Answer]] = {
            "begin": self.begin, "run": self.run_block, "report": self.report, "probe": self.probe,
            "predict": self.predict, "fit": self.fit, "batch": self.batch, "evaluate": self.evaluate,
        }  # fmt: skip
        given = {key: value for key, value in order.items() if key != "do"}
        try:
            return orders[order["do"]](**given)
        except BaseException as error:  # a task may raise anything, and torch may be out of memory
            raise (self.phase.translate_error(error) if self.is_open else error) from error

    def begin(
        self,
        overrides: list[str],
        task_file: str | None,
        config_dir: str | None,
        compiled: str,
        phase: str | None,
        evaluates: bool,
        *,
        slow: float = 1.0,
        settle: int = 0,
    ) -> Answer:
        """Build the run and its phase; return what it consists of.

        compiled   folder for compiled code, so that code compiled by other variants is not found
        phase      to run; None: the first that trains. Phases without gradients before it run, training phases do not:
                   the time of an update does not depend on the weights
        evaluates  whether evaluations run as often as in the real phase
        slow       times as long a sample takes on the last rank
        settle     updates until measured shares have settled
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        task, folder = (Path(path) if path else None for path in (task_file, config_dir))
        self.run = self.stack.enter_context(open_run(Request(tuple(overrides), task, folder), self.world))
        planned = self._prepared(phase)
        self.phase = MeasuredPhase(self.run, planned, evaluates=evaluates)
        self.stack.enter_context(self.phase)
        self.is_open = True
        self.updates = self._slowed_updates(slow) if slow > 1 else self.phase.updates()
        for _ in range(settle):
            next(self.updates)
        self.clock = DeviceBlockClock(self.run.parts.world.device) if self._is_on_gpu() else BlockClock()
        plan, parts, order = self.run.plan, self.run.parts, self.phase.order
        weights, device = list(parts.bare.parameters()), parts.world.device
        memory = get_accelerator(device).free_memory()
        return {
            "values": plan.values(),
            "notes": [*plan.notes, *parts.notes],
            "device": str(device),
            "device_name": plan.device_name,
            "phase": self.phase.name,
            "global_batch_size": planned.batch.global_batch_size,
            "micro_batch_size": planned.batch.micro_batch_size,
            "accumulation_steps": planned.batch.accumulation_steps,
            "updates": self.phase.whole,
            "epochs": self.phase.whole / order.updates_per_epoch,
            "num_samples": order.num_samples,
            "periods": self._periods(),
            "ahead": self._ahead(),
            "readers": self.phase.loader.num_workers,
            "threads": torch.get_num_threads(),
            "parameters": sum(weight.numel() for weight in weights),
            "trainable": sum(weight.numel() for weight in weights if weight.requires_grad),
            "has_batch_norm": any(isinstance(module, _BatchNorm) for module in parts.bare.modules()),
            "trained_layers": len({name.rpartition(".")[0] for name in self.phase.work.trained_names}),
            "free_gib": None if memory is None else memory.free / 2**30,
        }

    def run_block(self, updates: int, untimed: int = 0) -> Answer:
        """Run a block of updates; return its seconds, the parts of them, and the times of the last updates.

        untimed  updates before it whose batches may have become ready while the process was stopped
        """
        world, watch = self.run.parts.world, self.phase.watch
        for _ in range(untimed):
            next(self.updates)
        world.synchronize()
        before, joules, wait = watch.spent(), self.clock.joules(), self.clock.run_queue_wait()
        began = time.perf_counter()
        ticks = deque([self.clock.tick()], maxlen=TIMED_UPDATES + 1)
        for _ in range(updates):
            next(self.updates)
            ticks.append(self.clock.tick())
        world.synchronize()
        seconds, wait_s, after = time.perf_counter() - began, wait(), self.clock.joules()
        return {
            "updates": updates,
            "seconds": seconds,
            "run_queue_wait_s": min(wait_s, seconds),
            "parts_s": seconds_between(before, watch.spent()),
            "updates_ms": [round(self.clock.between_ms(*pair), 4) for pair in pairwise(ticks)],
            "joules": None if joules is None or after is None else after - joules,
            "throttled": self.clock.throttled(),
        }

    def report(self) -> Answer:
        """Return losses, memory and kernels since the run was opened."""
        accelerator = get_accelerator(self.run.parts.world.device)
        peak, total = accelerator.peak_memory(), accelerator.total_bytes()
        first = self.phase.hook(FirstUpdates)
        found: Answer = {
            "losses": [float(step.loss_sum) / float(step.items) for step in first.first if step.loss_sum is not None],
            "grad_norms": [float(step.grad_norm) for step in first.first if step.grad_norm is not None],
            "peak_host_gib": sum(self.run.parts.world.gather(host_peak_gib())),
            "attention": [[kind, kernel, num] for (kind, kernel), num in self.phase.work.attention.items()],
            "optimizer_bytes": list(self.phase.work.state_bytes()),
            "skipped_updates": self.run.num_skipped,
            "moved": None if first.moved is None else first.moved.tolist(),
            "draws": first.draws,
        }
        if peak is not None and total is not None:
            found |= {
                "peak_device_gib": peak.allocated / 2**30,
                "reserved_gib": peak.reserved / 2**30,
                "total_gib": total / 2**30,
                "alloc_retries": accelerator.memory_stats()["num_alloc_retries"],
            }
        return found

    def probe(self) -> Answer:
        """Inspect the task's code; updates of this process must not be timed after it."""
        return probe(self.run, self.phase, self.updates)

    def predict(self, least_s: float) -> Answer:
        """Predict as `accel-run inference` does, for at least so long or to its end; return seconds and items.

        There are no items if the task does not predict.
        """
        parts, items, seconds = self.run.parts, 0, 0.0
        if type(parts.task).predict is not Task.predict:
            with closing(iterate_predictions(self.run.plan, parts)) as predictions:
                began = time.perf_counter()
                for prediction in predictions:
                    parts.world.synchronize()
                    ended = time.perf_counter()
                    items += prediction.items
                    seconds += ended - began if prediction.items else 0.0
                    if seconds > least_s:
                        break
                    began = ended
        return {"items": items, "item": parts.task.item, "seconds": seconds}

    def fit(self) -> Answer:
        """Repeat the phases without gradients before the measured one; return name -> seconds.

        They depend on the data only, so the model is the same afterwards.
        """
        seconds = {}
        for planned in self.run.plan.phases:
            if planned.kind == "train":
                break
            with Phase(self.run, planned, None) as again:
                self.run.parts.world.synchronize()
                began = time.perf_counter()
                for _ in again.updates():
                    pass
                self.run.parts.world.synchronize()
                seconds[planned.name] = time.perf_counter() - began
        return {"seconds": seconds}

    def evaluate(self) -> Answer:
        """Return how many seconds longer the first evaluation takes than a later one, over all batch sizes."""
        phase, parts, took = self.phase, self.run.parts, list[float]()
        evaluation = phase.hook(Evaluation)
        if evaluation.held_out is None:
            return {"more_s": 0.0}
        size, samples = phase.hook(OutOfMemory).sizes.requested, evaluation.samples
        for _ in range(2):
            began = time.perf_counter()
            evaluate(parts, evaluation.held_out, samples[: size + len(samples) % size], BatchSizes(size))
            parts.world.synchronize()
            took.append(time.perf_counter() - began)
        return {"more_s": max(0.0, took[0] - took[1])}

    def batch(self) -> Answer:
        """Return the shape of the model's input and the number of terms of its loss."""
        return batch_of(self.phase)

    def _slowed_updates(self, factor: float) -> Iterator[int]:
        """Start the updates; on the last rank, a sample takes so many times as long, by sleeping."""
        world, work, more_s = self.run.parts.world, self.phase.work, [0.0]
        assert isinstance(work, GradientPhase)
        training = work.training

        def loss(model: Any, batch: Any) -> Any:
            sizes: list[int] = []
            map_tensors(lambda tensor: sizes.append(len(tensor)), batch)
            time.sleep(more_s[0] * max(sizes, default=0))
            return training.loss(model, batch)

        if world.rank == world.world_size - 1:
            work.training = dataclasses.replace(training, loss=loss)  # the loop keeps it from its first update on
        updates = self.phase.updates()
        for _ in range(TO_CALIBRATE):
            next(updates)
        began = time.perf_counter()
        for _ in range(TO_CALIBRATE):
            next(updates)
        update_s = (time.perf_counter() - began) / TO_CALIBRATE
        more_s[0] = (factor - 1) * update_s / (self.phase.planned.batch.global_batch_size / world.world_size)
        return updates

    def _is_on_gpu(self) -> bool:
        return bool(self.run.parts.world.device.type == "cuda")

    def _prepared(self, wanted: str | None) -> PhasePlan:
        """Return the requested phase, after running the phases without gradients before it."""
        phases = self.run.plan.phases
        names = [phase.name for phase in phases if phase.kind == "train"]
        selected = [phase.name for phase in self.run.plan.selected if phase.kind == "train"]
        name = wanted or next(iter(selected or names), None)
        if name not in names:
            what = f"must be a phase that trains, one of {', '.join(names) or 'none'}"
            raise ConfigError(Problem(what, f"phase={wanted}", did_you_mean(wanted or "", names)))
        place = [phase.name for phase in phases].index(name)
        for earlier in phases[:place]:
            if earlier.kind != "train":
                with Phase(self.run, earlier, None) as phase:
                    phase.run()
        return phases[place]

    def _ahead(self) -> int:
        """Return for how many updates data can be prefetched."""
        batches = self.phase.loader.max_prefetched + (self.run.plan.choices["prefetch"].name != "none")
        return -(-batches // self.phase.planned.batch.accumulation_steps)

    def _periods(self) -> dict[str, int | None]:
        """Return the periods of recurring work in updates; None: by the clock, or never."""
        policy = self.phase.hook(Checkpointing).saver.policy
        of_epochs = None if policy.epochs is None else policy.epochs * self.phase.order.updates_per_epoch
        return {
            "log": self.run.plan.settings.log_every,
            "evaluation": self.phase.period_of_evaluation or None,
            "checkpoint": of_epochs if policy.updates is None else policy.updates,
        }


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
