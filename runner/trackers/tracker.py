"""Send metrics to trackers in addition to metrics.jsonl. A tracker can neither block training nor make it fail."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import json
import math
import netrc
import os
import queue
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from runner.base.errors import MissingPackage
from runner.base.secret import drop_secrets, redact
from runner.base.values import Positive

Row = Mapping[str, Any]

QUEUE_ROWS = 10_000  # rows that wait while wandb starts or is slow; further ones are only in metrics.jsonl
BATCH_ROWS = 200
OPEN_S = 60.0  # timeout to import and start a tracker; imports are slow on network file systems
ONLINE_INIT_S = 25.0  # timeout to reach the server; wandb's own is 90 s
LOG_S = 60.0  # timeout to accept one batch of rows
FINISH_S = 2.0  # wait at the end of a run; after it, the tracker process sends the remaining rows by itself
OFFLINE_S = (
    4.0  # part of the time to finish that is reserved for falling back to an offline folder if going online hangs
)
HAND_OVER_EXTRA_S = 1.0  # as above, if rows are handed over to the process; also the extra time on a busy machine
HAND_OVER_S = 0.1  # timeout to send the last rows when they are handed over to the process
# Set by wandb's agent for a single run: with the same ID, the trials of a sweep would overwrite each other.
SINGLE_RUN_VARIABLES = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
LINGER_S = 8.0  # time for the process to send the last rows to a server after the run has exited or was killed
LOCAL_LINGER_S = 60.0  # the same for a local folder, which takes long only on a busy machine
KILL_S = 0.3  # part of the time to finish that is reserved for killing the process and joining the thread


class Tracker:
    """Interface of trackers; the base class tracks nothing, and `note` has the reason.

    id           ID of the run at the service; pass it as `previous_id` when resuming
    num_dropped  rows that are only in metrics.jsonl
    """

    id: str | None = None
    num_dropped = 0

    def __init__(self, note: str) -> None:
        self._note = note

    @property
    def note(self) -> str:
        """Line that states where the rows are stored, or why they are not tracked."""
        return self._note

    def start(self) -> None:
        """Start in the background; returns immediately."""

    def replay(self, path: Path) -> None:
        """Log the rows that metrics.jsonl holds now, before any later row.

        Call it between `start` and the first `log` of a resumed run. wandb receives only rows that it does not have
        yet; rows that it received after the checkpoint are not changed.
        """

    def log(self, row: Row) -> None:
        """Queue one row; never blocks or raises."""

    def finish(self, timeout_s: float = 30.0, *, exit_code: int = 0, hand_over: bool = False) -> None:
        """Wait up to `timeout_s` seconds until all rows are stored, and end the tracker process.

        hand_over  hand the remaining rows to the process, which exits some seconds later; `note` has the command that
                   uploads what is still missing. This may take HAND_OVER_EXTRA_S longer on a busy machine.
        """


@dataclass(frozen=True)
class Attempt:
    """One way to open a tracker.

    name             name in messages: "wandb online"
    request          request that opens the sink in the process
    describe         (folder, URL) -> note, once it is open
    describe_unsent  folder -> addition to the note if rows may be missing at the end
    later_note       note if the process is detached before it has reported its folder
    flush_s          seconds after which sent rows are on disk
    """

    name: str
    request: Mapping[str, Any]
    describe: Callable[[str, str | None], str]
    describe_unsent: Callable[[str], str] = lambda folder: ""
    later_note: str = ""
    flush_s: float = 3.0  # wandb: one second, see tracker_process.py, plus latency


class BackgroundTracker(Tracker):
    """Send rows through a queue and a thread to a separate process in its own session.

    wandb may hang for minutes, end the interpreter or catch signals; a process can be killed, and its imports do not
    hold the GIL of the training. If an attempt fails, the next one starts with the unconfirmed rows.
    """

    def __init__(self, attempts: tuple[Attempt, ...], run_id: str | None = None, *, reason: str = "") -> None:
        super().__init__(f"{attempts[0].name}: starting")
        self._attempts, self.id = attempts, run_id
        self._reasons = [reason] if reason else []
        self._queue: queue.SimpleQueue[Row | Replay | None] = queue.SimpleQueue()  # None: the end
        self._batches = self._read_batches()
        self._unconfirmed: list[Row] = []
        self._recent: deque[tuple[float, Row]] = deque()  # sent recently: may not be on disk yet
        # A thread that does not end in time still owns the lists above. So dropped rows are counted as the difference
        # between the rows that were queued and those that are safe.
        self._num_logged = self._num_replayed = self._num_safe = 0
        self._accepts_rows = True
        self._deadline = math.inf  # monotonic; set by finish
        self._hands_over = False  # set by finish
        self._exit_code = 0
        self._process: TrackerProcess | None = None
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)

    @property
    def note(self) -> str:
        return self._note + (f"; {self.num_dropped} rows are only in metrics.jsonl" if self.num_dropped else "")

    def start(self) -> None:
        # If no thread can be started, rows are counted as dropped, and the run continues.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def replay(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # no file, nothing to replay
            self._queue.put(Replay(path, path.stat().st_size))

    def log(self, row: Row) -> None:
        if self._accepts_rows and self._queue.qsize() < QUEUE_ROWS:
            self._num_logged += 1
            self._queue.put(dict(row))
        else:
            self.num_dropped += 1

    def finish(self, timeout_s: float = 30.0, *, exit_code: int = 0, hand_over: bool = False) -> None:
        if math.isfinite(self._deadline):
            return
        self._exit_code, self._accepts_rows, self._hands_over = exit_code, False, hand_over
        self._deadline = time.monotonic() + timeout_s - KILL_S
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(max(0.0, timeout_s - KILL_S))
        if hand_over:
            # The process ends by itself; if it were killed here, it would lose rows that the thread is about to hand
            # over.
            if self._thread.is_alive():
                self._thread.join(KILL_S + HAND_OVER_EXTRA_S)
        elif self._process is not None:
            self._process.kill()  # a process started after this receives no request and exits
        if self._thread.is_alive():
            self._thread.join(KILL_S)
        if not self._thread.is_alive():
            deque(self._batches, maxlen=0)  # counts the rows of a replay that the thread did not reach
        self.num_dropped += self._num_logged + self._num_replayed - self._num_safe

    def _run(self) -> None:
        try:
            if not any(self._run_attempt(attempt) for attempt in self._attempts):
                self._note = f"the tracker is off ({'; '.join(self._reasons)}); metrics.jsonl has every row"
        except Exception as error:  # a bug in the tracker must not end the training
            self._note = f"the tracker is off ({error!r}); metrics.jsonl has every row"
        self._accepts_rows = False

    def _run_attempt(self, attempt: Attempt) -> bool:
        """Send all rows with this attempt; return False if it failed."""
        is_last = attempt is self._attempts[-1]

        def limit() -> float:
            return self._deadline - (0.0 if is_last else HAND_OVER_EXTRA_S if self._hands_over else OFFLINE_S)

        try:
            if time.monotonic() >= limit():
                raise TrackerFailed("no time left to start it")
            keep = ("WANDB_",) if attempt.request.get("mode") == "online" else ()
            self._process = process = TrackerProcess(keep)
        except (TrackerFailed, OSError) as error:
            self._reasons.append(f"{attempt.name}: {error}")
            return False
        with process:
            opened: dict[str, Any] = {}
            try:
                opened = process.ask(attempt.request, OPEN_S, limit)["opened"]
                self._note = attempt.describe(opened["folder"], opened["url"]) + _format_reasons(self._reasons)
                while self._unconfirmed or self._next_batch():
                    process.ask({"rows": self._unconfirmed}, LOG_S, lambda: self._deadline)
                    self._confirm(attempt.flush_s)
            except TrackerFailed as error:
                if self._can_hand_over(process) and (is_last or opened):
                    if opened:
                        self._unconfirmed = []  # they were sent
                        self._note += attempt.describe_unsent(opened["folder"])
                    else:
                        self._note = attempt.later_note + _format_reasons(self._reasons)
                    self._hand_over(process)
                    return True
                self._fall_back(attempt, error)
                return False
            try:
                process.ask({"finish": self._exit_code}, math.inf, lambda: self._deadline)
                process.wait_for_exit()
            except TrackerFailed as error:
                if time.monotonic() < self._deadline:  # it failed before the time limit
                    self._fall_back(attempt, error)
                    return False
                unsent = attempt.describe_unsent(opened["folder"])
                self._note += unsent
                if self._can_hand_over(process):
                    process.detach([])
                elif not unsent:  # it is killed, so the rows of the last seconds may be lost
                    return True
            self._mark_all_safe()
        return True

    def _can_hand_over(self, process: TrackerProcess) -> bool:
        """Return True if the time limit is reached and the process may finish alone."""
        return self._hands_over and time.monotonic() >= self._deadline - 0.1 and process.is_running

    def _hand_over(self, process: TrackerProcess) -> None:
        """Send the remaining rows and the request to finish."""
        batches = [self._unconfirmed, *self._batches] if self._unconfirmed else list(self._batches)
        self._unconfirmed = []
        process.detach([*({"rows": batch} for batch in batches), {"finish": self._exit_code}])
        self._mark_all_safe()

    def _mark_all_safe(self) -> None:
        self._num_safe = self._num_logged + self._num_replayed

    def _confirm(self, flush_s: float) -> None:
        """Mark the rows as confirmed; those newer than `flush_s`, and the last batch, may still be lost."""
        now = time.monotonic()
        self._recent.extend((now, row) for row in self._unconfirmed)
        while len(self._recent) > len(self._unconfirmed) and self._recent[0][0] < now - flush_s:
            self._recent.popleft()
            self._num_safe += 1
        self._unconfirmed = []

    def _fall_back(self, attempt: Attempt, error: TrackerFailed) -> None:
        """Queue rows that the attempt may have lost for the next one, which skips rows that a folder already has."""
        self._reasons.append(f"{attempt.name}: {error}")
        self._unconfirmed = [*(row for _, row in self._recent), *self._unconfirmed]
        self._recent.clear()

    def _next_batch(self) -> bool:
        self._unconfirmed = next(self._batches, [])
        return bool(self._unconfirmed)

    def _read_batches(self) -> Iterator[list[Row]]:
        """Yield available rows in lists of at most BATCH_ROWS; block for the first row of each; stop at None."""
        batch: list[Row] = []
        while True:
            if batch and self._queue.empty():
                yield batch
                batch = []
            item = self._queue.get()
            if item is None:
                break
            for row in self._replayed(item) if isinstance(item, Replay) else (item,):
                batch.append(row)
                if len(batch) == BATCH_ROWS:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def _replayed(self, replay: Replay) -> Iterator[Row]:
        for row in replay.rows():
            self._num_replayed += 1
            yield row


def none(run_dir: Path, run_name: str, config: Mapping[str, Any], previous_id: str | None) -> Tracker:
    """Track nothing; metrics.jsonl has every row."""
    return Tracker("none (tracker=none); metrics.jsonl has every row")


def wandb(
    run_dir: Path,
    run_name: str,
    config: Mapping[str, Any],
    previous_id: str | None,
    *,
    project: str = "accel-run",
    entity: str | None = None,
    mode: Literal["auto", "online", "offline", "disabled"] = "auto",
    group: str | None = None,
    tags: list[str] = [],  # noqa: B006 - read as schema
) -> Tracker:
    """Log to Weights & Biases in a separate process: training neither waits for it nor fails with it.

    project  project of the run
    entity   user or team; null: the account's default
    mode     auto: WANDB_MODE if set, else online with an API key and offline without one
    group    group name, shared by the runs of an experiment
    tags     tags of the run
    `config` is stored unchanged: it must not contain secrets.
    """
    chosen, reason = choose_mode(mode, os.environ)
    if chosen == "disabled":
        return Tracker(f"wandb disabled ({reason}); metrics.jsonl has every row")
    run_id = previous_id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    request = {
        "sink": "wandb",
        "init_timeout_s": ONLINE_INIT_S,
        "run_dir": str(run_dir),
        "id": run_id,
        "name": run_name,
        "project": project,
        "entity": entity,
        "group": group,
        "tags": tags,
        "config": dict(config),
    }

    def describe_unsent(folder: str) -> str:
        return f"; not everything was uploaded; run: wandb sync --include-online {shlex.quote(folder)}"

    # All folders of a run that was resumed offline; wandb joins them in order of time.
    folders = f"{shlex.quote(str(run_dir / 'wandb'))}/offline-run-*-{run_id}"
    online = Attempt(
        "wandb online",
        {**request, "mode": "online", "linger_s": LINGER_S},
        lambda folder, url: f"wandb: {url or folder}",
        describe_unsent,
    )
    offline = Attempt(
        "wandb offline",
        {**request, "mode": "offline", "linger_s": LOCAL_LINGER_S},
        lambda folder, url: f"wandb offline; upload with: wandb sync {folders if previous_id else shlex.quote(folder)}",
        later_note=f"wandb offline, {_WRITTEN_LATER}; upload with: wandb sync {folders}",
    )
    return BackgroundTracker((online, offline) if chosen == "online" else (offline,), run_id, reason=reason)


def tensorboard(
    run_dir: Path,
    run_name: str,
    config: Mapping[str, Any],
    previous_id: str | None,
    *,
    flush_s: Positive = 10.0,
) -> Tracker:
    """Write TensorBoard event files into the run directory; needs the package tensorboard.

    flush_s  seconds between writes to the disk
    Raises MissingPackage if tensorboard is not installed.
    """
    require_installed("tensorboard")
    request = {"sink": "tensorboard", "run_dir": str(run_dir), "flush_s": flush_s, "linger_s": LOCAL_LINGER_S}
    show = Attempt(
        "tensorboard",
        request,
        lambda folder, url: f"tensorboard --logdir {shlex.quote(folder)}",
        later_note=f"tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))} ({_WRITTEN_LATER})",
        flush_s=flush_s,
    )
    return BackgroundTracker((show,))


def require_installed(tracker: str) -> None:
    """Raise MissingPackage if the package of the tracker is missing; without wandb, runs continue untracked."""
    if tracker == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        fix = 'pip install "accel-run[tensorboard]", or use tracker=none'
        raise MissingPackage(
            "needs the package tensorboard, which is not installed", where="tracker=tensorboard", fix=fix
        )


@dataclass(frozen=True)
class Replay:
    """Rows of metrics.jsonl, up to a file size."""

    path: Path
    size: int

    def rows(self) -> Iterator[Row]:
        """Yield the rows; invalid lines are omitted."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            while file.tell() < self.size and (line := file.readline()):
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row


