"""Records are correct, splits are disjoint, and character positions map exactly to token positions."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner.tasks.dynamo import text
from runner.tasks.dynamo.data import (
    GENERATION,
    IGNORED,
    Corpus,
    MaskedTexts,
    Rounds,
    limit_records,
    open_corpus,
    read_records,
    source_text,
    target_text,
    token_span,
)
from runner.tasks.dynamo.text import (
    ENDINGS,
    HELD_OUT_WANTED,
    OPENINGS,
    SPLITS,
    TASKS,
    WANTED,
    extract_records,
    pairs_of,
    postfix,
    remove_label_words,
    standard_library_records,
)
from runner.tasks.dynamo.tokenizer import BEGIN, END, MASK, PAD, Tokenizer, learn_pieces

from runner.base.errors import ConfigError, DataError, InputMissing

LIMITS = {"vocab_size": 2048, "max_length": 64, "max_target_length": 28}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The records of the standard library."""
    return open_corpus(None, tmp_path_factory.mktemp("cache"), **LIMITS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small records for each task in each split."""
    records: dict[str, list[Any]] = {
        "classification": [{"text": "Add two.", "label": "function"}, {"text": "A thing.", "label": "class"}],
        "qa": [{"question": "x?", "context": "def f(x=12): ...", "answer": "12", "start": 8}] * 2,
        **{task: [{"source": "a + b", "target": "a b +"}] * 2 for task in GENERATION},
    }
    for task, own in records.items():
        for name in SPLITS.values():
            file = tmp_path / "data" / task / f"{name}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(own))
    return tmp_path / "data"


# Tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", ["def f(x, *, y=-1):\n    return 'a_b'", "Zürich — 東京\t\r\n  ²٣ x\u00a0y", "", "   "]
)
def test_tokenization_is_lossless(args: str, corpus: Corpus) -> None:
    for tokenizer in (corpus.tokenizer, Tokenizer([])):
        assert tokenizer.decode([*tokenizer.encode(args), END, 300]) == args
        assert tokenizer.encode_with_offsets(args)[0] == tokenizer.encode(args)


@pytest.mark.slow
def test_offsets_of_a_token_exclude_the_space_before_it(corpus: Corpus) -> None:
    for source in ("def  f(x = None, y='utf-8'):\n    pass", "über das Maß"):
        tokens, offsets = corpus.tokenizer.encode_with_offsets(source)
        for token, (start, end) in zip(tokens, offsets, strict=True):
            piece = corpus.tokenizer.bytes[token]
            if piece.isascii():
                assert source[start:end] == (piece.decode().removeprefix(" ") or " ")
            else:  # every byte of a character has the offsets of the character
                assert piece in source[start:end].encode()
                assert end == start + 1


def test_vocabulary_pieces_are_the_most_frequent_pairs() -> None:
    text = "of aa aa aa aab aab"
    assert learn_pieces([text], 260 + 2) == [" a", " aa"]
    assert learn_pieces(["once"], 300) == []


# The records


@pytest.mark.slow
def test_the_standard_library_has_enough_records_for_each_task(corpus: Corpus) -> None:
    for task in TASKS:
        assert len(corpus.tables["train"][task].source) >= 500
        assert min(len(corpus.tables[split][task].source) for split in ("val", "test")) >= 40


@pytest.mark.slow
def test_evaluation_records_are_not_in_the_training_data(corpus: Corpus) -> None:
    for task in TASKS:
        texts = {split: {_bare(record, task) for record in corpus.records(split, task)} for split in SPLITS}
        assert not texts["train"] & (texts["val"] | texts["test"]), task


@pytest.mark.slow
def test_splits_use_different_wordings_of_requests(corpus: Corpus) -> None:
    for task in set(TASKS) - {"qa"}:
        used = {split: {source_text(r, task).split("\n")[0] for r in corpus.records(split, task)} for split in SPLITS}
        assert not used["train"] & (used["val"] | used["test"])
        assert not used["val"] & used["test"]


@pytest.mark.slow
def test_requests_of_all_tasks_use_the_same_openings_and_endings(corpus: Corpus) -> None:
    for split, task in itertools.product(SPLITS, set(TASKS) - {"qa"}):
        wordings = {f"{o}{wanted}{e}".lower() for o, e in pairs_of(split) for wanted in WANTED[task]}
        assert {source_text(r, task).split("\n")[0].lower() for r in corpus.records(split, task)} <= wordings
    for split in SPLITS:
        openings, endings = zip(*pairs_of(split), strict=True)
        assert set(openings) == set(OPENINGS)
        assert set(endings) == set(ENDINGS)


def test_an_answer_is_the_default_of_the_requested_parameter() -> None:
    source = "class C:\n    def f(self, a, b=1, *,\n          c='x, y', d=None):\n        pass\n"
    result = [record for task, record in extract_records(source) if task == "qa"]
    assert [(record["question"], record["answer"]) for record in result] == [("b", "1"), ("c", "'x, y'"), ("d", "None")]
    for record in result:
        assert record["context"][record["start"] :].startswith(record["answer"])
        assert re.search(rf"\b{record['question']}=$", record["context"][: record["start"]])


@pytest.mark.slow
def test_answers_start_and_end_at_token_boundaries(corpus: Corpus) -> None:
    for split in SPLITS:
        table = corpus.tables[split]["qa"]
        cut = 0
        for record, span in zip(corpus.records(split, "qa"), table.answer.tolist(), strict=True):
            if span[0] == IGNORED:
                cut += 1
                continue
            args = source_text(record, "qa")
            _, offsets = corpus.tokenizer.encode_with_offsets(args)
            assert args[offsets[span[0] - 1][0] : offsets[span[1] - 1][1]] == record["answer"]
        assert cut <= 0.05 * len(table.answer)


def test_character_positions_are_converted_to_token_positions() -> None:
    offsets = [(0, 3), (4, 5), (5, 6), (6, 10), (10, 11)]
    assert token_span(offsets, 6, 10) == (3, 3)
    assert token_span(offsets, 5, 11) == (2, 4)


@pytest.mark.slow
def test_classification_has_no_label_leakage(corpus: Corpus) -> None:
    for split in SPLITS:
        records = corpus.records(split, "classification")
        share = sum(record["label"] == "class" for record in records) / len(records)
        assert share == pytest.approx(0.5, abs=0.01)
        for record in records:
            args = set(re.findall("[a-z]+", record["text"].split("\n", 1)[1].lower()))
            assert not args & {"class", "function", "method", "instance", "object", "classes", "functions"}
    text = remove_label_words("A Foo is a class, not Food.", "Foo")
    assert text.split() == ["A", "it", "is", "a", "it,", "not", "Food."]


@pytest.mark.parametrize(
    "expression", ["1 + 2 * 3", "(1 + 2) * 3 - 4 // 5", "-(7 - 2) ** 2", "2 ** 3 ** 1 % 5", "1 < 2"]
)
def test_postfix_notation_has_the_value_of_the_expression(expression: str) -> None:
    args = postfix(ast.parse(expression, mode="eval").body)
    assert args is not None
    stack: list[int] = []
    for word in args:
        if word.isdigit():
            stack.append(int(word))
        elif word == "neg":
            stack.append(-stack.pop())
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(eval(f"({left}) {word} ({right})"))
    assert stack == [eval(expression)]


@pytest.mark.parametrize("expression", ["f(1) + 2", "a[0] + 1", "'x' + y"])
def test_postfix_rejects_calls_subscripts_and_strings(expression: str) -> None:
    assert postfix(ast.parse(expression, mode="eval").body) is None


def test_signature_and_summary_are_extracted() -> None:
    summary = "Return the sum of all."
    source = f'def f(a: int, b=2, *c) -> int:\n    """{summary}\n\n    ' + "More words. " * 5 + '"""\n'
    result = dict(extract_records(source))
    assert result["code"]["target"] == "def f(a, b=2, *c):"
    assert result["summary"]["target"] == summary
    assert "Return the sum" not in result["summary"]["source"]


# The user's files


def test_user_files_are_read(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(folder, tmp_path / "cache", **LIMITS)
    assert corpus.labels == ["class", "function"]
    assert corpus.tables["train"]["classification"].answer.tolist() == [1, 0]
    assert target_text(corpus.records("val", "qa")[0], "qa") == "12"


def test_a_missing_file_is_reported_by_name(folder: Path, tmp_path: Path) -> None:
    (folder / "qa" / "validation.json").unlink()
    with pytest.raises(InputMissing, match=r"qa/validation\.json does not exist"):
        open_corpus(folder, tmp_path / "cache", **LIMITS)


@pytest.mark.parametrize(
    ("task", "record", "message"),
    [
        ("qa", {"question": "x?", "context": "f(x=12)", "answer": "12", "start": 1}, "at character 1, but has '\\(x'"),
        (
            "qa",
            {"question": "x?", "context": "f(x=12)", "answer": "12", "start": "4"},
            "start is missing or of another",
        ),
        ("summary", {"source": " ", "target": "a"}, "source must not be empty"),
        ("summary", {"source": "cut: \ud83d", "target": "a"}, "source contains half a character"),
        ("code", ["a"], "must be an object"),
        ("classification", {"text": "a", "label": "module"}, "must be one of the training data's"),
    ],
)
def test_an_invalid_record_is_reported_with_file_and_index(
    task: str, record: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    file = folder / task / "test.json"
    file.write_text(json.dumps([*json.loads(file.read_text()), record]))
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(folder, tmp_path / "cache", **LIMITS)
    assert f"{file}, record 2" in str(caught.value)


def test_a_file_must_be_a_list_of_records(folder: Path) -> None:
    file = folder / "code" / "train.json"
    for content in ("{", "{}", "[]"):
        file.write_text(content)
        with pytest.raises(DataError, match=r"code/train\.json"):
            read_records(file, "code")


# Samples


@pytest.mark.slow
def test_a_training_round_has_one_record_per_task(corpus: Corpus) -> None:
    rounds = Rounds(corpus.tables["train"], cycle=True)
    batch = rounds.__getitems__([0, len(rounds) - 1])
    assert batch["task"].tolist() == [number for number in range(len(TASKS)) for _ in range(2)]
    for number, task in enumerate(TASKS):
        table = corpus.tables["train"][task]
        for i, index in enumerate((0, len(rounds) - 1)):
            row = batch["source"][2 * number + i]
            assert row[row != PAD].tolist() == [t for t in table.source[index % len(table.source)].tolist() if t != PAD]


@pytest.mark.slow
def test_every_validation_record_is_evaluated_once(corpus: Corpus) -> None:
    rounds = Rounds(corpus.tables["val"], cycle=False)
    counts = torch.zeros(len(TASKS), dtype=torch.long)
    for start in range(0, len(rounds), 16):
        batch = rounds.__getitems__(range(start, min(start + 16, len(rounds))))
        counts += batch["task"].bincount(minlength=len(TASKS))
        assert [len(batch[task]) for task in TASKS] == batch["task"].bincount(minlength=len(TASKS)).tolist()
    assert counts.tolist() == [len(table.source) for table in corpus.tables["val"].values()]


@pytest.mark.slow
def test_masks_depend_only_on_seed_epoch_and_index(corpus: Corpus) -> None:
    texts = MaskedTexts(corpus.tables["train"], 0, 2048, fixed=False)
    together, alone = texts.__getitems__([3, 7]), texts[7]
    length = alone["places"].shape[1]
    assert torch.equal(together["places"][1, :length], alone["places"][0])
    width = min(together["source"].shape[1], alone["source"].shape[1])
    assert torch.equal(together["source"][1, :width], alone["source"][0, :width])
    texts.set_epoch(1)
    assert not torch.equal(texts[7]["places"], alone["places"])
    other = MaskedTexts(corpus.tables["train"], 1, 2048, fixed=False)
    assert not torch.equal(other[7]["places"], alone["places"])
    fixed = MaskedTexts(corpus.tables["val"], 0, 2048, fixed=True)
    before = fixed[7]["source"]
    fixed.set_epoch(1)
    assert torch.equal(fixed[7]["source"], before)


@pytest.mark.slow
def test_only_masked_tokens_differ_and_are_the_targets(corpus: Corpus) -> None:
    texts = MaskedTexts(corpus.tables["train"], 0, 2048, fixed=False)
    batch = texts.__getitems__(range(64))
    masks = total = 0
    for row in range(64):
        original = texts.source[row][: batch["source"].shape[1]]
        asked = batch["hidden"][row] != IGNORED
        places, hidden = batch["places"][row][asked].numpy(), batch["hidden"][row][asked].numpy()
        assert len(set(places.tolist())) == len(places) >= 1
        assert (original[places] == hidden).all()
        assert not np.isin(hidden, [PAD, BEGIN, END]).any()
        changed = np.flatnonzero(batch["source"][row].numpy() != original)
        assert set(changed) <= set(places.tolist())
        masks += int((batch["source"][row] == MASK).sum())
        total += len(places)
    assert masks / total == pytest.approx(0.8, abs=0.06)


def _bare(record: dict[str, Any], task: str) -> str:
    """Return the text of a record without the request."""
    return record["context"] if task == "qa" else source_text(record, task).split("\n", 1)[1]


def test_extraction_of_records_is_deterministic() -> None:
    first, second = (list(extract_records(Path(text.__file__).read_text())) for _ in range(2))
    assert first == second
    assert {task for task, _ in first} >= {"classification", "code"}


def test_a_limit_applies_only_to_training_records(folder: Path, tmp_path: Path) -> None:
    corpus = limit_records(open_corpus(folder, tmp_path / "cache", **LIMITS), {"qa": 1})
    counts = {split: {task: len(table.source) for task, table in tables.items()} for split, tables in
              corpus.tables.items()}  # fmt: skip
    assert counts["train"] == {task: 1 if task == "qa" else 2 for task in TASKS}
    assert counts["val"] == dict.fromkeys(TASKS, 2)
    assert len(Rounds(corpus.tables["train"], cycle=True)) == 2
    with pytest.raises(ConfigError, match="poetry"):
        limit_records(corpus, {"poetry": 3})


@pytest.mark.slow
def test_held_out_instructions_occur_in_only_one_split() -> None:
    for task in TASKS:
        instructions = [wanted for wording in HELD_OUT_WANTED.values() for wanted in wording[task]]
        assert len(set(instructions)) == len(instructions)
    records = standard_library_records(held_out=True)
    for split, task in itertools.product(SPLITS, set(TASKS) - {"qa"}):
        allowed = {f"{o}{wanted}{e}".lower() for o, e in pairs_of(split) for wanted in HELD_OUT_WANTED[split][task]}
        assert {source_text(record, task).split("\n")[0].lower() for record in records[split][task]} <= allowed
