"""Tokenized records of five tasks from JSON files; rounds of one record per task; texts with masked tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runner.tasks.gpt.data import prepared, standard_library
from torch import Tensor

from runner.base.errors import ConfigError, DataError, InputMissing, Problem
from runner.base.task import sample_rng

from .text import SPLITS, TASKS, Record, write_standard_library
from .tokenizer import BEGIN, END, MASK, NUM_SPECIAL, PAD, Tokenizer, learn_pieces

Array = np.ndarray[Any, np.dtype[Any]]
Batch = dict[str, Tensor]

GENERATION = ("summary", "code", "translation")
FIELDS: Mapping[str, Mapping[str, type]] = {
    "classification": {"text": str, "label": str},
    "qa": {"question": str, "context": str, "answer": str, "start": int},
    **{task: {"source": str, "target": str} for task in GENERATION},
}
FORMAT = (
    "a folder with <task>/{train,validation,test}.json for the tasks " + ", ".join(TASKS) + "; see docs/tasks/dynamo.md"
)
VERSION = 6  # version of the prepared files; increase it when their content changes
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain one, for example if a text was cut inside an emoji
IGNORED = -100  # target without a loss
MASKED_SHARE = 0.3


@dataclass(frozen=True)
class Table:
    """The records of one task and split.

    source  (n, T) tokens, BEGIN first and END last, padded
    answer  classification: (n,) label; qa: (n, 2) first and last token of the answer, IGNORED if it is truncated;
            else: (n, S) tokens with END, followed by IGNORED
    """

    source: Array
    answer: Array


@dataclass(frozen=True)
class Corpus:
    """Tokenized records by split and task, with the tokenizer, the labels and the folder of the records."""

    tables: Mapping[str, Mapping[str, Table]]
    tokenizer: Tokenizer
    labels: Sequence[str]
    path: Path
    max_length: int

    def records(self, split: str, task: str) -> list[Record]:
        """Return the records of the file, in the order of the table."""
        return read_records(self.path / task / f"{SPLITS[split]}.json", task)


def open_corpus(
    data_path: Path | None,
    cache: Path,
    *,
    vocab_size: int,
    max_length: int,
    max_target_length: int,
    held_out: bool = False,
) -> Corpus:
    """Return the tokenized records of `data_path`, or of the standard library; they are prepared once.

    held_out  for the standard library: use each wording of an instruction in only one split
    Raises InputMissing if a file is missing, DataError if one is invalid.
    """
    if data_path is None:
        stamp = _fingerprint([document.path for document in standard_library()])
        kind = "held-out-requests" if held_out else "standard-library"
        data_path = prepare_text(cache / f"{kind}-{stamp}", held_out=held_out) / "data"
    files = {(split, task): data_path / task / f"{SPLITS[split]}.json" for split in SPLITS for task in TASKS}
    for file in files.values():
        if not file.is_file():
            raise InputMissing(f"{file} does not exist", where="data.path", fix=f"must be {FORMAT}")
    limits = (vocab_size, max_length, max_target_length)
    stamp = _fingerprint(list(files.values()), *limits)

    def encode(folder: Path) -> None:
        records = {key: read_records(file, key[1]) for key, file in files.items()}
        _write_tokens({key: (files[key], read) for key, read in records.items()}, folder, *limits)

    folder = prepared(cache / f"tokens-{stamp}", encode)
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    with np.load(folder / "tokens.npz") as arrays:
        tables = {
            split: {task: Table(arrays[f"{split}.{task}.source"], arrays[f"{split}.{task}.answer"]) for task in TASKS}
            for split in SPLITS
        }
    return Corpus(tables, Tokenizer(known["pieces"]), known["labels"], data_path, max_length)


def limit_records(corpus: Corpus, limits: Mapping[str, int]) -> Corpus:
    """Return the corpus with at most `limits[task]` training records per task. Raises ConfigError for unknown tasks."""
    if unknown := [name for name in limits if name not in TASKS]:
        raise ConfigError(Problem(f"unknown tasks: {', '.join(unknown)}", "task.limits", f"use {', '.join(TASKS)}"))
    train = {
        task: Table(table.source[: limits.get(task)], table.answer[: limits.get(task)])
        for task, table in corpus.tables["train"].items()
    }
    return replace(corpus, tables={**corpus.tables, "train": train})


def prepare_text(folder: Path, *, held_out: bool = False) -> Path:
    """Return `folder` with the records of the standard library in data/; they are written if missing."""
    written: Path = prepared(folder, partial(write_standard_library, held_out=held_out))
    return written


def read_records(file: Path, task: str) -> list[Record]:
    """Return the records of a file. Raises DataError, with file and index, if one is invalid."""
    expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in FIELDS[task].items())
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"is not JSON: {error}", where=str(file)) from None
    if not isinstance(records, list) or not records:
        raise DataError(f"must be a list of at least one record with {expected}", where=str(file))
    for index, record in enumerate(records):
        where = f"{file}, record {index}"
        for name, kind in FIELDS[task].items():
            if not isinstance(record, dict) or type(record.get(name)) is not kind:
                raise DataError(f"must be an object with {expected}; {name} is missing or of another type", where=where)
            if kind is str and not record[name].strip():
                raise DataError(f"{name} must not be empty", where=where)
            if kind is str and LONE_SURROGATE.search(record[name]):
                raise DataError(f"{name} contains half a character (a lone surrogate)", where=where, fix="remove it")
        if task == "qa" and (
            record["start"] < 0 or not record["context"].startswith(record["answer"], record["start"])
        ):
            found = record["context"][max(0, record["start"]) :][: len(record["answer"])]
            what = (
                f"context must hold the answer {record['answer']!r} at character {record['start']}, but has {found!r}"
            )
            raise DataError(what, where=where)
    return records


def source_text(record: Record, task: str) -> str:
    """Return the text that the encoder reads."""
    if task == "qa":
        return f"{record['question']}\n{record['context']}"
    return str(record["text" if task == "classification" else "source"])


def target_text(record: Record, task: str) -> str:
    """Return the target text."""
    return str(record[{"classification": "label", "qa": "answer"}.get(task, "target")])


def token_span(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return the first and the last token that share a character with [start, end)."""
    inside = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
    return inside[0], inside[-1]


