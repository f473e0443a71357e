"""Mutated configurations are either valid, or rejected with a helpful message.

By default, a few hundred cases of all kinds run; with ACCEL_RUN_FAULTS=long, 100,000.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from runner.base.errors import AccelRunError, ConfigError, Exit
from runner.base.paths import shipped_path
from runner.cli import print_problems
from runner.config.configuration import Configuration, compose, to_yaml
from runner.config.options import GROUPS, list_options
from runner.config.request import Request, format_value
from runner.plan.inventory import Inventory, read_cpu
from runner.plan.planner import make_plan, planning_inventory
from tests.faults.mutations import FILES, spoil_word, typo
from tests.faults.steps import TooManySteps, steps
from tests.faults.tallies import SEED, Tally
from tests.forkserver import ForkServer

HERE = Path(__file__).parents[2]
# Maximum number of Python lines for an answer, beyond those for a short argument.
STEPS_OF_A_WORD, STEPS_OF_A_LETTER = (300_000, 10)
MAX_SHOWN = 3000  # characters of one problem: one page of a terminal
HELPS = ("must", "did you mean", "use ", "run ", "choose ", "allowed:", "give ", "leave it out", "quote it", "known:",
         "accel-run plan", "settings cannot be deleted", "remove ", "nearest", "belongs to", "phases:", "fix the ",
         "write ", "contain", "accel-run search", "set ", "put ", "define ", "combine ", "rename ")  # fmt: skip
SECURITY = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_", "!!python", "${", "hydra")
OUT_OF_GROUPS = ("..", "@", "~", ":", "package")  # in the defaults list of a file


@dataclass
class Case:
    """A command line and the files of a configuration folder, with the expected answer.

    meant  the names that a single typo may stand for, one of which must be suggested
    named  independent invalid arguments, all of which must be reported
    """

    kind: str
    words: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    meant: frozenset[str] = frozenset()
    named: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.words!r:.600}" + "".join(
            f"\n      {name}: {content!r:.400}" for name, content in self.files.items()
        )


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    """Return every key of the default configuration, except groups, and its value as text."""
    result = compose(Request()).flat()
    return {key: format_value(value) for key, value in result.items() if key not in GROUPS}


# ---------------------------------------------------------------- cases


def cases(known: dict[str, str], count: int) -> Iterator[Case]:
    """Yield `count` cases; the number of a case is its seed."""
    makers = (
        *[_words] * 9, *[_typo_in_key] * 7, *[_typo_in_group] * 2, *[_typo_in_option] * 3, *[_several] * 6, _file,
        *[_many] * (count >= 10_000),
    )  # fmt: skip
    for number in range(count):
        rng = random.Random(f"configuration {SEED} {number}")
        yield makers[number % len(makers)](rng, known)


def _words(rng: random.Random, known: dict[str, str]) -> Case:
    return Case("words", [spoil_word(rng, known) for _ in range(rng.choice([1, 1, 2, 3]))])


def _typo_in_key(rng: random.Random, known: dict[str, str]) -> Case:
    key = rng.choice([*known])
    spoiled = typo(rng, key)
    is_still_one = spoiled in known or not spoiled or spoiled.startswith((".", "-"))
    parts = [(one, other) for one, other in itertools.zip_longest(key.split("."), spoiled.split(".")) if one != other]
    is_in_a_word = len(parts) == 1 and len(parts[0][0] or "") >= 4  # the typo is not at a dot between two words
    meant = close_matches(spoiled, [*known, *GROUPS]) if is_in_a_word and not is_still_one else frozenset()
    return Case("typo in a key", [f"{spoiled}={known[key]}"], meant=meant)


def _typo_in_group(rng: random.Random, known: dict[str, str]) -> Case:
    group = rng.choice(GROUPS)
    option = rng.choice(list_options(group))
    spoiled = typo(rng, group)
    meant = frozenset() if spoiled == group or len(group) < 4 else close_matches(spoiled, [*known, *GROUPS])
    return Case("typo in a group", [f"{spoiled}={option}"], meant=meant)


def _typo_in_option(rng: random.Random, known: dict[str, str]) -> Case:
    group = rng.choice(GROUPS)
    option = rng.choice(list_options(group))
    spoiled = typo(rng, option)
    is_still_one = spoiled in list_options(group) or spoiled in ("", "none", "off")
    meant = frozenset() if is_still_one or len(option) < 4 else close_matches(spoiled, list_options(group))
    return Case("typo in an option", [f"{group}={spoiled}"], meant=meant)


def close_matches(spoiled: str, known: Iterable[str]) -> frozenset[str]:
    """Return the known words at edit distance 1 or less."""
    return frozenset(word for word in known if distance(spoiled.lower(), word.lower()) <= 1)


def distance(one: str, other: str) -> int:
    """Return the edit distance with transpositions (optimal string alignment)."""
    table = {(-1, -1): 0}
    table |= {(at, -1): at + 1 for at in range(len(one))} | {(-1, at): at + 1 for at in range(len(other))}
    for i, left in enumerate(one):
        for j, right in enumerate(other):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (left != right))
            if i and j and left == other[j - 1] and one[i - 1] == right:
                table[i, j] = min(table[i, j], table[i - 2, j - 2] + 1)
    return table[len(one) - 1, len(other) - 1]


MISTAKES: dict[str, tuple[str, ...]] = {
    "unknown key": ("frobnicate=1", "optimizer.nothing=1", "batchsize=3", "task.nothing=1", "inference.nothing=2"),
    "unknown option": ("precision=fp17", "scheduler=cosinus", "compile=fast", "hardware=t5", "backend=quick"),
    "type": ("optimizer.lr=fast", "updates=many", "checkpoint.keep=few", "log_every=[1]", "resume_allow=lr"),
    "range": ("seed=-1", "max_grad_norm=0", "epochs=-1", "evaluate.samples=0", "dataloader.prefetch_factor=0"),
    "literal": ("dataloader.bad_samples=maybe", "early_stopping.best_is=most", "optimizer.kernel=quick", "device=gpu"),
    "sweep": ("micro_batch_size=1,2", "run=range(1,3)", "data.path=choice(a,b)"),
    "unreadable": ("data.train_samples=[1,2", "output_root='x", "early_stopping.patience={a"),
    "deleted": ("~tracker", "~monitor"),
    "package": ("profiler@x=trace",),
    "Hydra": ("hydra.run.dir=x",),
    "no setting": ("fast", "--verbose"),
}


def _several(rng: random.Random, known: dict[str, str]) -> Case:
    kinds = rng.sample([*MISTAKES], rng.randint(2, 4))
    args = [rng.choice(MISTAKES[kind]) for kind in kinds]
    return Case("several mistakes", args, named=tuple(args))


def _many(rng: random.Random, known: dict[str, str]) -> Case:
    count = rng.choice([100, 3000])
    return Case("many words", [spoil_word(rng, known) for _ in range(count)])


BASES = {
    "optimizer/mine.yaml": "# mine\noption: adamw\nlr: 0.001\nbetas: [0.9, 0.99]\nlr_scales:\n  head: 0.1\n",
    "scheduler/mine.yaml": "defaults:\n  - cosine\nwarmup: 10\nfinal_factor: 0.2\n",
    "precision/fp16.yaml": "init_scale: 1024\n",
    "hardware/mine.yaml": "# @package _global_\ndefaults:\n  - override /precision: bf16\nhardware:\n  title: mine\n"
    "  devices:\n    - {name: a card, memory_gib: 8, kind: cuda, capability: [8, 6]}\n",
    "task/mine.yaml": "option: gpt\nsize: tiny\n",
    "config.yaml": (shipped_path("conf") / "config.yaml").read_text(),
}


def _file(rng: random.Random, known: dict[str, str]) -> Case:
    name = rng.choice([*BASES])
    spoil = rng.choice([*FILES])
    content = FILES[spoil](rng, BASES[name])
    if rng.random() < 0.3:
        other = rng.choice([*FILES])
        with contextlib.suppress(UnicodeDecodeError, IndexError):
            content = FILES[other](rng, content.decode())
    group, _, option = name.removesuffix(".yaml").rpartition("/")
    return Case(f"file {spoil}", [f"{group}={option}"] if group else [], {name: content})


# ---------------------------------------------------------------- the oracle


class Judge:
    """Composes and plans a case, and checks the outcome."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cpu = folder, Inventory((), read_cpu()[0])
        self.seen: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()
        self.typos: Counter[str] = Counter()

    def judge(self, case: Case) -> Iterator[str]:
        """Yield what is wrong with the outcome of a case."""
        request = Request(tuple(case.words), None, self._write_files(case.files))
        error: AccelRunError | None = None
        try:
            self._compose_and_plan(compose(request))
        except AccelRunError as rejection:
            error = rejection
        except Exception as other:
            yield f"{type(other).__name__}: {other!s:.300}"
            return
        self.seen[case.kind] += 1
        self.codes[int(error.exit_code) if error else 0] += 1
        if error is not None:
            yield from self._defects_of(error, case)
        if case.meant and error is not None:
            self.typos[case.kind] += 1
            messages = {word.strip(".-") for problem in error.problems for word in re.findall(r"[\w.-]+", problem.fix)}
            if not messages & case.meant:
                yield f"a typo in {' or '.join(case.meant)} is reported with the fix: {error.problems[0].fix}"

    def _write_files(self, files: dict[str, bytes]) -> Path | None:
        for name, content in files.items():
            place = self.folder / f"{sum(self.seen.values())}"
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
            return place
        return None

    def _compose_and_plan(self, result: Configuration) -> None:
        result.flat()
        to_yaml(result)
        names_machine = any(item.get("kind") != "cpu" for item in result.hardware.get("devices") or ())
        inventory = planning_inventory(result)[0] if names_machine else self.cpu
        json.loads(make_plan(result, inventory).to_json())

    def _defects_of(self, error: AccelRunError, case: Case) -> Iterator[str]:
        text = " ".join([*case.words, *(content.decode(errors="replace") for content in case.files.values())])
        allowed = {Exit.CONFIG}
        hostile = (*SECURITY, *OUT_OF_GROUPS) if case.files else SECURITY
        allowed |= {Exit.SECURITY} if any(word in text for word in hostile) else set()
        allowed |= {Exit.NO_DEVICE} if "device" in text else set()
        if error.exit_code not in allowed:
            yield f"ended with {int(error.exit_code)}: {error!s:.300}"
        shown = io.StringIO()
        with contextlib.redirect_stderr(shown):
            print_problems(error)
        for problem in error.problems:
            if not problem.where.strip():
                yield f"names neither file nor argument: {problem!s:.300}"
            if not problem.what.strip() or not any(word in f"{problem.what} {problem.fix}" for word in HELPS):
                yield f"does not say what is allowed: {problem!s:.300}"
            if case.files and not any(name in str(problem) for name in (*case.files, str(self.folder), *case.words)):
                yield f"does not name the file: {problem!s:.300}"
            if len(str(problem)) > MAX_SHOWN:
                yield f"has {len(str(problem))} characters: {problem!s:.100}"
        controls = {char for char in shown.getvalue() if char != "\n" and _controls_the_terminal(char)}
        if controls:
            yield f"would print {controls!r}: {shown.getvalue()!r:.300}"
        if shown.getvalue().count("\n") > 3 * len(error.problems) + 1:
            yield f"has too many lines: {shown.getvalue()!r:.300}"
        for word in case.named:
            key = word.partition("=")[0].lstrip("~")
            if not any(key in problem.where for problem in error.problems):
                yield f"{word} is not named: {error!s:.600}"


