"""Trackers: where metrics go besides metrics.jsonl. They can neither hold training up nor raise into it."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from runner.base.errors import MissingPackage
from runner.base.secret import without_secrets
from runner.base.values import Positive

Row = Mapping[str, Any]

QUEUE_ROWS = 10_000  # rows that wait while wandb starts or is slow; more are left to metrics.jsonl
BATCH_ROWS = 200
OPEN_S = 60.0  # to import and start; imports are slow on network file systems
ONLINE_INIT_S = 25.0  # to reach the server; wandb's own limit is 90 s
LOG_S = 60.0  # to take one batch
OFFLINE_S = 4.0  # of the time to finish: kept so that a start online that hangs can still end in an offline folder
FAREWELL_S = 0.3  # of the time to finish: to kill the process and see the thread end


class Tracker:
    """The verbs of every tracker, and the one that tracks nothing: `note` says why."""

    def __init__(self, note: str) -> None:
        self._note = note

    @property
    def id(self) -> str | None:
        """The name under which the service continues this run; give it as `previous_id` when resuming."""
        return None

    @property
    def note(self) -> str:
        """Where the rows are, or why they are not tracked, in one line."""
        return self._note

    @property
    def num_dropped(self) -> int:
        """Rows that are only in metrics.jsonl."""
        return 0

    def start(self) -> None:
        """Begin in the background and return at once."""

    def replay(self, path: Path, from_update: int = 0) -> None:
        """Log the rows that metrics.jsonl holds now, from this update on, before any later row.

        To be called between `start` and the first `log` of a resumed run. wandb is given only what it does not have
        yet, so 0 is always right. Rows it has beyond the checkpoint stay as they are.
        """

    def log(self, row: Row) -> None:
        """Hand over one row; returns at once, never raises."""

    def finish(self, timeout_s: float = 30.0, *, exit_code: int = 0) -> None:
        """Wait until the rows are where they belong, at most `timeout_s`; leaves no process behind."""


@dataclass(frozen=True)
class Attempt:
    """One way to open a tracker.

    name      for the reader: "wandb online"
    order     what the process is to open
    where     folder and address once open -> the note
    unsent    folder -> what to add to the note when the end was cut short
    flush_s   seconds after which rows that were handed over are on the disk
    """

    name: str
    order: Mapping[str, Any]
    where: Callable[[str, str | None], str]
    unsent: Callable[[str], str] = lambda folder: ""
    flush_s: float = 3.0  # wandb: one second, see tracker_process.py, and time to be heard of


class BackgroundTracker(Tracker):
    """Rows go through a queue and a thread to a process in a session of its own.

    A process, because wandb may hang for minutes, end the interpreter or catch signals: it can be killed, and its
    import does not take the interpreter lock from the training. When one attempt fails the next begins, with the
    rows that were not confirmed.
    """

    def __init__(self, attempts: tuple[Attempt, ...], run_id: str | None = None, *, reason: str = "") -> None:
        super().__init__(f"{attempts[0].name}: starting")
        self._attempts, self._id = attempts, run_id
        self._reasons = [reason] if reason else []
        self._queue: queue.SimpleQueue[Row | Replay | None] = queue.SimpleQueue()  # None: the end
        self._batches = _batches(self._queue)
        self._unconfirmed: list[Row] = []
        self._recent: deque[tuple[float, Row]] = deque()  # handed over lately: may not be on the disk yet
        self._num_dropped = 0
        self._accepts = True
        self._ends_at = math.inf  # monotonic; set by finish
        self._exit_code = 0
        self._process: Process | None = None
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)

    @property
    def id(self) -> str | None:
        return self._id

    @property
    def note(self) -> str:
        return self._note + (f"; {self._num_dropped} rows are only in metrics.jsonl" if self._num_dropped else "")

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread to be had: rows are counted, the run goes on
            self._thread.start()

    def replay(self, path: Path, from_update: int = 0) -> None:
        with contextlib.suppress(OSError):  # no file, nothing to replay
            self._queue.put(Replay(path, from_update, path.stat().st_size))

    def log(self, row: Row) -> None:
        if self._accepts and self._queue.qsize() < QUEUE_ROWS:
            self._queue.put(dict(row))
        else:
            self._num_dropped += 1

    def finish(self, timeout_s: float = 30.0, *, exit_code: int = 0) -> None:
        if math.isfinite(self._ends_at):
            return
        self._exit_code, self._accepts = exit_code, False
        self._ends_at = time.monotonic() + timeout_s - FAREWELL_S
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(max(0.0, timeout_s - FAREWELL_S))
        if self._process is not None:
            self._process.kill()  # one that is born after this is not asked anything any more, and ends by itself
        if self._thread.is_alive():
            self._thread.join(FAREWELL_S)
        # A thread that hangs in spite of all that still owns the batches; what it holds was not confirmed either.
        left = [] if self._thread.is_alive() else [len(batch) for batch in self._batches]
        self._num_dropped += len(self._unconfirmed) + sum(left)

    def _work(self) -> None:
        try:
            if not any(self._feed(attempt) for attempt in self._attempts):
                self._note = f"tracker off, metrics.jsonl has every row ({'; '.join(self._reasons)})"
        except Exception as error:  # a fault in here must not end a training
            self._note = f"tracker off, metrics.jsonl has every row ({error!r})"
        self._accepts = False

    def _feed(self, attempt: Attempt) -> bool:
        """Give the rows to this attempt until the last one; False when it failed before."""
        kept_s = 0.0 if attempt is self._attempts[-1] else OFFLINE_S
        try:
            if time.monotonic() >= self._ends_at - kept_s:
                raise Failed("no time left to start it")
            keep = ("WANDB_",) if attempt.order.get("mode") == "online" else ()
            self._process = process = Process(keep)
        except (Failed, OSError) as error:
            self._reasons.append(f"{attempt.name}: {error}")
            return False
        with process:
            try:
                opened = process.ask(attempt.order, OPEN_S, lambda: self._ends_at - kept_s)["opened"]
                self._note = attempt.where(opened["folder"], opened["url"]) + _because(self._reasons)
                while self._unconfirmed or self._take():
                    process.ask({"rows": self._unconfirmed}, LOG_S, lambda: self._ends_at)
                    self._remember(attempt.flush_s)
            except Failed as error:
                self._fall_back(attempt, error)
                return False
            try:
                process.ask({"finish": self._exit_code}, math.inf, lambda: self._ends_at)
                process.let_end()
            except Failed as error:
                if time.monotonic() < self._ends_at:  # it broke, and was not cut short
                    self._fall_back(attempt, error)
                    return False
                self._note += attempt.unsent(opened["folder"])
        return True

    def _remember(self, flush_s: float) -> None:
        """The rows are confirmed; what is not older than `flush_s`, and the last of them, may still be lost."""
        now = time.monotonic()
        self._recent.extend((now, row) for row in self._unconfirmed)
        while len(self._recent) > len(self._unconfirmed) and self._recent[0][0] < now - flush_s:
            self._recent.popleft()
        self._unconfirmed = []

    def _fall_back(self, attempt: Attempt, error: Failed) -> None:
        """What the attempt may have lost is for the next one, which leaves out what is in a folder already."""
        self._reasons.append(f"{attempt.name}: {error}")
        self._unconfirmed = [*(row for _, row in self._recent), *self._unconfirmed]
        self._recent.clear()

    def _take(self) -> bool:
        self._unconfirmed = next(self._batches, [])
        return bool(self._unconfirmed)


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
    """Log to Weights & Biases, online where that works, else into an offline folder; the step is the update.

    project  where the run appears
    entity   user or team; null: the default of the account
    mode     auto: WANDB_MODE if set, else online with an API key and offline without one
    group    runs of one experiment share it
    tags     words to find the run by
    `config` is stored as it is: secrets must have been taken out.
    """
    chosen, reason = _choose_mode(mode, os.environ)
    if chosen == "disabled":
        return Tracker(f"wandb disabled ({reason}); metrics.jsonl has every row")
    run_id = previous_id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    order = {
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

    def sync(folder: str) -> str:
        return f"upload with: wandb sync {_fragments(folder, run_id) if previous_id else shlex.quote(folder)}"

    def unsent(folder: str) -> str:
        return f"; not all of it was uploaded, do: wandb sync --include-online {shlex.quote(folder)}"

    online = Attempt("wandb online", {**order, "mode": "online"}, lambda folder, url: f"wandb: {url or folder}", unsent)
    offline = Attempt(
        "wandb offline", {**order, "mode": "offline"}, lambda folder, url: f"wandb offline; {sync(folder)}"
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
    """Write TensorBoard event files into the run directory.

    flush_s  seconds between writes to the disk
    Raises MissingPackage where tensorboard is not installed.
    """
    must_be_installed("tensorboard")
    order = {"sink": "tensorboard", "run_dir": str(run_dir), "flush_s": flush_s}
    show = Attempt(
        "tensorboard", order, lambda folder, url: f"tensorboard --logdir {shlex.quote(folder)}", flush_s=flush_s
    )
    return BackgroundTracker((show,))


def wandb_mode(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return how `tracker=wandb` would log, online, offline or disabled, and why where that is not plain."""
    return _choose_mode("auto", environ)


