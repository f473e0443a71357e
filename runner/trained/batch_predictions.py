"""Predict the samples of a split with `predict_batch` of a task: a table with one row per sample."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.base import noise
from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.order import MicroBatchKey, spread_evenly
from runner.base.sample_rng import seeded_generators
from runner.base.secret import redact
from runner.base.task import Prediction
from runner.base.text import abbreviate
from runner.base.values import Count, PositiveInt
from runner.config.inference_keys import inference_keys
from runner.config.schema import default_values
from runner.engine.contract.contract_checks import describe_value
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.contract.task_loading import task_errors
from runner.engine.evaluation.evaluate import split_batches
from runner.engine.parts.assemble import Parts
from runner.loading.fetcher import Fetcher
from runner.trained.trained_evaluation import open_split

INDEX = "index"  # the first column
_SPECIAL = re.compile(r'[,"\r\n]')  # characters that must be quoted


@dataclass(frozen=True)
class PredictedRows(Prediction):
    """The rows of a batch, or of a part of it.

    batch    number of the batch among those that the shards divide
    names    names of the columns after the index
    rows     CSV without a header
    is_last  the batch is complete with these rows
    """

    batch: int = 0
    names: Sequence[str] = ()
    rows: str = ""
    is_last: bool = True


class PredictedBatch(NamedTuple):
    """All rows of a batch: their number, the names of their columns, and CSV without a header."""

    num_rows: int
    names: Sequence[str]
    rows: str


@dataclass(frozen=True)
class SplitBatches:
    """The batches of a split that `predict_batch` receives.

    keys     all batches; shard `shard` of `num_shards` has batches i with i % num_shards == shard
    options  additional options of `predict_batch`
    """

    fetcher: Fetcher
    keys: Sequence[MicroBatchKey]
    shard: int
    num_shards: int
    options: Mapping[str, Any]


def open_batches(
    parts: Parts,
    seed: int,
    *,
    split: str = "val",
    samples: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    shard: Count = 0,
    num_shards: PositiveInt = 1,
    **options: Any,
) -> SplitBatches:
    """Return the batches of a split; their rows are written to predictions/SPLIT.csv.

    split        split of the samples, such as test
    samples      number of samples, evenly spaced over the split; null: all
    batch_size   samples per batch; null: the micro-batch size of the run
    shard        predict only batches i with i % num_shards == shard; the ranks of parallelism=ddp set it
    num_shards   number of shards
    options      additional options, which `predict_batch` receives
    Raises ConfigError if the task has no such split, or no such option.
    """
    assert batch_size is not None, "`infer` sets it"
    with task_errors(parts.source, "predict_batch()"):
        fetcher = open_split(parts, split, "inference.split")
    indices = spread_evenly(len(fetcher), samples)
    keys = [*split_batches([MicroBatchKey(0, indices, last=True, seed=seed)], batch_size)]
    return SplitBatches(
        fetcher, keys, shard, num_shards, select_options(parts.task.predict_batch, options, parts.source)
    )


def select_options(method: Callable[..., Any], options: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return the options that a method of the task accepts. A file with several tasks has the options of all of them.

    Raises ConfigError if another option differs from its default.
    """
    parameters = inspect.signature(method).parameters
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(options)
    defaults = default_values(inference_keys(source))
    for name, value in options.items():
        if name not in parameters and name in defaults and value != defaults[name]:
            what = f"{method.__qualname__} has no such parameter"
            raise ConfigError(Problem(what, f"inference.{name}={value}", "omit it, or add the parameter"))
    return {name: value for name, value in options.items() if name in parameters}


def predict_batches(
    parts: Parts, batches: SplitBatches, seed: int, batch_size: int, finished: Collection[int] = ()
) -> Iterator[PredictedRows]:
    """Yield the rows of each batch of a shard.

    batch_size  after an out-of-memory error, batches are predicted in parts of this size
    finished    numbers of batches that are left out
    Raises TaskFault if `predict_batch` does not return columns with a value per sample.
    """
    task, source = parts.task, parts.source
    own = [number for number in range(batches.shard, len(batches.keys), batches.num_shards) if number not in finished]
    split = [(number, part) for number in own for part in split_batches([batches.keys[number]], batch_size)]
    names: list[str] = []
    with closing(parts.splits.evaluation_loader(batches.fetcher)) as loader, noise.without_samples():
        micros = parts.prefetch(iter(loader.batches([part for _, part in split])))
        for (number, part), micro in zip(split, micros, strict=True):
            assert micro.samples is not None, "the samples of a dataset are known"
            noise.start_pass(micro.samples._replace(epoch=noise.EVALUATION))
            offset = part.first - batches.keys[number].first
            # The random numbers of a batch do not depend on the batches that this process has predicted before.
            with seeded_generators(seed, "prediction", number, *([offset] if offset else [])):
                returned = task.predict_batch(parts.model, micro.batch, **batches.options)
            read = [*map(int, micro.samples.indices)]  # without bad samples
            try:
                columns = _format_columns(returned, len(read))
                names = names or [*columns]
                _check_names(columns, names)
            except ValueError as error:
                fix = 'return the same columns for each batch, with a value per sample: {"label": scores.argmax(-1)}'
                raise TaskFault(
                    f"predict_batch(): {error}", where=locate_definition(task.predict_batch, source), fix=fix
                ) from None
            is_last = offset + len(part.indices) == len(batches.keys[number].indices)
            rows = "".join(map(_format_row, zip(map(str, read), *columns.values(), strict=True)))
            yield PredictedRows({}, items=len(read), batch=number, names=names, rows=rows, is_last=is_last)


