"""Trackers never block or end training, and count every row that they lose."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from runner.base.errors import MissingPackage
from runner.config.schema import read_functions
from runner.trackers import tracker as trackers
from runner.trackers.tracker import KILL_S, TRACKERS, Row, Tracker, TrackerProcess
from tests.waiting import wait_until
from tests.wandb_server import KEY, MARK, Server, log_all, marked, offline_rows, rows

ROOT = Path(trackers.__file__).parents[2]
LIMIT_S = 60.0  # reached only if there is a defect


@pytest.fixture(autouse=True)
def isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove accounts and settings and use an empty home directory; check that no process or thread remains."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)  # inherited by every started process
    yield
    wait_until_all_ended()
    assert [thread.name for thread in threading.enumerate() if thread.name == "tracker"] == []


def make(tmp_path: Path, previous_id: str | None = None, **options: Any) -> Tracker:
    config = {"optimizer": {"lr": 0.1}, "path": Path("x")}
    return TRACKERS["wandb"](tmp_path / "run", "a run", config, previous_id, **options)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow wandb a day to start or to receive a batch, so that only the time limit of `finish` can end it."""
    for name in ("OPEN_S", "ONLINE_INIT_S", "LOG_S"):
        monkeypatch.setattr(trackers, name, 86400.0)


def wait_until_all_ended() -> None:
    """Wait for the processes of a tracker. The process of wandb completes its folder after its parent has ended."""
    wait_until(lambda: not marked(os.environ[MARK]))


def wait_for_next_second() -> None:
    """Wait, because trackers name folders and files by the second."""
    second = int(time.time())
    wait_until(lambda: int(time.time()) != second, "the next second")


# Options and modes


@pytest.mark.parametrize("name", TRACKERS)
def test_the_yaml_file_of_a_tracker_matches_its_signature(name: str) -> None:
    keys = read_functions(Path(trackers.__file__))[name].keys
    given = yaml.safe_load((ROOT / "conf" / "tracker" / f"{name}.yaml").read_text())
    assert given == {key.name: key.default for key in keys.values()}


def test_yaml_files_and_trackers_correspond() -> None:
    assert {path.stem for path in (ROOT / "conf" / "tracker").glob("*.yaml")} == set(TRACKERS)


def test_the_null_tracker_has_the_same_methods(tmp_path: Path, screen: Callable[..., None]) -> None:
    tracker = TRACKERS["none"](tmp_path / "run", "a run", {}, None)
    tracker.start()
    tracker.replay(tmp_path / "metrics.jsonl")
    tracker.log({"update": 1})
    tracker.finish(1.0)
    assert (tracker.id, tracker.num_dropped) == (None, 0)
    screen(tracker.note)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "environ", "chosen"),
    [
        ("auto", {}, ("offline", "no API key")),
        ("auto", {"WANDB_API_KEY": KEY}, ("online", "")),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, ("offline", "WANDB_MODE=offline")),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "dryrun"}, ("offline", "WANDB_MODE=dryrun")),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, ("disabled", "WANDB_MODE=disabled")),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, ("online", "")),
        ("auto", {"WANDB_MODE": "online"}, ("offline", "no API key")),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, ("online", "")),
        ("online", {}, ("offline", "no API key")),
        ("offline", {"WANDB_API_KEY": KEY}, ("offline", "mode=offline")),
        ("disabled", {"WANDB_API_KEY": KEY}, ("disabled", "mode=disabled")),
    ],
)
def test_the_mode_depends_on_the_setting_the_environment_and_the_api_key(
    mode: str, environ: dict[str, str], chosen: tuple[str, str]
) -> None:
    assert trackers.choose_mode(mode, environ) == chosen


