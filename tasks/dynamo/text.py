"""Generate JSON files with records of five tasks from the sources of Python's standard library.

The files of the library are split by the hash of their name, so that no text is in both training and evaluation data.
Texts that still occur in both, such as a copied docstring, are removed from validation and test.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.tasks.gpt.data import Document, standard_library

Record = dict[str, Any]
SPLITS = {"train": "train", "val": "validation", "test": "test"}  # split -> name of its file
HELD_OUT = 0.12  # fraction of the files in each of val and test
LARGEST_FILE = 60_000  # bytes; the few larger files would take most of the time
LONGEST_TEXT = 100  # characters of docstring or source in a record
LONGEST_TARGET = 48  # characters
MOST_RECORDS = {"train": 3000, "val": 150, "test": 150}  # maximum number of records of each task

# A request consists of an opening, the instruction and an ending. Openings and endings are the same for all tasks, so
# only the instruction distinguishes them. The pairs of opening and ending depend on the split.
WANTED: Mapping[str, Sequence[str]] = {
    "classification": ("the kind, function or class", "the kind, class or function"),
    "qa": ("the default of `{name}`", "the default value of `{name}`"),
    "summary": ("the summary", "a summary in one line"),
    "code": ("the signature", "the signature as a def line"),
    "translation": ("the postfix form", "the expression in postfix"),
}
# Instructions with different wordings in each split.
HELD_OUT_WANTED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "train": {
        "classification": (*WANTED["classification"], "which it is, a class or a function", "the type of this object"),
        "qa": (*WANTED["qa"], "what `{name}` is by default", "the value that `{name}` has if omitted"),
        "summary": (*WANTED["summary"], "the main point", "one sentence that sums it up"),
        "code": (*WANTED["code"], "the header of the function", "the def statement"),
        "translation": (*WANTED["translation"], "it in reverse Polish notation", "operands before their operators"),
    },
    "val": {
        "classification": ("whether this documents a class or a function", "what is described, class or function"),
        "qa": ("the value of `{name}` when it is not given", "which value `{name}` defaults to"),
        "summary": ("a short headline", "the gist in a line"),
        "code": ("the first line of the definition", "how the function is declared"),
        "translation": ("the RPN version", "it with each operator after its operands"),
    },
    "test": {
        "classification": ("the sort of object, class or function", "if a class or function is documented"),
        "qa": ("the initial value of `{name}`", "what `{name}` equals unless passed"),
        "summary": ("a brief overview", "the essence, as one line"),
        "code": ("its declaration in Python", "the def line for it"),
        "translation": ("the stack order of the expression", "postfix notation for it"),
    },
}
OPENINGS = ("", "Write ", "Give ", "Now give ", "Tell me ", "What is ", "Show me ", "Find ")
ENDINGS = (".", ":", " here.", " of this.", " for this text.", ", please.", " of what follows.")
TASKS = tuple(WANTED)


def write_standard_library(folder: Path, *, held_out: bool = False) -> None:
    """Write data/<task>/{train,validation,test}.json below `folder`; `held_out`: each wording is in only one split."""
    for split, tasks in standard_library_records(held_out=held_out).items():
        for task, records in tasks.items():
            path = folder / "data" / task / f"{SPLITS[split]}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")


def standard_library_records(*, held_out: bool = False) -> dict[str, dict[str, list[Record]]]:
    """Return split -> task -> records; they depend only on the Python version."""
    documents = [document for document in standard_library() if document.path.stat().st_size <= LARGEST_FILE]
    found: dict[str, dict[str, list[Record]]] = {split: {task: [] for task in TASKS} for split in SPLITS}
    for document in sorted(documents, key=lambda document: (document.hash, document.name)):
        records = found[_split(document)]
        for task, record in extract_records(document.path.read_text(encoding="utf-8")):
            records[task].append(record)
    wanted = HELD_OUT_WANTED if held_out else dict.fromkeys(SPLITS, WANTED)
    return {
        split: {task: _select_records(task, split, found, wanted[split][task]) for task in TASKS} for split in SPLITS
    }


def extract_records(source: str) -> Iterator[tuple[str, Record]]:
    """Yield (task, record) for the content of a Python file, without requests."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text and text.isascii():
                yield from _docstring_records(node, text)
        if isinstance(node, ast.FunctionDef):
            yield from _default_records(node, lines)
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare):
            words = postfix(node)
            if words is not None and len(words) < 16:
                expression = ast.unparse(node)
                if len(expression) <= LONGEST_TARGET and expression.isascii():
                    yield "translation", {"source": expression, "target": " ".join(words)}


def postfix(node: ast.expr) -> list[str] | None:
    """Return operands and operators in postfix order; None if there is anything but names, numbers and operators.

    A name may have dots: os.sep is one operand.
    """
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        words = postfix(node.value)
        return [f"{words[0]}.{node.attr}"] if words is not None and len(words) == 1 else None
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool, type(None)):
        return [ast.unparse(node)]
    if isinstance(node, ast.BinOp):
        return _joined([node.left, node.right], OPERATORS[type(node.op)])
    if isinstance(node, ast.BoolOp):
        return _joined(node.values, OPERATORS[type(node.op)])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _joined([node.left, *node.comparators], OPERATORS[type(node.ops[0])])
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        operand = postfix(node.operand)
        return None if operand is None else [*operand, OPERATORS[type(node.op)]]
    return None


