"""The process of a variant: real training that runs blocks of updates on command.

`python -m runner.tools.measure.variant_process SOCKET PARENT CORES` is the fork server, which only imports modules.
Each `fork` command on its socket creates a variant with a separate connection, on which the variant replies to each
command with a result or an error. A variant synchronizes with the device only before and after a block.
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
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401 - imported before the fork
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from runner.base.accelerator import get_accelerator
from runner.base.errors import AccelRunError, ConfigError, Exit, Problem, rebuild_error
from runner.base.stopwatch import seconds_between
from runner.base.task import Progress
from runner.base.text import error_line
from runner.config.configuration import compose
from runner.config.request import Request
from runner.config.schema import did_you_mean
from runner.distributed.world import World
from runner.engine.evaluation.evaluate import BatchSizes, evaluate
from runner.engine.hooks import HOOKS
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.hooks.oom import OutOfMemory
from runner.engine.opening import open_new_run
from runner.engine.phase import Phase
from runner.engine.run import TrainingRun
from runner.engine.update.loop import StepInfo
from runner.host.parent_death import die_with_parent
from runner.host.resources import affinity
from runner.host.run_queue import RunQueueWait
from runner.monitor.gpu_driver import open_driver
from runner.monitor.nvml import Gpu, Nvml, decode_throttle_reasons
from runner.plan.run_plan import PhasePlan
from runner.profiling.peak_memory import host_peak_gib
from runner.tools.measure.forked_ranks import run_on_forked_ranks
from runner.tools.measure.probe import inspect_batch, probe
from runner.tools.measure.weight_sketch import sketch
from runner.trained.infer import iterate_predictions

UNLIMITED_UPDATES = 10**12
NUM_COMPARED_UPDATES = 8  # first updates whose losses and gradient norms are compared with the baseline
SKETCH_UPDATE = 3  # update after which the weights are compared; every variant runs more before its first block
MAX_TIMED_UPDATES = 200  # last updates of a block that are timed individually

Reply = dict[str, Any]


def main(descriptor: int, parent: int, cores: int = 0) -> int:
    """Fork variants and report their exit codes until the socket is closed.

    cores  number of cores to run on; 0: all
    """
    die_with_parent(parent)
    if cores:
        os.sched_setaffinity(0, sorted(affinity())[:cores])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all processes; the parent ends this one
    compose(Request())  # imports Hydra
    gc.freeze()
    with socket.socket(fileno=descriptor) as sock:
        sock.sendall(b'{"ready": true}\n')
        while True:
            content, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 2)
            if not content:
                return int(Exit.DONE)
            command = json.loads(content)
            if command["do"] == "wait":
                _, status = os.waitpid(command["pid"], 0)
                reply = {"code": os.waitstatus_to_exitcode(status)}
            else:
                server, pid = os.getpid(), os.fork()
                if pid == 0:
                    sock.close()
                    os._exit(serve(descriptors[0], descriptors[1], server, command["ranks"]))
                for forwarded in descriptors:
                    os.close(forwarded)
                reply = {"pid": pid}
            sock.sendall((json.dumps(reply) + "\n").encode())


def serve(descriptor: int, errors: int, parent: int, ranks: int) -> int:
    """Execute commands in a forked process until the connection is closed.

    ranks  number of ranks to fork for the variant; 0: this process trains
    """
    os.setsid()
    os.dup2(errors, 2)
    die_with_parent(parent)
    warnings.simplefilter("ignore")
    try:
        with Connection(descriptor) as connection, ExitStack() as stack:
            if ranks:
                return _serve_ranks(connection, ranks)
            variant = TrainingVariant(stack)
            connection.send({"ready": True})
            while (command := _receive_command(connection)) is not None:
                try:
                    connection.send(variant.execute(command))
                except BaseException as error:
                    connection.send(_to_reported_error(error))
                    return int(Exit.SOFTWARE)
    except BaseException:  # an uncaught exception would continue in the code of the fork server
        traceback.print_exc()
        return int(Exit.SOFTWARE)
    return int(Exit.DONE)


def _serve_ranks(connection: Connection, num_ranks: int) -> int:
    """Execute commands on `num_ranks` forked ranks until the peer closes the connection; return the exit code.

    The first message contains the PIDs of the ranks. Each command is executed on all ranks, and rank 0 replies. An
    error on any rank ends all of them.
    """

    def on_rank(world: World) -> None:
        with ExitStack() as stack:
            variant = TrainingVariant(stack, world)
            ranks = world.gather(os.getpid())
            if world.is_first:
                connection.send({"ready": True, "ranks": ranks})
            while True:
                command = world.broadcast(_receive_command(connection) if world.is_first else None)
                if command is None:
                    return
                reply = variant.execute(command)
                if world.is_first:
                    connection.send(reply)

    try:
        run_on_forked_ranks(on_rank, num_ranks)
    except BaseException as error:
        connection.send(_to_reported_error(error))
        return int(Exit.SOFTWARE)
    return int(Exit.DONE)


def _receive_command(connection: Connection) -> dict[str, Any] | None:
    """Return the next command; None once the peer has closed the connection."""
    with suppress(EOFError, ConnectionError):
        return connection.recv()  # type: ignore[no-any-return]
    return None


def _to_reported_error(error: BaseException) -> AccelRunError:
    """Return the error as an AccelRunError, because the peer cannot unpickle errors of classes that a task defines."""
    if isinstance(error, AccelRunError):
        return rebuild_error(AccelRunError, error.problems, error.exit_code)
    return AccelRunError(error_line(error))


class FirstUpdates(Hook):
    """Records the results of the first updates.

    moved  sketch of the change of the weights; None: unknown
    draws  whether the updates drew random numbers, as dropout does
    """

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self.first: list[StepInfo] = []
        self.moved: Tensor | None = None
        self.draws = False

    def begin(self) -> None:
        weights = [weight for weight in self.phase.parts.bare.parameters() if weight.requires_grad]
        is_partial = any(weight.is_meta for weight in weights)  # a pipeline stage has only its own weights
        self._weights = [] if is_partial else weights
        self._before = sketch(self._weights)
        self._random_before = self._random_state()

    def after_update(self, step: StepInfo) -> None:
        if len(self.first) < NUM_COMPARED_UPDATES:  # cloned, because CUDA graphs reuse the memory
            loss, norm = (None if value is None else value.clone() for value in (step.loss_sum, step.grad_norm))
            self.first.append(step._replace(loss_sum=loss, grad_norm=norm))
        if step.update == SKETCH_UPDATE and self._weights and not self.phase.run.num_skipped:
            self.moved = sketch(self._weights) - self._before
            self.draws = any(
                not torch.equal(*pair) for pair in zip(self._random_before, self._random_state(), strict=True)
            )

    def _random_state(self) -> list[Tensor]:
        of_device = get_accelerator(self.phase.parts.world.device).generator_state()
        return [torch.get_rng_state(), *([] if of_device is None else [of_device])]


class MeasuredPhase(Phase):
    """A phase without an end.

    real_total  number of updates of the real phase
    """

    kinds_of_hooks = (FirstUpdates, *HOOKS)

    def __init__(self, run: TrainingRun, planned: PhasePlan, *, run_evaluations: bool) -> None:
        unlimited = dataclasses.replace(planned.early_stopping, patience=None)
        super().__init__(run, dataclasses.replace(planned, early_stopping=unlimited), None)
        evaluation = self.hook(Evaluation)
        self.real_total = self.total
        self.period_of_evaluation = evaluation.every if evaluation.held_out is not None else 0
        self.total = self.work.total = UNLIMITED_UPDATES
        if not run_evaluations:
            evaluation.every = 0

    def _report_progress(self) -> None:
        update = min(self.position.update, self.real_total)  # tasks may expect an update within the phase
        epoch = update / self.order.updates_per_epoch
        self.run.parts.task.begin_update(Progress(self.name, update, self.real_total, epoch))


class BlockClock:
    """Times updates by the host's clock; on a CPU, the work has finished when an update returns."""

    def __init__(self) -> None:
        self._wait_counter = RunQueueWait()

    def record(self) -> Any:
        """Return a time mark, without synchronization."""
        return time.perf_counter()

    def elapsed_ms(self, earlier: Any, later: Any) -> float:
        """Return the milliseconds between two marks."""
        return 1e3 * float(later - earlier)

    def throttled(self) -> list[str]:
        """Return the reasons for reduced clocks."""
        return []

    def run_queue_wait(self) -> Callable[[], float]:
        """Start measuring; return a function that returns the run-queue wait of this thread since then in seconds."""
        before = self._wait_counter.sample(begins=True)
        return lambda: self._wait_counter.wait_for_others_s(before, self._wait_counter.sample(begins=False))