def test_a_key_in_netrc_is_used_only_for_its_server(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".netrc").write_text(f"machine wandb.example login user password {KEY}\n")
    (home / ".netrc").chmod(0o600)
    assert not trackers.has_key({"HOME": str(home)})
    assert trackers.has_key({"HOME": str(home), "WANDB_BASE_URL": "https://wandb.example"})
    (home / ".config" / "wandb").mkdir(parents=True)
    (home / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = https://wandb.example\n")
    assert trackers.has_key({"HOME": str(home)})
    assert not trackers.has_key({"HOME": str(home), "NETRC": str(tmp_path / "none")})
    (home / ".netrc").write_bytes(b"\xff\xfe nonsense")
    assert not trackers.has_key({"HOME": str(home)})


def test_a_disabled_tracker_starts_no_process(tmp_path: Path, screen: Callable[..., None]) -> None:
    tracker = make(tmp_path, mode="disabled")
    tracker.start()
    tracker.log({"update": 1})
    tracker.finish(1.0)
    screen(tracker.note)
    assert list((tmp_path / "run").iterdir()) == []


# The real wandb, offline


@pytest.mark.slow
def test_without_a_key_every_row_is_in_an_offline_folder(tmp_path: Path, screen: Callable[..., None]) -> None:
    tracker = make(tmp_path, tags=["t"], group="g")
    tracker.start()
    log_all(tracker, rows(0, 500))
    tracker.finish(LIMIT_S)
    held = offline_rows(tmp_path / "run")
    assert [step for step, _ in held] == list(range(500))
    assert all(row["update"] == step and row["train/loss"] == 1 / (step + 1) for step, row in held)
    assert all("val/loss" not in row for _, row in held)  # unknown values are omitted
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    screen(tracker.note.replace(str(folder), "FOLDER"))
    assert folder.name.endswith(f"-{tracker.id}")
    assert tracker.num_dropped == 0
    for path in (tmp_path / "run" / "wandb").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"{path} can be read by others"


@pytest.mark.slow
def test_a_resumed_offline_run_contains_each_update_once(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.start()
    log_all(first, rows(0, 60))
    first.finish(LIMIT_S)
    wait_for_next_second()
    metrics = tmp_path / "run" / "metrics.jsonl"
    # Rows 60 to 79 were never sent, and the last line was being written when the run was killed.
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows(0, 80)) + '{"update": 80, "tr')
    second = make(tmp_path, first.id)
    second.start()
    second.replay(metrics)
    with metrics.open("a") as file:  # rows written after the call are logged, not replayed
        file.write("\n" + json.dumps(rows(80, 81)[0]) + "\n")
    log_all(second, rows(50, 100))  # resumed from a checkpoint at 50: repeats updates
    second.finish(LIMIT_S)
    assert second.id == first.id
    assert [step for step, _ in offline_rows(tmp_path / "run")] == list(range(100))
    assert f"wandb sync {tmp_path / 'run' / 'wandb'}/offline-run-*-{first.id}" in second.note


RUN_TO_BE_KILLED = """
import sys, time
from pathlib import Path
from runner.trackers.tracker import TRACKERS, TrackerProcess
confirmed, ask = 0, TrackerProcess.ask
def counted(process, order, *limits):
    global confirmed
    answer = ask(process, order, *limits)
    confirmed += len(order.get("rows", ()))
    return answer
TrackerProcess.ask = counted
tracker = TRACKERS["wandb"](Path(sys.argv[1]), "a run", {}, None)
tracker.start()
for update in range(200):
    tracker.log({"update": update})
while confirmed < 200:
    time.sleep(0.01)
print("logged", flush=True)
time.sleep(60)
"""