def _controls_the_terminal(char: str) -> bool:
    """Return whether a character controls a terminal or changes the order of text."""
    return (
        unicodedata.category(char) in ("Cc", "Cs") or char in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )


def test_every_configuration_is_valid_or_rejected_with_a_helpful_message(
    known: dict[str, str], tmp_path: Path, amount: Callable[[int, int], int], tally: Tally
) -> None:
    judge = Judge(tmp_path)
    bad = []
    for number, case in enumerate(cases(known, amount(250, 100_000))):
        tally.tried += 1
        bad += [f"{number}: {case}\n    {wrong}" for wrong in [*judge.judge(case)][:2]]
        if len(bad) > int(os.environ.get("ACCEL_RUN_SHOWN", "50")):
            break
    tally.notes |= dict(judge.typos)
    tally.notes |= {f"exit {code}": count for code, count in sorted(judge.codes.items())}
    repeat = f"ACCEL_RUN_SEED={SEED} ACCEL_RUN_COUNT={tally.tried} scripts/faults.sh valid_or_rejected"
    assert not bad, f"{len(bad)} configurations are handled incorrectly ({repeat}):\n" + "\n".join(bad)
    assert len(judge.typos) == 3, f"a kind of typo was not tried: {judge.typos}"


def compose_ignoring_errors(*args: str) -> None:
    with contextlib.suppress(AccelRunError):
        compose(Request(args))


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", ["updates", "task", "x", "optimizer.lr_scales.x", "resume_allow"])
def test_the_cost_of_an_override_is_linear_in_its_length(
    key: str, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    """Arguments have up to 128 KiB, the limit of Linux for one argument."""
    compose_ignoring_errors(f"{key}=1")  # warm up caches
    usual = steps(lambda: compose_ignoring_errors(f"{key}=1"))
    dice = random.Random(f"{seed} long {key}")
    long = [text * 60_000 for text in ("a", "1", "[", "'", "a.", "\\", "é", "1,", " ")]
    long += [f"{opening * 3000}1{closing * 3000}" for opening, closing in (("[", "]"), ("{a:", "}"), ("${a:", "}"))]
    for value in dice.sample(long, min(len(long), amount(3, len(long)))):
        for word in (f"{key}={value}", f"{value}=1", value):
            at_most = usual + STEPS_OF_A_WORD + STEPS_OF_A_LETTER * len(word)
            try:
                steps(lambda word=word: compose_ignoring_errors(word), at_most)  # type: ignore[misc]
            except TooManySteps:
                pytest.fail(f"seed {seed}: over {at_most} lines of Python are run for {word[:80]!r}...")
            tally.tried += 1


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "word", ["x{}=1", "updates={}1", "task.size=[{}", "--x{}", "optimzer=adam", "optimizer.lr_scales.x{}=fast"]
)
def test_the_cost_of_overrides_is_linear_in_their_number(word: str, tally: Tally) -> None:
    """Only the first 50 arguments are compared with similar names; each later one has a constant cost."""

    def refuse(count: int) -> None:
        compose_ignoring_errors(*(word.format(1000 + number) for number in range(count)))

    def cost(count: int) -> int:
        return steps(lambda: refuse(count))

    refuse(55)  # warm up caches
    few, twice, four_times = cost(55), cost(70), cost(100)
    assert four_times - twice <= 2.1 * (twice - few), f"{few}, {twice} and {four_times} lines for 55, 70, 100 words"
    tally.tried += 1


