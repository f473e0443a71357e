"""Run inference with a checkpoint of a run, and measure its speed."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.base.accelerator import get_accelerator
from runner.base.batch import first_shape
from runner.base.errors import (
    AccelRunError,
    ConfigError,
    DeviceMemoryError,
    Exit,
    HostMemoryError,
    Problem,
    StorageError,
    TaskFault,
)
from runner.base.oom_errors import halve
from runner.base.sample_rng import seeded_generators
from runner.base.secret import redact
from runner.base.stopwatch import Lap, new_stopwatch
from runner.base.task import Content, Prediction
from runner.base.text import abbreviate, format_rate, truncate
from runner.config.chosen_option import make_chosen
from runner.config.phases import INFERENCE
from runner.distributed.world import World
from runner.durable import files
from runner.durable.directory import INFERENCE_FILES, RunDirectory
from runner.engine.contract.contract_checks import describe_value, validate_prediction
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.contract.task_loading import check_packages, task_errors
from runner.engine.evaluation.evaluate import eval_mode
from runner.engine.parts.assemble import Parts
from runner.engine.process.watchdog import PREDICTION, HangTraces, ProgressMark, run_watchdog
from runner.engine.update.oom_retry import release
from runner.host.output import nonblocking_streams
from runner.monitor.monitor_thread import MONITORS, NoMonitor, monitored_gpus
from runner.plan.run_plan import Plan
from runner.profiling.module_times import wrap_compiled_call
from runner.profiling.peak_memory import host_peak_gib, restart_host_peak
from runner.records.events import Console, terminal_log_level
from runner.trained.batch_predictions import PredictedRows, format_table, open_batches, predict_batches, select_options
from runner.trained.table_parts import TableParts, decode_batches, open_table
from runner.trained.trained_run import ModelSource, TrainedModel, broadcast_name, open_source

_END = object()


def infer(source: ModelSource, plan: Plan, world: World) -> tuple[Exit, Any]:
    """Run predictions and write predictions/ and plots/ in the run directory; return the exit code and the summary.

    plan   plan for the device of this process alone
    world  each rank computes one shard of the predictions; rank 0 prints the summary
    Raises TaskFault if predict yields nothing, or if two ranks write the same file.
    """
    console = Console(level=terminal_log_level(), is_enabled=world.is_first)  # ignores a broken pipe, as in `| head`
    suffix = f"-rank{world.rank}" if world.rank else ""
    if world.world_size > 1:
        shard = {"shard": world.rank, "num_shards": world.world_size}
        plan = dataclasses.replace(plan, inference={**plan.inference, **shard})
    with ExitStack() as stack:
        stack.enter_context(nonblocking_streams())
        source = broadcast_name(source, world)
        trained = open_source(source, plan, console, stack, owns_results=world.is_first)
        directory, parts = trained.directory, trained.parts
        check_packages(parts.task, [INFERENCE], parts.source)
        get_accelerator(parts.world.device).reset_peak_memory()
        restart_host_peak()
        world.gather(None)  # timing starts when every rank has its model, and rank 0 has created the directory
        folder = directory.subfolder("predictions")
        if world.is_first and files.exists(folder / "summary.json"):  # it must not describe an incomplete inference
            files.remove(folder / "summary.json")
        monitor = stack.enter_context(_make_monitor(plan, parts, directory.predictions / f"gpu{suffix}.csv"))
        stacks = f"predictions/stacks{suffix}.txt"
        traces = HangTraces(lambda text: directory.write(stacks, text), file=stacks)
        plan = _choose_batch_size(plan, trained, world)
        is_table = parts.task.predicts == "predict_batch"
        table = stack.enter_context(open_table(source, trained, plan, world, console)) if is_table else None
        with run_watchdog(plan, parts.world, traces) as progress_mark:  # not during the wait for other ranks above
            result, names = _retry_in_smaller_batches(
                lambda less: _predict_all(less, parts, table, directory, progress_mark, console),
                plan, parts.world.device, console,
            )  # fmt: skip
        result, names = _merge_ranks(result, names, world, str(parts.source))
        # With one shard per command, other files may be shards of other commands.
        is_part = world.world_size == 1 and plan.inference.get("num_shards", 1) != 1
        if world.is_first and result.parts and not is_part:
            _write_combined(result.parts, names, parts, directory, console)
        if table is not None:
            names.add(_write_table(table, parts, world, console))
            if world.is_first:  # after an out-of-memory error, `result` has the rows of smaller batches only
                result = dataclasses.replace(result, num=table.num_rows - table.num_kept, kept=table.num_kept)
        elif not result.num:
            raise TaskFault("predict() yielded nothing", where=str(parts.source), fix="yield at least one Prediction")
        item = "sample" if is_table else parts.task.item
        summary = summarize_predictions(result, item, trained.update)
        summary["world_size"] = world.world_size
        if table is not None:
            summary["kept"] = result.kept
        summary["peak_host_gib"] = host_peak_gib()
        if peak := get_accelerator(parts.world.device).peak_memory():
            summary["peak_memory_gib"] = peak.allocated / 2**30
    monitor.stop()
    for notice in monitor.new_alerts():
        if notice.level == "warning":
            console.warning(notice.text)
    if monitor.latest():
        directory.write(f"predictions/monitor{suffix}.json", json.dumps(monitor.summary().to_json(), indent=2) + "\n")
    if world.is_first:
        directory.write("predictions/summary.json", json.dumps(summary, indent=2) + "\n")
        console.info(f"\n{_format_summary(result, item)}")
        others = "" if is_part else _describe_others(folder, names)
        console.info(f"written to {directory.shown / folder.name}{others}")
    return Exit.DONE, summary


def _describe_others(folder: Path, names: Collection[str]) -> str:
    """Return a note on the predictions in the folder that are not among `names`; empty if there are none."""
    own = {name.split("/")[1] for name in names}
    others = [name for name in files.list_names(folder) if not (name in own or INFERENCE_FILES.fullmatch(name))]
    others = [name for name in others if not name.startswith(files.TEMPORARY)]
    return f", which also has {len(others)} other file{'s' * (len(others) > 1)}: {abbreviate(others)}" if others else ""


def _make_monitor(plan: Plan, parts: Parts, file: Path) -> NoMonitor:
    """Return the monitor of the plan's device, in the phase of inference."""
    choice = plan.choices["monitor"]
    gpus = monitored_gpus([plan.device_uuid] if plan.device_uuid else [], parts.world.device.type)
    monitor: NoMonitor = make_chosen(MONITORS, choice, file, gpus)
    monitor.enter_phase(INFERENCE)
    return monitor


