"""Each Python version has one text. Splits are disjoint, and windows cover the text without overlap."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.gpt import data
from runner.tasks.gpt.baselines import bigram_bits_per_byte, bits_per_byte_baselines, unigram_bits_per_byte
from runner.tasks.gpt.data import (
    SPLITS,
    Corpus,
    blocks,
    open_corpus,
    prepared,
    read_tokens,
    remove_known_blocks,
    standard_library,
    user_documents,
)
from runner.tasks.gpt.task import build

from runner.base.errors import ConfigError, DataError, InputMissing, MissingPackage
from runner.base.task import Context

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="the package tokenizers is not installed"
)


def open_bytes(data_path: Path | None, cache: Path, **options: Any) -> Corpus:
    return open_corpus(data_path, cache, **{"tokenizer": "byte", "vocab_size": None, **options})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_bytes(None, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eighty small files in two folders."""
    for number in range(80):
        file = tmp_path / "texts" / ("even" if number % 2 == 0 else "odd") / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"number {number} — " * 10)
    return tmp_path / "texts"


# The text


@pytest.mark.slow
def test_every_document_is_in_one_split(corpus: Corpus) -> None:
    names = json.loads((corpus.cache / "documents.json").read_text())
    together = [name for split in SPLITS for name in names[split]]
    assert sorted(together) == sorted(document.name for document in standard_library())
    assert len(set(together)) == len(together)
    assert min(len(names[split]) for split in SPLITS) >= 10


def test_held_out_documents_lack_training_blocks(corpus: Corpus) -> None:
    names = json.loads((corpus.cache / "documents.json").read_text())
    paths = {document.name: document.path for document in standard_library()}
    for split in SPLITS:
        pieces = corpus.files[split].read_bytes().split(b"\0")
        assert pieces[-1] == b""
        for piece, name in zip(pieces[:-1], names[split], strict=True):
            there = paths[name].read_bytes()
            if split == "train":
                assert piece == there
            left = iter(there.splitlines(keepends=True))
            assert all(line in left for line in piece.splitlines(keepends=True)), name  # in the same order
        assert len(corpus.files[split].read_bytes()) > 0.9 * sum(paths[name].stat().st_size for name in names[split])


@pytest.mark.slow
def test_held_out_text_shares_no_five_lines_with_training(corpus: Corpus) -> None:
    def runs(split: str) -> Iterator[tuple[str, ...]]:
        for document in corpus.files[split].read_text().split("\0"):
            lines = [line.strip() for line in document.splitlines() if line.strip()]
            yield from zip(*(lines[shift:] for shift in range(5)), strict=False)

    known = set(runs("train"))
    leakage = json.loads((corpus.cache / "leakage.json").read_text())
    for split in ("val", "test"):
        assert not [run for run in runs(split) if run in known]
        assert leakage["of_text"][split] == 0
        assert 0 < leakage["of_documents"][split] < 0.1


def test_leakage_is_the_share_of_blocks_found_in_training(folder: Path, tmp_path: Path) -> None:
    """Leakage in a user's text is reported but not removed."""
    lines = "".join(f"line {number}\n" for number in range(9))
    for file in folder.rglob("*.txt"):
        file.write_text(lines + f"only in {file.stem}\n")
    made = open_bytes(folder, tmp_path / "cache")
    leakage = json.loads((made.cache / "leakage.json").read_text())
    assert leakage["of_documents"] == leakage["of_text"] == {"val": 5 / 6, "test": 5 / 6}
    assert made.files["val"].read_text().count("line 3") == made.files["val"].read_text().count("only in") > 0


def test_deduplicated_text_has_no_training_block() -> None:
    """This includes blocks that result from the removal of others."""
    known = {block for text in ("a\nb\nc\nd\ne\n", "1\n2\n3\n4\n5\n") for _, block in blocks(text)}
    assert remove_known_blocks("x\n\n  a\nb\n\nc\nd\ne\ny\n", known) == "x\n\n\ny\n"
    assert remove_known_blocks("1\n2\na\nb\nc\nd\ne\n3\n4\n5\n6\n", known) == "6\n"
    assert remove_known_blocks("a\nb\nc\nd\n", known) == "a\nb\nc\nd\n"


def test_the_default_text_is_the_standard_library() -> None:
    documents = standard_library()
    names = [document.name for document in documents]
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    assert not [name for name in names if {"site-packages", "test", "tests", "__pycache__"} & set(name.split("/"))]
    assert sum(document.path.stat().st_size for document in documents) > 5e6


