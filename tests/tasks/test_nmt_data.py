"""Tokenization is lossless, held-out pairs are not in the training data, and each pair is in a batch exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runner.tasks.nmt import data
from runner.tasks.nmt.data import (
    Batch,
    Corpus,
    PackedData,
    PairData,
    Sequences,
    baselines,
    described_functions,
    library_pairs,
    open_pairs,
    packed,
    random_pairs,
    standard_library,
)
from runner.tasks.nmt.task import build
from runner.tasks.nmt.vocabulary import BEGIN, END, JOINT, LEAST_SIZE, PAD, Numbers, SubwordVocabulary
from torch.utils.data import default_collate

from runner.base.batch import are_equal
from runner.base.errors import ConfigError, DataError, InputMissing
from runner.base.task import Context

Pairs = dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def library() -> Pairs:
    result: Pairs = library_pairs(standard_library())
    return result


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, library: Pairs) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "library_pairs", lambda files: library)  # reuse the parsed library
        return open_pairs(None, tmp_path_factory.mktemp("cache"), vocab_size=2000)


def texts(corpus: Corpus, split: str) -> list[tuple[str, str]]:
    decode, sources, targets = corpus.vocabulary.decode, corpus.sources[split], corpus.targets[split]
    return [(decode(sources[i].tolist()), decode(targets[i].tolist())) for i in range(len(sources))]


# The vocabulary

LEARNED = SubwordVocabulary.learn(["get the name", "get_name(self, name, default=None)", "(self, the_name=3)"] * 2, 300)


@given(st.text() | st.text("getnamself_(), =Xé3\n"))
def test_tokenization_is_lossless(text: str) -> None:
    text = text.encode(errors="replace").decode()  # replace lone surrogates, which are not valid text
    assert LEARNED.decode(LEARNED.encode(text)) == text


@given(st.lists(st.integers(0, LEARNED.num_tokens - 1)))
def test_any_sequence_of_tokens_decodes_to_text(tokens: list[int]) -> None:
    LEARNED.decode(tokens)


def test_words_are_single_tokens() -> None:
    name = LEAST_SIZE + LEARNED.pieces.index("name")
    assert LEARNED.encode("get the name")[-1] == name
    assert LEARNED.encode("get_name(")[2] == name
    assert LEARNED.encode("get name") == [LEAST_SIZE + LEARNED.pieces.index("get"), name]
    assert LEARNED.encode("getname")[0] == LEAST_SIZE + LEARNED.pieces.index("get")
    assert len(LEARNED.encode("getname")) == 3
    assert JOINT in LEARNED.encode("getname")


def test_the_vocabulary_has_the_most_frequent_pieces() -> None:
    assert LEARNED.pieces[0] == "name"
    assert len(set(LEARNED.pieces)) == len(LEARNED.pieces)
    assert SubwordVocabulary.learn(["a b c a b a"] * 2, LEAST_SIZE + 2).pieces == ["a", "b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SubwordVocabulary.learn(["a"], LEAST_SIZE),
        lambda: Numbers(3),
        lambda: random_pairs(0, vocab_size=3, source_length=5, target_length=5),
    ],
)
def test_too_small_vocabularies_are_rejected(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"task\.vocab_size"):
        make()


def test_the_number_vocabulary_encodes_and_decodes() -> None:
    numbers = Numbers(10)
    assert numbers.decode([BEGIN, 5, 9, END, PAD]) == "5 9"
    assert numbers.encode("5 9") == [5, 9]
    with pytest.raises(ConfigError, match="from 3 to 9"):
        numbers.encode("5 10")


# The standard library


@pytest.mark.slow
def test_held_out_descriptions_are_not_in_the_training_data(library: Pairs) -> None:
    seen = {source for source, _ in library["train"]}
    for split in ("val", "test"):
        assert len(library[split]) > 200
        assert not [source for source, _ in library[split] if source in seen]
    assert len(library["train"]) > 4000


@pytest.mark.slow
def test_the_vocabulary_is_built_from_training_data_only(library: Pairs, corpus: Corpus) -> None:
    alone = SubwordVocabulary.learn((text for pair in library["train"] for text in pair), 2000)
    assert isinstance(corpus.vocabulary, SubwordVocabulary)
    assert corpus.vocabulary.pieces == alone.pieces
    assert corpus.vocabulary.num_tokens == 2000


@pytest.mark.slow
def test_all_pairs_are_kept_in_order(library: Pairs, corpus: Corpus) -> None:
    assert texts(corpus, "val") == library["val"]


def test_descriptions_are_names_and_first_paragraphs() -> None:
    code = '''
class A:
    async def run(self, a: int = 3, *, b=(1, 2)) -> None:
        """Run it
        twice.

        And more.
        """
    def silent(self): ...
'''
    expected = ("A.run: Run it twice.", "run(self, a: int=3, *, b=(1, 2))")
    assert list(described_functions(code.encode(), "x")) == [expected]
    assert list(described_functions(b"print 3", "x")) == []


def test_pairs_are_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "mine")
    first = open_pairs(tmp_path / "mine", tmp_path / "cache", vocab_size=300)
    monkeypatch.setattr(data, "user_pairs", lambda *_: pytest.fail("prepared a second time"))
    again = open_pairs(tmp_path / "mine", tmp_path / "cache", vocab_size=300)
    assert texts(first, "train") == texts(again, "train")


# The user's pairs


def make_folder(folder: Path, pairs: str = "one two\tf(x)\nthree\tg(y)\n") -> None:
    folder.mkdir()
    for split in ("train", "val"):
        (folder / f"{split}.tsv").write_text(pairs)


def test_tables_and_parallel_files_give_the_same_pairs(tmp_path: Path) -> None:
    make_folder(tmp_path / "table")
    (tmp_path / "columns").mkdir()
    for split in ("train", "val", "test"):
        (tmp_path / "columns" / f"{split}.src").write_text("one two\nthree\n")
        (tmp_path / "columns" / f"{split}.tgt").write_text("f(x)\ng(y)\n")
    table, columns = (open_pairs(tmp_path / kind, tmp_path, vocab_size=300) for kind in ("table", "columns"))
    assert texts(table, "train") == texts(columns, "train") == texts(columns, "test")
    with pytest.raises(InputMissing, match="no split 'test', only train, val"):
        table.data("test", 5, 5)


def test_one_table_is_split_by_source(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"source {number % 200}\ttarget {number}\n" for number in range(400)))
    corpus = open_pairs(file, tmp_path, vocab_size=300)
    sources = {split: {source for source, _ in texts(corpus, split)} for split in ("train", "val", "test")}
    assert sum(len(texts(corpus, split)) for split in sources) == 400
    assert not sources["train"] & sources["val"]
    assert not sources["train"] & sources["test"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\nonly one\n", r"train\.tsv, line 2: must be source<TAB>target.*1 columns: 'only one'"),
        (b"a\tb\nc\td\te\n", r"line 2: .*3 columns"),
        (b"a\tb\nc\t \n", r"line 2: .*nonempty"),
        (b"a\tb\n\xff\tb\n", r"line 2: must be UTF-8"),
        (b"", r"line 1: must be source<TAB>target"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(tmp_path: Path, content: bytes, message: str) -> None:
    make_folder(tmp_path / "mine")
    (tmp_path / "mine" / "train.tsv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_pairs(tmp_path / "mine", tmp_path, vocab_size=300)


def test_parallel_files_must_have_equal_lengths(tmp_path: Path) -> None:
    make_folder(tmp_path / "mine")
    (tmp_path / "mine" / "train.tsv").unlink()
    (tmp_path / "mine" / "train.src").write_text("a\nb\n")
    with pytest.raises(InputMissing, match=r"train\.src exists, but .*train\.tgt does not"):
        open_pairs(tmp_path / "mine", tmp_path, vocab_size=300)
    (tmp_path / "mine" / "train.tgt").write_text("a\n")
    with pytest.raises(DataError, match=r"train\.tgt: must have as many lines as train\.src, 2, but has 1"):
        open_pairs(tmp_path / "mine", tmp_path, vocab_size=300)
    (tmp_path / "mine" / "train.tgt").write_text("a\n\n")
    with pytest.raises(DataError, match=r"train\.tgt, line 2: must not be empty"):
        open_pairs(tmp_path / "mine", tmp_path, vocab_size=300)


def test_missing_files_are_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="does not exist"):
        open_pairs(tmp_path / "none", tmp_path, vocab_size=300)
    make_folder(tmp_path / "mine")
    (tmp_path / "mine" / "val.tsv").unlink()
    with pytest.raises(InputMissing, match="has no pairs for val"):
        open_pairs(tmp_path / "mine", tmp_path, vocab_size=300)
    (tmp_path / "small.tsv").write_text("a\tb\n")
    with pytest.raises(DataError, match="too few pairs: none is left for"):
        open_pairs(tmp_path / "small.tsv", tmp_path, vocab_size=300)


def test_a_data_path_with_random_pairs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path"):
        build(Context(0, tmp_path, tmp_path), data="random")


# Batches


def some_pairs(count: int = 40) -> tuple[Sequences, Sequences]:
    rng = np.random.default_rng(0)
    return tuple(Sequences.of([rng.integers(3, 90, rng.integers(1, 12)).tolist() for _ in range(count)]) for _ in "st")


def unpacked(batch: Batch) -> Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return every pair of a batch as (source, target, labels)."""
    result = []
    for row in range(len(batch.labels)):
        for segment in range(1, int(batch.source.segments[row].max()) + 1):
            source, target = batch.source.segments[row] == segment, batch.target.segments[row] == segment
            for rows, where in ((batch.source, source), (batch.target, target)):
                assert rows.positions[row][where].tolist() == list(range(int(where.sum())))
            sides = (batch.source.tokens[row][source], batch.target.tokens[row][target], batch.labels[row][target])
            result.append(tuple(tuple(side.tolist()) for side in sides))
    return Counter(result)  # type: ignore[arg-type]