def _retry_in_smaller_batches(
    predict: Callable[[Plan], Predicted], plan: Plan, device: torch.device, console: Console
) -> Predicted:
    """Return the result of `predict`; after an out-of-memory error, call it again with half the batch size."""
    while True:
        try:
            return predict(plan)
        except (DeviceMemoryError, HostMemoryError) as error:
            plan = _halve_batch_size(plan, error, console)
        release(device)  # after the except clause, which keeps the tensors of the traceback alive


def _choose_batch_size(plan: Plan, trained: TrainedModel, world: World) -> Plan:
    """Return the plan with the batch size for `predict_batch`: by default the micro-batch size of the trained phase.

    It is that of rank 0, because the ranks share the batches.
    """
    if trained.parts.task.predicts != "predict_batch":
        return plan
    size = world.broadcast(plan.inference.get("batch_size") or trained.phase_plan.batch.micro_batch_size)
    return dataclasses.replace(plan, inference={**plan.inference, "batch_size": size})


def _write_table(table: TableParts, parts: Parts, world: World, console: Console) -> str:
    """Write the rows of all ranks to predictions/SPLIT.csv and print the first ones; return the name of the file."""
    name = f"predictions/{table.name}"
    for batches in world.gather_on_first(table.batches)[1:]:
        table.batches |= decode_batches(batches)
    if not world.is_first:
        return name
    if not table.batches:
        what = f"there is no such shard, because the split has only {len(table.split.keys)} batches"
        fix = "use fewer shards, or a smaller inference.batch_size"
        raise ConfigError(Problem(what, f"inference.shard={table.split.shard}", fix))
    try:
        content = format_table(table.batches)
    except ValueError as error:
        fix = "return the same columns for each batch"
        raise TaskFault(
            f"predict_batch(): {error}", where=locate_definition(parts.task.predict_batch, parts.source), fix=fix
        ) from None
    table.directory.write(name, content)
    table.remove()
    lines = content[: MAX_PRINTED * 10**4].decode(errors="ignore").splitlines()  # the first rows
    more = ["..."] if len(lines) > MAX_PRINTED + 1 else []
    shown = truncate(redact("\n".join(lines[: MAX_PRINTED + 1] + more)))
    console.info(f"\n--- {table.name}\n{shown}")
    return name