def encode_source(tokenizer: Tokenizer, text: str, max_length: int) -> list[int]:
    """Return BEGIN, the tokens of the text, truncated to max_length, and END."""
    return [BEGIN, *tokenizer.encode(text)[: max_length - 2], END]


class Rounds:
    """Sample i is the i-th record of each task, so that every batch contains all tasks equally.

    A batch: source (N, T) tokens, grouped by task in the order of TASKS; task (N,) indices of the tasks; and, under the
    name of each task, the answers of its records.

    cycle  repeat shorter tasks until the longest one is complete, for training; otherwise, the last rounds have no
           records of shorter tasks
    """

    def __init__(self, tables: Mapping[str, Table], *, cycle: bool) -> None:
        self.tables, self.cycle = dict(tables), cycle

    def __len__(self) -> int:
        return max(len(table.source) for table in self.tables.values())

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the collated batch."""
        return self.compose(self.load_fixed, indices)

    def load_fixed(self, indices: Sequence[int]) -> dict[str, dict[str, Tensor]]:
        """Return the records of each task, padded; a task with too few records starts again from its first."""
        rounds = np.asarray(indices)
        found = {}
        for task, table in self.tables.items():
            rows = rounds % len(table.source)
            found[task] = {
                "source": torch.from_numpy(table.source[rows]),
                "answer": torch.from_numpy(table.answer[rows]),
            }
        return found

    def compose(self, load: Callable[[Sequence[int]], Any], indices: Sequence[int]) -> Batch:
        """Return a batch of loaded records, without the columns that are padding in all of them."""
        rounds, loaded = torch.as_tensor(indices), load(indices)
        sources, batch, numbers = [], {}, []
        for number, (task, table) in enumerate(self.tables.items()):
            exists = torch.ones_like(rounds, dtype=torch.bool) if self.cycle else rounds < len(table.source)
            sources.append(loaded[task]["source"][exists].numpy())
            answers = loaded[task]["answer"][exists]
            if task in GENERATION:
                answers = answers[:, : max([1, *(answers != IGNORED).sum(dim=1).tolist()])]
            batch[task] = answers.long()
            numbers += [number] * len(answers)
        source = _trim_padding(np.concatenate(sources))
        return {"source": torch.from_numpy(source), "task": torch.tensor(numbers), **batch}


class MaskedTexts:
    """Sample i is the text of a record of any task, with some tokens masked.

    A batch: source (N, T) tokens; places (N, M) positions of the masked ones; hidden (N, M) the original tokens,
    IGNORED if a text has fewer than M. 80 % of the chosen tokens become MASK, 10 % another token, and 10 % are kept.
    Source: Devlin et al., BERT, NAACL 2019, section 3.1; with a higher masking rate as in Wettig et al., EACL 2023.
    """

    def __init__(self, tables: Mapping[str, Table], seed: int, num_tokens: int, *, fixed: bool) -> None:
        sources = [table.source for table in tables.values()]
        self.source = np.concatenate(sources)
        self.lengths = (self.source != PAD).sum(axis=1)
        self.seed, self.num_tokens, self.fixed, self.epoch = seed, num_tokens, fixed, 0

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = 0 if self.fixed else epoch

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the collated batch."""
        return self.compose(self.load_fixed, indices)

    def load_fixed(self, indices: Sequence[int]) -> Tensor:
        """Return the texts (N, T), padded."""
        return torch.from_numpy(self.source[indices])

    def compose(self, load: Callable[[Sequence[int]], Any], indices: Sequence[int]) -> Batch:
        """Return a batch of loaded texts with some of their tokens masked."""
        source = _trim_padding(load(indices).numpy())
        counts = self.num_hidden(self.lengths[indices])
        places = np.zeros((len(indices), counts.max()), dtype=np.int64)
        hidden = np.full_like(places, IGNORED)
        for row, (index, count) in enumerate(zip(indices, counts, strict=True)):
            generator = sample_rng(self.seed, self.epoch, int(index))
            chosen = 1 + generator.choice(self.lengths[index] - 2, count, replace=False)  # neither BEGIN nor END
            places[row, :count], hidden[row, :count] = chosen, source[row, chosen]
            fate = generator.random(count)
            other = generator.integers(NUM_SPECIAL, self.num_tokens, count)
            source[row, chosen] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, other, source[row, chosen]))
        return {
            "source": torch.from_numpy(source),
            "places": torch.from_numpy(places),
            "hidden": torch.from_numpy(hidden),
        }

    def num_hidden(self, lengths: Array) -> Array:
        """Return the number of masked tokens for texts of these lengths, at least one."""
        return np.maximum(1, np.round(MASKED_SHARE * (lengths - 2))).astype(np.int64)