COMPOSE_ALL = """
import json, sys
from runner.config.configuration import compose
from runner.config.request import Request
from runner.base.errors import AccelRunError
for words in json.load(sys.stdin):
    try:
        compose(Request(tuple(words)))
    except AccelRunError:
        pass
    assert "torch" not in sys.modules, words
"""


def test_composing_a_configuration_never_imports_torch(
    known: dict[str, str], amount: Callable[[int, int], int], tally: Tally
) -> None:
    argument_lists = [case.words for case in cases(known, amount(5, 600)) if not case.files]
    done = subprocess.run(
        [sys.executable, "-c", COMPOSE_ALL],
        cwd=HERE,
        input=json.dumps(argument_lists),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tally.tried += len(argument_lists)


def test_the_command_reports_all_problems_with_exit_code_config(
    known: dict[str, str], tmp_path: Path, amount: Callable[[int, int], int], tally: Tally, server: ForkServer
) -> None:
    """Uses only arguments that the system accepts: without NUL characters and of bounded length."""
    wanted = amount(3, 400)
    rng = random.Random(f"command {SEED}")
    for case in cases(known, 50_000):
        if case.files or not all(map(_can_be_typed, case.words)) or rng.random() > 0.1:
            continue
        try:
            compose(Request(tuple(case.words)))
            continue  # the configuration is valid: the command would train
        except ConfigError as error:
            count = len(error.problems)
        except AccelRunError:
            continue
        done = server.run([rng.choice(["train", "plan", "both"]), *case.words], tmp_path)
        messages = done.err
        assert done.code == Exit.CONFIG, f"{case}: {done.code}: {messages}"
        assert "Traceback" not in messages, f"{case}: {messages}"
        assert messages.startswith("accel-run: "), f"{case}: {messages}"
        assert count == 1 or f"{count} problems" in messages, f"{case}: {messages}"
        tally.tried += 1
        if tally.tried == wanted:
            return


def _can_be_typed(word: str) -> bool:
    try:
        return 0 < len(word.encode(errors="surrogateescape")) < 100_000 and "\x00" not in word
    except UnicodeEncodeError:
        return False
