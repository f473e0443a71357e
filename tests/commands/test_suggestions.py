"""Suggestions for arguments of other tools are accepted, and so are settings that messages in the code suggest."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from runner.base.errors import AccelRunError, ConfigError, InputMissing
from runner.cli import main
from runner.commands import COMMANDS, advise, benchmark, evaluate_run, monitor, profile, report, search, tune
from runner.commands.arguments import parse_arguments
from runner.commands.sweep_arguments import SWEEP_KEYS
from runner.config.aliases import ABSENT, FOREIGN_KEYS
from runner.config.config_files import cache_config_files
from runner.config.configuration import compose
from runner.config.options import AXES, GROUPS, find_signature, list_options
from runner.config.request import Request
from runner.config.schema import describe_mismatch, find_nearest, settings_keys
from runner.config.settings import MAIN_KEYS, Settings
from runner.sweeps.sweep_syntax import expand_sweep
from tests.commands.foreign_arguments import ARGPARSE, FIRST, HUGGING_FACE, HYDRA, LAUNCHERS, LIGHTNING
from tests.commands.test_typos import SLIPS

ROOT = Path(__file__).parent.parent.parent
TABLE = {**ARGPARSE, **LIGHTNING, **HUGGING_FACE, **LAUNCHERS, **HYDRA}
PLACEHOLDER = re.compile(r"\.\.\.|\[?[A-Z]+(\.\w+)?\]?")  # values that the user must fill in
GUESS = re.compile(r"did you mean|(?<!off unless )\buse (?!task\.NAME)")


@pytest.fixture(autouse=True, scope="module")
def unchanged() -> Iterator[None]:
    with cache_config_files():
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    return tmp_path


def problems_of(line: str) -> list[tuple[str, str]]:
    """Return (where, fix) of each problem of the arguments of `accel-run train`, or nothing if they are accepted."""
    try:
        arguments = parse_arguments(shlex.split(line), multirun=True)
        for request in expand_sweep(arguments.request) if arguments.multirun else [arguments.request]:
            compose(request)
    except (InputMissing, AccelRunError) as error:
        return [(problem.where, problem.fix) for problem in error.problems]
    return []


def suggestions(fix: str) -> Iterator[str]:
    """Yield the command lines that a message suggests, as arguments of `accel-run train`."""
    for part in re.split(r"\n|; |, or |, in | \(|\) or |: (?=accel-run)|, then ", fix):
        text = part.removeprefix("use ").removeprefix("quote it: ").strip(" ,")
        text = text.rstrip(")") if text.count(")") > text.count("(") else text
        text = re.sub(r"(?<!\.)\.$", "", text)
        text = re.sub(r"^did you mean (.*)\?$", r"\1", text)
        text = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", text)
        try:
            args = shlex.split(text)
        except ValueError:
            continue
        if args[:1] == ["accel-run"]:
            assert args[1] in COMMANDS or args[1].startswith("-"), f"there is no command {args[1]}: {fix}"
            args = args[2:] if args[1] == "train" else []
        kept = []
        for word in args:  # the arguments end where the text continues
            if word != "-m" and "=" not in word and word not in ("--task", "--config-dir") and kept[-1:] != ["--task"]:
                break
            kept.append(word.rstrip(","))
            if word.endswith(","):
                break
        if kept and kept != ["--task"] and "--config-dir" not in kept and "-m" not in kept:
            yield shlex.join(kept)


def problems_of_suggestion(suggestion: str) -> list[tuple[str, str]]:
    """Return the problems of a suggestion, except those of missing files and placeholders."""
    args = [word for word in shlex.split(suggestion) if not PLACEHOLDER.fullmatch(word.partition("=")[2])]
    if "micro_batch_size=" in suggestion and "global_batch_size=" not in suggestion:
        args.append("global_batch_size=64")  # the task determines which values divide the batch size
    result = []
    for where, fix in problems_of(shlex.join(args)):
        if not where.startswith("--task") and " " not in where.strip():
            result.append((where, fix))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("args", [words for words in SLIPS if words.startswith("train ") and "--task" not in words])
def test_suggestions_for_typos_are_accepted(args: str) -> None:
    _, *rest = SLIPS[args].split("\n")
    task = " ".join(word for word in args.split() if word.removeprefix("task=") in list_options("task"))
    for line in rest:
        for suggestion in suggestions(line.strip()) if "use " in line or "did you mean" in line else ():
            context = "-m " * args.startswith("train -m ") + f"{task} " * ("task" not in suggestion)
            assert problems_of_suggestion(context + suggestion) == [], suggestion


@pytest.mark.slow
@pytest.mark.sampled(30)
@pytest.mark.parametrize("line", TABLE)
def test_overrides_of_other_tools_get_a_suggestion(line: str) -> None:
    wanted, problems = TABLE[line], problems_of(line)
    if wanted is None:
        assert problems == []
        return
    assert problems, "the arguments of the other tool must be rejected"
    answer = "\n".join(fix for _, fix in problems)
    if wanted:
        assert wanted in answer
    else:
        assert not GUESS.search(answer), answer
    for suggestion in suggestions(answer):
        assert problems_of_suggestion(suggestion) == [], suggestion


@pytest.mark.parametrize("line", FIRST)
def test_arguments_without_a_command_get_the_full_command_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 78
    answer = capsys.readouterr().err
    assert FIRST[line] in answer
    for suggestion in suggestions(answer.partition("\n")[2].strip()):
        assert problems_of_suggestion(suggestion) == [], suggestion


def test_the_table_of_foreign_overrides_has_enough_rows() -> None:
    assert len(TABLE) + len(FIRST) >= 190
    assert not set(FOREIGN_KEYS) & set(ABSENT), "a key has two suggestions"


STRANGE = (
    "ema mixup dropout amsgrad lookahead sam distill teacher folds augmentation freeze resolution tokenizer "
    "vocab heads "
    "layers depth width rank alpha temperature top_k beam ray horovod jax tpu ipex onnx bucket zip debugger "
    "notebook email"
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("word", STRANGE.split())
def test_dissimilar_keys_get_no_suggestion(word: str) -> None:
    for line in (f"{word}=true", f"--{word}", f"+{word}=1", f"model.{word}=2"):
        for _, fix in problems_of(line):
            meant = re.search(r"did you mean ([\w.]+)\?", fix)
            assert meant is None or meant[1].rpartition(".")[2] == word, fix


def all_keys() -> dict[str, list[object]]:
    """Return each key of the settings and options, with its types."""
    result: dict[str, list[object]] = {name: [key.type] for name, key in settings_keys(Settings).items()}
    for group in AXES:
        for option in list_options(group):
            signature = find_signature(group, option)
            for name, key in (signature.keys if signature else {}).items():
                result.setdefault(f"{group}.{name}", []).append(key.type)
    return result


def messages_in_code() -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of each string in the code that suggests arguments, with {} for fields of f-strings."""
    for file in sorted((ROOT / "runner").rglob("*.py")):
        if file.name == "auto_parallel.py":  # the messages of this file are about arguments of Python functions
            continue
        tree = ast.parse(file.read_text())
        comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in comments:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if re.search(r"\b(say|use|try|set|give|or) \S*=|accel-run [a-z]", text) and "\n" not in text:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", text