def remove_label_words(text: str, name: str) -> str:
    """Return the text without the name of the documented object and without words that reveal its kind."""
    if name.strip("_"):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "it", text)
    return KIND_WORDS.sub("it", text)


def _docstring_records(node: ast.FunctionDef | ast.ClassDef, text: str) -> Iterator[tuple[str, Record]]:
    is_class = isinstance(node, ast.ClassDef)
    plain = shortened(remove_label_words(text, node.name))
    if len(plain) >= 20:
        yield "classification", {"text": plain, "label": "class" if is_class else "function"}
    first, _, rest = text.partition("\n\n")
    if rest and "\n" not in first and 10 <= len(first) <= LONGEST_TARGET and len(rest) >= 40:
        yield "summary", {"source": shortened(rest.strip()), "target": first}
    if isinstance(node, ast.FunctionDef):
        signature = f"def {node.name}({_arguments(node.args)}):"
        if len(signature) <= LONGEST_TARGET and len(text) >= 20:
            yield "code", {"source": shortened(text), "target": signature}


def _default_records(node: ast.FunctionDef, lines: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Yield one question per parameter with a default, for functions in which at least two defaults differ."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = list(zip(positional[len(positional) - len(node.args.defaults) :], node.args.defaults, strict=True))
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    defaults += [(argument, default) for argument, default in keywords if default is not None]
    if len({ast.dump(default) for _, default in defaults}) < 2:
        return
    indent, first = " " * node.col_offset, node.lineno - 1
    own = [line.removeprefix(indent) for line in lines[first : node.end_lineno]]
    context = shortened("".join(own))
    if not context.isascii():
        return
    for argument, default in defaults:
        before = own[: default.lineno - 1 - first]
        start = sum(map(len, before)) + default.col_offset - len(indent)
        answer = ast.unparse(default)
        if (
            context.startswith(answer, start) and len(answer) <= LONGEST_TARGET
        ):  # the default is written as ast.unparse writes it, on one line
            yield "qa", {"question": argument.arg, "context": context, "answer": answer, "start": start}


def shortened(text: str) -> str:
    """Return the text, truncated after the last word that fits into LONGEST_TEXT characters."""
    return text if len(text) <= LONGEST_TEXT else re.sub(r"\s+\S*$", "", text[: LONGEST_TEXT + 1])


def _joined(operands: Sequence[ast.expr], operator: str) -> list[str] | None:
    """Return the operands in postfix order, with the operator after each operand except the first."""
    words: list[str] = []
    for i, operand in enumerate(operands):
        part = postfix(operand)
        if part is None:
            return None
        words += [*part, operator] if i else part
    return words


def _arguments(arguments: ast.arguments) -> str:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def _split(document: Document) -> str:
    share = document.hash / 2**64
    return "val" if share < HELD_OUT else "test" if share < 2 * HELD_OUT else "train"


def _select_records(
    task: str, split: str, found: Mapping[str, Mapping[str, Sequence[Record]]], wanted: Sequence[str]
) -> list[Record]:
    """Return the shuffled records of a task and split, with requests and without duplicates.

    Records of validation and test whose text occurs in training are left out.
    """
    key = "context" if task == "qa" else "text" if task == "classification" else "source"
    seen = set() if split == "train" else {record[key] for record in found["train"][task]}
    records = []
    for record in found[split][task]:
        identity = (record[key], record["question"]) if task == "qa" else record[key]
        if record[key] not in seen and identity not in seen:
            seen.add(identity)
            records.append(record)
    generator = random.Random(f"{task} {split}")
    generator.shuffle(records)
    if task == "classification":  # balanced, so that predicting one class is no better than chance
        kinds = [[record for record in records if record["label"] == label] for label in ("class", "function")]
        records = [record for pair in zip(*kinds, strict=False) for record in pair]
    return [_add_request(task, split, record, wanted, generator) for record in records[: MOST_RECORDS[split]]]


def pairs_of(split: str) -> list[tuple[str, str]]:
    """Return the pairs of opening and ending in a split. Splits share openings and endings, but no pair of them."""
    kept = {"val": (0,), "test": (1,), "train": (2, 3, 4, 5, 6)}[split]
    return [(o, e) for i, o in enumerate(OPENINGS) for j, e in enumerate(ENDINGS) if (i + j) % len(ENDINGS) in kept]


def _add_request(task: str, split: str, record: Record, wanted: Sequence[str], generator: random.Random) -> Record:
    """Return the record with a request, worded as in its split."""
    opening, ending = generator.choice(pairs_of(split))
    request = f"{opening}{generator.choice(wanted)}{ending}"
    request = request[:1].upper() + request[1:]
    if task == "qa":
        return {**record, "question": request.format(name=record["question"])}
    key = "text" if task == "classification" else "source"
    return {**record, key: f"{request}\n{record[key]}"}


KIND_WORDS = re.compile(r"(?i)(?<![a-z])(sub)?(class(es)?|function(s|al)?|method(s)?|instance(s)?|object(s)?)(?![a-z])")
OPERATORS: Mapping[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.And: "and",
    ast.Or: "or",
    ast.Not: "not",
    ast.USub: "neg",
    ast.Invert: "~",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