def test_targets_have_start_and_end_tokens_and_are_truncated() -> None:
    batch = PairData(Sequences.of([[5, 6, 7, 8], [9]]), Sequences.of([[5, 6, 7], [5]]), 3, 3).__getitems__([1, 0])
    assert batch.source.tokens.tolist() == [[9, 0, 0], [5, 6, 7]]
    assert batch.target.tokens.tolist() == [[BEGIN, 5, 0], [BEGIN, 5, 6]]
    assert batch.labels.tolist() == [[5, END, PAD], [5, 6, 7]]
    assert batch.source.segments.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_packed_rows_need_less_space() -> None:
    indices = [*range(5, 40), 3, 3]
    padded, dense = (kind(*some_pairs(), 20, 16).__getitems__(indices) for kind in (PairData, PackedData))
    assert unpacked(padded) == unpacked(dense)
    assert len(padded.labels) == len(indices)
    assert dense.labels.numel() < 0.7 * padded.labels.numel()
    assert dense.source.tokens.numel() < 0.7 * padded.source.tokens.numel()
    for rows in (dense.source, dense.target):
        assert int(rows.segments.max()) <= 8
        assert ((rows.segments == 0) == (rows.tokens == PAD)).all()


@given(st.lists(st.tuples(st.integers(1, 10), st.integers(1, 8)), min_size=1, max_size=60))
def test_packed_rows_do_not_exceed_the_maximum_length(lengths: list[tuple[int, int]]) -> None:
    sources, targets = (np.array(side) for side in zip(*lengths, strict=True))
    places = packed(sources, targets, 20, 16, 4)
    assert set(places.rows.tolist()) == set(range(places.num_rows))
    for row in range(places.num_rows):
        mine = places.rows == row
        assert sorted(places.segments[mine]) == list(range(1, mine.sum() + 1))
        assert mine.sum() <= 4
        for starts, side, room in ((places.source_starts, sources, 20), (places.target_starts, targets, 16)):
            taken = np.concatenate(
                [np.arange(start, start + length) for start, length in zip(starts[mine], side[mine], strict=True)]
            )
            assert len(set(taken.tolist())) == len(taken)
            assert taken.max() < room


