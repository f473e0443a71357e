"""Every exit code is documented and reachable, and exceptions of a task are reported with their source lines.

By default, a seed selects some of the codes and exceptions; `scripts/test.sh --all` tests all of them.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from runner.base import errors
from runner.base.errors import AccelRunError, DataError, Exit, rebuild_error
from tests.faults import test_environment as environment
from tests.faults import test_numeric as numeric
from tests.faults.tallies import Tally
from tests.forkserver import ForkServer

ROOT = Path(__file__).parents[2]
BASE = environment.BASE

# ---------------------------------------------------------------- codes


@dataclass(frozen=True)
class Way:
    """How to reach an exit code: a command, an earlier command `first` if any, and text of the message."""

    code: Exit
    words: list[str]
    cause: str = ""
    first: list[str] | None = None
    act: str = ""


WAYS = {
    "done": Way(Exit.DONE, BASE),
    "no command": Way(Exit.USAGE, [], "usage: accel-run COMMAND"),
    "no such run": Way(Exit.NO_INPUT, ["inference", "run=nowhere"], "there is no run 'nowhere'"),
    "no such device": Way(Exit.NO_DEVICE, [*BASE[:3], "device=mps", *BASE[4:]], "device=mps"),
    "the task raises": Way(Exit.SOFTWARE, BASE, "raised KeyError: 'points'", act="raise"),
    "a stop signal": Way(Exit.PREEMPTED, BASE, act="hang-up"),
    "a typo": Way(Exit.CONFIG, ["train", "lrr=3"], "did you mean"),
    "a full GPU": Way(Exit.GPU_MEMORY, BASE, "the GPU is out of memory", act="gpu-memory"),
    "a killed rank": Way(
        Exit.RANK_LOST,
        [*BASE, "parallelism=ddp", "parallelism.world_size=2", "parallelism.restarts=0", "dataloader.drop_last=true"],
        "was ended by SIGKILL",
        act="kill-rank",
    ),
    "another seed": Way(
        Exit.INCOMPATIBLE_RESUME, [*BASE, "seed=9"], "a run cannot be resumed with another value", first=BASE
    ),
    "a second signal": Way(Exit.INTERRUPTED, BASE, "Stopped immediately, without saving", act="interrupt-twice"),
}


# Messages with neither a requirement nor a fix, by the reason.
WITHOUT_ADVICE = {
    "the caller has the requirement": {
        "Problem(wrong, f'SETTINGS[{key!r}]')", "Problem(wrong, arg)", "Problem(what, files)", "Problem(what, where)",
        "Problem(what, 'capacities')", "Problem(what, 'launcher.signal_s')", "IncompatibleResume(str(problems[0]))",
        "Problem(what, key.replace('__', '.'))",
    },
    "problems that have their own advice": {
        "SharedConfigError(problems)", "SharedConfigError(problem)", "RepeatedConfigError(problems)",
    },
    "reported by another rank or process, in its words": {
        "AccelRunError(error_line(error))",
        "RankLost(f'rank {world.global_rank(rank)} failed: {text}', where=where)", "RankLost(output.text, where=WHERE)",
        "RankLost(value.text, where='parallelism=pipeline')", "AccelRunError(differs)",
        "RankLost(f'rank {rank} is out of memory', where=self._describe_location(cause))",
    },
    "a damaged or incomplete checkpoint or copy: the caller skips it and reports which one it uses": {
        "DataError('its update number does not match the name of its folder', where=str(target))",
        "DataError(f'its {MANIFEST} is damaged', where=str(path))",
        "DataError(f'its {MANIFEST} is damaged', where=where)",
        """DataError(f"{entry['name']} is missing or has the wrong size", where=self.store.shown)""",
        """StorageError(f"rank {rank} cannot write its part: {report.get('error')}", where=str(temporary))""",
        """StorageError(f"{entry['name']} does not have the size that its rank reported", where=str(temporary))""",
        "StorageError(f'rank {min(missing)} has not written its part', where=str(temporary))",
    },
    "the saver reports how it continues": {"StorageError(f'cannot save the checkpoint: {error}', where=str(target))"},
    "a process of accel-run was killed, or nothing was started": {
        "AccelRunError('nothing was started')",
        '''AccelRunError(f"the fork server ended: {_last_line(self._errors) or 'unknown reason'}")''',
    },
}  # fmt: skip


@cache
def calls() -> list[tuple[Path, ast.Call]]:
    """Return each call in the runner."""
    return [
        (file, node)
        for file in sorted((ROOT / "runner").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def messages() -> list[tuple[Path, ast.Call]]:
    """Return each call in the runner that creates a problem or an error with a message."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AccelRunError)}
    kinds = kinds - {"ConfigError"} | {"Problem"}  # a ConfigError consists of problems
    return [(file, node) for file, node in calls() if isinstance(node.func, ast.Name) and node.func.id in kinds]