def must_be_installed(tracker: str) -> None:
    """Raise MissingPackage for a tracker whose package is not here; wandb goes on without."""
    if tracker == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        fix = 'pip install tensorboard, which "accel-run[tensorboard]" brings; or say tracker=none'
        raise MissingPackage("tensorboard must be installed, but is not", where="tracker=tensorboard", fix=fix)


@dataclass(frozen=True)
class Replay:
    """The rows of metrics.jsonl from an update on, up to the size the file had."""

    path: Path
    from_update: int
    size: int

    def rows(self) -> Iterator[Row]:
        """Yield the rows; lines that cannot be read are left out."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            while file.tell() < self.size and (line := file.readline()):
                with contextlib.suppress(ValueError, TypeError):
                    row = json.loads(line)
                    if isinstance(row, dict) and int(row.get("update", 0)) >= self.from_update:
                        yield row


def _batches(rows: queue.SimpleQueue[Row | Replay | None]) -> Iterator[list[Row]]:
    """Yield what is there in lists of at most BATCH_ROWS, waiting for the first row of each; ends at None."""
    batch: list[Row] = []
    while True:
        if batch and rows.empty():
            yield batch
            batch = []
        item = rows.get()
        if item is None:
            break
        for row in item.rows() if isinstance(item, Replay) else (item,):
            batch.append(row)
            if len(batch) == BATCH_ROWS:
                yield batch
                batch = []
    if batch:
        yield batch


class Failed(Exception):
    """The process failed, ended, or did not answer in time."""


class Process:
    """runner.observe.tracker_process, running, and the line to it. Leaving the `with` block ends it."""

    def __init__(self, keep: tuple[str, ...] = ()) -> None:
        """Start it; of the environment's secrets it is given those whose names begin with `keep`."""
        self._line, theirs = socket.socketpair()
        self._heard = b""
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # -P: modules beside the script must not shadow what wandb imports
                    [sys.executable, "-P", str(Path(__file__).with_name("tracker_process.py")), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,  # nobody to ask
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl+C and signals to the group of the run do not reach it
                    env={"WANDB_ERROR_REPORTING": "false", **without_secrets(os.environ, keep=keep)},
                )
        except OSError:
            self._line.close()
            raise

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._process.wait()
        self._line.close()

    def let_end(self) -> None:
        """Give the process, which has nothing more to do, a moment to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def kill(self) -> None:
        """End the process at once; wandb's own service sees that its parent is gone and ends within a second."""
        self._process.kill()

    def ask(self, order: Row, limit_s: float, ends_at: Callable[[], float]) -> dict[str, Any]:
        """Return the answer to `order`. Raises Failed after `limit_s`, or at `ends_at()`, which may come nearer."""
        limit = time.monotonic() + limit_s
        try:
            self._line.settimeout(max(0.01, min(limit_s, ends_at() - time.monotonic(), LOG_S)))
            self._line.sendall(json.dumps(order, default=str, skipkeys=True).encode() + b"\n")
            while b"\n" not in self._heard:
                left_s = min(limit, ends_at()) - time.monotonic()
                if left_s <= 0:
                    raise Failed("no answer in time")
                self._line.settimeout(min(left_s, 0.1))
                try:
                    heard = self._line.recv(65536)
                except TimeoutError:
                    if self._process.poll() is None:
                        continue
                    heard = b""  # a process forked by the run may hold the other end open, so no end is heard
                if not heard:
                    raise Failed("its process ended")
                self._heard += heard
        except OSError as error:
            raise Failed(f"its process cannot be reached ({error})") from error
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer


