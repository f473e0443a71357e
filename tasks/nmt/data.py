"""Tokenized pairs of texts: descriptions and signatures of the standard library, the user's pairs, or random tokens.

The standard library is split by file, so that held-out pairs come from modules that are not used in training.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from runner.tasks.gpt.data import prepared
from torch import Tensor

from runner.base.errors import ConfigError, DataError, InputMissing, Problem

from .model import MAX_SEGMENTS, Rows
from .vocabulary import BEGIN, END, FIRST_ORDINARY, Numbers, SubwordVocabulary, Vocabulary

Array = np.ndarray[Any, np.dtype[np.int64]]
Texts = list[tuple[str, str]]
SPLITS = ("train", "val", "test")


class Batch(NamedTuple):
    """Rows of sources (R, S) and of targets (R, T) with N pairs.

    labels  (R, T): the token after each target token, 0 if none
    places  (N, 2): the row of pair i minus i, and its number in that row, from 1. The row is relative, so that samples
            that are read separately collate to a batch with pair i in row i
    """

    source: Rows
    target: Rows
    labels: Tensor
    places: Tensor


@dataclass(frozen=True)
class Sequences:
    """Many sequences in one array; sequence i is tokens[starts[i] : starts[i + 1]]."""

    tokens: Array
    starts: Array

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Sequences:
        starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls(np.fromiter((token for each in lists for token in each), np.int64, count=int(starts[-1])), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Array:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> Array:
        return np.diff(self.starts)

    @classmethod
    def of_padded(cls, rows: Tensor) -> Sequences:
        """Return sequences from rows (N, L) that are padded with 0, which is not a token of a text."""
        lengths = (rows != 0).sum(dim=1).numpy()
        return cls(rows[rows != 0].numpy(), np.concatenate([[0], np.cumsum(lengths)]))

    def padded(self, numbers: Array, width: int) -> Tensor:
        """Return the sequences with these numbers as rows (N, width), padded with 0."""
        lengths = self.lengths[numbers]
        rows = np.zeros(len(numbers) * width, dtype=np.int64)
        rows[_runs(np.arange(len(numbers)) * width, lengths)] = self.tokens[_runs(self.starts[numbers], lengths)]
        return torch.from_numpy(rows.reshape(-1, width))

    def cut(self, longest: int) -> Sequences:
        """Return the sequences truncated to `longest` tokens."""
        lengths = np.minimum(self.lengths, longest)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return Sequences(self.tokens[_runs(self.starts[:-1], lengths)], starts)


class PairData:
    """Tokenized pairs: sources truncated to S tokens, targets with their end to T; a batch has one pair per row.

    sources, targets  not truncated, the targets without an end
    """

    def __init__(self, sources: Sequences, targets: Sequences, source_length: int, target_length: int) -> None:
        self.whole_sources, self.whole_targets = sources, targets
        self.sources = sources.cut(source_length)
        ends = np.insert(targets.tokens, targets.starts[1:], END)
        self.labels = Sequences(ends, targets.starts + np.arange(len(targets.starts))).cut(target_length)
        self.source_length, self.target_length = source_length, target_length

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Batch:
        source, target, labels, places = self.__getitems__([index])
        return Batch(Rows(*(field[0] for field in source)), Rows(*(field[0] for field in target)), labels[0], places[0])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the collated batch, one row per pair; S and T are always the maximum lengths."""
        rows = np.arange(len(indices))
        places = RowPacking(rows, np.zeros_like(rows), np.zeros_like(rows), np.ones_like(rows), len(rows))
        return _lay_out(self.sources, self.labels, np.asarray(indices), places, self.source_length, self.target_length)


