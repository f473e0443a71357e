"""Malicious configurations and checkpoints are refused with a message.

They execute no code, and change no files outside of the run folder. By default, a seeded sample of a few dozen
attacks runs; with ACCEL_RUN_FAULTS=long, all of them.
"""

from __future__ import annotations

import json
import os
import pkgutil
import random
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import AccelRunError, Exit, SecurityRefusal
from runner.config.configuration import compose
from runner.config.guarded_yaml import ENVIRONMENT, MAX_BYTES, read_guarded
from runner.config.options import GROUPS
from runner.config.request import Request
from runner.config.schema import read_functions
from tests.composed import composed
from tests.faults import attacks
from tests.faults.tallies import IS_LONG, SEED, Tally
from tests.forkserver import CompletedCommand, ForkServer

# ruff: noqa: E501 - tables of attacks

TARGETS = ("os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "pickle.loads", "shutil.rmtree",
           "torch.load", "importlib.import_module", "hydra.utils.instantiate", "runner.cli.main")  # fmt: skip

REFUSED = (Exit.SECURITY, Exit.CONFIG)
NAMES_PER_FILE = 400  # names per file; a configuration file may have at most 64 KiB


@pytest.fixture(scope="module")
def watch() -> Iterator[list[tuple[str, str]]]:
    """Audit events recorded while the hook is armed: executed code, processes, sockets, written files."""
    return (yield from _watching())


SEEN: list[tuple[str, str]] = []
ARMED = [False]
AUDITED_EVENTS = ("exec", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "socket.connect",
         "socket.bind", "ctypes.dlopen", "pickle.find_class", "marshal.loads", "os.remove", "os.rename", "os.chmod",
         "shutil.rmtree", "os.symlink", "os.link")  # fmt: skip


DEFINING = ("collections/__init__.py", "dataclasses.py", "typing.py", "enum.py",
            "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")  # fmt: skip


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not ARMED[0]:
        return
    if event in ("exec", "marshal.loads") and sys._getframe(1).f_code.co_filename.endswith(DEFINING):
        return  # defines a class or module of an installed package, or evaluates its annotations
    if event in AUDITED_EVENTS:
        SEEN.append((event, f"{arguments!r:.200} by {sys._getframe(1).f_code.co_filename}"))
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        SEEN.append((event, repr(arguments[0])))


def _watching() -> Iterator[list[tuple[str, str]]]:
    sys.addaudithook(_hook)  # an audit hook cannot be removed, so it is disarmed outside of the tests
    compose(Request(("optimizer.lr=0.1",)))  # Hydra imports modules and generates code on first use
    yield SEEN
    ARMED[0] = False


def attempt(args: tuple[str, ...], folder: Path | None = None, task: Path | None = None) -> AccelRunError | None:
    """Compose under the audit hook; return the error, or None if the input was accepted."""
    SEEN.clear()
    ARMED[0] = True
    try:
        with composed().unshared():  # else the hook would report the files of the cache
            compose(Request(args, task, folder))
    except AccelRunError as error:
        return error
    finally:
        ARMED[0] = False
    return None


def hostile_overrides() -> Iterator[tuple[str, ...]]:
    for target in TARGETS if IS_LONG else TARGETS[:4]:
        yield (f"+optimizer._target_={target}",)
        yield (f"optimizer={{_target_:{target}}}",)
        yield (f"+data={{path:{{_target_:{target},_args_:[id]}}}}",)
    for key in ("hydra.callbacks.x._target_", "+hydra.job.chdir", "hydra/launcher", "hydra.run.dir", "hydra.searchpath",
                "++hydra.launcher._target_", "hydra/job_logging", "hydra.sweeper.params", "hydra.output_subdir"):  # fmt: skip
        yield (f"{key}=evil",)
    for group in GROUPS[:: 1 if IS_LONG else 9]:
        for way in ("../../../etc/passwd", "/etc/passwd", "..", "file:///etc/passwd", "pkg://os", "a/../../b", "\\x00"):
            yield (f"{group}={way}",)
        yield (f"{group}@hydra.callbacks=default",)
        yield (f"~{group}",)
    yield ("x=" + "[" * 3000 + "]" * 3000,)
    yield ("x=" + "{a:" * 500 + "1" + "}" * 500,)
    yield ("run=../../etc",)
    yield ("run=/etc/cron.d/x",)


