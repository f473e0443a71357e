"""Text as memory-mapped tokens: the Python standard library's own sources, the user's text, or token shards.

Documents are split by the hash of their name, so none is in both training and validation. Some files share copied
lines, so runs of five lines that also occur in the training text are removed from the standard library's held-out text.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sysconfig
import tempfile
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import ConfigError, DataError, InputMissing, Problem

from .tokenizer import SEPARATOR, BytePairs, Bytes, Numbers, Tokenizer, train_byte_pairs

SPLITS = ("train", "val", "test")
HELD_OUT_FRACTION = 0.05  # share of the documents in each of val and test
TokenArray = np.ndarray[Any, np.dtype[np.uint8]] | np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(frozen=True)
class Corpus:
    """Token streams, one file per split, and the tokenizer that reads them.

    files  split -> file of `dtype`, concatenated documents, each followed by a separator
    text   the same splits as bytes, or None if only tokens are known
    cache  folder for results that are computed once from this corpus
    """

    files: Mapping[str, Path]
    dtype: type[np.uint8] | type[np.uint16]
    tokenizer: Tokenizer
    text: Mapping[str, Path] | None
    cache: Path

    def windows(self, split: str, block_size: int) -> Windows:
        """Return the samples of a split. Raises InputMissing if there is no such split."""
        if split not in self.files:
            known = ", ".join(self.files)
            raise InputMissing(f"there is no split {split!r}, only {known}", where="data.path", fix=FORMATS)
        return Windows(self.files[split], self.dtype, block_size, self.tokenizer.num_tokens)


class Windows:
    """Sample i is the tokens from i T to (i + 1) T, and the same shifted by one: x (T,), y (T,), both int64.

    Raises DataError if the file is too short for one sample, or contains a token that is not below `num_tokens`.
    """

    def __init__(self, path: Path, dtype: type[np.uint8] | type[np.uint16], block_size: int, num_tokens: int) -> None:
        self.path, self.dtype, self.block_size, self.num_tokens = path, dtype, block_size, num_tokens
        tokens = read_tokens(path, dtype)
        if len(tokens) <= block_size:
            what = f"must hold at least block_size + 1 = {block_size + 1} tokens, but holds {len(tokens)}"
            raise DataError(what, where=str(path), fix="use more text, or a smaller task.block_size")
        self._length = (len(tokens) - 1) // block_size
        self._can_exceed = num_tokens <= np.iinfo(dtype).max
        self._rows = np.lib.stride_tricks.as_strided(
            tokens,
            shape=(self._length, block_size + 1),
            strides=(block_size * tokens.itemsize, tokens.itemsize),
            writeable=False,
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the collated batch: x and y (B, T), both contiguous.

        One gather and two casts: 18 us for 16 x 1024 tokens in the page cache, where casting sample by sample
        costs 132 us.
        """
        rows = self._rows[indices]
        if self._can_exceed and (highest := int(rows.max())) >= self.num_tokens:
            what = f"must hold tokens below {self.num_tokens} (task.vocab_size), but holds {highest}"
            raise DataError(what, where=str(self.path), fix=FORMATS)
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        """Send only the name of the file to a worker process; numpy would send the tokens."""
        return Windows, (self.path, self.dtype, self.block_size, self.num_tokens)


@dataclass(frozen=True)
class Document:
    """A text file; `name` is its path relative to the folder it was found in, with slashes."""

    name: str
    path: Path

    @property
    def hash(self) -> int:
        """A 64-bit hash of the name."""
        return int.from_bytes(hashlib.sha256(os.fsencode(self.name)).digest()[:8], "big")

    @property
    def split(self) -> str:
        """The split that the document belongs to."""
        if self.name in ALWAYS_TRAIN:
            return "train"
        share = self.hash / 2**64
        return "val" if share < HELD_OUT_FRACTION else "test" if share < 2 * HELD_OUT_FRACTION else "train"