class PackedData(PairData):
    """The same pairs packed into rows, to reduce padding; the number of rows varies.

    A row has space for five pairs of average length, fewer than MAX_SEGMENTS. With as much space as MAX_SEGMENTS pairs
    need, the limits on source tokens, target tokens and pairs would all apply, which leaves more of a row empty, and
    attention costs more in longer rows.
    """

    def __init__(self, sources: Sequences, targets: Sequences, source_length: int, target_length: int) -> None:
        super().__init__(sources, targets, source_length, target_length)
        self.source_width = max(source_length, _multiple_of_8(5 * self.sources.lengths.mean()))
        self.target_width = max(target_length, _multiple_of_8(5 * self.labels.lengths.mean()))

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the collated batch, packed into few rows."""
        return self.compose(self.load_fixed, indices)

    def load_fixed(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens of sources (N, S) and of targets with their end (N, T), padded with 0."""
        pairs = np.asarray(indices)
        return self.sources.padded(pairs, self.source_length), self.labels.padded(pairs, self.target_length)

    def compose(self, load: Callable[[Sequence[int]], Any], indices: Sequence[int]) -> Batch:
        """Return a batch of loaded pairs, packed into few rows."""
        sources, labels = map(Sequences.of_padded, load(indices))
        places = packed(sources.lengths, labels.lengths, self.source_width, self.target_width, MAX_SEGMENTS)
        return _lay_out(sources, labels, np.arange(len(indices)), places, self.source_width, self.target_width)


@dataclass(frozen=True)
class RowPacking:
    """Position of each pair of a batch: its row, the starts of its source and target, and its number from 1."""

    rows: Array
    source_starts: Array
    target_starts: Array
    segments: Array
    num_rows: int


def packed(sources: Array, targets: Array, source_width: int, target_width: int, most: int) -> RowPacking:
    """Pack pairs of these lengths: the longest first, each into the first row with enough space."""
    filled = [(0, 0, 0)]  # per row: source tokens, target tokens, pairs; the last row is empty
    places = np.empty((4, len(sources)), dtype=np.int64)
    for pair in np.argsort(-sources, kind="stable").tolist():
        source, target = int(sources[pair]), int(targets[pair])
        row, (s, t, n) = next(
            (row, (s, t, n))
            for row, (s, t, n) in enumerate(filled)
            if row == len(filled) - 1 or (s + source <= source_width and t + target <= target_width and n < most)
        )
        places[:, pair] = row, s, t, n + 1
        if n == 0:
            filled.append((0, 0, 0))
        filled[row] = (s + source, t + target, n + 1)
    return RowPacking(places[0], places[1], places[2], places[3], len(filled) - 1)


@dataclass(frozen=True)
class Corpus:
    """Tokenized pairs of each split, not truncated and targets without an end, and their vocabulary."""

    sources: Mapping[str, Sequences]
    targets: Mapping[str, Sequences]
    vocabulary: Vocabulary

    def data(self, split: str, source_length: int, target_length: int, *, packed: bool = False) -> PairData:
        """Return the samples of a split. Raises InputMissing if there is no such split."""
        if split not in self.sources:
            known = ", ".join(self.sources)
            raise InputMissing(f"there is no split {split!r}, only {known}", where="data.path", fix=FORMATS)
        kind = PackedData if packed else PairData
        return kind(self.sources[split], self.targets[split], source_length, target_length)