def test_hostile_overrides_are_rejected_and_nothing_is_called(
    watch: list[tuple[str, str]], seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    from runner.durable.directory import check_run_name

    for args in sample_cases(hostile_overrides(), amount(30, 10_000), seed):
        if args[0].startswith("run="):
            with pytest.raises(AccelRunError):
                check_run_name(args[0].partition("=")[2])
        else:
            error = attempt(args)
            assert error is not None, f"accepted as data: {args}"
            assert error.exit_code in REFUSED, (args, error)
        assert not watch, (args, watch)
        tally.tried += 1


def test_values_that_name_code_are_rejected(watch: list[tuple[str, str]]) -> None:
    for target in TARGETS:
        error = attempt((f"+optimizer._target_={target}",))
        assert error is not None
        assert error.exit_code == Exit.SECURITY


BILLION_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [*{old},*{old},*{old},*{old},*{old},*{old},*{old},*{old},*{old},*{old}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def hostile_files() -> Iterator[tuple[str, str | bytes, int]]:
    """Yield (name, content, expected exit code) of malicious files for the group optimizer."""
    head = "option: adamw\n"
    for target in TARGETS:
        yield f"target {target}", f"{head}_target_: {target}\n", 89
        yield f"nested target {target}", f"{head}lr_scales: {{head: {{_target_: {target}}}}}\n", 89
        yield f"tag {target}", f"{head}lr: !!python/object/apply:{target} ['id']\n", 89
        yield f"name tag {target}", f"{head}lr: !!python/name:{target}\n", 89
    for resolver in ("oc.create:{a: 1}", "oc.decode:'[1]'", "oc.select:lr", "oc.dict.keys:x", "hydra:runtime.cwd",
                     "now:%Y", "python_version:", "evil:1", "oc.deprecated:lr", "oc.env", "oc.env:", "${x}:1",
                     "oc.env:HOME,${oc.env:HF_TOKEN}", "oc.env:'HF_TOKEN'", "oc.${x}:HF_TOKEN", "oc.env:${x}"):  # fmt: skip
        yield f"resolver {resolver}", f'{head}lr: "${{{resolver}}}"\n', 0 if resolver == "oc.env" else 89
        yield f"resolver in a key {resolver}", f'{head}"${{{resolver}}}": 1\n', 0 if resolver == "oc.env" else 89
    for variable in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PATH", "LD_PRELOAD", "SSH_AUTH_SOCK", "SLURM_JWT", "MY_OWN"):
        yield f"variable {variable}", f"{head}lr: ${{oc.env:{variable}}}\n", 89
        yield f"variable with default {variable}", f"{head}lr: ${{oc.env:{variable},0.1}}\n", 89
    for entry in ("../../../etc/passwd", "/../x", "//etc/passwd", "file:///etc/passwd", "pkg://os", "adamw@hydra.callbacks",
                  "override /hydra/launcher: basic", "/hydra/callbacks: x", "hydra/job_logging: colorlog",
                  "adamw@hydra", "../task/gpt", "override /task: ../../x", "optional ../../x"):  # fmt: skip
        yield f"defaults {entry}", f"defaults:\n  - {entry}\n", 89
    for package in ("hydra.callbacks", "hydra", "optimizer", "_global_.hydra"):
        yield f"package {package}", f"# @package {package}\n{head}", 89
    yield "hydra key", "# @package _global_\nhydra:\n  callbacks:\n    x: {_target_: os.system}\n", 89
    yield "searchpath", "# @package _global_\nhydra: {searchpath: ['file:///tmp']}\n", 89
    yield "billion laughs", BILLION_LAUGHS, 78
    yield "a circle", "a: &a [*a]\n", 78
    yield "deep", "a: " + "[" * 5000 + "]" * 5000, 78
    yield "deep block", "".join(" " * depth + "a:\n" for depth in range(200)), 78
    yield "large", "a: " + "x" * MAX_BYTES, 78
    yield "many keys", "".join(f"a{number}: 1\n" for number in range(7000)), 78
    yield "merge of many", "a: &a {" + ",".join(f"k{number}: 1" for number in range(900)) + "}\n" + "".join(
        f"m{number}: {{<<: *a}}\n" for number in range(100)), 78  # fmt: skip
    yield "twice", f"{head}lr: 0.1\nlr: 0.2\n", 78
    yield "huge number", f"{head}lr: " + "9" * 5000 + "\n", 78
    yield "infinite", f"{head}lr: .inf\n", 78
    yield "not a number", f"{head}lr: .nan\n", 78
    yield "a date", f"{head}lr: 2024-02-31\n", 78
    yield "binary", f"{head}lr: !!binary aGVsbG8=\n", 78
    yield "a set", f"{head}lr: !!set {{a, b}}\n", 78
    yield "own tag", f"{head}lr: !evil x\n", 78
    yield "a path", f"{head}lr: !!python/object/apply:pathlib.Path [/etc]\n", 89
    yield "two documents", f"{head}---\n{head}", 78
    yield "a list", "- 1\n- 2\n", 78
    yield "a scalar", "just text\n", 78
    yield "nothing", "", 78
    yield "zeros", b"\x00" * 100, 78
    yield "latin", head.encode() + "lr: é\n".encode("latin-1"), 78
    yield "utf-16", f"{head}lr: 0.1\n".encode("utf-16"), 78
    yield "pickle", b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.", 78
    yield "list as a key", f"{head}? [a]\n: 1\n", 78
    yield "secret", f"{head}api_key: hunter2hunter2\n", 78
    yield "secret inside", f"{head}lr_scales: {{my_token: hunter2hunter2}}\n", 78
    yield "address with password", f"{head}lr: https://me:hunter2hunter2@host/x\n", 78


def sample_cases(cases: Iterator[Any], count: int, seed: int) -> list[Any]:
    """Return `count` random items."""
    every = list(cases)
    return random.Random(f"{seed} hostile").sample(every, min(len(every), count))


@pytest.mark.slow
def test_hostile_files_are_rejected_and_nothing_is_called(
    watch: list[tuple[str, str]], tmp_path: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    chosen = sample_cases(hostile_files(), amount(40, 1000), seed)
    (tmp_path / "optimizer").mkdir()
    for name, content, code in chosen:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / "optimizer" / "evil.yaml").write_bytes(data)
        error = attempt(("optimizer=evil",), tmp_path)
        assert error is not None, f"{name}: accepted as data"
        assert error.exit_code == (code or Exit.CONFIG), (name, error)
        assert "hunter2" not in str(error), name
        assert not watch, (name, watch)
        tally.tried += 1


def test_a_hostile_config_yaml_is_rejected(
    watch: list[tuple[str, str]], tmp_path: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    for name, content, _ in sample_cases(hostile_files(), amount(30, 1000), seed + 1):
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / "config.yaml").write_bytes(data)
        error = attempt((), tmp_path)
        assert error is not None, name
        assert error.exit_code in REFUSED, (name, error)
        assert not watch, (name, watch)
        tally.tried += 1


def test_special_files_and_escaping_links_are_rejected(watch: list[tuple[str, str]], tmp_path: Path) -> None:
    outside = tmp_path / "outside.yaml"
    outside.write_text("option: adamw\n")
    folder = tmp_path / "conf" / "optimizer"
    folder.mkdir(parents=True)
    (folder / "link.yaml").symlink_to(outside)
    (folder / "zero.yaml").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.yaml")
    for option, code in (("link", 89), ("zero", 89), ("pipe", 78)):
        error = attempt((f"optimizer={option}",), tmp_path / "conf")
        assert error is not None
        assert error.exit_code in (code, Exit.CONFIG), (option, error)
        assert not watch


def test_harmless_values_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    folder = tmp_path / "optimizer"
    folder.mkdir()
    (folder / "mine.yaml").write_bytes(b"\xef\xbb\xbfoption: adamw\r\nlr: 0.25\r\nbetas: &b [0.9, 0.99]\r\n")
    (tmp_path / "task").mkdir()
    own = tmp_path / "hardware"
    own.mkdir()
    (own / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /precision: bf16\n  - override /compile: 'off'\n"
        "data:\n  path: ${oc.env:SCRATCH}/data\noutput_root: ${oc.env:NOT_THERE_AT_ALL,here}\n".replace(
            "NOT_THERE_AT_ALL", "SLURM_TMPDIR"
        )
        + "hardware:\n  title: mine\n  devices: []\n"
    )
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    result = compose(Request(("optimizer=mine", "hardware=mine"), None, tmp_path))
    assert result.choices["optimizer"].options["lr"] == 0.25
    assert result.settings.data.path == "/scratch/me/data"
    assert result.settings.output_root == "here"
    assert result.choices["precision"].name == "bf16"


def test_no_allowed_environment_variable_is_a_secret() -> None:
    from runner.base.secret import is_secret_name

    assert not [name for name in ENVIRONMENT if is_secret_name(name)]


ANNOTATIONS = (
    "__import__('os').system('touch CANARY')", "exec('1')", "(lambda: 1/0)()", "'__import__(\"os\")'", "open('CANARY','w')",
    "[x for x in ().__class__.__bases__[0].__subclasses__()]", "int if print('x') else str", "Literal[exec('1')]",
    "Annotated[int, __import__('os')]", "Range(__import__('os'))", "typing.get_type_hints", "object.__class__",
)  # fmt: skip


def test_reading_the_options_of_a_task_does_not_run_it(watch: list[tuple[str, str]], tmp_path: Path) -> None:
    for annotation in ANNOTATIONS:
        file = tmp_path / "evil.py"
        file.write_text(
            f"def build(*, a: {annotation} = 1, b: {annotation!r} = 2):\n    pass\nraise SystemExit('it was run')\n"
        )
        read_functions.cache_clear()
        compile(file.read_text(), "warm", "exec")
        SEEN.clear()
        ARMED[0] = True
        try:
            keys = read_functions(file)["build"].keys
        finally:
            ARMED[0] = False
        assert keys["a"].default == 1
        assert [event for event in watch if event[0] != "compile"] == []
    assert not (tmp_path / "CANARY").exists()


def importable() -> Iterator[str]:
    """Yield the dotted names of callables in all modules that can be found, without importing them."""
    import ast

    for module in sorted(sys.stdlib_module_names):
        yield from (f"{module}.{name}" for name in ("main", "run", "open", "system", "call", "loads", "load"))
    for result in pkgutil.iter_modules():
        path = getattr(result.module_finder, "path", "")
        files = [Path(path) / f"{result.name}.py", *sorted((Path(path) / result.name).glob("**/*.py"))]
        for file in files:
            if file.is_file():
                try:
                    tree = ast.parse(file.read_bytes())
                except (SyntaxError, ValueError, RecursionError):
                    continue
                module = ".".join(file.relative_to(path).with_suffix("").parts).removesuffix(".__init__")
                for node in tree.body:
                    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                        yield f"{module}.{node.name}"


@pytest.fixture(scope="module")
def names() -> list[str]:
    """With ACCEL_RUN_FAULTS=long, all importable callables; otherwise one name per module of the standard library."""
    result = list(importable()) if IS_LONG else [
        f"{module}.main" for module in sorted(sys.stdlib_module_names)
    ]  # fmt: skip
    random.Random(SEED).shuffle(result)
    return result


@pytest.mark.slow
def test_guarded_files_cannot_name_any_callable(
    names: list[str], watch: list[tuple[str, str]], tmp_path: Path, tally: Tally
) -> None:
    """Write each name to a separate file, once as a `_target_` and once as a resolver."""
    file = tmp_path / "evil.yaml"
    file.write_text("_target_: os.system\n")
    for _ in range(2):  # reading the first files imports modules
        with pytest.raises(SecurityRefusal):
            read_guarded(file, tmp_path)
    before = set(sys.modules)
    for name in names:
        for content in (f"option: adamw\n_target_: {name}\n", f"option: adamw\nlr: ${{{name}:1}}\n"):
            file.write_text(content)
            SEEN.clear()
            ARMED[0] = True
            try:
                read_guarded(file, tmp_path)
            except SecurityRefusal:
                pass
            else:
                pytest.fail(f"accepted as data: {content}")
            finally:
                ARMED[0] = False
            assert not watch, (name, watch)
            tally.tried += 1
        assert set(sys.modules) == before, name


@pytest.mark.slow
def test_the_name_of_a_callable_never_calls_it(
    names: list[str], watch: list[tuple[str, str]], tmp_path: Path, amount: Callable[[int, int], int], tally: Tally
) -> None:
    """Write the names as values, many per file; write a few of them alone, in each position that a name can have."""
    (tmp_path / "optimizer").mkdir()
    file = tmp_path / "optimizer" / "evil.yaml"

    def assert_rejected(content: str, what: str) -> None:
        file.write_text(content)
        before = set(sys.modules)
        error = attempt(("optimizer=evil",), tmp_path)
        assert error is not None, what
        assert error.exit_code in REFUSED, (what, error)
        assert not watch, (what, watch)
        assert set(sys.modules) == before, what
        tally.tried += 1

    file.write_text("option: nothing\n")
    assert attempt(("optimizer=evil",), tmp_path) is not None  # reading the first file imports modules
    for name in names[: amount(2, 2000)]:
        assert_rejected(f"option: adamw\n_target_: {name}\n", f"_target_ {name}")
        assert_rejected(f"option: {name}\n", f"option {name}")
        assert_rejected(f"option: adamw\nkernel: {name}\n", f"value {name}")
        assert_rejected(f"option: adamw\nlr: ${{{name}:1}}\n", f"resolver {name}")
    for first in range(0, len(names), NAMES_PER_FILE):
        many = names[first : first + NAMES_PER_FILE]
        assert_rejected(f"option: adamw\nbetas: {json.dumps(many)}\n", f"{len(many)} from {many[0]}")


# ---------------------------------------------------------------- checkpoints and run folders

TASK = Path(__file__).with_name("task_to_attack.py")
ARGUMENTS = [
    "--task",
    str(TASK),
    "device=cpu",
    "monitor=off",
    "tracker=none",
    "dataloader.num_workers=0",
    "checkpoint.every=3",
]
COMMANDS = {
    "status": ["status", "hostile"],
    "train": ["train", *ARGUMENTS, "updates=9", "resume_allow=[updates]", "run=hostile"],
    "inference": ["inference", "run=hostile", "device=cpu", "monitor=off", "--task", str(TASK)],
    "resume": ["train", *ARGUMENTS, "updates=9", "resume_allow=[updates]", "run=new", "resume=outputs/hostile"],
    "bare inference": ["inference", "run=hostile", "device=cpu", "monitor=off"],
    "bare resume": ["resume", "hostile", "device=cpu", "monitor=off"],
    "export": ["export", "hostile", "format=safetensors", "--task", str(TASK)],
    "complete": ["complete", "--", "inference", "run=hostile", "inference."],
}
DOCUMENTED = {0, 65, 66, 73, 74, 77, 78, 87, 88, 89}

WATCH = """
import sys, os, resource, tempfile
DEFINING = ("collections/__init__.py", "dataclasses.py", "typing.py", "enum.py", "<frozen importlib._bootstrap>",
            "<frozen importlib._bootstrap_external>", "<frozen runpy>", "engine/contract/task_loading.py", "functools.py", "jit/frontend.py")
CHANGING = {"os.remove": 1, "os.rename": 2, "os.mkdir": 1, "os.rmdir": 1, "os.symlink": 2, "os.link": 2, "os.chmod": 1,
            "os.truncate": 1, "shutil.rmtree": 1, "os.chown": 1, "os.utime": 1}
NEVER = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.bind", "pickle.find_class",
         "os.forkpty", "os.mkfifo", "os.mknod")
OF_INVENTORY = (("runner.plan.inventory", "Inventory"), ("runner.plan.inventory", "Cpu"),  # with a CUDA build of torch,
                ("torch.torch_version", "TorchVersion"))  # a child process lists the GPUs
def watch(folder, report):
    home, private = os.path.realpath(folder), os.path.join(os.path.realpath(tempfile.gettempdir()), "accelrun-")
    out = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    own = {"pid": os.getpid()}
    def inside(path, at=-1):
        if isinstance(path, int):
            return True
        path = os.fsdecode(path)
        if at is not None and at >= 0 and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{at}"), path)
        folder, name = os.path.split(os.path.abspath(path))
        real = os.path.join(os.path.realpath(folder), name)
        return real.startswith((home + "/", "/dev/null", private, "/tmp/pymp-", "/dev/shm/", "/proc/")) or real == home
    def hook(event, arguments):
        bad = None
        if event in NEVER and arguments[0] != "uname" and arguments not in OF_INVENTORY:  # uname: of Python's `platform`
            bad = arguments
        elif event == "exec":
            caller = sys._getframe(1).f_code.co_filename
            if not caller.endswith(DEFINING) and "torch" not in caller:
                bad = (str(arguments[0]), caller)
        elif event == "open":
            path, mode, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and os.path.isabs(os.fsdecode(path) if not isinstance(path, int) else ""):
                if not inside(path): bad = arguments
        elif event in CHANGING:
            names, at = arguments[:CHANGING[event]], arguments[CHANGING[event]:]
            ats = at if event in ("os.rename", "os.link") else at[-1:]
            for number, name in enumerate(names):
                where = ats[number] if number < len(ats) and isinstance(ats[number], int) else -1
                if not inside(name, where): bad = arguments
        if bad is not None:
            os.write(out, (f"{event} {bad!r:.300}\\n").encode())
    sys.addaudithook(hook)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (2 << 30),) * 2)
"""


class Watched:
    """Runs commands in a fork server. Each reports forbidden audit events, and may allocate up to 2 GiB of memory."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server

    def start(self, args: list[str], folder: Path, report: Path) -> int:
        """Start a command that may change only files in `folder`."""
        before = f"{WATCH}\nwatch({str(folder)!r}, {str(report)!r})"
        return self.server.start(args, folder, {"XDG_CACHE_HOME": str(folder / ".cache")}, before)

    def run(self, args: list[str], folder: Path, report: Path) -> CompletedCommand:
        self.start(args, folder, report)
        return self.server.wait()


@pytest.fixture(scope="module")
def watched(server: ForkServer) -> Watched:
    return Watched(server)


@pytest.fixture(scope="module")
def trained(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 updates with two checkpoints. Tests attack copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    # fills the cache of compositions, to which a watched command may not write
    compose(Request(tuple(ARGUMENTS[2:]), TASK))
    result = watched.run(["train", *ARGUMENTS, "updates=6", "run=hostile"], folder, folder / "seen")
    assert result.code == 0, result.err
    assert (folder / "seen").read_text() == "", "a normal run must not cause events"
    assert watched.run(COMMANDS["export"], folder, folder / "seen").code == 0
    assert (folder / "seen").read_text() == "", "a normal export must not cause events"
    return folder / "outputs" / "hostile"


def snapshot_of(folder: Path) -> list[tuple[str, int, bytes]]:
    return [
        (str(path), path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    ]


def test_the_audit_hook_detects_calls(watched: Watched, tmp_path: Path) -> None:
    evil = tmp_path / "inside"
    evil.mkdir()
    (evil / "evil.py").write_text(
        "import subprocess, socket, os\nopen('../out', 'w').close()\nopen(os.path.abspath('../out'), 'w').close()\n"
        "subprocess.run(['true'])\nos.rename(os.path.abspath('../out'), os.path.abspath('../other'))\nexec('1')\n"
        "import pickle\npickle.loads(b'cposix\\nsystem\\n.')\n"
        "from runner import Task\n\ndef build() -> Task: ...\n"
    )
    report = tmp_path / "seen"
    watched.run(["train", "--task", "evil.py", "device=cpu", "updates=1"], evil, report)
    seen = report.read_text()
    for event in ("open", "subprocess.Popen", "os.rename", "exec", "pickle.find_class"):
        assert f"\n{event} " in f"\n{seen}", (event, seen)


def test_a_hostile_run_ends_every_command_without_a_traceback(
    watched: Watched, trained: Path, tmp_path: Path, amount: Callable[[int, int], int], seed: int, tally: Tally
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("untouched\n")
    known = snapshot_of(outside)
    cases = [(name, attack, command) for name, attack in attacks.attacks(outside) for command in COMMANDS]
    random.Random(seed).shuffle(cases)
    codes: dict[int, int] = {}
    for name, attack, command in cases[: amount(8, len(cases))]:
        folder = tmp_path / "work"
        shutil.copytree(trained, folder / "outputs" / "hostile", symlinks=True)
        try:
            attack(folder / "outputs" / "hostile")
        except (PermissionError, FileNotFoundError) as error:
            tally.skip(str(error).split(":")[0])
            shutil.rmtree(folder)
            continue
        report = tmp_path / "seen"
        pid = watched.start(COMMANDS[command], folder, report)
        alarm = threading.Timer(120.0, os.kill, (pid, 9))  # kills a command that hangs: its exit code fails the test
        alarm.start()
        result = watched.server.wait()
        alarm.cancel()
        messages = f"{command}, {name}: exit {result.code}\n{result.out[-500:]}\n{result.err[-3000:]}"
        assert result.code in DOCUMENTED, messages
        assert "Traceback" not in result.err, messages
        assert result.code != Exit.SOFTWARE, messages
        assert "overrides" not in name or "hunter2" not in result.out + result.err, messages
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", result.out + result.err), messages
        assert report.read_text() == "", f"{messages}\n{report.read_text()}"
        assert snapshot_of(outside) == known, messages
        if result.code:
            assert result.err.startswith("accel-run: ") or "\naccel-run: " in result.err, messages
        codes[result.code] = codes.get(result.code, 0) + 1
        shutil.rmtree(folder)
        tally.tried += 1
    tally.notes["codes"] = " ".join(f"{code}:{count}" for code, count in sorted(codes.items()))


def test_a_hostile_checkpoint_is_rejected_or_equal(
    trained: Path, tmp_path: Path, amount: Callable[[int, int], int], seed: int, tally: Tally
) -> None:
    """A checkpoint that is accepted has the bits of the original in each file that was not attacked."""
    from runner.durable.checkpoint import load
    from runner.engine.checkpoints.checkpoint_state import check_state
    from runner.tensors.bitwise import bitwise_equal

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("untouched\n")
    original = load(attacks.newest(trained))
    cases = [
        one
        for one in attacks.attacks(outside)
        if one[0].startswith(("manifest", "state", "model", "optimizer", "random"))
    ]
    random.Random(seed).shuffle(cases)
    for name, attack in cases[: amount(30, len(cases))]:
        run = tmp_path / "run"
        shutil.copytree(trained, run)
        attack(run)
        refusal = None
        try:
            result = check_state(load(attacks.newest(run)))
            tensors = {stem: result.tensors(stem) for stem in result.stems}
        except AccelRunError as error:
            refusal = error
        if refusal is None:
            assert result.update == original.update, name
            attacked = name.partition(" ")[0]
            for stem in tensors.keys() - {attacked}:
                there = original.tensors(stem)
                assert tensors[stem].keys() == there.keys(), (name, stem)
                assert all(bitwise_equal(value, there[key]) for key, value in tensors[stem].items()), (name, stem)
        else:
            assert refusal.exit_code in (65, 74), (name, refusal)
        shutil.rmtree(run)
        tally.tried += 1
    assert (outside / "canary").read_text() == "untouched\n"