@pytest.mark.slow
def test_the_same_python_version_gives_the_same_text(corpus: Corpus, tmp_path: Path) -> None:
    again = open_bytes(None, tmp_path)
    assert again.cache.name == corpus.cache.name
    for split in SPLITS:
        assert again.files[split].read_bytes() == corpus.files[split].read_bytes()


def test_text_is_prepared_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_bytes(folder, tmp_path / "cache")
    monkeypatch.setattr(data, "write_bytes", lambda *_: pytest.fail("prepared a second time"))
    assert open_bytes(folder, tmp_path / "cache").files == first.files


def test_changed_text_is_prepared_again(folder: Path, tmp_path: Path) -> None:
    first = open_bytes(folder, tmp_path / "cache")
    (folder / "even" / "0.txt").write_text("something else")
    second = open_bytes(folder, tmp_path / "cache")
    assert second.files != first.files
    assert any(b"something else" in file.read_bytes() for file in second.files.values())


# Preparation


def test_two_processes_may_prepare_at_the_same_time(tmp_path: Path) -> None:
    def make(folder: Path, winner: bool) -> None:
        if not winner:  # another process starts and finishes first
            prepared(tmp_path / "text", lambda other: make(other, True))
        (folder / "file").write_text("winner" if winner else "loser")

    assert prepared(tmp_path / "text", lambda folder: make(folder, False)) == tmp_path / "text"
    assert (tmp_path / "text" / "file").read_text() == "winner"
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        prepared(tmp_path / "text", make)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_detected(folder: Path, tmp_path: Path) -> None:
    train = open_bytes(folder, tmp_path / "cache").files["train"]
    train.write_bytes(train.read_bytes()[:-1])
    with pytest.raises(DataError, match="damaged"):
        open_bytes(folder, tmp_path / "cache")


def test_files_in_subfolders_are_checked(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "file").write_text("text")

    text = prepared(tmp_path / "text", make)
    assert json.loads((text / "header.json").read_text()) == {"a/b/file": 4}
    (text / "a" / "b" / "file").write_text("tex")
    with pytest.raises(DataError, match="damaged"):
        prepared(tmp_path / "text", make)


# The samples


def test_a_batch_equals_its_stacked_samples(corpus: Corpus) -> None:
    windows = corpus.windows("train", 64)
    indices = [3, 0, len(windows) - 1, 3]
    x, y = windows.__getitems__(indices)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    for row, index in enumerate(indices):
        assert torch.equal(x[row], windows[index][0])
        assert torch.equal(y[row], windows[index][1])


def test_windows_tile_the_stream(corpus: Corpus) -> None:
    windows = corpus.windows("val", 100)
    x, y = windows.__getitems__(range(len(windows)))
    stream = torch.from_numpy(read_tokens(corpus.files["val"], np.uint8).astype(np.int64))
    assert len(stream) - 1 - x.numel() in range(100)
    assert torch.equal(x.flatten(), stream[: x.numel()])
    assert torch.equal(y.flatten(), stream[1 : x.numel() + 1])


def test_an_index_after_the_last_window_is_rejected(corpus: Corpus) -> None:
    windows = corpus.windows("val", 100)
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_only_the_file_name_is_sent_to_worker_processes(corpus: Corpus) -> None:
    windows = corpus.windows("train", 64)
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[5][0], windows[5][0])


# The user's text


def test_a_folder_is_split_by_file(folder: Path, tmp_path: Path) -> None:
    corpus = open_bytes(folder, tmp_path / "cache")
    pieces = {split: corpus.files[split].read_bytes().split(b"\0")[:-1] for split in SPLITS}
    assert sum(map(len, pieces.values())) == 80
    assert all(pieces.values())
    assert all(piece.decode().startswith("number") for split in SPLITS for piece in pieces[split])


def test_a_single_file_is_divided_into_three_splits(tmp_path: Path) -> None:
    text = "ein Wörtchen, das 世界 heißt; " * 100
    (tmp_path / "text.txt").write_text(text)
    corpus = open_bytes(tmp_path / "text.txt", tmp_path / "cache")
    pieces = [corpus.files[split].read_bytes().decode() for split in SPLITS]
    assert all(piece.endswith("\0") for piece in pieces)
    assert "".join(piece[:-1] for piece in pieces) == text
    assert [len(piece) / len(text) for piece in pieces] == pytest.approx([0.9, 0.05, 0.05], abs=0.01)


