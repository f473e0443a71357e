"""Predict the samples of a split with `predict_batch` of a task: a table with one row per sample."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base import noise
from runner.base.errors import TaskFault
from runner.base.order import MicroBatchKey, spread_evenly
from runner.base.task import Prediction
from runner.base.values import Count, PositiveInt
from runner.engine.contract.contract_checks import describe_value
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.evaluation.evaluate import split_batches
from runner.engine.parts.assemble import Parts
from runner.trained.trained_evaluation import open_split

INDEX = "index"  # the first column
_SPECIAL = re.compile(r'[,"\r\n]')  # characters that must be quoted


@dataclass(frozen=True)
class PredictedRows(Prediction):
    """The rows of one batch.

    indices  index of each sample in its dataset
    columns  name -> one text per sample
    """

    indices: Sequence[int] = ()
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)


def predict_batches(
    parts: Parts,
    seed: int,
    shared_size: int,
    *,
    split: str = "val",
    samples: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    shard: Count = 0,
    num_shards: PositiveInt = 1,
    **options: Any,
) -> Iterator[PredictedRows]:
    """Yield the rows of each batch of a split; they are written to predictions/SPLIT.csv.

    shared_size  samples in each batch that the shards divide; after an out-of-memory error, it is predicted in parts
                 of `batch_size`, which may differ between shards
    split        split of the samples, such as test
    samples      number of samples, evenly spaced over the split; null: all
    batch_size   samples per batch; null: the micro-batch size of the run
    shard        predict only batches i with i % num_shards == shard; the ranks of parallelism=ddp set it
    num_shards   number of shards
    options      further options, which `predict_batch` receives
    Raises TaskFault if `predict_batch` does not return columns with a value per sample.
    """
    assert batch_size is not None, "`infer` sets it"
    task, source = parts.task, parts.source
    fetcher = open_split(parts, split, "inference.split")
    indices = spread_evenly(len(fetcher), samples)
    shared = [*split_batches([MicroBatchKey(0, indices, last=True, seed=seed)], shared_size)]
    batches = split_batches(shared[shard::num_shards], batch_size)
    names: list[str] = []
    with closing(parts.splits.evaluation_loader(fetcher)) as loader, noise.without_samples():
        for micro in parts.prefetch(iter(loader.batches(batches))):
            assert micro.samples is not None, "the samples of a dataset are known"
            noise.start_pass(micro.samples._replace(epoch=noise.EVALUATION))
            returned = task.predict_batch(parts.model, micro.batch, **options)
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
            yield PredictedRows({}, items=len(read), indices=read, columns=columns)


def format_table(batches: Sequence[tuple[Sequence[int], Mapping[str, Sequence[str]]]]) -> str:
    """Return (indices, columns) of all batches as CSV, ordered by index. Raises ValueError if their columns differ."""
    names = [*batches[0][1]]
    rows: list[tuple[int, tuple[str, ...]]] = []
    for indices, columns in batches:
        _check_names(columns, names)
        rows += zip(indices, zip(*columns.values(), strict=True), strict=True)
    lines = [[INDEX, *names], *([str(index), *values] for index, values in sorted(rows))]
    text = "".join(f"{','.join(map(_quote, line))}\n" for line in lines)
    return text.encode("utf-8", "backslashreplace").decode()  # file names may have bytes that are not UTF-8


def _check_names(columns: Collection[str], names: Sequence[str]) -> None:
    if [*columns] != names:
        raise ValueError(f"the columns of two batches differ: {', '.join(names)} and {', '.join(columns)}")


def _quote(text: str) -> str:
    """Return the text of a cell. Before Python 3.13, csv.writer leaves a carriage return unquoted, which ends a row."""
    if not _SPECIAL.search(text):
        return text
    quoted = text.replace('"', '""')
    return f'"{quoted}"'


def _format_columns(returned: Any, num_samples: int) -> dict[str, list[str]]:
    """Return name -> one text per sample; a column with k numbers per sample becomes k columns, NAME.0 to NAME.k-1.

    Raises ValueError with a description of what is wrong.
    """
    if not isinstance(returned, Mapping) or not returned:
        raise ValueError(f"must return a dictionary of columns, but returned {describe_value(returned)}")
    result: dict[str, list[str]] = {}
    for name, values in returned.items():
        if not isinstance(name, str) or not name or name == INDEX:
            raise ValueError(f"a column must have a name other than {INDEX!r}, but has {name!r}")
        array = _to_array(values)
        if array is None or array.ndim not in (1, 2):
            what = (
                f"column {name} must contain a number, a text or a vector per sample, but is {describe_value(values)}"
            )
            raise ValueError(f"{what}; write other results in predict()")
        if len(array) != num_samples:
            raise ValueError(f"column {name} has {len(array)} values, but the batch has {num_samples} samples")
        if array.ndim == 2 and not array.shape[1]:
            raise ValueError(f"column {name} has vectors without elements")
        # For a number, the shortest text from which it can be restored.
        texts = array if array.dtype == object else array.astype(str)
        columns = {name: texts.tolist()}
        if array.ndim == 2:
            columns = {f"{name}.{number}": column for number, column in enumerate(texts.T.tolist())}
        if repeated := [*columns.keys() & result]:
            raise ValueError(f"two columns have the name {repeated[0]}")
        result |= columns
    return result


def _to_array(values: Any) -> np.ndarray[Any, Any] | None:
    """Return numbers or texts as an array; None if they are of another type."""
    if isinstance(values, list | tuple) and values and all(isinstance(value, Tensor) for value in values):
        if len({value.shape for value in values}) > 1:
            return None
        values = torch.stack([*values])
    if isinstance(values, Tensor):
        values = (values.float() if values.dtype == torch.bfloat16 else values).detach().cpu().numpy()
    if not isinstance(values, list | tuple | np.ndarray):
        return None
    try:
        is_text = all(isinstance(value, str) for value in values)
        # As objects, because numpy pads texts to the length of the longest one, and removes trailing NUL characters.
        array = np.asarray(values, dtype=object if is_text else None)
    except (ValueError, TypeError):  # lists of different lengths; lists of lists of tensors on a GPU
        return None
    return array if is_text or array.dtype.kind in "biufU" else None
