"""The watchdog of a single-process run: hanging runs are reported and ended, and slow runs continue."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch

from runner.engine.process.watchdog import (
    CHECKPOINT,
    DATA,
    EVALUATION,
    MAX_RECENT,
    MIN_TIMEOUT_S,
    NUM_SETTLED,
    REPORT_TIMEOUT_S,
    START,
    SUMMARY,
    UPDATE,
    WORKER,
    WatchdogLimits,
    WorkDurations,
    format_hang,
)
from runner.host import stacks
from tests.forkserver import ForkServer
from tests.waiting import ON_DISK_AT_ONCE, wait_until

pytestmark = pytest.mark.timeout(120)

TASK = """
import glob, os, pdb, threading, time
import torch, torch.nn.functional as F
from torch import nn
from runner import Prediction, Task
from runner.durable import files
from runner.durable.system import System
from tests.engine.virtual_watchdog import hang, is_watched, pass_time

FOR_EVER = 10**6

class Stuck(System):
    def fsync(self, descriptor):
        hang()
        time.sleep(FOR_EVER)

class Slow(System):
    def fsync(self, descriptor):
        pass_time(0.5)

class Debugged:
    def readline(self):
        pass_time(4.0)
        return "c\\\\n"

class Rows(torch.utils.data.Dataset):
    def __init__(self, fault):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(320, 6, generator=g), torch.randint(3, (320,), generator=g)
        self.fault, self.num_read = fault, 0
    def __len__(self): return 320
    def __getitem__(self, index):
        self.num_read += 1
        if self.fault == "search": pass_time(0.0625)
        if self.fault == "data" and self.num_read > 200:
            open(f"hangs-{os.getpid()}", "w").close()
            while "SAVED" in os.environ and not glob.glob(os.environ["SAVED"]): time.sleep(0.01)
            hang()
            time.sleep(FOR_EVER)
        return self.x[index], self.y[index]

class Small(Task):
    def __init__(self, fault):
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.fault, self.update = fault, 0
    def begin_update(self, progress):
        self.update = progress.update
        self.fail("begin")
        saved = glob.glob("outputs/*/checkpoints/*/MANIFEST.json")
        if self.fault == "disk" and self.update >= 7 and saved: files._system = Stuck()
        if self.fault == "slow disk" and self.update == 7: files._system = Slow()
    def fail(self, place):
        if self.fault != place or self.update != 7: return
        if place not in ("pdb", "a while", "jump"): hang()
        if place == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        elif place == "pipe":
            os.read(os.pipe()[0], 1)
        elif place == "pdb":
            pdb.Pdb(stdin=Debugged(), stdout=open(os.devnull, "w")).set_trace()
        elif place == "a while":
            assert not is_watched()
        elif place == "jump":
            monotonic, perf_counter, now = time.monotonic, time.perf_counter, time.time
            time.monotonic, time.perf_counter = lambda: monotonic() + 1e4, lambda: perf_counter() + 1e4
            time.time = lambda: now() + 1e4
            pass_time(0.5)
        else:
            time.sleep(FOR_EVER)
    def dataset(self, split): return Rows(self.fault if split == "train" else "")
    def loss(self, model, batch):
        x, y = batch
        if self.fault == "slow" and model.training: pass_time(2.5)
        if self.fault == "disk": time.sleep(0.02)  # training must not end before the hang is detected
        if self.fault == "search" and self.update == 2: x = x * float("nan")
        if model.training:
            for place in ("loss", "lock", "pipe", "pdb", "a while", "jump"): self.fail(place)
        elif self.fault == "val" and self.update > 7:
            hang()
            time.sleep(FOR_EVER)
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)
    def summarize(self, metrics):
        if self.fault == "summary": pass_time(2.5)
        return metrics
    def predict(self, model, generator):
        if self.fault == "slow":
            for number in range(3):
                pass_time(2.5)
                yield Prediction({f"{number}.txt": "x"})
            return
        hang()
        time.sleep(FOR_EVER)
        yield