def _choose_mode(mode: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return online, offline or disabled, and why where that is not plain from the setting."""
    if mode == "auto" and (asked := environ.get("WANDB_MODE")):
        known = {"online": "online", "run": "online", "disabled": "disabled"}.get(asked, "offline")
        if known != "online":
            return known, f"WANDB_MODE={asked}"
    elif mode in ("offline", "disabled"):
        return mode, f"mode={mode}"
    return ("online", "") if _has_key(environ) else ("offline", "no API key")


def _has_key(environ: Mapping[str, str]) -> bool:
    """Tell whether wandb would find credentials; they are looked at by nobody here."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environ.get("HOME", "/"))
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):  # ValueError: not text
            return netrc.netrc(path).authenticators(urlsplit(_server(environ, home)).netloc) is not None
    return False


def _server(environ: Mapping[str, str], home: Path) -> str:
    """Return the address of the wandb server: from the environment, wandb's settings file, or the public one."""
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ValueError, configparser.Error):
        settings.read(Path(environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb")) / "settings")
    stored = settings.get("default", "base_url", fallback="https://api.wandb.ai")
    return environ.get("WANDB_BASE_URL") or stored


def _fragments(folder: str, run_id: str) -> str:
    """Return a shell pattern for all folders of a run that was resumed offline; wandb joins them in order of time."""
    return f"{shlex.quote(str(Path(folder).parent))}/offline-run-*-{run_id}"


def _because(reasons: list[str]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else ""


TRACKERS: Mapping[str, Callable[..., Tracker]] = {"none": none, "wandb": wandb, "tensorboard": tensorboard}
