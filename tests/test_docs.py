"""Documented commands are valid, links resolve, and every code block is checked.

Every code block has a language: none or sh for shell commands; python; yaml, with its file name in the first line; or
text, followed by the reason why it is not a command. Commands and settings in sentences and tables are also checked. No
command runs and torch is not imported: arguments are parsed by the command's own parser, and settings composed.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import runner
from runner.cli import main
from runner.commands import COMMANDS, advise, benchmark, doctor, monitor, profile, report, runs, search, tune
from runner.commands.arguments import (
    parse_arguments,
    parse_command_keys,
    parse_options,
    parse_run_request,
    pop_checkpoint_choice,
)
from runner.commands.sweep_arguments import SWEEP_KEYS, parse_sweep_options
from runner.config.aliases import FOREIGN_KEYS
from runner.config.config_files import shipped_options
from runner.config.configuration import compose
from runner.config.options import AXES, GROUPS, find_signature, list_options, option_with_key, task_source
from runner.config.request import Request
from runner.config.schema import read_functions, settings_keys
from runner.config.settings import MAIN_KEYS, Settings
from runner.durable.checkpoint_choice import is_choice
from runner.plan.planner import make_plan, planning_inventory
from runner.sweeps.sweep_syntax import expand_sweep
from runner.tools.doctor.checks import CHECKS
from runner.tools.measure.suites import SUITES
from runner.tools.measure.technique import find_techniques

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# without the changelog, which names settings of earlier releases and has long lines
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md")} - {ROOT / "CHANGELOG.md"})
RESULTS = DOCS / "results"  # whose code blocks are raw output of the script in the heading
HOOK_SWITCH = re.compile(r"^hook\.\w+\.enabled$")
WITH_RECIPES = ROOT / "CONTRIBUTING.md"  # whose recipes tests/end_to_end/test_contributing.py follows
WHY_TEXT = ("output", "layout", "formula")
FOREIGN = DOCS / "coming-from.md"  # whose first column has arguments of other programs

# Placeholders for the reader's own values.
PLACEHOLDERS = {
    "KEY": "precision", "COMMAND": "train", "NAME": "first", "OTHER": "first", "OTHER_RUN": "first", "NEW": "new",
    "FILE": "my_task.py", "DIR": "DIR", "CONFIG_DIR": "DIR", "FOLDER": "outputs",
}  # fmt: skip
OTHER_PROGRAMS = {"git", "cd", "pip", "docker", "sh", "source", "exit", "code=$?", "if"}


# ---------------------------------------------------------------- the pages


@dataclass(frozen=True)
class Block:
    """A code block: its location, its language, the rest of the info string, and its text."""

    page: Path
    line: int
    language: str
    rest: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class InlineCode:
    """Inline code in a sentence or a table cell."""

    page: Path
    line: int
    text: str
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} {self.text}"


@cache
def tokens(page: Path) -> Sequence[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            language, _, rest = token.info.strip().partition(" ")
            yield Block(page, (token.map or [0])[0] + 1, language, rest, token.content)


def inner(page: Path) -> Iterator[tuple[int, int | None, Token]]:
    """Yield the inline tokens, with their line and their table column."""
    line, column = 0, None
    for token in tokens(page):
        line = token.map[0] + 1 if token.map else line
        if token.type == "tr_open":
            column = -1
        elif token.type in ("td_open", "th_open"):
            column = (column or 0) + 1
        elif token.type == "table_close":
            column = None
        for child in token.children or ():
            yield line, column, child


def inline_code(page: Path) -> Iterator[InlineCode]:
    for line, column, token in inner(page):
        if token.type == "code_inline" and not (page == FOREIGN and column == 0):
            yield InlineCode(page, line, token.content, column)


BLOCKS = [block for page in PAGES for block in blocks(page)]
INLINE_CODE = [each for page in PAGES for each in inline_code(page)]
UNIQUE = list({each.text: each for each in INLINE_CODE}.values())


# ---------------------------------------------------------------- how commands parse their arguments


def _settings(args: list[str]) -> None:
    own, rest, _ = parse_command_keys(args, SWEEP_KEYS) if "-m" in args else (SWEEP_KEYS, args, False)
    parse_sweep_options(own)
    arguments = parse_arguments(rest, multirun=True)
    for combination in expand_sweep(arguments.request) if arguments.multirun else [arguments.request]:
        configuration = compose(combination)
        if any(word.lstrip("+").startswith("hardware=") for word in args):
            make_plan(configuration, planning_inventory(configuration)[0])


def _options_of_the_run(typed: Sequence[str]) -> Iterator[str]:
    """For each key that the default option lacks, yield one that has it (averaging=ema for averaging.evaluate)."""
    for word in typed:
        group, _, name = word.partition("=")[0].partition(".")
        default = find_signature(group, shipped_options()[group]) if group in AXES and name else None
        if group in AXES and name and (default is None or name not in default.keys):
            yield f"{group}={option_with_key(group, name)}"


def _of_a_run(args: list[str]) -> None:
    """Compose the overrides with options that a run may have; keys of any task are accepted."""
    _, args = pop_checkpoint_choice(args)
    known = ("--json", "format=", "split=", "inference.")
    request = parse_run_request([word for word in args if not word.startswith(known)])
    compose(replace(request, overrides=(*_options_of_the_run(request.overrides), *request.overrides)))
    for word in args:
        if word.startswith("inference."):
            assert word.partition("=")[0] in known_keys(), f"no task has {word}"


def _search(args: list[str]) -> None:
    """Check the keys of the search ranges, and compose all other settings."""
    own, rest, _ = parse_command_keys(args, search.COMMAND_KEYS)
    parse_sweep_options(own)
    ranges = [word for word in rest if re.search(r"=.*[(,]", word)]
    assert ranges, "nothing is searched"
    assert {word.partition("=")[0] for word in ranges} <= known_keys()
    compose(parse_arguments([word for word in rest if word not in ranges], command_keys=search.COMMAND_KEYS).request)


def _explain(args: list[str]) -> None:
    arguments = parse_arguments(args, positional=1)
    (key,) = arguments.positional
    assert key in compose(arguments.request).flat()


def _profile(args: list[str]) -> None:
    compose(profile.profiled_request(parse_arguments(args, command_keys=profile.COMMAND_KEYS).request))


def _benchmark(args: list[str]) -> None:
    suite, wanted, _ = benchmark.parse_benchmark_arguments(args)
    mine = {path.stem for path in Path("DIR/benchmark/technique").glob("*.yaml")} if "--config-dir" in args else set()
    if "--task" in args:
        mine |= find_techniques(None, Path(args[args.index("--task") + 1])).keys()
    known = mine | {"init", "reset", "clean", "plots", "all", "matmul", "copies", "disk", "roofline"} | techniques()
    assert set(wanted.positional) <= known, wanted.positional
    if suite == "ladder" and wanted.options["techniques"] != "all":
        assert set(wanted.options["techniques"].strip("[]").split(",")) <= techniques()


def _advise(args: list[str]) -> None:
    _, rest, _ = parse_command_keys(args, advise.COMMAND_KEYS)
    compose(parse_run_request(rest, advise.COMMAND_KEYS))


def _doctor(args: list[str]) -> None:
    if args[:1] == [doctor.CONTACT]:
        doctor.parse_contact_arguments(args[1:])
        return
    settings, _ = doctor.parse_doctor_arguments(args)
    doctor.select_checks(settings.checks)


def _import(args: list[str]) -> None:
    assert 1 <= len(parse_arguments(args, positional=2).positional) <= 2


def _runs(args: list[str]) -> None:
    assert parse_options(args, runs.RunsOptions, ["--json"])[1] == []


def _completion(args: list[str]) -> None:
    assert args in (["bash"], ["zsh"], ["fish"])


def _new(args: list[str]) -> None:
    (name,) = args
    assert name.endswith(".py")


READERS: Mapping[str, Callable[[list[str]], Any]] = {
    "train": _settings, "both": _settings,
    "plan": _settings,
    "inference": _of_a_run, "evaluate_run": _of_a_run, "export": _of_a_run, "status": _of_a_run, "resume": _of_a_run,
    "search": _search, "explain": _explain, "profile": _profile, "benchmark": _benchmark, "advise": _advise,
    "tune": tune.parse_tune_arguments,
    "monitor": monitor.parse_monitor_arguments, "doctor": _doctor,
    "report": report.parse_report_arguments,
    "runs": _runs,
    "new": _new, "import_": _import, "completion": _completion,
}  # fmt: skip


def check_arguments(args: Sequence[str]) -> None:
    """Raise the error that accel-run reports for these arguments."""
    assert args, "a command is missing"
    first, *rest = args
    if first.startswith("--"):
        assert first in ("--help", "--version")
        return
    assert first in COMMANDS, f"no command {first}"
    if "--help" not in rest:
        READERS[COMMANDS[first][0]](rest)


@cache
def techniques() -> set[str]:
    return {path.stem for path in (ROOT / "conf" / "benchmark" / "technique").glob("*.yaml")}


@cache
def known_keys() -> set[str]:
    """Return all keys of the command line: of settings, options, tasks and commands."""
    keys = {
        *settings_keys(Settings),
        *MAIN_KEYS,
        *AXES,
        "task",
        "hardware",
        "inference.seed",
        "key",
        "format",
        "hook.NAME.enabled",
    }
    for group in AXES:
        for option in list_options(group):
            signature = find_signature(group, option)
            keys |= {f"{group}.{name}" for name in (signature.keys if signature else ())}
    sources = [(task_source(name, None)) for name in list_options("task")]
    for source in [*sources, Path("my_task.py")]:
        for name, signature in read_functions(source).items():
            head = "task" if name == "build" else "inference" if name.endswith(".predict") else None
            keys |= {f"{head}.{key}" for key in signature.keys} if head else set()
    for owner in (
        SWEEP_KEYS,
        search.COMMAND_KEYS,
        advise.COMMAND_KEYS,
        benchmark.COMMAND_KEYS,
        tune.COMMAND_KEYS,
        profile.COMMAND_KEYS,
        report.COMMAND_KEYS,
        doctor.COMMAND_KEYS,
    ):
        keys |= set(owner)
    for suite in SUITES:
        keys |= set(SUITES[suite].options)
    parallel = ast.parse((ROOT / "runner" / "auto_parallel.py").read_text(encoding="utf-8"))
    keys |= {node.arg for node in ast.walk(parallel) if isinstance(node, ast.arg)}
    return keys | set(settings_keys(monitor.MonitorOptions))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The reader's working directory: a new task, runs, and a configuration folder with files of earlier blocks."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my_task.py"]) == 0
    capsys.readouterr()
    for name in ("outputs/first", "outputs/second", "benchmarks", "conf/hardware", "DIR/hardware"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("conf/hardware/gpt_tuned.yaml", "DIR/hardware/mine.yaml"):
        (tmp_path / name).write_text("# @package _global_\nhardware:\n  title: tuned\n  devices: []\n")
    return tmp_path


# ---------------------------------------------------------------- shell commands


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each line, without comments, pipes and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        args = shlex.split(line.removeprefix("$ "), comments=True)
        ends = [args.index(sign) for sign in ("|", ">", "&&") if sign in args]
        if args:
            yield args[: min(ends, default=None)]


def check_line(args: list[str]) -> None:
    program, *rest = args
    if "-m" in rest and rest[rest.index("-m") + 1] == "runner":
        check_arguments(rest[rest.index("-m") + 2 :])
    elif args[:2] == ["python", "-m"]:
        assert find_spec(rest[1]), f"there is no module {rest[1]}"
        if "accel-run" in rest:
            check_arguments(rest[rest.index("accel-run") + 1 :])
    elif program == "accel-run":
        check_arguments(rest)
    elif args[:2] == ["docker", "run"]:
        (image,) = (word for word in rest if word.startswith("accel-run"))
        check_arguments(rest[rest.index(image) + 1 :])
    elif program == "python" or program.removeprefix("./").startswith("scripts/"):
        script, *rest = rest if program == "python" else args
        path = ROOT / script
        assert path.is_file(), f"there is no {script}"
        assert program == "python" or path.stat().st_mode & 0o100, f"{script} is not executable"
        if path.name == "run.sh":
            check_arguments(rest)
    else:
        assert program in OTHER_PROGRAMS, (
            f"{program}: not a program of accel-run; mark the block as text, with the reason"
        )
        for extras in re.findall(r"accel-run\[([\w,-]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def fill_placeholders(text: str) -> str:
    """Replace the placeholders in a line."""
    text = re.sub(r" \[[^\]]*\]| \.\.\.", "", text)
    return re.sub(r"\b[A-Z][A-Z_]+\b", lambda result: PLACEHOLDERS.get(result[0], result[0]), text)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# ---------------------------------------------------------------- tests


def test_every_code_block_has_a_known_language() -> None:
    for block in BLOCKS:
        assert block.language in ("", "sh", "python", "yaml", "text"), f"{block}: {block.language}"
        if block.language == "text":
            assert block.rest in WHY_TEXT, (
                f"{block}: `text` must be followed by the reason why the block cannot be typed: {WHY_TEXT}"
            )


def is_checked_shell(block: Block) -> bool:
    """Return whether the block has shell commands that do not depend on code that a recipe adds."""
    is_of_a_recipe = block.page == WITH_RECIPES and block.text.startswith("accel-run ")
    return block.language in ("", "sh") and RESULTS not in block.page.parents and not is_of_a_recipe


@pytest.mark.slow_beyond(3)
@pytest.mark.sampled(30)
@pytest.mark.parametrize("block", list(filter(is_checked_shell, BLOCKS)), ids=str)
def test_commands_in_code_blocks_are_accepted(block: Block) -> None:
    if block.text.startswith("#!/bin/bash"):
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for page_block in blocks(block.page):
        if page_block.language == "yaml" and page_block.line < block.line:
            put(page_block)
        if page_block.language == "python" and (result := re.match(r"# (\w+\.py)\n", page_block.text)):
            Path(result[1]).write_text(page_block.text)
    for args in commands(block.text):
        check_line(args)


def put(block: Block) -> list[str]:
    """Write a YAML block to the file named in its first line; return the command in that line, if any."""
    result = re.match(r"# (DIR/\S+\.yaml)(?: +(accel-run .+))?$", block.text.partition("\n")[0])
    assert result, f"{block}: the first line must name its file, as in # DIR/optimizer/slow.yaml"
    path = Path(result[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text.partition("\n")[2])
    return shlex.split(result[2] or "")[1:]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if each.language == "yaml" and each.page != WITH_RECIPES], ids=str
)
def test_yaml_files_in_code_blocks_are_accepted(block: Block) -> None:
    content = yaml.safe_load(block.text)
    if "parameters" in content:  # wandb's agent builds commands from this file
        given = {key: each.get("values", [each.get("min")])[0] for key, each in content["parameters"].items()}
        program, *args, arguments = content["command"]
        assert (program, arguments) == ("accel-run", "${args_no_hyphens}")
        check_arguments([*args, *(f"{key}={value}" for key, value in given.items())])
        return
    args = put(block)
    assert args, f"{block}: the file name must be followed by a command that uses it"
    check_arguments(args)


@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if each.language == "python" and each.page != WITH_RECIPES], ids=str
)
def test_python_blocks_compile_and_import_existing_names(block: Block) -> None:
    typed, text = re.findall(r"^!(.*)$", block.text, re.MULTILINE), re.sub(r"^!.*$", "", block.text, flags=re.MULTILINE)
    for args in commands("\n".join(typed)):  # shell commands of a notebook
        check_line(args)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("runner"):
            module = importlib.import_module(str(node.module))
            assert module is runner or str(node.module).startswith("runner.adapters.")
            public = set(runner.__all__) if module is runner else set(vars(module))
            assert {alias.name for alias in node.names} <= public
    source = Path("my_task.py")
    if "PHASES =" in block.text:
        source.write_text(f"{block.text}\n{source.read_text()}")
    elif "def build(" in block.text:
        source.write_text(block.text)
    compose(Request((), source))


@pytest.mark.slow
@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    "each", [each for each in UNIQUE if re.match(r"(accel-run|python|(\./)?scripts/\S+)(?= |$)", each.text)], ids=str
)
def test_commands_in_prose_are_accepted(each: InlineCode) -> None:
    for args in commands(fill_placeholders(each.text)):
        if args[0].startswith("scripts/") and len(args) == 1:  # mentioned, not called
            assert (ROOT / args[0]).exists()
        elif args[0] == "accel-run" and len(args) == 2:
            assert args[1] in (*COMMANDS, "--help", "--version")
        elif len(args) > 1:
            check_line(args)


@pytest.mark.slow
@pytest.mark.parametrize(
    "each", [each for each in INLINE_CODE if each.page == FOREIGN and re.match(r"[a-z][\w.]*=\S", each.text)], ids=str
)
def test_settings_that_replace_flags_of_other_tools_compose(each: InlineCode) -> None:
    check_arguments(["train", *shlex.split(each.text)])


@pytest.mark.parametrize("each", [each for each in INLINE_CODE if each.text.startswith("from runner import ")], ids=str)
def test_documented_imports_exist(each: InlineCode) -> None:
    assert set(each.text.removeprefix("from runner import ").split(", ")) <= set(runner.__all__)


def test_flags_of_other_scripts_get_suggestions() -> None:
    flags = {
        result
        for line, column, token in inner(FOREIGN)
        if column == 0 and token.type == "code_inline" and not re.match(r"torchrun|nvidia-smi|watch", token.content)
        for result in re.findall(r"--([\w-]+)", token.content)
    }
    assert "use_amp" in flags
    assert {flag.replace("-", "_") for flag in flags} - known_keys() - set(FOREIGN_KEYS) == set()


def test_the_readme_lists_every_command() -> None:
    named = {
        args[1] for each in INLINE_CODE if each.page == ROOT / "README.md" for args in [each.text.split()] if args[1:]
    }
    assert {name for name, (_, summary) in COMMANDS.items() if summary} - named == set()


def test_the_table_of_groups_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (DOCS / "configuration.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {group: set(re.findall(r"`([\w-]+)`", text)) for group, text in rows}
    assert listed == {group: set(list_options(group)) for group in GROUPS}


def test_the_doctor_page_lists_every_check() -> None:
    text = (DOCS / "doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(name, check.summary, check.why) for name, check in CHECKS.items()]


def test_settings_named_in_prose_exist() -> None:
    unknown = []
    for each in INLINE_CODE:
        result = re.fullmatch(r"\+?([a-z][\w.-]*)=(\S*)", each.text)
        if result and RESULTS not in each.page.parents:
            key, value = result.groups()
            if key == "checkpoint" and is_choice(value):
                continue
            options = list_options(key) if key in (*AXES, "task", "hardware") else ()
            is_known = (
                re.sub(r"^(phase|objective)\.\w+\.", "", HOOK_SWITCH.sub("hook.NAME.enabled", key)) in known_keys()
            )
            if not is_known or (options and re.fullmatch(r"[a-z][\w-]*", value) and value not in options):
                unknown.append(str(each))
    assert not unknown, "\n".join(unknown)


# ---------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings."""
    result = set()
    for heading, text in zip(tokens(page), tokens(page)[1:], strict=False):
        if heading.type == "heading_open":
            plain = "".join(child.content for child in text.children or ())
            result.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for line, _, token in inner(page):
        target = token.attrGet("href" if token.type == "link_open" else "src")
        if token.type not in ("link_open", "image") or re.match(r"https://", str(target)):
            continue
        path, _, anchor = str(target).partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}:{line} {target}"
        assert there.is_relative_to(ROOT), f"{page.name}:{line} {target} is outside of the project"
        assert not anchor or anchor in anchors(there), f"{page.name}:{line} {target}: no such heading"