def test_a_killed_run_leaves_its_rows_and_no_process(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN_TO_BE_KILLED, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"logged\n"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    wait_until_all_ended()  # the tracker process detects the end of the run and completes the folder
    assert [step for step, _ in offline_rows(tmp_path / "run")] == list(range(200))


# The real wandb with working and faulty servers


@pytest.mark.slow
def test_online_rows_are_sent_once_even_by_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        first = make(tmp_path)
        first.start()
        log_all(first, rows(0, 30))
        first.finish(LIMIT_S)
        assert server.updates == list(range(30))
        assert first.note == f"wandb: {server.url}/me/accel-run/runs/{first.id}"
        metrics = tmp_path / "run" / "metrics.jsonl"
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows(0, 40)))
        wait_for_next_second()
        second = make(tmp_path, first.id)
        second.start()
        second.replay(metrics)
        log_all(second, rows(25, 60))
        second.finish(LIMIT_S)
        assert server.updates == list(range(60))
        assert first.num_dropped == second.num_dropped == 0
    for path in tmp_path.rglob("*"):  # the folder of the run, and wandb's files in the home folder
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), f"the key is in {path}"


@pytest.mark.slow
def test_a_run_is_offline_if_the_server_refuses_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(status=401) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        tracker = make(tmp_path)
        tracker.start()
        log_all(tracker, rows(0, 50))
        tracker.finish(LIMIT_S)
        assert server.requests > 0
    assert [step for step, _ in offline_rows(tmp_path / "run")] == list(range(50))
    assert "401" in tracker.note
    assert KEY not in tracker.note


@pytest.mark.slow
def test_an_unresponsive_network_neither_blocks_the_run_nor_loses_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as black_hole:  # connects, but never answers
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{black_hole.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        tracker = make(tmp_path)
        tracker.start()
        log_all(tracker, rows(0, 100))
        black_hole.settimeout(LIMIT_S)
        with black_hole.accept()[0]:  # the tracker has connected and waits for an answer
            tracker.finish(3.0)
    wait_until_all_ended()
    held = [step for step, _ in offline_rows(tmp_path / "run")]
    assert len(held) + tracker.num_dropped >= 100  # stored but unconfirmed rows also count as dropped
    assert held == list(range(len(held)))


@pytest.mark.slow
def test_start_and_log_return_before_the_server_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()

    def mood() -> tuple[int, float]:
        may_answer.wait(LIMIT_S)
        return 200, 0.0

    with Server(mood=mood) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        tracker = make(tmp_path)
        tracker.start()
        wait_until(lambda: server.requests)
        log_all(tracker, rows(0, 100))
        assert server.history == []
        may_answer.set()
        tracker.finish(LIMIT_S)
        assert server.updates == list(range(100))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("does", [{"status": 500}, {"delay_s": 1.0}, {"lives_for": 0}, {"lives_for": 6}], ids=str)
def test_a_faulty_server_causes_no_duplicate_or_uncounted_lost_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: dict[str, Any]
) -> None:
    with Server(**does) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        tracker = make(tmp_path)
        tracker.start()
        log_all(tracker, rows(0, 60))
        wait_until(lambda: server.requests)
        log_all(tracker, rows(60, 100))
        tracker.finish(5.0)
        wait_until_all_ended()
        sent = server.updates
    # This is also true of the local folder of an online run, from which `wandb sync` uploads.
    held = [step for step, _ in offline_rows(tmp_path / "run", "*run-*")]
    assert held == list(range(len(held)))
    assert len(held) + tracker.num_dropped >= 100  # stored but unconfirmed rows also count as dropped
    assert sent == list(range(len(sent)))


# A fake wandb with configurable behavior