def _predict_all(
    plan: Plan,
    parts: Parts,
    table: TableParts | None,
    directory: RunDirectory,
    progress_mark: ProgressMark,
    console: Console,
) -> Predicted:
    """Write all predictions.

    plan   the plan of `infer`, with a smaller batch size after an out-of-memory error
    table  receives the rows of `predict_batch`; None: the task defines `predict`
    """
    num = items = 0
    names: set[str] = set()
    prediction_parts: list[Any] = []
    rows = None
    if table is not None:
        batch_size, finished = plan.inference["batch_size"], table.restart()
        rows = predict_batches(parts, table.split, plan.inference["seed"], batch_size, finished)

    def on_next() -> None:
        progress_mark.advance(PREDICTION, num + 1)

    began = time.perf_counter()
    with time_calls(parts.model, parts.world.device) as calls, PredictionWriter(directory, console.info) as writer:
        with closing(iterate_predictions(plan, parts, on_next, rows)) as predictions:
            for prediction in predictions:
                progress_mark.completed_kinds.add(PREDICTION)
                items += prediction.items
                if isinstance(prediction, PredictedRows):
                    assert table is not None, "it has opened the batches"
                    num += prediction.items
                    table.add(prediction)
                    continue
                num += prediction.items > 0
                prediction_parts.append(prediction.part)
                contents = _encode_files(prediction, names, parts)
                writer.put(contents, printed_text(prediction, num))
        writer.write()
    return PredictionSummary(num, items, time.perf_counter() - began, calls, parts=prediction_parts), names


def _write_combined(
    prediction_parts: Sequence[Any], names: set[str], parts: Parts, directory: RunDirectory, console: Console
) -> None:
    """Write and print the predictions of `combine_predictions`, and add their files to `names`."""
    method = parts.task.combine_predictions
    with PredictionWriter(directory, console.info) as writer, task_errors(parts.source, f"{method.__name__}()"):
        for result in method(prediction_parts):
            prediction = validate_prediction(result, method, parts.source)
            writer.put(_encode_files(prediction, names, parts), printed_text(prediction, 0))


def _encode_files(prediction: Prediction, names: set[str], parts: Parts) -> dict[str, bytes]:
    """Return path -> content of a prediction's files, and add the paths to `names`. Raises TaskFault for duplicates."""
    _check_names(prediction.files, str(parts.source))
    contents = {f"predictions/{name}": _encode(name, content) for name, content in prediction.files.items()}
    contents |= {f"plots/{name}": picture for name, picture in prediction.plots.items()}
    for name in contents.keys() & names:
        what = f"two predictions write the file {name}, so the second would replace the first"
        fix = "use a different name for each prediction, such as one with its number"
        raise TaskFault(what, where=str(parts.source), fix=fix)
    names.update(contents)
    return contents