def _trim_padding(source: Array) -> Array:
    """Return the rows (N, T) as int64 without columns that are padding in all rows; T is a multiple of 8."""
    longest = int((source != PAD).sum(axis=1).max())
    return source[:, : -(-longest // 8) * 8].astype(np.int64)


def _write_tokens(
    records: Mapping[tuple[str, str], tuple[Path, Sequence[Record]]],
    folder: Path,
    vocab_size: int,
    max_length: int,
    max_target_length: int,
) -> None:
    """Write tokenizer.json, trained on the training records, and tokens.npz."""
    train = {task: records["train", task][1] for task in TASKS}
    texts = [
        text
        for task in TASKS
        for record in train[task]
        for text in (source_text(record, task), target_text(record, task))
    ]
    tokenizer = Tokenizer(learn_pieces(texts, vocab_size))
    labels = sorted({record["label"] for record in train["classification"]})
    if len(labels) < 2:
        where = str(records["train", "classification"][0])
        raise DataError(f"must have at least two labels, but has only {labels}", where=where)
    arrays = {}
    for (split, task), (file, read) in records.items():
        sources, answers = [], []
        for index, record in enumerate(read):
            text = source_text(record, task)
            tokens, offsets = tokenizer.encode_with_offsets(text)
            sources.append([BEGIN, *tokens[: max_length - 2], END])
            if task == "classification":
                if record["label"] not in labels:
                    what = f"label must be one of the training data's {labels}, but is {record['label']!r}"
                    raise DataError(what, where=f"{file}, record {index}")
                answers.append([labels.index(record["label"])])
            elif task == "qa":
                start = len(record["question"]) + 1 + record["start"]
                first, last = token_span(offsets, start, start + len(record["answer"]))
                answers.append([first + 1, last + 1] if last + 1 < max_length - 1 else [IGNORED, IGNORED])
            else:
                answers.append([*tokenizer.encode(record["target"])[: max_target_length - 1], END])
        arrays[f"{split}.{task}.source"] = _pad_rows(sources, PAD, max_length)
        width = {"classification": 1, "qa": 2}.get(task, max_target_length)
        answer = _pad_rows(answers, IGNORED, width)
        arrays[f"{split}.{task}.answer"] = answer[:, 0] if task == "classification" else answer
    np.savez(folder / "tokens.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub allows for a name of an option
    header = {"pieces": tokenizer.pieces, "labels": labels}
    (folder / "tokenizer.json").write_text(json.dumps(header), encoding="utf-8")


def _pad_rows(rows: Sequence[Sequence[int]], padding: int, width: int) -> Array:
    table = np.full((len(rows), width), padding, dtype=np.int16)
    for row, tokens in zip(table, rows, strict=True):
        row[: len(tokens)] = tokens
    return table


def _fingerprint(files: Sequence[Path], *parameters: int) -> str:
    """Return a fingerprint of the files, the parameters and the version of this preparation."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([VERSION, parameters, stats]).encode()).hexdigest()[:12]