def linked(page: Path) -> set[Path]:
    targets = [str(token.attrGet("href")).partition("#")[0] for _, _, token in inner(page) if token.type == "link_open"]
    return {(page.parent / target).resolve() for target in targets if target and "://" not in target}


def test_every_page_is_linked() -> None:
    index, folders = DOCS / "README.md", {DOCS / "decisions", RESULTS}
    expected = folders | {page for page in DOCS.rglob("*.md") if page != index and page.parent not in folders}
    assert expected - linked(index) == set()
    assert index in linked(ROOT / "README.md")


def test_the_design_page_lists_every_folder_of_runner() -> None:
    (layout,) = (block.text for block in blocks(DOCS / "design.md") if block.language == "text")
    listed = set(re.findall(r"^ {2}(?:cli\.py )?(\w+)/", layout, re.MULTILINE))
    assert listed == {path.parent.name for path in (ROOT / "runner").glob("*/__init__.py")}


def test_decisions_have_unique_numbers() -> None:
    numbers = [path.name[:4] for path in sorted((DOCS / "decisions").glob("*.md"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]
    for path in (DOCS / "decisions").glob("*.md"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        assert first.startswith(f"# {path.name[:4]} ") or not re.match(r"# \d", first)


def test_numbers_in_the_readme_are_in_the_linked_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = dict(re.findall(r"^\[(\w+)\]: (docs/results/\S+)$", text, re.MULTILINE))
    rows = re.findall(r"^\|.+\| (.+) \| `(scripts/\S+|accel-run [^`]+)` \| \[[\d-]+\]\[(\w+)\] \|$", text, re.MULTILINE)
    assert len(rows) == text.count("][") >= 9
    for figure, script, name in rows:
        page = (ROOT / pages[name]).read_text(encoding="utf-8")
        assert script in page
        assert all(number in page for number in re.findall(r"\d+(?:[.,]\d+)?", figure)), figure


def test_results_name_their_scripts() -> None:
    for page in sorted(RESULTS.glob("*.md")):
        assert re.match(r"\d{4}-\d\d-\d\d-", page.name)
        named = set(re.findall(r"scripts/[\w./]+", page.read_text(encoding="utf-8")))
        assert named, f"{page.name} names no script"
        assert all((ROOT / name.rstrip(".")).exists() for name in named), named


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_fit_a_terminal(page: Path) -> None:
    """No line of a paragraph exceeds 140 columns, except for images."""
    lines = page.read_text().splitlines()
    paragraphs = [token.map for token in tokens(page) if token.type == "paragraph_open" and token.map]
    prose = [(number + 1, lines[number]) for begin, end in paragraphs for number in range(begin, end)]
    assert [(number, line) for number, line in prose if len(line) > 140 and not line.startswith("![")] == []