def open_corpus(
    data_path: Path | None,
    cache: Path,
    *,
    tokenizer: Literal["byte", "bpe"],
    vocab_size: int | None,
) -> Corpus:
    """Return the tokens of `data_path`, or of the standard library; they are prepared once.

    vocab_size  maximum number of tokens; None: 256 for bytes, 2048 for byte pairs, 50257 for shards as in GPT-2
    Raises InputMissing if the path does not exist, DataError if its content is invalid, ConfigError if the
    vocabulary is too small for the tokenizer or too large for 16 bits.
    """
    if data_path is not None and (data_path / "train.bin").is_file():
        if tokenizer != "byte":
            what = "has no effect on token shards, which are already tokenized"
            raise ConfigError(Problem(what, "task.tokenizer", "leave it out, or give text as data.path"))
        return _token_shards(data_path, _check_vocab_size(vocab_size, 50257, minimum=1))
    documents = standard_library() if data_path is None else user_documents(data_path)
    origin = f"python-{platform.python_version()}" if data_path is None else data_path.resolve().name
    stamp = _fingerprint(documents)
    # Repetitions in the user's text may be intended, so nothing is removed from it.
    text = prepared(
        cache / f"{origin}-{stamp}", lambda folder: write_bytes(documents, folder, exclude_known=data_path is None)
    )
    if tokenizer == "byte":
        _check_vocab_size(vocab_size, 256, minimum=256)
        return Corpus(_files(text, "bytes"), np.uint8, Bytes(), _files(text, "bytes"), text)
    max_tokens = _check_vocab_size(vocab_size, 2048, minimum=257)
    pairs = prepared(text / f"bpe-{max_tokens}", lambda folder: _write_byte_pairs(text, max_tokens, folder))
    encoding = BytePairs(pairs / "tokenizer.json")
    return Corpus(_files(pairs, "bpe"), np.uint16, encoding, _files(text, "bytes"), text)


def standard_library() -> list[Document]:
    """Return the Python sources of the standard library without its tests: 537 files, 10.4 MB in Python 3.11.

    pydoc_data.topics, the language reference as text, is one of them. Left out are installed packages, character
    tables (encodings), a second copy of the grammar tools (lib2to3) and files that depend on how Python was built.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = [
        document
        for document in _walk(root, EXCLUDED_FOLDERS)
        if document.name.endswith(".py") and not document.name.startswith(("_sysconfigdata", "config-"))
    ]
    if len(documents) < 100:
        what = f"the sources of Python's standard library are not in {root}"
        raise InputMissing(what, where="data.path", fix=FORMATS)
    return documents


def user_documents(path: Path) -> list[Document]:
    """Return the text file `path`, or all files below the folder `path` except hidden and empty ones.

    Raises InputMissing for a link to a missing file, because its text would otherwise be missing silently.
    """
    if not path.exists():
        raise InputMissing(f"{path} does not exist", where="data.path", fix=FORMATS)
    documents = [Document(path.name, path)] if path.is_file() else _walk(path, frozenset(), follow_links=True)
    if not documents:
        raise DataError(f"{path} holds no text", where="data.path", fix=FORMATS)
    return documents


def read_tokens(path: Path, dtype: type[np.uint8] | type[np.uint16]) -> TokenArray:
    """Map a file of tokens into memory. Raises DataError if it is invalid."""
    size = path.stat().st_size
    if size == 0 or size % np.dtype(dtype).itemsize:
        what = f"must be a file of {np.dtype(dtype).name}, but has {size} bytes"
        raise DataError(what, where=str(path), fix=FORMATS)
    # asarray: a plain view of the mapping; the subclass costs time at each access
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def prepared(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, created atomically by `make` if it does not exist.

    Concurrent processes each fill a draft; the first to rename it wins, and the others use that one.
    Raises DataError if a file does not have the size with which it was written.
    """
    header = folder / "header.json"
    if not header.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            make(draft)
            files = sorted(path for path in draft.rglob("*") if path.is_file())  # not folders
            sizes = {file.relative_to(draft).as_posix(): file.stat().st_size for file in files}
            (draft / header.name).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
            draft.rename(folder)
        except OSError:
            if not header.exists():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    for name, size in json.loads(header.read_text(encoding="utf-8")).items():
        file = folder / name
        if not file.exists() or file.stat().st_size != size:
            raise DataError(f"{file} is damaged", fix=f"delete {folder}; it will be prepared again")
    return folder