def test_every_message_states_a_requirement_or_a_fix() -> None:
    def advises(call: ast.Call) -> bool:
        is_problem = isinstance(call.func, ast.Name) and call.func.id == "Problem"
        has_fix = any(keyword.arg in ("fix", None) for keyword in call.keywords) or (is_problem and len(call.args) > 2)
        return has_fix or any(isinstance(word, ast.Starred) for word in call.args)

    result = messages()
    silent = {
        ast.unparse(call): f"{file.relative_to(ROOT)}:{call.lineno}"
        for file, call in result
        if not advises(call) and not re.search(r"must|needs|leave|take|\buse\b", ast.unparse(call))
    }
    assert len(result) > 350
    known = set().union(*WITHOUT_ADVICE.values())
    assert {call: place for call, place in silent.items() if call not in known} == {}
    assert known <= set(silent), "the table lists a case that no longer exists"


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WAYS)
def test_a_command_reaches_each_exit_code(name: str, server: ForkServer, tmp_path: Path, tally: Tally) -> None:
    way = WAYS[name]
    if way.first:
        assert server.run(way.first, tmp_path).code == 0
    result = server.run(way.words, tmp_path, {"ACT": way.act, "AT": "23"} if way.act else None)
    assert result.code == way.code, result.err
    assert way.cause in result.err
    assert "Traceback" not in result.err
    tally.tried += 1


def test_a_run_directory_that_is_a_link_is_rejected(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "mine").symlink_to(tmp_path / "elsewhere")
    result = server.run(BASE, tmp_path)
    environment.assert_error(result, Exit.SECURITY, "must be in outputs, but is a link")


def test_every_exit_code_is_covered_by_a_test() -> None:
    """The tests of the watchdog reach HANG."""
    reached = {int(way.code) for way in WAYS.values()}
    reached |= {case.code for case in environment.DISKS.values()}
    reached |= {case.code for case in environment.LIMITS.values()}
    reached |= {code for code, _ in (*environment.SAMPLES.values(), *environment.WORKERS.values())}
    reached |= {case.code for case in numeric.FAULTS.values()}
    apart = {Exit.PERMISSION, Exit.IN_USE, Exit.SECURITY}  # reached by tests without a table
    source = Path(environment.__file__).read_text() + Path(__file__).read_text()
    for code in apart:
        pattern = rf'assert_error\(result, ({int(code)}|Exit\.{code.name})\b|runs", {int(code)}\)'
        assert re.search(pattern, source), code
    apart.add(Exit.HANG)
    assert reached | {int(code) for code in apart} == {int(code) for code in Exit}


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(int(code), code.name) for code in Exit]


def test_every_class_of_error_is_raised_somewhere() -> None:
    named = {node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "") for _, node in calls()}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AccelRunError)]
    assert [kind.__name__ for kind in kinds if kind.__name__ not in named] == []
    assert {kind.exit_code for kind in kinds} <= set(Exit)


def test_a_pickled_error_keeps_its_place() -> None:
    error = DataError("what", where="where", fix="fix")
    error.place = {"samples": [3]}
    kind, given = error.__reduce__()
    assert kind is rebuild_error
    again = rebuild_error(*given)
    assert (again.problems, again.place, again.exit_code) == (error.problems, {"samples": [3]}, Exit.BAD_DATA)


# ---------------------------------------------------------------- exceptions of a task