class TrackerFailed(Exception):
    """The process failed, exited, or did not respond in time."""


class TrackerProcess:
    """A running runner.trackers.tracker_process and the socket to it. Leaving the `with` block ends it."""

    def __init__(self, keep: tuple[str, ...] = ()) -> None:
        """Start the process, which inherits only the secrets of the environment whose names start with `keep`."""
        self._socket, child_socket = socket.socketpair()
        self._received = b""
        self.is_detached = False
        _DETACHED[:] = [process for process in _DETACHED if process.poll() is None]  # reap zombies
        try:
            with child_socket:
                self._process = subprocess.Popen(
                    # -P: modules beside the script must not shadow what wandb imports
                    [
                        sys.executable,
                        "-P",
                        str(Path(__file__).with_name("tracker_process.py")),
                        str(child_socket.fileno()),
                    ],
                    pass_fds=[child_socket.fileno()],
                    stdin=subprocess.DEVNULL,  # no prompts
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl+C and signals to the group of the run do not reach it
                    env={"WANDB_ERROR_REPORTING": "false", **drop_secrets(os.environ, keep=keep)},
                )
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> TrackerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_detached:
            _DETACHED.append(self._process)
            return
        self.kill()
        self._process.wait()
        self._socket.close()

    def wait_for_exit(self) -> None:
        """Wait a moment for the process to exit after its last request."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def detach(self, requests: Sequence[Row]) -> None:
        """Send the last requests without waiting for answers; the process exits within its `linger_s`."""
        self.is_detached = True
        with contextlib.suppress(OSError):  # rows that do not fit into the socket buffer are in metrics.jsonl
            self._socket.settimeout(HAND_OVER_S)
            for request in requests:
                self._socket.sendall(_encode(request))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a process forked by the run may keep this end open
        self._socket.close()

    def kill(self) -> None:
        """Kill the process; wandb's service notices that its parent is gone and exits within a second."""
        self._process.kill()

    def ask(self, request: Row, limit_s: float, deadline: Callable[[], float]) -> dict[str, Any]:
        """Return the answer to `request`. Raises TrackerFailed after `limit_s`, or at `deadline()` if earlier."""
        limit = time.monotonic() + limit_s
        try:
            self._socket.settimeout(max(0.01, min(limit_s, deadline() - time.monotonic(), LOG_S)))
            self._socket.sendall(_encode(request))
            while b"\n" not in self._received:
                left_s = min(limit, deadline()) - time.monotonic()
                if left_s <= 0:
                    raise TrackerFailed("no answer in time")
                self._socket.settimeout(min(left_s, 0.1))
                try:
                    data = self._socket.recv(65536)
                except TimeoutError:
                    if self._process.poll() is None:
                        continue
                    data = b""  # a process forked by the run may keep the other end open, which hides the EOF
                if not data:
                    raise TrackerFailed("its process ended")
                self._received += data
        except OSError as error:
            raise TrackerFailed(f"its process cannot be reached ({error})") from error
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise TrackerFailed(answer["failed"])
        return answer