def open_pairs(data_path: Path | None, cache: Path, *, vocab_size: int) -> Corpus:
    """Return the pairs of `data_path`, or of the standard library; they are prepared once.

    The vocabulary has at most `vocab_size` tokens and is learned from the training split only.
    Raises InputMissing if the path does not exist, DataError if its content is invalid, ConfigError if the
    vocabulary is too small.
    """
    files = standard_library() if data_path is None else user_files(data_path)
    key = f"{_fingerprint(files, data_path)}-{vocab_size}"

    def make(folder: Path) -> None:
        pairs = library_pairs(files) if data_path is None else user_pairs(data_path, files)
        if not all(pairs.values()):
            empty = ", ".join(split for split, found in pairs.items() if not found)
            raise DataError(f"there are too few pairs: none is left for {empty}", where="data.path", fix=FORMATS)
        vocabulary = SubwordVocabulary.learn((text for pair in pairs["train"] for text in pair), vocab_size)
        arrays = {}
        for split, found in pairs.items():
            for side, name in enumerate(("sources", "targets")):
                sequences = Sequences.of([vocabulary.encode(pair[side]) for pair in found])
                arrays[f"{split}.{name}.tokens"] = sequences.tokens
                arrays[f"{split}.{name}.starts"] = sequences.starts
        np.savez(folder / "tokens.npz", **arrays)  # type: ignore[arg-type]
        (folder / "pieces.json").write_text(json.dumps(vocabulary.pieces), encoding="utf-8")

    name = f"python-{platform.python_version()}" if data_path is None else data_path.resolve().name
    folder: Path = prepared(cache / f"{name}-{key}", make)
    try:
        with np.load(folder / "tokens.npz") as arrays:
            read = {key: arrays[key] for key in arrays.files}
        pieces = json.loads((folder / "pieces.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is damaged: {error}", fix="delete it; it will be prepared again") from error
    splits = [split for split in SPLITS if f"{split}.sources.tokens" in read]
    sides = [
        {split: Sequences(read[f"{split}.{side}.tokens"], read[f"{split}.{side}.starts"]) for split in splits}
        for side in ("sources", "targets")
    ]
    return Corpus(sides[0], sides[1], SubwordVocabulary(pieces))


def random_pairs(seed: int, *, vocab_size: int, source_length: int, target_length: int) -> Corpus:
    """Return pairs of random tokens, to measure speed.

    Lengths are uniform between half the maximum and the maximum, so a quarter of a padded batch is padding.
    Raises ConfigError if the vocabulary is too small.
    """
    vocabulary, rng = Numbers(vocab_size), np.random.Generator(np.random.Philox(seed))
    sides: list[dict[str, Sequences]] = []
    for longest in (source_length, target_length - 1):  # a target is followed by an end token
        side = {}
        for split, num_pairs in RANDOM_PAIRS.items():
            lengths = rng.integers((longest + 1) // 2, longest + 1, num_pairs)
            tokens = rng.integers(FIRST_ORDINARY, vocab_size, int(lengths.sum()))
            side[split] = Sequences(tokens, np.cumsum(np.insert(lengths, 0, 0)))
        sides.append(side)
    return Corpus(sides[0], sides[1], vocabulary)


def standard_library() -> list[Path]:
    """Return the Python sources of the standard library without its tests: 537 files in Python 3.11.

    Excluded are installed packages, character tables (encodings), a second copy of the grammar tools (lib2to3) and
    files that depend on how Python was built. Raises InputMissing if Python was installed without sources.
    """
    root = _library_root()
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith(".")]
        files += [Path(folder) / name for name in names if name.endswith(".py") and not name.startswith(BUILT)]
    if len(files) < 100:
        what = f"the sources of Python's standard library are not in {root}"
        raise InputMissing(what, where="data.path", fix=FORMATS)
    return sorted(files)


def library_pairs(files: Sequence[Path]) -> dict[str, Texts]:
    """Return the pairs of each split, by file; a held-out pair whose description is also in training is removed."""
    root = _library_root()
    pairs: dict[str, Texts] = {split: [] for split in SPLITS}
    for file in files:
        name = file.relative_to(root).as_posix()
        pairs[_choose_split(name)] += described_functions(file.read_bytes(), str(file))
    seen = {source for source, _ in pairs["train"]}
    held_out = {split: [pair for pair in pairs[split] if pair[0] not in seen] for split in SPLITS[1:]}
    return {"train": pairs["train"], **held_out}


def described_functions(code: bytes, name: str) -> Iterator[tuple[str, str]]:
    """Yield a pair for each function with a docstring: `Class.name: first paragraph`, one line, and `name(parameters)`.

    Files that are not valid in this version of Python are skipped.
    """
    try:
        tree = ast.parse(code, name)
    except (SyntaxError, ValueError):
        return
    found: list[tuple[str, ast.AST]] = [("", tree)]
    for prefix, node in found:  # grows during the iteration
        for child in ast.iter_child_nodes(node):
            inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
            found.append((inner, child))
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                paragraph = " ".join((ast.get_docstring(child) or "").partition("\n\n")[0].split())
                signature = " ".join(f"{child.name}({ast.unparse(child.args)})".split())
                if paragraph:
                    yield f"{prefix}{child.name}: {paragraph}", signature


def user_files(path: Path) -> list[Path]:
    """Return the files of the user's pairs: one .tsv, or those of each split in a folder. See FORMATS."""
    if not path.exists():
        raise InputMissing(f"{path} does not exist", where="data.path", fix=FORMATS)
    if path.is_file():
        return [path]
    files = []
    for split in SPLITS:
        table, sides = path / f"{split}.tsv", [path / f"{split}.src", path / f"{split}.tgt"]
        found = [table] if table.is_file() else [side for side in sides if side.is_file()]
        if len(found) == 1 and found != [table]:
            missing = next(side for side in sides if side not in found)
            raise InputMissing(f"{found[0]} exists, but {missing} does not", where="data.path", fix=FORMATS)
        if not found and split != "test":
            raise InputMissing(f"{path} has no pairs for {split}", where="data.path", fix=FORMATS)
        files += found
    return files


def user_pairs(path: Path, files: Sequence[Path]) -> dict[str, Texts]:
    """Return the pairs of each split; those of a single file are split by the hash of their source."""
    pairs: dict[str, Texts] = {split: [] for split in SPLITS}
    if path.is_file():
        for pair in _read_table(path):
            pairs[_choose_split(pair[0])].append(pair)
        return {split: found for split, found in pairs.items() if found or split != "test"}
    for split in SPLITS:
        mine = [file for file in files if file.stem == split]
        if len(mine) == 1:
            pairs[split] = list(_read_table(mine[0]))
        elif mine:
            pairs[split] = list(_read_parallel_files(*mine))
        else:
            del pairs[split]
    return pairs


def baselines(corpus: Corpus, source_length: int, target_length: int) -> dict[str, float]:
    """Return the results of frequency baselines: counted on the training split, evaluated on the validation split.

    loss                     nats per token, predicting token frequencies (add-one smoothing)
    token_accuracy           always predicting the most frequent token
    exact_match              always predicting the most frequent target
    exact_match_copied_name  predicting `name(self)`, with the name at the start of the source; absent if no source
                             has one
    """
    train, val = (corpus.data(split, source_length, target_length) for split in ("train", "val"))
    counts = 1.0 + np.bincount(train.labels.tokens, minlength=corpus.vocabulary.num_tokens)
    tokens = val.labels.tokens
    known = Counter(train.labels[index].tobytes() for index in range(len(train)))
    likeliest = known.most_common(1)[0][0]
    is_complete = likeliest.endswith(np.int64(END).tobytes())
    same = sum(val.labels[index].tobytes() == likeliest for index in range(len(val)))
    names = [NAME.match(corpus.vocabulary.decode(val.sources[index].tolist())) for index in range(len(val))]
    named = sum(
        [*corpus.vocabulary.encode(f"{name[1]}(self)"), END] == val.labels[index].tolist()
        for index, name in enumerate(names)
        if name
    )
    return {
        "loss": float(-np.log(counts / counts.sum())[tokens].mean()),
        "token_accuracy": float((tokens == counts.argmax()).mean()),
        "exact_match": same / len(val) if is_complete else 0.0,
        **({"exact_match_copied_name": named / len(val)} if any(names) else {}),
    }


def _read_table(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_lines(path), start=1):
        fields = line.split("\t")
        if len(fields) != 2 or not all(field.strip() for field in fields):
            what = f"must be source<TAB>target, both nonempty, but has {len(fields)} columns: {_shorten(line)}"
            raise DataError(what, where=f"{path}, line {number}", fix=FORMATS)
        yield fields[0].strip(), fields[1].strip()


def _read_parallel_files(sources: Path, targets: Path) -> Iterator[tuple[str, str]]:
    sides = _lines(sources), _lines(targets)
    if len(sides[0]) != len(sides[1]):
        what = f"must have as many lines as {sources.name}, {len(sides[0])}, but has {len(sides[1])}"
        raise DataError(what, where=str(targets), fix=FORMATS)
    for number, pair in enumerate(zip(*sides, strict=True), start=1):
        for path, line in zip((sources, targets), pair, strict=True):
            if not line.strip():
                raise DataError("must not be empty", where=f"{path}, line {number}", fix=FORMATS)
        yield pair[0].strip(), pair[1].strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise DataError("must be UTF-8, but is not", where=f"{path}, line {number}", fix=FORMATS) from error


def _shorten(line: str) -> str:
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


def _lay_out(
    sources: Sequences, targets: Sequences, pairs: Array, places: RowPacking, source_width: int, target_width: int
) -> Batch:
    """Return the batch with the pairs at these places."""
    source, _ = _rows(sources, pairs, places, places.source_starts, source_width, shifted=False)
    target, labels = _rows(targets, pairs, places, places.target_starts, target_width, shifted=True)
    relative = places.rows - np.arange(len(places.rows))
    return Batch(source, target, labels, torch.from_numpy(np.stack([relative, places.segments], axis=1)))


def _rows(
    sequences: Sequences, pairs: Array, places: RowPacking, starts: Array, width: int, *, shifted: bool
) -> tuple[Rows, Tensor]:
    """Return rows of sequences, and their tokens; `shifted`: the rows are shifted right, after a begin token."""
    lengths = sequences.lengths[pairs]
    where = _runs(places.rows * width + starts, lengths)
    within = _runs(np.zeros_like(lengths), lengths)
    tokens = sequences.tokens[_runs(sequences.starts[pairs], lengths)]
    before = np.where(within == 0, BEGIN, np.roll(tokens, 1)) if shifted else tokens
    fields = np.zeros((4, places.num_rows * width), dtype=np.int64)
    for field, values in zip(fields, (before, np.repeat(places.segments, lengths), within, tokens), strict=True):
        field[where] = values
    rows = [torch.from_numpy(field.reshape(places.num_rows, width)) for field in fields]
    return Rows(*rows[:3]), rows[3]


def _runs(starts: Array, lengths: Array) -> Array:
    """Return the concatenated ranges start, start + 1, ... of the given lengths."""
    ends = np.cumsum(lengths)
    runs: Array = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return runs


def _multiple_of_8(length: float) -> int:
    return -int(-length // 8) * 8


def _choose_split(name: str) -> str:
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return "val" if share < HELD_OUT else "test" if share < 2 * HELD_OUT else "train"


def _library_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _fingerprint(files: Sequence[Path], data_path: Path | None) -> str:
    """Return a fingerprint of the files and of the version of this preparation."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    content = json.dumps([FORMAT_VERSION, str(data_path), stats])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def check_no_data_path(data_path: Path | None) -> None:
    """Raise ConfigError if data.path is set, because it would not be read."""
    if data_path is not None:
        what = f"task.data=random generates its pairs, so {data_path} would not be read"
        raise ConfigError(Problem(what, "data.path", "leave it out, or use task.data=pairs"))


FORMAT_VERSION = 3  # version of the prepared files; increase it when their content changes
NAME = re.compile(r"(?:\w+\.)*(\w+): ")  # name of a function, with those of its classes, before its description
HELD_OUT = 0.1  # fraction of the files in each of val and test
RANDOM_PAIRS: Mapping[str, int] = {"train": 25600, "val": 1024, "test": 1024}
FORMATS = (
    "data.path takes a .tsv file with source<TAB>target in each line, or a folder with train.tsv and val.tsv, "
    "or with train.src, train.tgt, val.src and val.tgt, one text per line; UTF-8"
)
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib2to3"}
)
BUILT = ("_sysconfigdata", "config-")
