"""Compare training and inference of every task with handwritten loops at the same settings.

    scripts/measure/task_loops.py [TASK ...] [--rounds 12] [--limits] [--device cuda] [--set KEY=VALUE ...]

hand  a loop in plain torch over the same samples in the same micro-batches, with the same model, loss and optimizer
      (torch's fused kernel), foreach clipping, a cosine schedule, and the loss read every 10 updates. Inference: the
      task's predictions, written to files
ours  the phase of accel-run, including its meter, monitor, screen, metrics and checks. Inference: as in
      `accel-run inference`, including the times of model calls

Both are interleaved in one process. On a CPU, one thread computes, and ratios are those of its CPU time, which other
processes hardly affect. On a GPU, both read batches in the main process into pinned memory, and ratios are those of the
elapsed time. A ratio is the median over rounds of the ratio within a round, with the range of 80 % of the rounds in
parentheses. Both write files in the main thread; `hand` does not wait for the disk. --set adds settings to both, such
as task.size=full or precision=bf16. With --limits, exits with 1 if an update takes more than 1.05 times, or inference
more than 1.1 times, as long as the handwritten loop.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.base.batch import map_tensors
from runner.base.noise import without_samples
from runner.base.order import Order
from runner.base.task import Progress
from runner.config.request import Request, merge_overrides
from runner.durable.directory import RunDirectory
from runner.engine.opening import open_new_run
from runner.engine.phase import Phase
from runner.engine.run import TrainingRun
from runner.engine.update.parameter_selection import select_parameters
from runner.plan.run_plan import PhasePlan
from runner.trained.infer import PredictionWriter, iterate_predictions, time_calls

MAX_UPDATE, MAX_INFERENCE = 1.05, 1.1  # maximum ratios to the handwritten loop


@dataclass(frozen=True)
class Measured:
    """A task.

    before     phases that must be finished before the measured one
    updates    number of updates in a block; few for slow tasks
    inference  settings of a short inference
    predicts   phase after which the task predicts; empty: the measured one
    """

    phase: str
    updates: int
    inference: tuple[str, ...]
    before: tuple[str, ...] = ()
    predicts: str = ""


TASKS = {
    "cape": Measured("train", 2, ("inference.samples=8", "inference.pictures=1")),
    "tractodiff": Measured("train", 10, ()),
    "nmt": Measured("train", 10, ("inference.samples=64",)),
    "dynamo": Measured("pretrain", 5, ("inference.samples=8",), predicts="joint"),
    "hyperspectral": Measured("train", 3, (), before=("fit",)),
}


def by_hand(run: TrainingRun, planned: PhasePlan, order: Order) -> Iterator[None]:
    """Yield after each update of a handwritten loop in fp32, or bf16 autocast; it trains a copy of the model."""
    device = run.parts.world.device
    precision = run.plan.choices["precision"].name
    if precision not in ("fp32", "bf16"):
        raise SystemExit(f"the handwritten loop supports only precision fp32 and bf16, not {precision}")
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=precision == "bf16")
    task = copy.deepcopy(run.parts.task)
    task.begin_phase(planned.name)
    model, dataset = task.model.train(), task.dataset("train")
    loss_of = task.losses.get(planned.name, task.loss)
    trained = [*select_parameters(model, planned.trains).values()]
    for weight in model.parameters():
        weight.requires_grad_(any(weight is each for each in trained))
    options = planned.optimizer.options
    decay = options["weight_decay"]
    groups = [
        {"params": [weight for weight in trained if weight.dim() > 1], "weight_decay": decay},
        {"params": [weight for weight in trained if weight.dim() < 2], "weight_decay": 0.0},
    ]
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[planned.optimizer.function]
    optimizer = kind(groups, lr=options["lr"], betas=tuple(options["betas"]), eps=options["eps"], fused=True)
    total, number, epoch, passes = planned.updates or 1000, 0, -1, []
    for key in order.from_update(0):
        if key.epoch != epoch and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch := key.epoch)
        if not passes:
            task.begin_update(Progress(planned.name, number, total, 0.0))
        batch = _to_device(_read(dataset, key.indices), device)
        with autocast():
            loss, items = loss_of(model, batch)[:2]
        (loss / (items * planned.batch.accumulation_steps)).backward()  # no int(items), which may synchronize
        passes.append(loss.detach())
        if not key.last:
            continue
        if planned.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained, planned.max_grad_norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * 0.5 * (1 + math.cos(math.pi * number / total))
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number % 10 == 0:
            float(sum(passes))
        passes.clear()
        yield


def _read(dataset: Any, indices: Sequence[int]) -> Any:
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return torch.utils.data.default_collate([dataset[index] for index in indices])


def _to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), batch)


def _now(device: torch.device) -> float:
    """Return the CPU time of this thread in seconds; for a GPU, the time at which its work has finished."""
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def measure(variants: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each call of each variant, interleaved; a first call of each warms up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in sorted(variants, reverse=bool(number % 2)):
            began = _now(device)
            variants[name]()
            if number:
                times[name].append(_now(device) - began)
    return times


def measure_updates(run: TrainingRun, measured: Measured, rounds: int, stack: ExitStack) -> dict[str, list[float]]:
    """Return the seconds of blocks of updates."""
    plans = {planned.name: planned for planned in run.plan.phases}
    for name in measured.before:
        with Phase(run, plans[name], None) as phase:
            for _ in phase.updates():
                pass
    planned = plans[measured.phase]
    phase = stack.enter_context(Phase(run, planned, None))
    hand, ours = by_hand(run, planned, phase.order), phase.updates()

    def advance(loop: Iterator[object]) -> None:
        for _ in range(measured.updates):
            next(loop)

    def advance_by_hand() -> None:
        with without_samples():
            advance(hand)

    return measure({"hand": advance_by_hand, "ours": lambda: advance(ours)}, rounds, run.parts.world.device)


def measure_inference(run: TrainingRun, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of complete inferences, without loading the model."""
    parts, folder = run.parts, run.directory.path / "by-hand"
    options = {key: value for key, value in run.plan.inference.items() if key != "seed"}
    folder.mkdir()
    model = parts.bare

    def by_hand() -> None:
        generator = torch.Generator(parts.world.device).manual_seed(0)
        model.eval()
        with torch.no_grad(), without_samples():
            for prediction in parts.task.predict(model, generator, **options):
                for name, content in {**prediction.files, **prediction.plots}.items():
                    (folder / name).write_bytes(content.encode() if isinstance(content, str) else bytes(content))

    def ours() -> None:
        directory: RunDirectory = run.directory
        with time_calls(parts.model, parts.world.device), PredictionWriter(directory, lambda text: None) as writer:
            for prediction in iterate_predictions(run.plan, parts):
                files = {f"predictions/{name}": _encode(content) for name, content in prediction.files.items()}
                plots = {f"plots/{name}": content for name, content in prediction.plots.items()}
                writer.put(files | plots, prediction.text)
            writer.write()

    run.directory.subfolder("predictions")
    run.directory.subfolder("plots")
    return measure({"hand": by_hand, "ours": ours}, rounds, parts.world.device)