def test_a_packed_sample_is_one_row_of_the_batch() -> None:
    pairs = PairData(*some_pairs(), 10, 8)
    batch, sample = pairs.__getitems__([4, 7]), pairs[7]
    assert torch.equal(batch.source.tokens[1], sample.source.tokens)
    assert torch.equal(batch.labels[1], sample.labels)
    assert are_equal(default_collate([pairs[4], sample]), batch)


@pytest.mark.parametrize("kind", [PairData, PackedData])
def test_places_locate_each_pair_in_the_batch(kind: type[PairData]) -> None:
    indices = [7, 3, 3, *range(10, 40)]
    pairs = kind(*some_pairs(), 20, 16)
    for batch in (pairs.__getitems__(indices), default_collate([pairs[index] for index in indices])):
        rows = torch.arange(len(indices)) + batch.places[:, 0]
        for index, row, segment in zip(indices, rows.tolist(), batch.places[:, 1].tolist(), strict=True):
            source, target = batch.source.segments[row] == segment, batch.target.segments[row] == segment
            assert batch.source.tokens[row][source].tolist() == pairs.sources[index].tolist()
            assert batch.labels[row][target].tolist() == pairs.labels[index].tolist()


def test_sequences_are_recovered_from_padded_rows() -> None:
    sequences = Sequences.of([[5, 6, 7], [], [8], [9, 3]])
    rows = sequences.padded(np.array([3, 0, 1, 3]), 4)
    assert rows.tolist() == [[9, 3, 0, 0], [5, 6, 7, 0], [0, 0, 0, 0], [9, 3, 0, 0]]
    back = Sequences.of_padded(rows)
    assert [back[number].tolist() for number in range(4)] == [[9, 3], [5, 6, 7], [], [9, 3]]