def _check_vocab_size(vocab_size: int | None, default: int, *, minimum: int) -> int:
    size = default if vocab_size is None else vocab_size
    if not minimum <= size <= 2**16:
        what = f"must be between {minimum} and {2**16}, but is {size}"
        raise ConfigError(Problem(what, "task.vocab_size", "leave it out for the usual size"))
    return size


def _files(folder: Path, kind: str) -> dict[str, Path]:
    return {split: folder / f"{split}.{kind}" for split in SPLITS}


def _token_shards(folder: Path, vocab_size: int) -> Corpus:
    """Return the shards `train.bin`, `val.bin` and, if it exists, `test.bin`: uint16, as in nanoGPT's prepare.py."""
    files = {split: folder / f"{split}.bin" for split in SPLITS if (folder / f"{split}.bin").is_file()}
    if "val" not in files:
        raise InputMissing(f"{folder} has train.bin but no val.bin", where="data.path", fix=FORMATS)
    for file in files.values():
        read_tokens(file, np.uint16)
    return Corpus(files, np.uint16, Numbers(vocab_size), None, folder)


def _walk(root: Path, excluded: frozenset[str], *, follow_links: bool = False) -> list[Document]:
    """Return the files below `root` that are neither hidden nor empty, in order of their names.

    follow_links  also read linked folders, unless they are read under another name
    """
    documents, seen, starts = [], set(), deque([root])
    while starts:  # links last: names determine splits, so a folder that is also linked keeps its own name
        for folder, subfolders, files in os.walk(starts.popleft()):
            here = Path(folder)
            if here.resolve() in seen:
                subfolders.clear()
                continue
            seen.add(here.resolve())
            subfolders[:] = sorted(name for name in subfolders if name not in excluded and not name.startswith("."))
            if follow_links:
                starts += [here / name for name in subfolders if (here / name).is_symlink()]
            paths = [here / name for name in files if not name.startswith(".")]
            documents += [Document(path.relative_to(root).as_posix(), path) for path in paths if _has_content(path)]
    return sorted(documents, key=lambda document: document.name)


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError as error:
        what = f"{path} is a link to a file that does not exist"
        raise InputMissing(what, where="data.path", fix="restore the file, or remove the link") from error