def format_table(batches: Mapping[int, PredictedBatch]) -> bytes:
    """Return all batches, by number, as a CSV file. Raises ValueError if their columns differ."""
    names = next(iter(batches.values())).names
    for batch in batches.values():
        _check_names(batch.names, names)
    rows = (batches[number].rows for number in sorted(batches))
    return "".join((_format_row([INDEX, *names]), *rows)).encode()


def _check_names(columns: Collection[str], names: Sequence[str]) -> None:
    if [*columns] != names:
        raise ValueError(f"the columns of two batches differ: {', '.join(names)} and {', '.join(columns)}")


def _format_row(cells: Iterable[str]) -> str:
    """Return a row as CSV. Before Python 3.13, csv.writer leaves a carriage return, which ends a row, unquoted."""
    return ",".join(map(_quote, cells)) + "\n"


def _quote(text: str) -> str:
    if not _SPECIAL.search(text):
        return text
    quoted = text.replace('"', '""')
    return f'"{quoted}"'


def _format_columns(returned: Any, num_samples: int) -> dict[str, list[str]]:
    """Return name -> one string per sample; a column with k numbers per sample becomes k columns, NAME.0 to NAME.k-1.

    Raises ValueError with a description of what is wrong.
    """
    if not isinstance(returned, Mapping) or not returned:
        found = "an empty one" if returned == {} else describe_value(returned)
        raise ValueError(f"must return a dictionary of columns, but returned {found}")
    result: dict[str, list[str]] = {}
    for name, values in returned.items():
        if not isinstance(name, str) or not name or name == INDEX:
            raise ValueError(f"a column must have a name other than {INDEX!r}, but has {name!r}")
        array = _to_array(values)
        if array is None or array.ndim not in (1, 2):
            what = f"column {name} must contain a number, a string or a vector per sample, but is {_describe(values)}"
            raise ValueError(f"{what}; for other kinds of results, define predict()")
        if len(array) != num_samples:
            what = f"column {name} has {len(array)} values, but the batch has {num_samples} samples"
            raise ValueError(f"{what}, all of which collate must keep")
        if array.ndim == 2 and not array.shape[1]:
            raise ValueError(f"column {name} has vectors without elements")
        # For a number, the shortest string from which it can be restored.
        texts = array if array.dtype == object else array.astype(str)
        (label,) = _clean([name])
        columns = {label: texts.tolist()}
        if array.ndim == 2:
            columns = {f"{label}.{number}": column for number, column in enumerate(texts.T.tolist())}
        if array.dtype.kind in "OU":
            columns = {name: _clean(column) for name, column in columns.items()}
        if repeated := [*columns.keys() & result]:
            raise ValueError(f"two columns have the name {repeated[0]}")
        result |= columns
    return result


def _clean(texts: list[str]) -> list[str]:
    """Return the strings without secrets, and with bytes that are not UTF-8, as in file names, escaped.

    Each string is redacted separately: in a row, a URL and an address in a later cell together look like a password.
    """
    if redact(joined := "\n".join(texts)) != joined:  # faster than one by one
        texts = [*map(redact, texts)]
    return [text.encode("utf-8", "backslashreplace").decode() for text in texts]


def _describe(values: Any) -> str:
    if isinstance(values, Tensor):
        return f"{describe_value(values)}, {values.dtype} and {values.layout}"
    if isinstance(values, list | tuple):
        kinds = dict.fromkeys(type(value).__name__ for value in values)
        return f"a {type(values).__name__} of {abbreviate([*kinds])}"
    return describe_value(values)


def _to_array(values: Any) -> np.ndarray[Any, Any] | None:
    """Return numbers or strings as an array; None if they are of another type."""
    if isinstance(values, list | tuple) and values and all(isinstance(value, Tensor) for value in values):
        if len({value.shape for value in values}) > 1:
            return None
        values = torch.stack([*values])
    try:
        if isinstance(values, Tensor):
            values = (values.float() if values.dtype == torch.bfloat16 else values).detach().cpu().numpy()
        if not isinstance(values, list | tuple | np.ndarray):
            return None
        is_text = all(isinstance(value, str) for value in values)
        # As objects, because numpy pads strings to the length of the longest one, and removes trailing NUL characters.
        array = np.asarray(values, dtype=object if is_text else None)
    except (ValueError, TypeError):  # lists of different lengths or of tensors on a GPU; formats that numpy lacks
        return None
    return array if is_text or array.dtype.kind in "biufU" else None