def test_random_pairs_depend_only_on_the_seed() -> None:
    first, again, other = (
        random_pairs(seed, vocab_size=5000, source_length=50, target_length=20) for seed in (0, 0, 1)
    )
    batches = [corpus.data("train", 50, 20).__getitems__(range(256)) for corpus in (first, again, other)]
    assert torch.equal(batches[0].labels, batches[1].labels)
    assert not torch.equal(batches[0].labels, batches[2].labels)
    assert batches[0].source.tokens.shape == (256, 50)
    assert batches[0].target.tokens.shape == (256, 20)
    assert 0.7 < (batches[0].source.tokens != PAD).float().mean() < 0.8
    assert (batches[0].labels == END).any(dim=1).all()


# Baselines


@pytest.mark.slow
def test_baselines_are_the_metrics_of_a_constant_output(library: Pairs, corpus: Corpus) -> None:
    result = baselines(corpus, 50, 20)
    likeliest = Counter(target for _, target in library["train"]).most_common(1)[0][0]
    assert result["exact_match"] == np.mean([target == likeliest for _, target in library["val"]])
    labels = corpus.data("val", 50, 20).__getitems__(range(len(library["val"]))).labels
    best = max(float((labels == token).sum() / (labels != PAD).sum()) for token in range(2000))
    assert result["token_accuracy"] <= best * (1 + torch.finfo(torch.float32).eps)
    assert result["token_accuracy"] > 0.05
    assert 3 < result["loss"] < np.log(2000)


@pytest.mark.slow
def test_the_name_copying_baseline_is_scored_like_exact_match(library: Pairs, corpus: Corpus) -> None:
    right = [target == f"{source.partition(':')[0].split('.')[-1]}(self)" for source, target in library["val"]]
    assert (
        baselines(corpus, 1000, 1000)["exact_match_copied_name"]
        == np.mean(right)
        > baselines(corpus, 50, 20)["exact_match"]
    )
    assert baselines(corpus, 50, 3)["exact_match_copied_name"] == 0  # truncated targets never match exactly


def test_name_copying_needs_sources_that_start_with_a_name(tmp_path: Path) -> None:
    make_folder(tmp_path / "mine")
    assert "exact_match_copied_name" not in baselines(open_pairs(tmp_path / "mine", tmp_path, vocab_size=300), 50, 20)
    make_folder(tmp_path / "named", "A.b.run: go\trun(self)\nrun: go\trun()\n")
    assert baselines(open_pairs(tmp_path / "named", tmp_path, vocab_size=300), 50, 20)["exact_match_copied_name"] == 0.5