TASK = """\
import torch
import torch.nn.functional as F
from runner import Task

SETTINGS = {"updates": 8, "global_batch_size": 4, "checkpoint.every": 2, "optimizer.lr": 0.01, "evaluate.every": 4}

def build() -> Task:
    return Mine()

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((2,), float(index)), index % 2

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no words")

def inner():
    return {}["inner"]

class Mine(Task):
    def __init__(self):
        self.model = torch.nn.Linear(2, 2)
        self.update = 0
    def begin_update(self, progress):
        self.update = progress.update
    def dataset(self, split):
        return Points()
    def loss(self, model, batch):
        x, y = batch
        if self.update == 5:
            pass  # HERE
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)
"""


@dataclass(frozen=True)
class ReportedError:
    """A change of the task; the first line of the message must contain `cause`, the complete message `lines`."""

    new: str
    cause: str
    lines: tuple[str, ...] = ()
    old: str = "            pass  # HERE\n"
    code: int = 70
    words: str = ""


def in_loss(*lines: str) -> str:
    return "".join(f"            {line}\n" for line in lines)


def method(*lines: str) -> str:
    return "    def loss(" if not lines else "".join(f"    {line}\n" for line in lines) + "    def loss("


RAISED = {
    "an explicit cause": ReportedError(
        in_loss("try:", "    inner()", "except KeyError as error:", "    raise ValueError('outer') from error"),
        "update 6 of phase train raised ValueError: outer",
        ("from KeyError: 'inner'", 'in inner: return {}["inner"]'),
    ),
    "an exception in a handler": ReportedError(
        in_loss("try:", "    inner()", "except KeyError:", "    raise ValueError('outer')"),
        "raised ValueError: outer",
        ("while handling KeyError: 'inner'",),
    ),
    "an exception group": ReportedError(
        in_loss("raise ExceptionGroup('two', [KeyError('one'), ValueError('other')])"),
        "raised ExceptionGroup: two (2 sub-exceptions)",
        ("1. KeyError: 'one'", "2. ValueError: other"),
    ),
    "an exception that cannot be printed": ReportedError(
        in_loss("raise Unprintable"), "raised Unprintable: (its __str__ raises ValueError)"
    ),
    "a very long message": ReportedError(in_loss("raise ValueError('x' * 10**6)"), "... (999600 more characters)"),
    "a message of many lines": ReportedError(
        in_loss("raise ValueError('x\\n' * 10**4)"), "raised ValueError: x", ("(9988 more lines)",)
    ),
    "control characters": ReportedError(
        in_loss("raise ValueError('\\x1b[31mred\\x1b]0;title\\x07 \\r\\b\\x9b2J')"), "raised ValueError: red"
    ),
    "endless recursion": ReportedError(
        in_loss("self.loss(model, batch)"), "raised RecursionError: maximum recursion depth"
    ),
    "a subprocess": ReportedError(
        in_loss("import subprocess", "subprocess.run(['false'], check=True)"), "raised CalledProcessError: Command"
    ),
    "a message like torch's about a worker": ReportedError(
        in_loss("raise ValueError('ffmpeg exited unexpectedly')"),
        "raised ValueError: ffmpeg exited",
        ("in loss: raise",),
    ),
    "a message like the system's about memory": ReportedError(
        in_loss("raise ValueError('cannot allocate memory for this frame')"),
        "update 6 of phase train raised ValueError",
    ),
    "a message like the system's about files": ReportedError(
        in_loss("raise ValueError('too many open files')"), "update 6 of phase train raised ValueError"
    ),
    "a message like torch's about a GPU": ReportedError(
        in_loss("raise RuntimeError('my CUDA error handler is missing')"), "update 6 of phase train raised RuntimeError"
    ),
    "a class named like torch's": ReportedError(
        in_loss("raise type('OutOfMemoryError', (RuntimeError,), {})('CUDA budget used up')"),
        "raised OutOfMemoryError: CUDA budget used up",
    ),
    "too much memory": ReportedError(
        in_loss("x.new_empty(1 << 60)"),
        "the machine is out of memory",
        ("in loss: x.new_empty(1 << 60)",),
        code=81,
    ),
    "a BaseException": ReportedError(
        in_loss("raise BaseException('odd')"), "update 6 of phase train raised BaseException: odd"
    ),
    "a BaseException, with ranks": ReportedError(
        in_loss("raise BaseException('odd')"),
        "raised BaseException: odd",
        words="parallelism=ddp parallelism.world_size=2",
    ),
    "a KeyboardInterrupt": ReportedError(
        in_loss("raise KeyboardInterrupt"), "update 6 of phase train raised KeyboardInterrupt"
    ),
    "a GeneratorExit": ReportedError(in_loss("raise GeneratorExit"), "update 6 of phase train raised GeneratorExit"),
    "an exit": ReportedError(in_loss("raise SystemExit(0)"), "update 6 of phase train raised SystemExit: 0"),
    "a BaseException in a sample": ReportedError(
        "        if index == 37:\n            raise BaseException('odd')\n        return torch.full(",
        "sample 37 cannot be read: BaseException: odd",
        old="        return torch.full(",
        code=65,
    ),
    "a KeyboardInterrupt in a sample, in a worker": ReportedError(
        "        if index == 37:\n            raise KeyboardInterrupt\n        return torch.full(",
        "sample 37 cannot be read: KeyboardInterrupt",
        old="        return torch.full(",
        code=65,
        words="dataloader.num_workers=1 dataloader.bad_samples=skip",
    ),
    **{
        f"an exit in a sample, {where}": ReportedError(
            "        if index == 37:\n            raise SystemExit(3)\n        return torch.full(",
            "sample 37 cannot be read: SystemExit: 3",
            old="        return torch.full(",
            code=65,
            words=words,
        )
        for where, words in {
            "in this process": "dataloader.num_workers=0",
            "in a worker": "dataloader.num_workers=1",
            "in a thread": "dataloader=thread",
            "with ranks": "dataloader.num_workers=1 parallelism=ddp parallelism.world_size=2",
        }.items()
    },
    **{
        f"{what}, {where}": ReportedError(
            method("def collate(self, samples):", f"    {line}"), expected, old="    def loss(", words=words
        )
        for what, line, expected in (
            ("an exit in collate", "raise SystemExit(3)", "SystemExit: 3"),
            (
                "a generator as collate",
                "yield samples",
                "collate() must return a batch, but returned a generator",
            ),
        )
        for where, words in {
            "in this process": "dataloader.num_workers=0",
            "in a worker": "dataloader.num_workers=1",
            "in a thread": "dataloader=thread",
        }.items()
    },
    "a batch that a worker cannot send": ReportedError(
        method(
            "def collate(self, samples):", "    return torch.stack([x for x, _ in samples]), (y for _, y in samples)"
        ),
        "a batch cannot be sent from a data worker: cannot pickle 'generator' object",
        old="    def loss(",
        words="dataloader.num_workers=1",
    ),
    "an assertion": ReportedError(in_loss("assert y is None"), "raised AssertionError", ("assert y is None",)),
    "a module that is missing": ReportedError(
        in_loss("import nowhere"), "No module named 'nowhere'", ("import nowhere",)
    ),
    "a helper with a syntax error": ReportedError(
        in_loss("import helper"), "raised SyntaxError: '(' was never closed (helper.py, line 1)"
    ),
    "the evaluation": ReportedError(
        method("def evaluate(self, model, batch):", "    return inner()"),
        "the evaluation after update 4 of phase train raised KeyError: 'inner'",
        old="    def loss(",
    ),
    "baselines": ReportedError(
        method("def baselines(self):", "    return inner()"),
        "baselines() raised KeyError: 'inner'",
        old="    def loss(",
    ),
    "blocks": ReportedError(
        method("def blocks(self):", "    return inner()"), "blocks() raised KeyError: 'inner'", old="    def loss("
    ),
    "losses": ReportedError(
        method("@property", "def losses(self):", "    return inner()"), "raised KeyError: 'inner'", old="    def loss("
    ),
    "predict": ReportedError(
        method("def predict(self, model, generator):", "    yield inner()"),
        "predict() raised KeyError: 'inner'",
        old="    def loss(",
        words="both",
    ),
    "a state dict hook": ReportedError(
        "        self.model.register_state_dict_post_hook(lambda *_: inner())\n        self.update = 0\n",
        "raised KeyError: 'inner'",
        old="        self.update = 0\n",
    ),
    "a gradient hook": ReportedError(
        "        self.model.weight.register_hook(lambda gradient: inner())\n        self.update = 0\n",
        "raised KeyError: 'inner'",
        old="        self.update = 0\n",
    ),
    "nothing to train": ReportedError(
        "torch.nn.ReLU()", "has no parameter to train", old="torch.nn.Linear(2, 2)", code=78
    ),
    "collate, in a worker": ReportedError(
        method("def collate(self, samples):", "    return inner()"),
        "raised KeyError: 'inner'",
        ('in inner: return {}["inner"]',),
        old="    def loss(",
        words="dataloader.num_workers=1",
    ),
    "collate, in a thread": ReportedError(
        method("def collate(self, samples):", "    return inner()"),
        "raised KeyError: 'inner'",
        ('in inner: return {}["inner"]',),
        old="    def loss(",
        words="dataloader=thread",
    ),
    "collate, with a message like torch's": ReportedError(
        method("def collate(self, samples):", "    raise ValueError('a\\nb')"),
        "raised ValueError: a",
        old="    def loss(",
        words="dataloader.num_workers=1 dataloader.start_method=spawn",
    ),
}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RAISED)
def test_task_errors_are_reported_only_with_lines_of_the_task(
    name: str, server: ForkServer, tmp_path: Path, tally: Tally
) -> None:
    reported = RAISED[name]
    changed = TASK.replace(reported.old, reported.new, 1)
    assert changed != TASK
    (tmp_path / "mine.py").write_text(changed)
    (tmp_path / "helper.py").write_text("f(\n")
    command, *more = reported.words.split() if reported.words.startswith("both") else ["train", *reported.words.split()]
    result = server.run([command, "--task", "./mine.py", "run=mine", "device=cpu", "monitor=off", *more], tmp_path)
    environment.assert_error(result, reported.code, reported.cause, *reported.lines)
    assert f"{ROOT}/runner" not in result.err, "no lines of accel-run"
    assert "site-packages" not in result.err, "no lines of torch"
    assert len(result.err) < 8000
    assert all(char == "\n" or char.isprintable() for char in result.err)
    if command == "train":
        error = json.loads((tmp_path / "outputs" / "mine" / "error.json").read_text())
        assert error["exit_code"] == reported.code
        assert json.loads((tmp_path / "outputs" / "mine" / "run.json").read_text())["exit_code"] == reported.code
        assert "Traceback" in error["traceback"] or "world_size" in reported.words
    tally.tried += 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", ["os.abort()", "__import__('ctypes').string_at(0)"])