FAKE = """
import json, os, signal, time

class Settings:
    def __init__(self, **settings): pass

class Run:
    url, starting_step = "http://fake/run", 0

    def __init__(self, mode, does, folder):
        self.mode, self.does, self.num_rows = mode, does, 0
        self.settings = Settings()
        self.settings.sync_dir = folder
        self.path = os.path.join(folder, f"{mode}.jsonl")

    def define_metric(self, *names, **options): pass

    def log(self, row, step):
        self.num_rows += 1
        if self.num_rows == 50 and "in init" not in self.does:
            misbehave(self.does)
        with open(self.path, "a") as file:
            file.write(json.dumps({**row, "step": step}) + "\\n")

    def finish(self, exit_code):
        if self.does == "never ends": time.sleep(600)

def misbehave(does):
    if "hangs" in does: time.sleep(600)
    while "waits" in does and not os.path.exists(os.environ["FAKE_GO"]): time.sleep(0.01)
    if "dawdles" in does: time.sleep(1)
    if "raises" in does: raise RuntimeError("no: " + os.environ.get("WANDB_API_KEY", ""))
    if "exits" in does: raise SystemExit(1)
    if "interrupts" in does: signal.raise_signal(signal.SIGINT); raise KeyboardInterrupt
    if "dies" in does: os._exit(3)

def init(*, mode, dir, **named):
    does = json.loads(os.environ["FAKE_WANDB"]).get(mode, "ok")
    if "in init" in does:
        misbehave(does)
    return Run(mode, does, dir)

def teardown(): pass
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the behavior of wandb in each mode."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("FAKE_GO", str(tmp_path / "go"))
    return lambda **modes: monkeypatch.setenv("FAKE_WANDB", json.dumps(modes))


def fake_rows(tmp_path: Path, mode: str) -> list[int]:
    path = tmp_path / "run" / f"{mode}.jsonl"
    return [json.loads(line)["update"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "does", ["hangs in init", "raises in init", "exits in init", "interrupts in init", "dies in init"]
)
def test_every_row_is_stored_offline_if_wandb_fails_to_start_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any, does: str
) -> None:
    monkeypatch.setattr(trackers, "OPEN_S", 1.0)
    fake(online=does)
    tracker = make(tmp_path)
    tracker.start()
    log_all(tracker, rows(0, 1000))
    tracker.finish(LIMIT_S)
    assert fake_rows(tmp_path, "offline") == list(range(1000))
    assert tracker.num_dropped == 0
    assert "wandb sync" in tracker.note
    assert KEY not in tracker.note


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("does", ["raises", "exits", "dies"])
def test_a_run_continues_offline_if_wandb_fails(tmp_path: Path, fake: Any, does: str) -> None:
    fake(online=does)
    tracker = make(tmp_path)
    tracker.start()
    log_all(tracker, rows(0, 1000))
    tracker.finish(LIMIT_S)
    confirmed = 1000 - len(fake_rows(tmp_path, "offline"))
    assert set(fake_rows(tmp_path, "online")) | set(fake_rows(tmp_path, "offline")) == set(range(1000))
    assert fake_rows(tmp_path, "offline") == list(range(confirmed, 1000))
    assert confirmed < 50
    assert tracker.num_dropped == 0


@pytest.mark.parametrize("does", ["raises in init", "dies in init"])
def test_tracking_is_disabled_if_wandb_fails_online_and_offline(tmp_path: Path, fake: Any, does: str) -> None:
    fake(online=does, offline=does)
    tracker = make(tmp_path)
    tracker.start()
    log_all(tracker, rows(0, 100))
    tracker.finish(LIMIT_S)
    assert tracker.num_dropped == 100
    assert re.findall(r"\d+(?= rows)", tracker.note) == ["100"]


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("does", ["hangs in init", "hangs"])
def test_finish_returns_in_time_if_wandb_hangs(tmp_path: Path, fake: Any, does: str) -> None:
    fake(online=does, offline=does)
    tracker = make(tmp_path, mode="offline")
    tracker.start()
    log_all(tracker, rows(0, 100))
    tracker.finish(1.5)
    tracker.finish(1.5)  # a second call does nothing
    assert tracker.num_dropped == 100  # none of them was confirmed


@pytest.mark.usefixtures("endless")
def test_an_endless_upload_is_stopped_and_reported(tmp_path: Path, fake: Any) -> None:
    fake(online="never ends")
    tracker = make(tmp_path)
    tracker.start()
    log_all(tracker, rows(0, 40))
    wait_until(lambda: "http://fake/run" in tracker.note, "the tracker is online")
    tracker.finish(1.5)
    assert "--include-online" in tracker.note
    assert tracker.num_dropped == 0


def test_possibly_unflushed_rows_of_a_killed_process_count_as_dropped(tmp_path: Path, fake: Any) -> None:
    fake(offline="never ends")
    tracker = make(tmp_path, mode="offline")
    tracker.start()
    log_all(tracker, rows(0, 40))
    wait_until(lambda: fake_rows(tmp_path, "offline") == list(range(40)), "all rows were handed over")
    tracker.finish(1.5)
    assert tracker.num_dropped == 40


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("does", ["ok", "dawdles", "dawdles in init"])
def test_a_detached_process_keeps_every_row_and_ends(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """Rows that are not stored when the run ends are stored afterwards."""
    monkeypatch.setattr(trackers, "HAND_OVER_EXTRA_S", LIMIT_S)
    monkeypatch.setattr(trackers, "LOCAL_LINGER_S", 10 * LIMIT_S)
    fake(offline=does)
    tracker = make(tmp_path, mode="offline")
    tracker.start()
    monkeypatch.setenv("DATABASE_PASSWORD", "c0rrect-h0rse-battery")
    log_all(tracker, rows(0, 100))
    tracker.log({"update": 100, "text": os.environ["DATABASE_PASSWORD"]})
    tracker.finish(KILL_S, hand_over=True)
    wait_until_all_ended()
    assert os.environ["DATABASE_PASSWORD"] not in (tmp_path / "run" / "offline.jsonl").read_text()
    assert fake_rows(tmp_path, "offline") == list(range(101))
    assert tracker.num_dropped == 0
    assert "wandb sync" in tracker.note


def test_no_row_is_lost_if_the_thread_detaches_the_process_late(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, `finish` and the thread may both wake up at the time limit, in any order."""
    killed, detach, kill = threading.Event(), TrackerProcess.detach, TrackerProcess.kill

    def detach_late(process: TrackerProcess, orders: Sequence[Row]) -> None:
        killed.wait(2 * KILL_S)
        detach(process, orders)

    def note_and_kill(process: TrackerProcess) -> None:
        kill(process)
        killed.set()

    monkeypatch.setattr(trackers, "HAND_OVER_EXTRA_S", LIMIT_S)
    monkeypatch.setattr(TrackerProcess, "detach", detach_late)
    monkeypatch.setattr(TrackerProcess, "kill", note_and_kill)
    fake(offline="waits in init")
    tracker = make(tmp_path, mode="offline")
    tracker.start()
    log_all(tracker, rows(0, 100))
    wait_until(lambda: marked(os.environ[MARK]), "the tracker process has started")
    tracker.finish(1.0, hand_over=True)
    (tmp_path / "go").touch()
    wait_until_all_ended()
    assert fake_rows(tmp_path, "offline") == list(range(100))
    assert tracker.num_dropped == 0