def test_a_missing_path_lists_valid_kinds(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="nowhere does not exist") as caught:
        open_bytes(tmp_path / "nowhere", tmp_path / "cache")
    assert "train.bin" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("content", "match"), [(b"\xff\xfe", "not UTF-8 at byte 0"), (b"a\0b", "NUL byte")], ids=["binary", "nul"]
)
def test_binary_files_are_rejected(folder: Path, tmp_path: Path, content: bytes, match: str) -> None:
    (folder / "picture.txt").write_bytes(content)
    with pytest.raises(DataError, match=match):
        open_bytes(folder, tmp_path / "cache")


def test_a_file_name_may_contain_undecodable_bytes(folder: Path, tmp_path: Path) -> None:
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    assert open_bytes(folder, tmp_path / "cache").windows("train", 16)


def test_linked_folders_are_read_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "text.txt").write_text("more")
    (folder / "more").symlink_to(tmp_path / "more")
    (folder / "odd" / "parent").symlink_to(folder)
    (folder / "alias").symlink_to(
        folder / "odd"
        # if it were read before its target, documents of another split would be renamed
    )
    names = [document.name for document in user_documents(folder)]
    assert len(names) == 81
    assert "more/text.txt" in names
    assert not any(name.startswith("alias/") for name in names)
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputMissing, match=r"gone\.txt is a link"):
        user_documents(folder)


def test_an_empty_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").touch()
    with pytest.raises(DataError, match="holds no text"):
        open_bytes(tmp_path / "texts", tmp_path / "cache")


def test_too_little_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short\n" * 10)
    corpus = open_bytes(tmp_path / "text.txt", tmp_path / "cache")
    with pytest.raises(DataError, match="at least block_size"):
        corpus.windows("val", 128)


# Token shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "shards").mkdir()
    for split in ("train", "val"):
        rng.integers(0, 50257, 1000, dtype=np.uint16).tofile(tmp_path / "shards" / f"{split}.bin")
    return tmp_path / "shards"


def test_token_shards_are_memory_mapped(shards: Path, tmp_path: Path) -> None:
    task = build(Context(0, shards, tmp_path / "cache"), block_size=16)
    tokens = np.fromfile(shards / "train.bin", np.uint16).astype(np.int64)
    x, y = task.dataset("train")[2]
    assert x.tolist() == tokens[32:48].tolist()
    assert y.tolist() == tokens[33:49].tolist()
    assert not (tmp_path / "cache").exists()
    assert task.baselines() == {}
    assert set(task.evaluate(task.model, (x[None], y[None]))) == {"loss"}


def test_predictions_of_token_shards_are_token_ids(shards: Path, tmp_path: Path) -> None:
    task = build(Context(0, shards, tmp_path / "cache"), block_size=16)
    options: dict[str, Any] = {"samples": 1, "max_new_tokens": 3, "prompt": "17 4"}
    with torch.no_grad():
        (prediction,) = task.predict(task.model.eval(), torch.Generator(), **options)
        assert prediction.text.startswith("17 4 ")
        assert all(0 <= int(word) < 50257 for word in prediction.text.split())
        with pytest.raises(ConfigError, match="token IDs"):
            list(task.predict(task.model, torch.Generator(), prompt="def"))


@pytest.mark.parametrize(("vocab_size", "end"), [(None, 50256), (50304, 50256), (50256, None)])
def test_end_of_document_token_of_token_shards(
    vocab_size: int | None, end: int | None, shards: Path, tmp_path: Path
) -> None:
    """The token is known only for GPT-2, even if padded as in nanoGPT; other encodings end with an ordinary token."""
    assert open_bytes(shards, tmp_path, vocab_size=vocab_size).tokenizer.end == end