def test_a_crash_in_c_reports_the_running_lines(call: str, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\n" + TASK.replace("pass  # HERE", call))
    result = server.run("train --task ./mine.py run=mine device=cpu monitor=off", tmp_path)
    assert result.code not in set(Exit)
    assert "Fatal Python error: " in result.err
    assert re.search(r'mine.py", line \d+ in loss', result.err), result.err  # lint-tests: phrase: lines of a traceback


def test_a_missing_tracker_package_is_reported_before_a_run_starts(server: ForkServer, tmp_path: Path) -> None:
    without = """
import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *rest: None if name == 'tensorboard' else find(name, *rest)
"""
    (tmp_path / "mine.py").write_text(TASK)
    words = "train --task ./mine.py run=mine device=cpu monitor=off tracker=tensorboard"
    result = server.run(words, tmp_path, {}, without)
    environment.assert_error(result, 78, "needs the package tensorboard, which is not installed")
    assert not (tmp_path / "outputs").exists()


def test_error_json_contains_the_place_of_an_error(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("pass  # HERE", "inner()"))
    server.run("train --task ./mine.py run=mine device=cpu monitor=off", tmp_path)
    error = json.loads((tmp_path / "outputs" / "mine" / "error.json").read_text())
    assert error["place"] == {"rank": 0, "phase": "train", "update": 5}
    assert (error["last_checkpoint"], error["updates_repeated"]) == ("update-0000000004", 1)


def test_an_error_before_training_does_not_mention_checkpoints(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("return Mine()", "return inner()"))
    result = server.run("train --task ./mine.py run=mine device=cpu monitor=off", tmp_path)
    environment.assert_error(result, 70, "build() raised KeyError: 'inner'")
    assert "checkpoint" not in result.err


@environment.needs_root
def test_an_unreadable_config_folder_is_reported(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "conf").chmod(0o000)
    result = server.run(["plan", "--config-dir", "conf"], tmp_path, None, environment.WITHOUT_RIGHTS)
    assert "Traceback" not in result.err
    assert result.code in (66, 77, 78), result.err