def _encode(request: Row) -> bytes:
    """Return a request to the process as a line, without secrets."""
    return redact(json.dumps(request, default=str, skipkeys=True)).encode() + b"\n"


def choose_mode(mode: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return online, offline or disabled, and the reason, which is empty for online."""
    if mode == "auto" and (variable := environ.get("WANDB_MODE")):
        normalized = {"online": "online", "run": "online", "disabled": "disabled"}.get(variable, "offline")
        if normalized != "online":
            return normalized, f"WANDB_MODE={variable}"
    elif mode in ("offline", "disabled"):
        return mode, f"mode={mode}"
    return ("online", "") if has_key(environ) else ("offline", "no API key")


def has_key(environ: Mapping[str, str]) -> bool:
    """Return whether wandb would find credentials; their values are not used."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environ.get("HOME", "/"))
    netrc_path = environ.get("NETRC")
    for path in [Path(netrc_path)] if netrc_path else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):  # ValueError: not text
            settings = configparser.ConfigParser(interpolation=None)
            with contextlib.suppress(OSError, ValueError, configparser.Error):
                settings.read(Path(environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb")) / "settings")
            stored = settings.get("default", "base_url", fallback="https://api.wandb.ai")
            return (
                netrc.netrc(path).authenticators(urlsplit(environ.get("WANDB_BASE_URL") or stored).netloc) is not None
            )
    return False


def _format_reasons(reasons: list[str]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else ""


_WRITTEN_LATER = "written in the seconds after the end of the run; metrics.jsonl has every row"
# Kept until they exit: Python warns if a running Popen object is collected.
_DETACHED: list[subprocess.Popen[bytes]] = []

TRACKERS: Mapping[str, Callable[..., Tracker]] = {"none": none, "wandb": wandb, "tensorboard": tensorboard}