def _encode(content: Any) -> bytes:
    return content.encode() if isinstance(content, str) else bytes(content)


def describe(times: dict[str, list[float]], per: int) -> tuple[float, str]:
    """Return the median ratio, and a text with the milliseconds of both and the range of the ratio."""
    ratios = sorted(ours / hand for ours, hand in zip(times["ours"], times["hand"], strict=True))
    low, middle, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9))
    hand, ours = (1e3 * sorted(times[name])[len(ratios) // 2] / per for name in ("hand", "ours"))
    return middle, f"{middle:.3f} ({low:.3f} to {high:.3f}), {ours:.1f} ms, by hand {hand:.1f} ms"


def run_task(name: str, rounds: int, device: str, chosen: Sequence[str]) -> tuple[float, float]:
    """Measure a task and print its lines; return both ratios."""
    measured = TASKS[name]
    with ExitStack() as stack:
        quiet = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = merge_overrides(
            (
                f"task={name}", "task.size=tiny", f"device={device}", f"output_root={folder}", "run=loops",
                "evaluate.every=0", "checkpoint=off", *measured.inference,
                "backend.threads=1" if device == "cpu" else "dataloader.num_workers=0",
            ),
            chosen,
        )  # fmt: skip
        with redirect_stdout(quiet), redirect_stderr(quiet):
            run = stack.enter_context(open_new_run(Request(settings)))
            run.parts.task.begin_phase(measured.predicts or measured.phase)
            inference = measure_inference(run, max(3, rounds // 4))
            updates = measure_updates(run, measured, rounds, stack)
    update_ratio, update_text = describe(updates, measured.updates)
    inference_ratio, inference_text = describe(inference, 1)
    print(f"{name:<14} update     {update_text}")
    print(f"{name:<14} inference  {inference_text}", flush=True)
    return update_ratio, inference_ratio


def main(argv: Sequence[str]) -> int:
    """Print the ratios; exit 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=[*TASKS], metavar="TASK")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="chosen")
    options = parser.parse_args(argv)
    where = "1 thread"
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        where = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, {options.rounds} rounds; ours relative to the handwritten loop")
    ratios = [run_task(name, options.rounds, options.device, options.chosen) for name in options.tasks]
    exceeded = any(update > MAX_UPDATE or inference > MAX_INFERENCE for update, inference in ratios)
    return int(options.limits and exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