@pytest.mark.slow
def test_settings_suggested_in_messages_exist() -> None:
    keys, tried = all_keys(), 0
    owners = (
        SWEEP_KEYS,
        evaluate_run.COMMAND_KEYS,
        search.COMMAND_KEYS,
        advise.COMMAND_KEYS,
        benchmark.COMMAND_KEYS,
        tune.COMMAND_KEYS,
        profile.COMMAND_KEYS,
        report.COMMAND_KEYS,
    )
    known = {
        *keys,
        *GROUPS,
        *OF_COMMANDS,
        *MAIN_KEYS,
        *settings_keys(monitor.MonitorOptions),
        *(key for owner in owners for key in owner),
    }
    for where, text in messages_in_code():
        for command in re.findall(r"(?:use |or |then |: )accel-run ([a-z]+)\b", text):
            assert command in COMMANDS, f"{where}: there is no command {command}: {text}"
        for key, value in re.findall(r"(?<![\w.{}\[/?&'\"-])([a-z][\w.]*)=([^\s;,)'\"]+)", text):
            if "{" in key or key.startswith(("task.", "inference.", "phase.")):
                continue
            assert key in known, f"{where}: {key} is not a setting: {text}"
            tried += 1
            if "{" in value or PLACEHOLDER.fullmatch(value) or key not in {*keys, *GROUPS} or key in OF_COMMANDS:
                continue
            if key in GROUPS:
                wanted = value.partition("|")[0].rstrip(".:?")
                assert wanted in list_options(key), f"{where}: {key} has no option {wanted}: {text}"
            else:
                if value.count("[") != value.count("]"):
                    continue  # part of a longer list
                parsed = yaml.safe_load(value.rstrip(".:?"))
                assert any(describe_mismatch(each, parsed) is None for each in keys[key]), (
                    f"{where}: {key}={value} is rejected: {text}"
                )
    assert tried > 150