def build(*, fault: str = "") -> Task: return Small(fault)
""".replace("\\\\n", "\\n")
BASE = (
    "train --task task.py run=r updates=12 global_batch_size=32 log_every=1 evaluate.every=6 monitor=off"
    " watchdog.update_s=3 watchdog.data_s=3 watchdog.checkpoint_s=60"
)
COUNTED = "checkpoint.every=6updates"  # in a short run, the best checkpoint may exist only in memory
SOON = "checkpoint.every=5updates"
BY_THE_CLOCK = "checkpoint.every=0.002min updates=500"
VIRTUAL = {"IMPORT_FIRST": "tests.engine.virtual_watchdog"}
# Without these limits, only that of the operation under test can be exceeded while training continues.
NO_LIMIT = "watchdog.update_s=1e6"
NO_LIMITS = f"{NO_LIMIT} watchdog.data_s=1e6"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def processes_with(word: str) -> set[int]:
    """Return the live processes whose command line contains `word`."""
    result = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        if word in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            result.add(process.pid)
    return result


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "args", "message", "at"),
    [
        ("loss", "", "update 8 of phase train timed out", "in fail: time.sleep(FOR_EVER)"),
        ("begin", "", "update 7 of phase train timed out", "in fail: time.sleep(FOR_EVER)"),
        ("lock", "", "update 8 of phase train timed out", "in fail: lock.acquire()"),
        ("pipe", "", "update 8 of phase train timed out", "in fail: os.read(os.pipe()[0], 1)"),
        (
            "val",
            "",
            "a batch of the evaluation after update 12 of phase train timed out",
            "in loss: time.sleep(FOR_EVER)",
        ),
        ("data", "", "the next batch for update 7 of phase train timed out", "in __getitem__: time.sleep(FOR_EVER)"),
        ("data", f"dataloader.num_workers=1 {NO_LIMIT}", "the next batch for", "in __getitem__: time.sleep(FOR_EVER)"),
        ("disk", f"{SOON} {NO_LIMITS}", "the checkpoint of update", ""),
        ("disk", f"{BY_THE_CLOCK} {NO_LIMITS}", "the checkpoint of update", ""),
    ],
    ids=["loss", "begin_update", "lock", "pipe", "validation", "data", "worker", "disk", "disk during training"],
)
def test_a_hang_is_reported_with_its_location_and_leaves_no_processes(
    fault: str, args: str, message: str, at: str, server: ForkServer, folder: Path
) -> None:
    run = f"h{os.getpid()}"
    line = f"{BASE} task.fault={fault}".replace("run=r", f"run={run}")
    args = args if fault == "disk" else f"{args} {COUNTED}"
    changed = {word.partition("=")[0] for word in args.split()}
    line = " ".join([word for word in line.split() if word.partition("=")[0] not in changed] + args.split())
    before = "" if fault == "disk" else ON_DISK_AT_ONCE  # with "disk", training must continue during the save
    env = VIRTUAL | {"TMPDIR": str(folder / "tmp")}
    if "num_workers" in args:  # the worker prefetches
        env["SAVED"] = str(folder / "outputs" / run / "checkpoints" / "update-0000000006" / "MANIFEST.json")
    result = server.run(line, folder, env, before)
    assert result.code == 83, result.err
    assert message in result.err
    assert at in result.err
    assert "Traceback" not in result.err
    assert not processes_with(f"run={run}")
    assert not list((folder / "tmp").iterdir())
    directory = folder / "outputs" / run
    if fault == "disk":  # nothing more can be written to the folder
        assert re.search(r"last checkpoint: update \d+ ", result.err), result.err
        assert ".py:" in result.err, "the message has the stacks, which cannot be stored in a file"
        return
    error = json.loads((directory / "error.json").read_text())
    assert (error["exit_code"], message in error["cause"]) == (83, True)
    saved, reached = (6, 12 if fault == "val" else 6 if fault == "data" else 7)
    repeated = {0: "nothing is", 1: "1 update is"}.get(reached - saved, f"{reached - saved} updates are")
    assert f"\n           last checkpoint: update {saved} ({repeated} repeated)\n" in result.err
    assert (error["reached"], error["updates_repeated"]) == (reached, reached - saved)
    assert error["place"]["phase"] == "train"
    assert error["place"]["update"] in (reached, reached + 1)
    assert "\n\n" not in result.err
    assert json.loads((directory / "run.json").read_text())["state"] == "failed"
    assert "task.py" in (directory / "stacks.txt").read_text()


def test_a_hanging_prediction_is_reported_with_its_number(server: ForkServer, folder: Path) -> None:
    assert server.run(BASE, folder, VIRTUAL).code == 0
    result = server.run("inference run=r watchdog.first_update_s=3", folder, VIRTUAL)
    assert result.code == 83, result.err
    assert "prediction 1 timed out" in result.err
    assert "task.py" in (folder / "outputs/r/predictions/stacks.txt").read_text()


@pytest.mark.slow
def test_a_debugger_and_a_disabled_watchdog_have_no_time_limit(server: ForkServer, folder: Path) -> None:
    result = server.run([*BASE.split(), "task.fault=pdb"], folder, VIRTUAL)
    assert result.code == 0, result.err
    args = [word for word in BASE.split() if not word.startswith("watchdog")]
    result = server.run([*args, "task.fault=a while", "watchdog=off", "run=off"], folder, VIRTUAL)
    assert result.code == 0, result.err


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("is_there", [True, False], ids=["no disk space", "no temporary folder"])
def test_a_hang_is_reported_even_if_nothing_can_be_written(is_there: bool, server: ForkServer, folder: Path) -> None:
    """There is no checkpoint, so the message does not name one."""
    gone = folder / "gone"
    gone.mkdir()
    before = "import runner.host.stacks, runner.engine.process.watchdog as watchdog\n"
    if is_there:
        before += (
            "def full(*_): raise OSError(28, 'No space left on device')\n"
            "runner.host.stacks.os.memfd_create = runner.host.stacks.request_stacks = full\n"
            "report = watchdog._ExitOnHang._report\n"
            "def report_full(self, heartbeat): self.traces = watchdog.HangTraces(full, full); report(self, heartbeat)\n"
            "watchdog._ExitOnHang._report = report_full\n"
        )
    else:
        before += (
            "import shutil\n"
            "report = watchdog._ExitOnHang._report\n"
            f"def report_after(self, heartbeat): shutil.rmtree({str(gone)!r}); report(self, heartbeat)\n"
            "watchdog._ExitOnHang._report = report_after\n"
        )
    line = f"{BASE} task.fault=loss".replace("evaluate.every=6", "evaluate.every=0")
    result = server.run(line, folder, VIRTUAL | {"TMPDIR": str(gone)}, before)
    assert result.code == 83, result.err
    assert "time.sleep(FOR_EVER)" in result.err
    assert "no checkpoint yet" in result.err
    assert "(7 updates" in result.err
    assert "last checkpoint" not in result.err
    assert ("stacks.txt" in result.err) == (not is_there)
    assert (folder / "outputs/r/error.json").exists() == (not is_there)


def test_a_slow_disk_that_makes_progress_is_not_a_hang(server: ForkServer, folder: Path) -> None:
    """A save takes at least three seconds, but each of its steps takes less than the limit."""
    args = BASE.partition(" watchdog")[0] + f" {SOON} watchdog.checkpoint_s=1.5 {NO_LIMITS}"
    result = server.run([*args.split(), "task.fault=slow disk"], folder, VIRTUAL)
    assert result.code == 0, result.err
    assert (folder / "outputs/r/checkpoints/update-0000000012").is_dir()


SOON_OVER = "import runner.engine.process.watchdog as watchdog; watchdog.MIN_TIMEOUT_S = 2.0"  # faster than the default


@pytest.mark.slow
def test_updates_slow_from_the_start_are_not_hangs(server: ForkServer, folder: Path) -> None:
    args = " ".join(word for word in BASE.split() if not word.startswith("watchdog")).replace("updates=12", "updates=3")
    for fault in ("slow", "summary"):
        line = f"{args.replace('run=r', f'run={fault}')} evaluate.every=2 task.fault={fault}"
        result = server.run(line, folder, VIRTUAL, SOON_OVER)
        assert result.code == 0, result.err
    result = server.run("inference run=slow", folder, VIRTUAL, SOON_OVER)
    assert result.code == 0, result.err


def test_the_search_for_nonfinite_values_has_no_update_limit(server: ForkServer, folder: Path) -> None:
    args = BASE.replace("watchdog.data_s=3", "watchdog.data_s=60").replace("updates=12", "updates=4")
    result = server.run(f"{args} task.fault=search", folder, VIRTUAL)
    assert result.code == 82, result.err
    assert "at update 3" in result.err


def test_a_process_suspended_beyond_the_limit_continues(server: ForkServer, folder: Path) -> None:
    """All clocks jump by hours between two checks, as they do for a stopped process or a suspended machine."""
    result = server.run([*BASE.split(), "task.fault=jump"], folder, VIRTUAL)
    assert result.code == 0, result.err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_no_process_outlives_a_killed_run_and_the_next_run_cleans_up(
    start: str, server: ForkServer, folder: Path, short: Path
) -> None:
    """The workers hang, so they cannot notice that their parent has died."""
    run, place = f"k{os.getpid()}", {"TMPDIR": str(short)}
    args = f"{BASE} dataloader.num_workers=2 dataloader.start_method={start} task.fault=data watchdog=off"
    args = " ".join(word for word in args.split() if not word.startswith("watchdog.")).replace("run=r", f"run={run}")
    args = args.replace("updates=12", "updates=60").replace("evaluate.every=6", "evaluate.every=0")  # no saves
    pid = server.start(args.split(), folder, place)
    rows = folder / "outputs" / run / "metrics.jsonl"
    wait_until(lambda: rows.is_file() and rows.read_text().count("\n") > 3)
    wait_until(lambda: len(list(folder.glob("hangs-*"))) == 2, "both workers hang")
    others = {child.pid for child in psutil.Process(pid).children(recursive=True)}
    assert len(others) >= 2
    os.kill(pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not [one for one in others if psutil.pid_exists(one)])
    assert list(short.iterdir()), "the killed run leaves its folder"
    again = [word for word in args.split() if "fault" not in word]
    assert server.run(again, folder, place).code == 0
    assert not list(short.iterdir())


# ---------------------------------------------------------------- limits

LIMITS = WatchdogLimits(update_s=None, first_update_s=1800.0, data_s=7.0, checkpoint_s=600.0)


def test_the_limit_is_ten_times_the_longest_recent_update_with_a_minimum() -> None:
    done: set[str] = set()
    durations = WorkDurations(LIMITS, done, compiles=False)
    assert [durations.limit_s(kind) for kind in (START, UPDATE, DATA, CHECKPOINT)] == [1800.0, 1800.0, 1800.0, 600.0]
    done |= {UPDATE, DATA}
    durations.record(UPDATE, 1, 12.0)
    assert (durations.limit_s(UPDATE), durations.limit_s(DATA), durations.limit_s(EVALUATION)) == (120.0, 7.0, 1800.0)
    assert durations.limit_s(UPDATE, is_first=True) == 1800.0
    for number in range(MAX_RECENT):
        durations.record(UPDATE, number + 2, 1.0)
    assert durations.limit_s(UPDATE) == MIN_TIMEOUT_S


@pytest.mark.parametrize("kind", [UPDATE, DATA, EVALUATION, SUMMARY])
def test_the_limit_of_uniform_steps_is_ten_times_their_duration(kind: str) -> None:
    durations = WorkDurations(WatchdogLimits(None, 1800.0, None, 600.0), {kind}, compiles=False)
    for update in range(1, 10):
        durations.record(kind, update, 55.0)
        assert durations.limit_s(kind) == 550.0
        for _ in range(5):  # later work of the same update is instantaneous
            durations.record(kind, update, 0.0 if kind != EVALUATION else 55.0)


@pytest.mark.parametrize("update_s", [0.0, 0.3])
def test_a_long_first_step_counts_only_until_enough_steps_are_known(update_s: float) -> None:
    durations = WorkDurations(LIMITS, {UPDATE}, compiles=False)
    durations.record(UPDATE, 1, 240.0)
    for number in range(NUM_SETTLED):
        assert durations.limit_s(UPDATE) == 2400.0
        durations.record(UPDATE, number + 2, update_s)
    assert durations.limit_s(UPDATE) == MIN_TIMEOUT_S


def test_the_limit_with_compilation_allows_recompilation() -> None:
    durations = WorkDurations(LIMITS, {UPDATE}, compiles=True)
    for number in range(MAX_RECENT):
        durations.record(UPDATE, number + 1, 240.0 if number == 0 else 0.3)
    assert durations.limit_s(UPDATE) == 360.0


def test_a_hang_is_reported_within_a_minute() -> None:
    assert MIN_TIMEOUT_S + 2 * 0.25 + (stacks.ANSWER_S + 1.0) + REPORT_TIMEOUT_S + 1.0 < 60.0  # single process
    assert MIN_TIMEOUT_S + 2 * 0.25 + 2 * 0.5 + stacks.ANSWER_S + 3.0 < 60.0  # with several ranks


def test_the_first_stuck_data_worker_of_a_hang_is_shown() -> None:
    def stack(file: str) -> str:
        return f'Thread 0x0001 (most recent call first):\n  File "{file}", line 7 in read\n'

    idle = stack(torch.__file__)  # waits in a library
    text = format_hang({
        "rank 0": stack("/home/me/train.py"), f"{WORKER} 0": idle, f"{WORKER} 1": stack("/home/me/data.py"),
        f"{WORKER} 2": stack("/home/me/other.py"),
    })  # fmt: skip
    shown = [name for name in ("rank 0", f"{WORKER} 0", f"{WORKER} 1", f"{WORKER} 2") if name in text]
    assert shown == ["rank 0", f"{WORKER} 1"]


def test_the_advice_for_a_hang_names_the_setting_of_its_limit() -> None:
    known, unknown = format_hang({}, "watchdog.timeout_s=99"), format_hang({})
    assert known.startswith(unknown)
    assert known.endswith("watchdog.timeout_s=99")