@pytest.mark.parametrize("request_of", ["sink", "rows", "finish"])
def test_rows_of_a_late_thread_count_as_dropped(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, request_of: str
) -> None:
    """On a busy machine, the thread may not run between the time limit and the end of `finish`."""
    asked, finished, ask = threading.Event(), threading.Event(), TrackerProcess.ask

    def ask_late(process: TrackerProcess, order: Row, *limits: Any) -> dict[str, Any]:
        if request_of in order:
            asked.set()
            finished.wait(LIMIT_S)
        return ask(process, order, *limits)

    monkeypatch.setattr(TrackerProcess, "ask", ask_late)
    fake()
    tracker = make(tmp_path, mode="offline")
    tracker.start()
    log_all(tracker, rows(0, 100))
    if request_of != "finish":
        asked.wait(LIMIT_S)
    tracker.finish(1.0)
    num_dropped = tracker.num_dropped
    finished.set()
    wait_until(lambda: all(thread.name != "tracker" for thread in threading.enumerate()), "the thread has ended")
    assert num_dropped == 100


@pytest.mark.slow
@pytest.mark.parametrize("does", ["never ends", "hangs in init", "hangs"])
def test_a_detached_process_that_hangs_is_ended(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(trackers, "LOCAL_LINGER_S", 1.0)
    monkeypatch.setattr(trackers, "LINGER_S", 1.0)
    fake(online=does, offline=does)
    tracker = make(tmp_path)
    tracker.start()
    log_all(tracker, rows(0, 100))
    wait_until(lambda: marked(os.environ[MARK]), "the tracker process has started")
    tracker.finish(1.0, hand_over=True)
    assert "wandb sync" in tracker.note or tracker.num_dropped == 100
    wait_until_all_ended()


def test_rows_that_exceed_the_queue_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_ROWS", 100)
    fake(offline="waits in init")  # no row leaves the queue until the file `go` exists
    tracker = make(tmp_path, mode="offline")
    tracker.start()
    log_all(tracker, rows(0, 10_000))
    assert tracker.num_dropped == 9_900
    (tmp_path / "go").touch()
    tracker.finish(LIMIT_S)
    assert fake_rows(tmp_path, "offline") == list(range(100))
    assert re.findall(r"\d+(?= rows)", tracker.note) == ["9900"]


def test_the_tracker_process_has_its_own_session_and_ignores_signals(tmp_path: Path, fake: Any) -> None:
    fake()
    tracker = make(tmp_path)
    tracker.start()
    wait_until(lambda: "http://fake/run" in tracker.note, "the tracker is online")
    (child,) = (each for each in psutil.Process().children() if "tracker_process" in " ".join(each.cmdline()))
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SLURM signals every process
        child.send_signal(number)
    log_all(tracker, rows(0, 10))
    tracker.finish(LIMIT_S)
    assert fake_rows(tmp_path, "online") == list(range(10))


def test_steps_of_a_phase_continue_those_of_the_previous_phase(tmp_path: Path, fake: Any) -> None:
    fake()
    tracker = make(tmp_path)
    tracker.start()
    log_all(tracker, rows(0, 10))
    log_all(tracker, [{**row, "phase": "router"} for row in rows(0, 10)])
    tracker.finish(LIMIT_S)
    held = [json.loads(line) for line in (tmp_path / "run" / "online.jsonl").read_text().splitlines()]
    assert [row["step"] for row in held] == list(range(20))
    assert [row["update"] for row in held] == [*range(10), *range(10)]


def test_values_that_wandb_cannot_store_do_not_end_tracking(tmp_path: Path, fake: Any) -> None:
    fake()
    tracker = make(tmp_path)
    tracker.start()
    tracker.log({"update": 0, "path": tmp_path, "nan": float("nan"), ("a", "tuple"): 1})  # type: ignore[dict-item]
    tracker.log({"update": 1})
    tracker.finish(LIMIT_S)
    assert fake_rows(tmp_path, "online") == [0, 1]


def test_a_tracker_process_that_cannot_start_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python-here"))
    tracker = make(tmp_path)
    tracker.start()
    log_all(tracker, rows(0, 10))
    tracker.finish(5.0)
    assert tracker.num_dropped == 10
    assert "metrics.jsonl" in tracker.note


def test_rows_of_an_unstarted_tracker_count_as_dropped(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    log_all(tracker, rows(0, 10))
    tracker.finish(1.0)
    tracker.log({"update": 10})
    assert tracker.num_dropped == 11


# TensorBoard


def test_without_tensorboard_the_package_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"accel-run\[tensorboard\]"):
        TRACKERS["tensorboard"](tmp_path / "run", "a run", {}, None)


@pytest.mark.filterwarnings("default")  # warnings of tensorboard itself
def test_tensorboard_shows_each_update_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows(0, 50)))
    for first, last in ((0, 60), (50, 80)):
        tracker = TRACKERS["tensorboard"](tmp_path / "run", "a run", {}, None)
        tracker.start()
        if first:
            tracker.replay(metrics)
        log_all(tracker, rows(first, last))
        tracker.finish(LIMIT_S)
        assert tracker.note == f"tensorboard --logdir {tmp_path / 'run' / 'tensorboard'}"
        wait_for_next_second()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == list(range(80))
