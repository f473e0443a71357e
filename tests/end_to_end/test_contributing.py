"""Follow the recipes of CONTRIBUTING.md in a copy of the project: the added code passes the checks and works."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.forkserver import ForkServer

ROOT = Path(__file__).parents[2]

# Runs the commands sequentially, with the modules of the copy, in a fork of the fork server, which has imported torch.
# Then runs the tests that compare names, keys and floors. A technique is not measured: only two of its updates run.
# Variants of a suite run two blocks of about one update; no machine exceeds the budget.
DRIVER = """
import json, os, sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("runner", "tasks", "tests"):
        del sys.modules[name]
sys.path.insert(0, os.getcwd())
import pytest
from runner.cli import main
from runner.commands.benchmark import parse_benchmark_arguments
from runner.tools.measure import suite
from runner.tools.measure.compare import Comparison
from runner.tools.measure.technique import load_techniques

suite.ROUNDS, suite.BLOCK_S = (2, 2), 0.001
Comparison.block_s = property(lambda comparison: suite.BLOCK_S, lambda comparison, seconds: None)

def run(words):
    words = [word.replace("budget_s=30", "budget_s=3600") for word in words]
    if words[0] == "benchmark":
        suite, wanted, _ = parse_benchmark_arguments(words[1:])
        if suite == "ladder":
            overrides = [word for name in wanted.positional for word in load_techniques(None)[name].overrides]
            words = ["train", *overrides, "updates=2"]
        else:
            words.append("threads=1")  # two threads wait for each other actively, which takes minutes on a busy machine
    given = "device=cpu monitor=off evaluate.samples=4 run=new resume=fresh global_batch_size=16 micro_batch_size=4"
    return main([*words, *given.split()])

codes = [run(words) for words in {lines!r}]
checks = ["tests/axes/test_yaml_is_signature.py", "tests/test_layers.py", "tests/plan/test_hardware_profiles.py"]
checks.append("tests/engine/test_hooks.py")
quiet = ["-W", "ignore:Module already imported"]  # hydra, by the commands
names = "bf16_weights or lockstep or ring or l4 or table or function or file or promised or floor or order"
codes.append(int(pytest.main(["-q", "-p", "no:cacheprovider", *quiet, "-k", names, *checks])))
print(json.dumps(codes), flush=True)
sys.stderr.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Recipe:
    """The blocks below one heading: pieces of files with their places, and commands that use them."""

    title: str
    pieces: tuple[tuple[str, str, str], ...]  # (file, place in the file, text)
    commands: tuple[tuple[str, ...], ...]


def recipes() -> list[Recipe]:
    """Return the recipes, which are the sections with a code block."""
    result: list[Recipe] = []
    tokens = MarkdownIt("commonmark").parse((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    for number, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            result.append(Recipe(tokens[number + 1].content, (), ()))
        elif token.type == "fence" and result:
            last = result.pop()
            if token.info in ("", "sh"):
                lines = tuple(tuple(shlex.split(line)) for line in token.content.splitlines())
                result.append(Recipe(last.title, last.pieces, last.commands + lines))
                continue
            first, _, text = token.content.partition("\n")
            place = re.fullmatch(r"# (\S+\.\w+)(?:: (above|in) ([A-Z]+|imports))?", first)
            assert place, f"{last.title}: the first line of a block must name its file, but is {first}"
            piece = (place[1], f"{place[2]} {place[3]}" if place[2] else "new", text)
            result.append(Recipe(last.title, (*last.pieces, piece), last.commands))
    return [recipe for recipe in result if recipe.pieces or recipe.commands]


RECIPES = recipes()


def put(root: Path, file: str, place: str, text: str) -> None:
    """Insert a piece at the place named in its first line."""
    path = root / file
    if place == "new":
        assert not path.exists(), f"{file} already exists"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if place == "in imports":  # imports of the package are sorted
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        first = next(number for number, line in enumerate(lines) if line.startswith("from runner"))
        last = max(number for number, line in enumerate(lines) if line.startswith("from runner"))
        path.write_text("".join([*lines[:first], *sorted([*lines[first : last + 1], text]), *lines[last + 1 :]]))
        return
    side, table = place.split()
    before = path.read_text(encoding="utf-8")
    result = re.search(rf"^{table}\b.*[\[{{]\n", before, re.MULTILINE)
    assert result, f"{file} has the table {table} on separate lines"
    at, text = (result.start(), f"{text.rstrip()}\n\n\n") if side == "above" else (result.end(), text)
    path.write_text(before[:at] + text + before[at:], encoding="utf-8")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with all recipes applied."""
    root = tmp_path_factory.mktemp("followed")
    for folder in ("conf", "runner", "scripts", "tasks", "tests"):  # with bytecode, except that of pytest
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("*-pytest-*"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for recipe in RECIPES:
        for piece in recipe.pieces:
            put(root, *piece)
    return root


def test_every_kind_of_extension_has_a_recipe() -> None:
    assert [recipe.title.split()[2] for recipe in RECIPES] == [
        "technique", "suite", "hardware", "precision", "strategy", "hook", "task",
    ]  # fmt: skip
    for recipe in RECIPES:
        assert recipe.pieces, recipe.title
        assert recipe.commands, recipe.title


@pytest.mark.slow
def test_recipe_files_are_formatted_and_linted(copy: Path) -> None:
    for args in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *args, "--no-cache", "runner", "tasks"],
            cwd=copy, env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_recipe_commands_use_recipe_files(copy: Path, server: ForkServer) -> None:
    lines = [list(args[1:]) for recipe in RECIPES for args in recipe.commands if args[0] == "accel-run"]
    assert len(lines) >= len(RECIPES)
    result = server.run([], copy, before=DRIVER.replace("{lines!r}", repr(lines)))
    assert result.code == 0, result.out + result.err
    codes = json.loads(result.out.splitlines()[-1])
    assert codes == [0] * (len(lines) + 1), result.out + result.err