def _fingerprint(documents: Sequence[Document]) -> str:
    """Return a fingerprint of the files and of the version of this preparation."""
    stats = [(document.path, document.path.stat()) for document in documents]
    content = [FORMAT_VERSION, *((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def write_bytes(documents: Sequence[Document], folder: Path, *, exclude_known: bool) -> None:
    """Write the splits as bytes, the documents of each, and the fraction of held-out blocks that are in training.

    Documents are in the order of their hash, so that any part of a split is a mixture. If a split would be empty
    because there are few files, each document is cut into three parts instead.

    exclude_known  remove blocks from the held-out documents that are also in training
    """
    ordered = sorted(documents, key=lambda document: (document.hash, document.name))
    members = {split: [document for document in ordered if document.split == split] for split in SPLITS}
    has_all_splits = all(members.values())
    texts = {
        split: [
            _read_text(document) if has_all_splits else _cut(_read_text(document), split)
            for document in (members[split] if has_all_splits else ordered)
        ]
        for split in SPLITS
    }
    known = {block for text in texts["train"] for _, block in blocks(text)}
    shares = {split: known_fraction(texts[split], known) for split in SPLITS[1:]}
    if exclude_known and has_all_splits:
        texts |= {split: [remove_known_blocks(text, known) for text in texts[split]] for split in SPLITS[1:]}
    final_shares = {split: known_fraction(texts[split], known) for split in SPLITS[1:]}
    for split, each in texts.items():
        (folder / f"{split}.bytes").write_bytes(b"".join(text.encode() + SEPARATOR for text in each))
    names = {split: [document.name for document in members[split] if has_all_splits] for split in SPLITS}
    (folder / "documents.json").write_text(json.dumps(names, indent=1), encoding="utf-8")
    leakage = {"of_documents": shares, "of_text": final_shares}
    (folder / "leakage.json").write_text(json.dumps(leakage, indent=1), encoding="utf-8")


def blocks(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each run of five lines that are not blank: their numbers, and a hash of them without indentation."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines()) if line.strip()]
    for first in range(len(lines) - BLOCK_LINES + 1):
        run = lines[first : first + BLOCK_LINES]
        digest = hashlib.blake2b("\n".join(line for _, line in run).encode(), digest_size=8).digest()
        yield tuple(number for number, _ in run), int.from_bytes(digest, "big")


def known_fraction(texts: Sequence[str], known: Container[int]) -> float:
    """Return the fraction of the blocks of these texts that are known."""
    found = [block in known for text in texts for _, block in blocks(text)]
    return sum(found) / max(1, len(found))


def remove_known_blocks(text: str, known: Container[int]) -> str:
    """Return the text without the lines of its known blocks."""
    while excluded := {number for numbers, block in blocks(text) if block in known for number in numbers}:
        lines = text.splitlines(keepends=True)
        # Lines that now follow each other may be a known block again.
        text = "".join(line for number, line in enumerate(lines) if number not in excluded)
    return text


def _read_text(document: Document) -> str:
    """Return the text of a document. Raises DataError if it is not UTF-8 or contains a NUL byte."""
    try:
        text = document.path.read_bytes().decode("utf-8")
        fault = "has a NUL byte" if SEPARATOR.decode() in text else ""
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 at byte {error.start}"
    if fault:
        raise DataError(f"{document.path} must be text, but {fault}", where="data.path", fix=FORMATS)
    return text


def _cut(text: str, split: str) -> str:
    """Return the part of a text that belongs to a split: train, then val, then test."""
    marks = [0, *(int(len(text) * share) for share in (1 - 2 * HELD_OUT_FRACTION, 1 - HELD_OUT_FRACTION)), len(text)]
    part = SPLITS.index(split)
    return text[marks[part] : marks[part + 1]]


def _write_byte_pairs(text: Path, vocab_size: int, folder: Path) -> None:
    """Train the encoding on the training text, then write all splits as its tokens."""
    train_byte_pairs(_texts(text / "train.bytes"), vocab_size, folder / "tokenizer.json")
    encoding = BytePairs(folder / "tokenizer.json")
    for split in SPLITS:
        with (folder / f"{split}.bpe").open("wb") as file:
            for tokens in encoding.encode_all(list(_texts(text / f"{split}.bytes"))):
                np.array([*tokens, encoding.end], dtype=np.uint16).tofile(file)


def _texts(path: Path) -> Iterator[str]:
    """Yield the documents of a file of bytes."""
    for document in path.read_bytes().split(SEPARATOR)[:-1]:
        yield document.decode("utf-8")


BLOCK_LINES = 5
FORMAT_VERSION = 2  # version of the prepared files; increase it when their content changes
FORMATS = (
    "data.path must be a UTF-8 text file, a folder of such files, or a folder with train.bin and val.bin, "
    "which contain uint16 tokens in nanoGPT's format"
)
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib2to3"}
)
# A twelfth of all text, with repetitive entries. If it were held out, it alone would determine the metric.
ALWAYS_TRAIN = frozenset({"pydoc_data/topics.py"})