class DeviceBlockClock(BlockClock):
    """Times updates by events on the stream of a GPU, read after synchronization."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nvml: Nvml = open_driver()
        self.gpu: Gpu | None = self.nvml.find_torch_device(get_accelerator(device).uuid())

    def record(self) -> Any:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later))

    def run_queue_wait(self) -> Callable[[], float]:
        return lambda: 0.0  # the device continues while the host waits

    def throttled(self) -> list[str]:
        reasons = self.nvml.read(self.gpu, ["throttle_reasons"])["throttle_reasons"] if self.gpu else None
        return list(decode_throttle_reasons(reasons))


class TrainingVariant:
    """A training run that runs updates on command."""

    run: TrainingRun
    phase: MeasuredPhase
    updates: Iterator[int]

    def __init__(self, stack: ExitStack, world: World | None = None) -> None:
        self.stack, self.world = stack, world
        self.is_open = False

    def execute(self, command: Mapping[str, Any]) -> Reply:
        """Execute a command; return its result. Raises its error, explained as at the end of a run."""
        handlers: Mapping[str, Callable[..., Reply]] = {
            "begin": self.begin, "run": self.run_block, "report": self.report, "probe": self.probe,
            "predict": self.predict, "fit": self.fit, "batch": self.batch, "evaluate": self.evaluate,
        }  # fmt: skip
        arguments = {key: value for key, value in command.items() if key != "do"}
        try:
            return handlers[command["do"]](**arguments)
        except BaseException as error:  # a task may raise anything, and torch may be out of memory
            raise (self.phase.translate_error(error) if self.is_open else error) from error

    def begin(
        self,
        overrides: list[str],
        task_file: str | None,
        config_dir: str | None,
        compiled: str,
        phase: str | None,
        run_evaluations: bool,
        *,
        settle: int = 0,
    ) -> Reply:
        """Build the run and its phase; return a description of them.

        compiled         folder for compiled code, separate from that of other variants
        phase            phase to run; None: the first training phase. Earlier phases without gradients run before it;
                         earlier training phases do not, because the time of an update does not depend on the weights
        run_evaluations  run evaluations as often as the real phase
        settle           number of updates to run first, in which load balancing adapts the shares of the ranks
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        task, folder = (Path(path) if path else None for path in (task_file, config_dir))
        self.run = self.stack.enter_context(open_new_run(Request(tuple(overrides), task, folder), self.world))
        planned = self._prepare_phase(phase)
        self.phase = MeasuredPhase(self.run, planned, run_evaluations=run_evaluations)
        self.stack.enter_context(self.phase)
        self.is_open = True
        self.updates = self.phase.updates()
        for _ in range(settle):
            next(self.updates)
        plan, parts, order = self.run.plan, self.run.parts, self.phase.order
        weights, device = list(parts.bare.parameters()), parts.world.device
        self.clock = DeviceBlockClock(device) if device.type == "cuda" else BlockClock()
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
            "updates": self.phase.real_total,
            "epochs": self.phase.real_total / order.updates_per_epoch,
            "num_samples": order.num_samples,
            "periods": self._periods(),
            "ahead": self._prefetched_updates(),
            "readers": self.phase.loader.num_workers,
            "threads": torch.get_num_threads(),
            "parameters": sum(weight.numel() for weight in weights),
            "trainable": sum(weight.numel() for weight in weights if weight.requires_grad),
            "has_batch_norm": any(isinstance(module, _BatchNorm) for module in parts.bare.modules()),
            "free_gib": None if memory is None else memory.free / 2**30,
        }

    def run_block(self, updates: int, untimed: int = 0) -> Reply:
        """Run a block of updates; return its time, its parts, and the times of its last updates.

        untimed  number of updates before the block that are not timed: their batches may have become ready while the
                 process was stopped
        """
        world, stopwatch = self.run.parts.world, self.phase.stopwatch
        for _ in range(untimed):
            next(self.updates)
        world.synchronize()
        before, wait = stopwatch.spent(), self.clock.run_queue_wait()
        began = time.perf_counter()
        marks = deque([self.clock.record()], maxlen=MAX_TIMED_UPDATES + 1)
        for _ in range(updates):
            next(self.updates)
            marks.append(self.clock.record())
        world.synchronize()
        seconds, wait_s = time.perf_counter() - began, wait()
        return {
            "updates": updates,
            "seconds": seconds,
            "run_queue_wait_s": min(wait_s, seconds),
            "parts_s": seconds_between(before, stopwatch.spent()),
            "updates_ms": [round(self.clock.elapsed_ms(*pair), 4) for pair in pairwise(marks)],
            "throttled": self.clock.throttled(),
        }

    def report(self) -> Reply:
        """Return losses of the first updates, and memory and kernels of all updates so far."""
        accelerator = get_accelerator(self.run.parts.world.device)
        peak, total = accelerator.peak_memory(), accelerator.total_bytes()
        first = self.phase.hook(FirstUpdates)
        found: Reply = {
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
            }
        return found

    def probe(self) -> Reply:
        """Inspect the task's code. Updates of this process must not be timed afterwards."""
        return probe(self.run, self.phase)

    def predict(self, least_s: float) -> Reply:
        """Predict as `accel-run inference` does, for at least `least_s` seconds; return seconds and items.

        The number of items is 0 if the task defines neither `predict` nor `predict_batch`.
        """
        parts, plan, items, seconds = self.run.parts, self.run.plan, 0, 0.0
        has_batches = parts.task.predicts == "predict_batch"
        if has_batches and not plan.inference.get("batch_size"):
            size = self.phase.planned.batch.micro_batch_size
            plan = dataclasses.replace(plan, inference={**plan.inference, "batch_size": size})
        if parts.task.predicts:
            with closing(iterate_predictions(plan, parts)) as predictions:
                began = time.perf_counter()
                for prediction in predictions:
                    parts.world.synchronize()
                    ended = time.perf_counter()
                    items += prediction.items
                    seconds += ended - began if prediction.items else 0.0
                    if seconds > least_s:
                        break
                    began = ended
        return {"items": items, "item": "sample" if has_batches else parts.task.item, "seconds": seconds}

    def fit(self) -> Reply:
        """Repeat the phases without gradients before the measured phase; return name -> seconds.

        Their results depend only on the data, so repeating them does not change the model.
        """
        seconds = {}
        for planned in self.run.plan.phases:
            if planned.kind == "train":
                break
            with Phase(self.run, planned, None) as phase:
                self.run.parts.world.synchronize()
                began = time.perf_counter()
                for _ in phase.updates():
                    pass
                self.run.parts.world.synchronize()
                seconds[planned.name] = time.perf_counter() - began
        return {"seconds": seconds}

    def evaluate(self) -> Reply:
        """Return the extra seconds of the first of two evaluations, both with one batch of each size."""
        phase, parts, seconds = self.phase, self.run.parts, list[float]()
        evaluation = phase.hook(Evaluation)
        if evaluation.held_out is None:
            return {"more_s": 0.0}
        sizes, samples = phase.hook(OutOfMemory).sizes, evaluation.samples
        loader = phase.loader.for_evaluation(evaluation.held_out)
        for _ in range(2):
            began = time.perf_counter()
            one_of_each = samples[: sizes.requested + len(samples) % sizes.requested]
            evaluate(parts, loader, one_of_each, BatchSizes(sizes.requested, sizes.coupled))
            parts.world.synchronize()
            seconds.append(time.perf_counter() - began)
        return {"more_s": max(0.0, seconds[0] - seconds[1])}

    def batch(self) -> Reply:
        """Return the shape of the model's input and the number of terms of its loss."""
        return inspect_batch(self.phase)

    def _prepare_phase(self, requested: str | None) -> PhasePlan:
        """Run the phases without gradients before the requested phase, and return its plan."""
        phases = self.run.plan.phases
        names = [phase.name for phase in phases if phase.kind == "train"]
        selected = [phase.name for phase in self.run.plan.selected if phase.kind == "train"]
        name = requested or next(iter(selected or names), None)
        if name not in names:
            what = f"must be a training phase, one of {', '.join(names) or 'none'}"
            raise ConfigError(Problem(what, f"phase={requested}", did_you_mean(requested or "", names)))
        index = [phase.name for phase in phases].index(name)
        for earlier in phases[:index]:
            if earlier.kind != "train":
                with Phase(self.run, earlier, None) as phase:
                    phase.run_updates()
        return phases[index]

    def _prefetched_updates(self) -> int:
        """Return the number of updates for which data can be prefetched."""
        batches = self.phase.loader.max_prefetched + (not self.run.plan.choices["prefetch"].uses("none"))
        return -(-batches // self.phase.planned.batch.accumulation_steps)

    def _periods(self) -> dict[str, int | None]:
        """Return the periods of recurring work in updates; None: by time, or never."""
        policy = self.phase.hook(Checkpointing).saver.policy
        epochs_period = None if policy.epochs is None else policy.epochs * self.phase.order.updates_per_epoch
        return {
            "log": self.run.plan.settings.log_every,
            "evaluation": self.phase.period_of_evaluation or None,
            "checkpoint": epochs_period if policy.updates is None else policy.updates,
        }


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