def _merge_ranks(
    result: PredictionSummary, names: Collection[str], world: World, where: str
) -> tuple[PredictionSummary, set[str]]:
    """Merge the summaries and file names of all ranks; the time is that of the slowest rank."""
    calls = [result.calls.seconds, result.calls.samples]
    gathered = world.gather([result.num, result.items, result.seconds, calls, sorted(names)])
    nums, items, seconds, rank_calls, rank_names = zip(*gathered, strict=True)
    seen: set[str] = set()
    for name in itertools.chain.from_iterable(rank_names):
        if name in seen:
            fix = "yield prediction i where i % num_shards == shard, with i in its file names"
            raise TaskFault(f"two ranks wrote {name}", where=where, fix=fix)
        seen.add(name)
    calls_by_rank = [list(zip(*calls, strict=True)) for calls in rank_calls]  # (seconds, samples) of each call
    first = [call for calls in calls_by_rank for call in calls[:1]]
    later = [call for calls in calls_by_rank for call in calls[1:]]
    merged = PredictCalls([call[0] for call in first + later], [call[1] for call in first + later], len(first))
    # Rank r computed the predictions r, r + world_size, ...
    rows = itertools.zip_longest(*world.gather_on_first(result.parts))
    in_order = [part for row in rows for part in row if part is not None]
    return PredictionSummary(sum(nums), sum(items), max(seconds), merged, parts=in_order), seen


@dataclass
class PredictCalls:
    """Device time and number of samples of each model call.

    Work between calls, such as reading, plotting and writing, is excluded.

    num_first  number of calls at the beginning that may compile: the first one of each rank
    """

    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    num_first: int = 1


@dataclass(frozen=True)
class PredictionSummary:
    """Number of predictions and items, and the seconds from the start until all are on disk.

    kept   number of rows of a table that an earlier command has predicted, not included in `num`
    parts  for `Task.combine_predictions`; None for a prediction without a part
    """

    num: int
    items: int
    seconds: float
    calls: PredictCalls
    kept: int = 0
    parts: list[Any] = field(default_factory=list)


Predicted = tuple[PredictionSummary, set[str]]  # with the names of the files


