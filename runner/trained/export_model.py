"""Export the model of a run to other formats and compare each export with the original."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from runner.base.batch import count_samples
from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, MissingPackage, Problem
from runner.base.packages import require
from runner.base.task import Task
from runner.base.text import error_message, first_line, format_bytes
from runner.config.request import Request
from runner.config.schema import did_you_mean
from runner.distributed.deferred_init import DeferredInit
from runner.durable import files
from runner.durable.checkpoint import FORMAT_OF_PARTS, LoadedCheckpoint, load
from runner.durable.directory import RunDirectory
from runner.durable.files import exists, remove, rename
from runner.durable.safetensors_reader import open_tensors
from runner.durable.safetensors_writer import serialize_header, stream_tensors, view_bytes
from runner.durable.weight_source import averaged_stem
from runner.engine.checkpoints.checkpoint_state import check_state
from runner.engine.contract.contract_checks import validate_example
from runner.engine.contract.lora import merge
from runner.engine.contract.task_loading import load_task, task_errors
from runner.engine.evaluation.evaluate import eval_mode
from runner.plan.planner import plan_this_process
from runner.plan.run_plan import Plan
from runner.records.events import Console
from runner.tensors.bitwise import bitwise_equal
from runner.tensors.global_rng import seed_everything
from runner.tensors.shared_names import expand_shared_names, names_of_parameters
from runner.tensors.stored_tensor import StoredTensor
from runner.trained.trained_run import ModelSource, TrainedModel, find_source, open_source

TOLERANCE = 1e-4  # maximum output difference relative to the largest output; float32 kernels differ by less


@dataclass(frozen=True)
class Parity:
    """Difference between an exported model and the original, on inputs of two batch sizes.

    largest_difference  of any output, divided by the largest output
    """

    file: str
    bytes: int
    batch_sizes: tuple[int, ...]
    largest_difference: float

    @property
    def holds(self) -> bool:
        """True if the difference is within rounding error."""
        return self.largest_difference <= TOLERANCE


Inputs = tuple[Any, ...]  # arguments of one call of the model
Outputs = tuple[Tensor, ...]
Run = Callable[[Inputs], Outputs]


def export(request: Request, formats: Sequence[str], checkpoint: str | None = None) -> Exit:
    """Write export/ in the run directory; if a format fails, the reason is printed and the others are still written.

    checkpoint  best, last or an update; None: the best one if there is one, else the last one
    Raises ConfigError for an unknown format, or if no format could be written.
    """
    problems = [
        Problem(f"must be one of {', '.join(FORMATS)}, but is {name}", "format", did_you_mean(name, FORMATS))
        for name in formats
        if name not in FORMATS
    ]
    if problems:
        raise ConfigError(problems)
    console = Console()
    source = find_source(request, console, checkpoint)
    in_parts = find_streamable(source) if [*formats] == ["safetensors"] else None
    if in_parts is not None and source.run is not None:
        return _export_weights(source, source.run, in_parts, console)
    with ExitStack() as stack:
        trained = open_source(source, plan_this_process(source.configuration)[0], console, stack)
        task = trained.parts.task
        example = None
        if type(task).example is not Task.example:
            with task_errors(trained.parts.source, "example()"):
                example = validate_example(task.example(), task.example, trained.parts.source, min_samples=2)
        model = trained.parts.bare.cpu()
        if not trained.plan.choices["adapter"].uses("none"):
            merge(model)
        folder = trained.directory.subfolder("export")
        # Third-party writers follow symbolic links, so they write into a private folder.
        draft = Path(stack.enter_context(TemporaryDirectory(prefix=".tmp-export-", dir=trained.directory.path)))
        with eval_mode(model, torch.device("cpu")), torch.no_grad():
            parities, failures = _write_formats(formats or [*FORMATS], model, example, draft, folder)
    for problem in failures:
        console.warning(str(problem))
    if not parities:
        raise ConfigError(failures)
    _write_parity(trained, parities)
    traced = parities.keys() - {"safetensors"}
    inputs = _describe_inputs(model, example) if example is not None and traced else ""
    _report(parities, inputs, trained.directory.shown / folder.name, console)
    return Exit.DONE


def _write_formats(
    formats: Sequence[str], model: nn.Module, example: Inputs | None, draft: Path, folder: Path
) -> tuple[dict[str, Parity], list[Problem]]:
    """Write files to `draft`, move them to `folder`; return format -> comparison, and the problems of other formats.

    example  arguments of one call of the model; None: the task has none, so only its weights can be written
    """
    parities: dict[str, Parity] = {}
    failures: list[Problem] = []
    for name in formats:
        file = draft / f"model.{FORMATS[name].suffix}"
        if example is None and name != "safetensors":
            fix = "define example(self), which returns the arguments of one call of the model for a batch of two"
            failures.append(Problem("needs example(), which the task does not define", f"format={name}", fix))
            continue
        try:
            if example is None:
                parities[name] = _write_weights(model, file)
            else:
                parities[name] = _compare(model, example, file, FORMATS[name].write(model, example, file))
            rename(file, folder / file.name)
        except MissingPackage as error:
            failures.append(error.problems[0])
        except AccelRunError:
            raise
        except Exception as error:  # any exception type is possible
            if exists(file):
                remove(file)
            what = f"cannot be exported: {first_line(error_message(error)) or type(error).__name__}"
            fix = "use format=safetensors, which contains only the weights"
            failures.append(Problem(what, f"format={name}", fix))
    return parities, failures


def _describe_inputs(model: nn.Module, inputs: Inputs) -> str:
    """Return the name and shape of each input of a traced model, such as `x (batch, 5)`."""
    samples, described = count_samples(inputs), []
    for name, argument in inspect.signature(model.forward).bind(*inputs).arguments.items():
        for path, value in tree_flatten_with_path(argument)[0]:
            if isinstance(value, Tensor):
                sizes = list(map(str, value.shape))
                if _has_batch(value, samples):
                    sizes[0] = "batch"
                described.append(f"{name}{keystr(path)} ({', '.join(sizes)})")
    return ", ".join(described)


def _report(parities: Mapping[str, Parity], inputs: str, folder: Path, console: Console) -> None:
    """Print a line per format. Raises AccelRunError if an exported model's outputs differ from the original's.

    inputs  names and shapes of the inputs of traced models
    """
    for name, parity in parities.items():
        same = "equal except for rounding" if parity.largest_difference else "identical"
        verdict = same if parity.holds else "DIFFERENT"
        console.info(
            f"{name:<12} {folder / parity.file}  {format_bytes(parity.bytes)}  {verdict}"
            f" (largest difference {parity.largest_difference:.1e})"
        )
    if inputs:
        console.info(f"{'inputs':<12} {inputs}; the batch size is dynamic, the other dimensions are fixed")
    wrong = [name for name, parity in parities.items() if not parity.holds]
    if wrong:
        fix = (
            "use format=NAME with the formats that agree; a model that draws random numbers in eval mode cannot be"
            " compared"
        )
        raise AccelRunError(
            f"outputs of the exported model differ from those of the original: {', '.join(wrong)}",
            where=str(folder),
            fix=fix,
        )


def _export_weights(source: ModelSource, run: RunDirectory, checkpoint: LoadedCheckpoint, console: Console) -> Exit:
    """Write the weights of a sharded checkpoint, which may not fit into memory as a whole."""
    folder = run.subfolder("export")
    file = export_weights(source, checkpoint, folder, f"model.{FORMATS['safetensors'].suffix}")
    content = {
        "checkpoint_update": checkpoint.update,
        "safetensors": asdict(Parity(file.name, file.stat().st_size, (), 0.0)),
    }
    run.write("export/parity.json", json.dumps(content, indent=2) + "\n")
    console.info(
        f"{'safetensors':<12} {run.shown / folder.name / file.name}  {format_bytes(file.stat().st_size)} "
        " equal to the checkpoint, bit for bit; the model was not run, because a sharded checkpoint may exceed memory"
    )
    return Exit.DONE


def _write_parity(trained: TrainedModel, parities: Mapping[str, Parity]) -> None:
    content: dict[str, Any] = {"checkpoint_update": trained.update, "tolerance": TOLERANCE}
    content |= {name: asdict(parity) for name, parity in parities.items()}
    trained.directory.write("export/parity.json", json.dumps(content, indent=2) + "\n")


def _compare(model: nn.Module, inputs: Inputs, file: Path, run: Run) -> Parity:
    """Compare both models on the example and on its first sample, which reveals a batch size fixed by tracing."""
    samples = count_samples(inputs)
    largest, sizes = 0.0, (samples, 1)
    for size in sizes:
        args = tree_map(lambda value, size=size: value[:size] if _has_batch(value, samples) else value, inputs)
        expected, outputs = _flatten(model(*args)), run(args)
        if len(expected) != len(outputs):
            raise ValueError(
                f"the exported model returns {len(outputs)} outputs, but the model returns {len(expected)}"
            )
        largest = max(largest, *map(_difference, expected, outputs))
    return Parity(file.name, file.stat().st_size, sizes, largest)


def _difference(expected: Tensor, output: Tensor) -> float:
    """Return the largest difference relative to the largest value, or infinity for non-numerical differences."""
    if expected.shape != output.shape or expected.is_floating_point() != output.is_floating_point():
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, output) else math.inf
    expected, output = expected.double(), output.double()
    finite = expected.isfinite()
    if not torch.equal(finite, output.isfinite()):
        return math.inf
    if not torch.equal(_classify_non_finite(expected[~finite]), _classify_non_finite(output[~finite])):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    return float((expected - output)[finite].abs().max() / expected[finite].abs().max().clamp(min=1e-6))


def _classify_non_finite(values: Tensor) -> Tensor:
    """Return -1 for minus infinity, 0 for NaN and 1 for infinity."""
    return values.nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)


def _has_batch(value: Any, samples: int) -> bool:
    """Return whether a value is a tensor whose first dimension is the batch size."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples


def _flatten(values: Any) -> Outputs:
    """Return the tensors of nested values, in the order of the inputs and outputs of an exported graph."""
    return tuple(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _write_safetensors(model: nn.Module, inputs: Inputs, file: Path) -> Run:
    """Write only the weights; they are verified in a copy of the model."""
    copied = _save_and_load(model, file)
    return lambda args: _flatten(copied(*args))


def _write_weights(model: nn.Module, file: Path) -> Parity:
    """Write only the weights, and compare them bit for bit: without an example the model cannot be called."""
    loaded = _save_and_load(model, file).state_dict()
    is_same = all(bitwise_equal(value, loaded[name]) for name, value in model.state_dict().items())
    return Parity(file.name, file.stat().st_size, (), 0.0 if is_same else math.inf)


def _save_and_load(model: nn.Module, file: Path) -> nn.Module:
    """Write the weights, and return a copy of the model that has all of them from the file."""
    save_model(model, str(file))
    copied = copy.deepcopy(model)
    for value in copied.state_dict().values():
        value.zero_()
    load_model(copied, str(file))
    return copied


def _write_program(model: nn.Module, inputs: Inputs, file: Path) -> Run:
    """Write a graph of torch operators that runs without the model's code (torch.export.load)."""
    torch.export.save(_trace(model, inputs), str(file))
    program = torch.export.load(str(file)).module()
    return lambda args: _flatten(program(*args))


def _write_onnx(model: nn.Module, inputs: Inputs, file: Path) -> Run:
    """Write an ONNX graph; it is compared as executed by onnxruntime."""
    require("onnxscript", "onnx")
    runtime = require("onnxruntime", "onnx")
    for name in ("torch.onnx", "onnx_ir", "onnxscript"):  # silence verbose loggers
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(_trace(model, inputs), inputs, dynamo=True, verbose=False, external_data=False)
    assert program is not None
    program.save(str(file))
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def run(args: Inputs) -> Outputs:
        feeds = {name: value.numpy() for name, value in zip(names, _flatten(args), strict=True)}
        return tuple(torch.from_numpy(value) for value in session.run(None, feeds))

    return run


def _trace(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """Return the model as a graph with a dynamic batch size, and with portable operators instead of fused attention."""
    batch, samples = torch.export.Dim("batch", min=1, max=4096), count_samples(inputs)
    shapes = tree_map(lambda value: {0: batch} if _has_batch(value, samples) else None, inputs)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


@dataclass(frozen=True)
class ExportFormat:
    """A file format: its file name suffix, and a writer that returns a function to run the exported model."""

    suffix: str
    write: Callable[[nn.Module, Inputs, Path], Run]


FORMATS: Mapping[str, ExportFormat] = {
    "safetensors": ExportFormat("safetensors", _write_safetensors),
    "program": ExportFormat("pt2", _write_program),
    "onnx": ExportFormat("onnx", _write_onnx),
}


def find_streamable(source: ModelSource) -> LoadedCheckpoint | None:
    """Return the checkpoint if it is sharded and holds the weights of the model itself, without an adapter."""
    if source.checkpoint is None or not source.configuration.choices["adapter"].uses("none"):
        return None
    checkpoint = load(source.checkpoint)
    return checkpoint if checkpoint.manifest["format_version"] == FORMAT_OF_PARTS else None


def export_weights(source: ModelSource, checkpoint: LoadedCheckpoint, folder: Path, file_name: str) -> Path:
    """Write the weights to `folder`, in a file that `safetensors.torch.load_model` loads; return its path.

    Only some rows of one tensor are in memory at a time. The file is read again and compared bit for bit with the
    checkpoint. Raises DataError if it differs.
    """
    check_state(checkpoint)
    model = _build_without_memory(plan_this_process(source.configuration)[0])
    names = names_of_parameters(model)
    tensors = dict(checkpoint.stored("model"))
    stem = averaged_stem(checkpoint)
    if stem:
        tensors |= expand_shared_names(names, checkpoint.stored(stem))
    # Map each additional name of a shared parameter to the first one, which safetensors stores.
    replaced_by = {other: first for first, *others in map(sorted, names) for other in others}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in replaced_by}
    draft = folder / f"{files.TEMPORARY}{file_name}-{secrets.token_hex(4)}"
    files.write_stream(draft, _file_content(tensors, replaced_by))
    try:
        _compare_bytes(tensors, draft)
        files.rename(draft, folder / file_name)
        files.fsync_directory(folder)
    except BaseException:
        files.remove(draft)
        raise
    return folder / file_name


def _build_without_memory(plan: Plan) -> nn.Module:
    """Return the task's model, if possible without values: only names and shared parameters are used."""
    seed_everything(plan.settings.seed)
    try:
        with DeferredInit():
            return load_task(plan).model
    except Exception:  # the task may need values of tensors; any other error is raised again below
        seed_everything(plan.settings.seed)
        return load_task(plan).model


def _file_content(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield serialize_header(tensors, metadata)
    for _, _, rows in stream_tensors(tensors):
        yield view_bytes(rows)


def _compare_bytes(tensors: Mapping[str, StoredTensor], file: Path) -> None:
    """Raise DataError unless the file holds the same bytes as the checkpoint."""
    written = open_tensors(file)
    is_same = written.keys() == tensors.keys() and all(
        bitwise_equal(rows, written[name].read(start, start + len(rows) if rows.dim() else None))
        for name, start, rows in stream_tensors(tensors)
    )
    if not is_same:
        raise DataError("the exported file differs from the checkpoint", where=str(file), fix="export it again")