def test_samples_without_an_end_of_document_token(shards: Path, tmp_path: Path) -> None:
    task = build(Context(0, shards, tmp_path / "cache"), block_size=16, vocab_size=65)

    class AlwaysLast(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
            cache.length += tokens.shape[1]
            return torch.nn.functional.one_hot(torch.tensor([[64]]), 65).float()

    options: dict[str, Any] = {"samples": 1, "max_new_tokens": 3, "temperature": 0.0}
    (prediction,) = task.predict(AlwaysLast(), torch.Generator(), prompt="7", **options)
    assert (prediction.text, prediction.items) == ("7 64 64 64", 3)
    with pytest.raises(ConfigError, match=r"inference\.prompt"):
        list(task.predict(AlwaysLast(), torch.Generator(), prompt="", **options))


def test_invalid_token_shards_are_rejected(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="'test'"):
        open_bytes(shards, tmp_path).windows("test", 16)
    with (shards / "val.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="uint16"):
        open_bytes(shards, tmp_path)
    (shards / "val.bin").unlink()
    with pytest.raises(InputMissing, match=r"no val\.bin"):
        open_bytes(shards, tmp_path)


def test_tokens_outside_the_vocabulary_are_rejected_on_reading(shards: Path, tmp_path: Path) -> None:
    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[500] = 300
    tokens.tofile(shards / "train.bin")
    windows = open_bytes(shards, tmp_path, vocab_size=300).windows("train", 100)
    assert windows.__getitems__([0, 1])[0].sum() == 0
    with pytest.raises(DataError, match="below 300"):
        windows.__getitems__([0, 5])


def test_token_shards_do_not_accept_a_tokenizer(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        open_bytes(shards, tmp_path, tokenizer="bpe")


# Bits per byte


def test_baselines_equal_manual_counts() -> None:
    train, val = b"abracadabra, abracadabra", b"abba, cadabra!"
    singles, pairs = Counter(train), Counter(itertools.pairwise(train))
    firsts = Counter(train[:-1])
    unigram = bigram = 0.0
    for first, second in itertools.pairwise(val):
        unigram -= math.log2((singles[second] + 1) / (len(train) + 256))
        bigram -= math.log2((pairs[first, second] + 1) / (firsts[first] + 256))
    train_array, val_array = np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8)
    assert unigram_bits_per_byte(train_array, val_array) == pytest.approx(unigram / (len(val) - 1))
    assert bigram_bits_per_byte(train_array, val_array) == pytest.approx(bigram / (len(val) - 1))


@pytest.mark.slow
def test_baselines_are_counted_once(corpus: Corpus) -> None:
    assert corpus.text is not None
    figures = bits_per_byte_baselines(corpus.text, corpus.cache)
    assert 3 < figures["bigram"] < 4 < figures["unigram"] < 5
    assert bits_per_byte_baselines({}, corpus.cache) == figures


# Byte pairs


def test_a_missing_package_is_reported_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingPackage, match="tokenizers"):
        open_bytes(folder, tmp_path / "cache", tokenizer="bpe")


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [("byte", 255), ("bpe", 256), ("bpe", 65537)])
def test_an_impossible_vocabulary_is_rejected(folder: Path, tmp_path: Path, tokenizer: str, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"is {vocab_size}"):
        open_bytes(folder, tmp_path / "cache", tokenizer=tokenizer, vocab_size=vocab_size)


@needs_tokenizers
def test_byte_pair_encoding_is_lossless(folder: Path, tmp_path: Path) -> None:
    corpus = open_bytes(folder, tmp_path / "cache", tokenizer="bpe", vocab_size=300)
    assert corpus.text is not None
    for split in SPLITS:
        tokens = read_tokens(corpus.files[split], np.uint16).tolist()
        text = corpus.text[split].read_bytes()
        assert corpus.tokenizer.decode(tokens).encode() == text.replace(b"\0", b"<|endoftext|>")
        assert corpus.tokenizer.num_bytes is not None
        assert corpus.tokenizer.num_bytes[tokens].sum() == len(text)
        assert len(tokens) < len(text) / 2
        assert max(tokens) < corpus.tokenizer.num_tokens <= 300
    for text in ("", "x = 'é'\n\t日本", "<|endoftext|>", "  two  spaces "):
        assert corpus.tokenizer.decode(corpus.tokenizer.encode(text)) == text
        assert corpus.tokenizer.end not in corpus.tokenizer.encode(text)


@needs_tokenizers
def test_bits_per_byte_counts_encoded_bytes(folder: Path, tmp_path: Path) -> None:
    task = build(Context(0, folder, tmp_path / "cache"), tokenizer="bpe", vocab_size=300, block_size=1)
    corpus = open_bytes(folder, tmp_path / "cache", tokenizer="bpe", vocab_size=300)
    windows = corpus.windows("val", block_size=1)
    batch = windows.__getitems__(range(len(windows)))
    with torch.no_grad():
        (nats, num_tokens), (bits, num_bytes) = task.evaluate(task.model, batch).values()
    first = corpus.tokenizer.decode(batch[0][0].tolist())
    assert corpus.text is not None
    assert num_tokens == len(windows)
    assert num_bytes == len(corpus.text["val"].read_bytes()) - len(first.encode())
    assert float(bits) == pytest.approx(float(nats) / math.log(2))


@needs_tokenizers
def test_byte_pair_vocabularies_are_deterministic(folder: Path, tmp_path: Path) -> None:
    first = open_bytes(folder, tmp_path / "one", tokenizer="bpe", vocab_size=400)
    second = open_bytes(folder, tmp_path / "two", tokenizer="bpe", vocab_size=400)
    for split in SPLITS:
        assert first.files[split].read_bytes() == second.files[split].read_bytes()