@contextmanager
def time_calls(model: nn.Module, device: torch.device) -> Iterator[PredictCalls]:
    """Record the calls of `model(...)` inside the context. The device is synchronized on exit only.

    Nested calls count as part of the outer call. A compiled model is timed around its graph, because torch.compile
    would trace module hooks with the model.
    """
    calls, depth = PredictCalls(), 0

    def on_lap(lap: Lap) -> None:
        calls.seconds.append(lap.seconds.get(CALL, 0.0))

    stopwatch = new_stopwatch(device, on_lap)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            stopwatch.lap("between")
            values = [value for value in (*args, *kwargs.values()) if not isinstance(value, str)]  # the step's name
            shape = first_shape(values)
            calls.samples.append(int(shape[0]) if isinstance(shape, tuple) and shape else 1)

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            stopwatch.lap(CALL)
            stopwatch.stop(len(calls.samples))

    def run_timed(graph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        enter(model, args, kwargs)
        try:
            return graph(*args, **kwargs)
        finally:
            leave()

    with ExitStack() as stack:
        stack.callback(stopwatch.finish)
        if model._compiled_call_impl is not None:
            stack.callback(wrap_compiled_call(model, run_timed))
        else:
            stack.callback(model.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(model.register_forward_hook(leave, always_call=True).remove)
        yield calls


def printed_text(prediction: Prediction, number: int) -> str:
    """Return what to print of the prediction with this number, counted from 1; empty for nothing.

    Only the first predictions are printed, because many would scroll the summary of a training run off the screen. A
    prediction without items, such as a summary table, is always printed.
    """
    if not prediction.text or (prediction.items and number > MAX_PRINTED + 1):
        return ""
    if prediction.items and number > MAX_PRINTED:
        return "\n... (the remaining predictions are only in files)"
    return f"\n--- {', '.join(prediction.files)}\n{prediction.text}"


class PredictionWriter:
    """Write prediction files in batches: one fsync per file costs more than most predictions.

    Queued files are written when they are many or large, and when a prediction completes more than `MAX_WRITE_DELAY_S`
    seconds after the last write. Completed predictions are written even if a later one fails.

    show  prints the text of a prediction once its files are on disk, so that printed predictions are never lost
    """

    def __init__(self, directory: RunDirectory, show: Callable[[str], object]) -> None:
        self.directory, self.show = directory, show
        self._contents: dict[str, bytes] = {}
        self._texts: list[str] = []
        self._size = 0
        self._last_write = time.monotonic()

    def put(self, contents: Mapping[str, bytes], text: str = "") -> None:
        """Queue the files of a prediction, and write all queued files if one of the limits is reached."""
        self._contents |= contents
        self._texts += [text] if text else []
        self._size += sum(map(len, contents.values()))
        is_full = len(self._contents) >= MAX_QUEUED_FILES or self._size >= MAX_QUEUED_BYTES
        if is_full or time.monotonic() - self._last_write >= MAX_WRITE_DELAY_S:
            self.write()

    def write(self) -> None:
        """Write all queued files."""
        contents, texts = self._contents, self._texts
        self._contents, self._texts, self._size = {}, [], 0
        self._last_write = time.monotonic()
        if contents:
            try:
                self.directory.write_all(contents)
            except StorageError:  # the disk may have space for some of them
                for name, content in contents.items():
                    self.directory.write(name, content)
        for text in texts:
            self.show(text)

    def __enter__(self) -> PredictionWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(Exception) if kind else nullcontext():  # report the first error
            self.write()


def iterate_predictions(
    plan: Plan,
    parts: Parts,
    on_next: Callable[[], object] = lambda: None,
    rows: Iterator[PredictedRows] | None = None,
) -> Generator[Prediction]:
    """Yield the predictions of the task with the current model.

    on_next  called before each prediction
    rows     the predictions of `predict_batch`; None: those of all batches of the plan
    """
    options = {key: value for key, value in plan.inference.items() if key != "seed"}
    seed = int(plan.inference["seed"])
    first, step = options.get("shard"), options.get("num_shards")
    # Each prediction has the same index as in a single process. The index seeds the generators, so that no two ranks
    # draw the same random numbers.
    numbers = itertools.count(first, step) if isinstance(first, int) and isinstance(step, int) else itertools.count()
    generator = torch.Generator(parts.world.device).manual_seed(seed)
    title = f"{parts.task.predicts or 'predict'}()"
    with eval_mode(parts.bare, parts.world.device), torch.no_grad(), parts.precision.forward():
        with seeded_generators(seed, "predict"), task_errors(parts.source, title):
            result: Any = rows
            if rows is None and parts.task.predicts == "predict_batch":
                result = predict_batches(parts, open_batches(parts, seed, **options), seed, options["batch_size"])
            elif rows is None:
                own = select_options(parts.task.predict, options, parts.source)
                result = parts.task.predict(parts.model, generator, **own)
        predictions = _get_iterator(result, parts)
        for number in numbers:
            on_next()
            # Random numbers in a dataset read by `predict` must not depend on earlier predictions.
            with seeded_generators(seed, "prediction", number), task_errors(parts.source, title):
                prediction = next(predictions, _END)
            if prediction is _END:
                return
            yield validate_prediction(prediction, parts.task.predict, parts.source)


def _get_iterator(result: Any, parts: Parts) -> Iterator[Any]:
    if isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping):
        return iter(result)
    raise TaskFault(
        f"predict() must yield Predictions, but returned {describe_value(result)}",
        where=locate_definition(parts.task.predict, parts.source),
        fix='from runner import Prediction; yield Prediction({"sample.txt": text})',
    )


def _halve_batch_size(plan: Plan, error: AccelRunError, console: Console) -> Plan:
    """Return the plan with half the batch size. Raises `error` if the batch size cannot be halved."""
    size = plan.inference.get("batch_size")
    halved_size = halve(size) if isinstance(size, int) else None
    if halved_size is None or plan.settings.on_oom == "stop":
        raise error
    console.warning(
        f"{error.problems[0].what.rstrip('.')}. Predicting with batch_size={halved_size} instead of {size}; use"
        f" inference.batch_size={halved_size} to start with it"
    )
    return dataclasses.replace(plan, inference={**plan.inference, "batch_size": halved_size})


def _check_names(names: Iterable[str], where: str) -> None:
    reserved = [name for name in names if INFERENCE_FILES.fullmatch(name)]
    if reserved:
        raise TaskFault(
            f"a prediction must not be named {reserved[0]}, which the runner uses itself", where=where, fix="rename it"
        )


def _encode(name: str, content: Content) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    buffer = io.BytesIO()
    np.save(buffer, content, allow_pickle=False)
    return buffer.getvalue()


def summarize_predictions(result: PredictionSummary, item: str, update: int) -> dict[str, Any]:
    """Return the content of summary.json.

    predictions           including those that are `kept` from an earlier command
    seconds, items_per_s  wall-clock time, including reading, plotting and writing
    model                 device time of model calls only; `latency_ms` excludes the first call of each rank
    """
    calls = result.calls
    return {
        "checkpoint_update": update,
        "predictions": result.kept + result.num,
        "items": result.items,
        "item": item,
        "seconds": result.seconds,
        "items_per_s": result.items / result.seconds,
        "model": {
            "calls": len(calls.seconds),
            "seconds": sum(calls.seconds),
            "samples_per_call": sum(calls.samples) / len(calls.samples) if calls.samples else None,
            "ms_per_sample": 1e3 * sum(calls.seconds) / sum(calls.samples) if sum(calls.samples) else None,
            "first_call_ms": 1e3 * max(calls.seconds[: calls.num_first], default=math.nan) if calls.seconds else None,
        },
        "latency_ms": _latency_ms(calls.seconds[calls.num_first :] or calls.seconds),
    }


def _latency_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentile latencies; a percentile is None if there are too few values."""
    ms = 1e3 * np.array(seconds)
    percentiles = {"median": (50, 1), "p95": (95, 20), "p99": (99, 100)}  # percentile, minimum number of values
    return {
        "mean": float(ms.mean()) if len(ms) else None,
        **{
            name: float(np.percentile(ms, percent)) if len(ms) >= min_values else None
            for name, (percent, min_values) in percentiles.items()
        },
    }


def _format_summary(result: PredictionSummary, item: str) -> str:
    summary = summarize_predictions(result, item, 0)
    total = result.kept + result.num
    text = f"{total} prediction{'s' * (total > 1)}" + (f", {result.kept} by an earlier command" if result.kept else "")
    text += f", {format_rate(summary['items_per_s'])} {item}s/s including reading and writing"
    model, latency = summary["model"], summary["latency_ms"]
    if not model["calls"]:
        return f"{text}; model(...) is not called, so its latency is unknown"
    latencies = ", ".join(f"{name} {value:.3g}" for name, value in latency.items() if value is not None)
    calls = f"{model['calls']} call{'s' * (model['calls'] != 1)}"
    samples = f"{model['samples_per_call']:.3g} samples" if model["samples_per_call"] != 1 else "1 sample"
    return (
        f"{text}\nmodel: {calls} of {samples}; latency in ms per call: {latencies};"
        f" {model['ms_per_sample']:.3g} ms per sample; first call: {model['first_call_ms']:.3g} ms"
    )


MAX_PRINTED = 8  # predictions whose text is printed
CALL = "call"  # the part of the stopwatch in which the model computes
MAX_QUEUED_FILES, MAX_QUEUED_BYTES, MAX_WRITE_DELAY_S = 256, 64 << 20, 2.0  # limits of files waiting to be written