# keys of commands, of functions quoted in messages, and of other programs
OF_COMMANDS = {
    word
    for line in (
        "checks suite steps batch batches by micro global workers pin cache forms devices budget_s trials goal",
        "seconds prefix format key apply techniques technique out title pip reduction start_method requires_grad",
        "use_reentrant max_split_size_mb sparse size batch_size",
    )
    for word in line.split()
}


def test_keys_of_other_tools_are_not_mistaken_for_typos() -> None:
    for key in ABSENT:
        assert find_nearest(key, [*all_keys(), *GROUPS]) != key, f"{key} is a key of this program"


@pytest.mark.parametrize("command", ["benchmark", "tune", "search"])
def test_command_keys_take_precedence_over_keys_of_other_tools(command: str) -> None:
    own = {"benchmark": "steps", "tune": "budget_s", "search": "trials"}[command]
    with pytest.raises(ConfigError) as refused:
        compose(Request((f"{own.upper()}=50",), command_keys=(own,)))
    assert refused.value.problems[0].fix == f"use {own}=50"


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ("resume --epochs 3", "use epochs=3"),
        ("resume first --lr 0.1", "use optimizer.lr=0.1"),
        ("inference --seed 3", "use inference.seed=3"),
    ],
)
def test_suggestions_match_the_given_command(args: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args.split()) == 78
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["x=[1,2", "x=(1",
     "x={a", "x='a", "a b=1", "optimizer.lr=(", "x=a;b", "x=*", "=3", "x=a[1]", "1x=2", "x=${", "x=a:b:c d",
     "x=" + "9" * 5000, "data.path=a(b)", "run='", "x=]", "x=a=(", "x=\\"],
)  # fmt: skip
def test_unparsable_overrides_get_a_short_message(line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(Request((line,)))
    text = str(refused.value)
    for word in ("input", "expecting", "alternative", "token", "EOF", "BRACKET", "ANTLR", "lexer", "QUOTED", "ESC"):
        assert word not in text, text


@pytest.mark.parametrize(
    "line",
    ["optimizer.lr=nan", "updates=1.5", "evaluate.every=null", "updates=nan", "seed=inf", "epochs=-inf"],
)
def test_suggestions_for_invalid_numbers_are_accepted(line: str) -> None:
    (_, fix), *more = problems_of(line)
    assert not more
    for suggestion in suggestions(fix):
        assert problems_of_suggestion(suggestion) == []
