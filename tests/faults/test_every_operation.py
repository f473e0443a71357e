"""Promises hold if any file operation fails, or if the process is killed at any file operation."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import AccelRunError, StorageError
from runner.durable import checkpoint, files
from runner.durable.directory import RunDirectory
from runner.durable.system import System
from runner.host import dirfd
from tests.faults.crash_states import states
from tests.faults.histories import BY_NAME, ROWS, SHORT, History, check, check_checkpoints, snapshot
from tests.faults.recording import Acknowledge, Faults, Killed, Quick, Recording
from tests.faults.tallies import IS_LONG, Tally

KINDS = ("EIO", "ENOSPC", "short", "killed half way", "killed after", "link")
if IS_LONG:  # other errnos take the same path, and "before" one operation equals "after" the previous one
    KINDS += ("EDQUOT", "EINTR", "killed before")
PAIRS = [("EIO", "EIO"), ("ENOSPC", "killed after"), ("short", "EIO"), ("killed half way", "EIO")]
OF_WRITES = ("short", "killed half way")


def release_locks_and_folders() -> None:
    """Release locks and close folders, as happens when the process ends."""
    files.close_inherited_locks()
    dirfd.unpin_all()


class Attempt:
    """A history with injected failures, in a new folder.

    promised  what the history had promised when it ended
    ended     None, the error of the product, or Killed
    """

    def __init__(self, history: History, at: Mapping[int, str], root: Path, inner: System | None = None) -> None:
        self.root = root
        self.promised: dict[str, Any] = {}
        self.ended: BaseException | None = None
        root.mkdir()
        victim = root.with_name("victim")
        victim.write_text("untouched")
        with files.use_system(Quick()):
            history.prepare(root)
        self.faults = Faults(at, inner, victim)
        with self.faults.active():
            try:
                history.act(root, self.promised.__setitem__)
            except (AccelRunError, Killed) as error:
                self.ended = error
        release_locks_and_folders()
        assert victim.read_text() == "untouched", "no file may be written through a link"
        for path in [victim, *(path for path in root.rglob("*") if path.is_symlink())]:
            path.unlink()


def run_and_check(history: History, at: Mapping[int, str], root: Path) -> Attempt:
    """Run the history with these failures, and assert that its promises hold."""
    attempt = Attempt(history, at, root)
    messages = f"{history.name}, {at}, {[attempt.faults.trace[number] for number in attempt.faults.met]}"
    try:
        if isinstance(attempt.ended, AccelRunError):
            assert attempt.ended.problems, "an error must describe a problem"
            assert attempt.ended.problems[0].where, "an error must name its location"
        with files.use_system(Quick()):
            history.check(root, attempt.promised)
    except Exception as error:
        raise AssertionError(f"{messages}: {attempt.ended!r}\n{type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(root)
    return attempt


def test_every_system_call_can_be_recorded_and_can_fail() -> None:
    calls = {name for name in vars(System) if not name.startswith("_")}
    assert calls <= set(vars(Faults))
    assert calls - set(vars(Recording)) == {"begin_write_back"}, (
        "every call that can change the state after a crash must be recorded"
    )


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("history", SHORT, ids=lambda history: history.name)
def test_promises_hold_if_any_operation_fails(
    history: History, memory: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    trace = run_and_check(history, {}, memory / "whole").faults.trace
    whole = Attempt(history, {}, memory / "once").promised
    every = [
        (number, kind)
        for (number, (operation, _)), kind in itertools.product(enumerate(trace), KINDS)
        if (kind not in OF_WRITES or operation == "write") and (kind != "link" or operation == "open")
    ]
    chance = random.Random(f"{seed} {history.name} once")
    for number, kind in chance.sample(every, min(len(every), amount(60, len(every)))):
        attempt = run_and_check(history, {number: kind}, memory / "attempt")
        assert attempt.faults.met == [number]
        if attempt.ended is None:
            assert attempt.promised == whole, f"{history.name}, {kind} at {trace[number]}: continued without a message"
        if kind == "short":
            assert attempt.ended is None, f"{history.name}: a short write must be continued"
        tally.tried += 1
    tally.notes["operations"] = len(trace)


class Careless(Quick):
    """A system that drops some of the flags of open."""

    def __init__(self, without: int) -> None:
        self.without = without

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return super().open(path, flags & ~self.without, mode)


@pytest.mark.parametrize(
    ("without", "is_detected"),
    [(os.O_EXCL | os.O_NOFOLLOW, True), (os.O_EXCL, False), (os.O_NOFOLLOW, False)],
    ids=["without both", "without O_EXCL, O_NOFOLLOW rejects the link", "without O_NOFOLLOW, O_EXCL rejects the link"],
)
def test_opening_files_without_protection_against_links_is_detected(
    memory: Path, without: int, is_detected: bool
) -> None:
    history = next(one for one in SHORT if one.name == "the first save of a run")
    trace = Attempt(history, {}, memory / "whole").faults.trace
    manifest = next(
        at for at, (name, path) in enumerate(trace) if name == "open" and path.endswith(checkpoint.MANIFEST)
    )
    if is_detected:
        with pytest.raises(AssertionError, match="through a link"):
            Attempt(history, {manifest: "link"}, memory / "attempt", Careless(without))
    else:
        assert isinstance(
            Attempt(history, {manifest: "link"}, memory / "attempt", Careless(without)).ended, StorageError
        )


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("history", SHORT, ids=lambda history: history.name)
def test_promises_hold_if_any_two_operations_fail(
    history: History, memory: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    num_operations = len(run_and_check(history, {}, memory / "whole").faults.trace) + 4  # cleaning up adds some
    pairs = list(itertools.product(itertools.combinations(range(num_operations), 2), PAIRS))
    chance = random.Random(f"{seed} {history.name}")
    for numbers, kinds in chance.sample(pairs, min(len(pairs), amount(40, len(pairs)))):
        attempt = run_and_check(history, dict(zip(numbers, kinds, strict=True)), memory / "attempt")
        if len(attempt.faults.met) == 2:
            tally.tried += 1
        else:
            tally.skip("ended at the first failure")


def test_a_torn_row_is_truncated_later_if_truncation_fails(memory: Path) -> None:
    history = replace(BY_NAME["a log"], act=lambda *_: None)
    failing = {2: "short", 3: "ENOSPC", 4: "ENOSPC"}  # after opening the file and syncing its folder
    (memory / "run").mkdir()
    faults = Faults({number + 2: kind for number, kind in failing.items()})
    with faults.active(), files.AppendLog(memory / "run" / "metrics.jsonl") as log:
        log.write(ROWS[0].decode())
        with pytest.raises(StorageError):
            log.flush()
        assert [faults.trace[number][0] for number in faults.met] == ["write", "write", "truncate"]
        log.write(ROWS[1].decode())
        log.flush()
        assert log.length == len(ROWS[0] + ROWS[1])
    history.check(memory / "run", {"rows": 2})


def test_a_log_is_truncated_only_between_lines(memory: Path) -> None:
    with files.AppendLog(memory / "metrics.jsonl") as log:
        log.write(ROWS[0].decode())
        log.write(ROWS[1].decode())
        log.flush()
        log.cut(len(ROWS[0]) + 5)
        log.write(ROWS[2].decode())
    assert (memory / "metrics.jsonl").read_bytes() == ROWS[0] + ROWS[2]


# A power cut after a failure that the program survived


def _start_and_save(root: Path, promise: Callable[[str, Any], None]) -> None:
    with RunDirectory.create_or_open(root / "runs", "one") as run:
        result = checkpoint.recover(run.checkpoints).checkpoint
        num_saved = int(result is not None)
        if result:
            promise("update", result.update)  # a finished run saves nothing more
        for update in range(result.update + 1 if result else 1, 4):
            with suppress(StorageError):  # training continues
                checkpoint.save(run.checkpoints, snapshot(update))
                promise("update", update)
                num_saved += 1
                promise("saved", num_saved)
                checkpoint.retain(run.checkpoints, 2)


def _check_run(root: Path, promised: Mapping[str, Any]) -> None:
    check_checkpoints(
        root / "runs" / "one" / "checkpoints", promised.get("update", 0), num_saved=promised.get("saved", 0)
    )


def start_until_finished(at: Mapping[int, str], root: Path) -> tuple[Recording, Faults]:
    """Start a run repeatedly until it finishes, despite the failures."""
    root.mkdir()
    recording = Recording(root)
    faults = Faults(at, recording)
    with faults.active():
        for _ in range(5):
            try:
                _start_and_save(root, recording.acknowledge)
                break
            except Killed:
                faults.restart()
                release_locks_and_folders()
            except AccelRunError:
                continue
    return recording, faults


NAMED = ("mkdir", "rename", "fsync", "open")  # operations that affect names


@pytest.mark.slow
def test_guarantees_hold_after_a_failure_followed_by_a_crash(
    memory: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    history = History("a run that is started until it ends", _start_and_save, _check_run)
    trace = start_until_finished({}, memory / "whole")[1].trace
    injections = list(itertools.product(range(len(trace)), ("EIO", "killed after", "killed half way")))
    possible = [(n, kind) for n, kind in injections if kind not in OF_WRITES or trace[n][0] == "write"]
    usual = [(n, kind) for n, kind in possible if trace[n][0] in NAMED]
    count = amount(12, len(possible))
    chosen = possible if count >= len(possible) else random.Random(seed).sample(usual, min(len(usual), count))
    for number, kind in chosen:
        recording, faults = start_until_finished({number: kind}, memory / "run")
        shutil.rmtree(memory / "run")
        assert faults.met == [number]
        done = recording.operations
        struck = faults.struck[0]
        promises = [place + 1 for place, one in enumerate(done) if isinstance(one, Acknowledge) and place >= struck]
        points = {*range(struck, min(struck + 8, len(done) + 1)), *promises[:1]}
        for state in states(recording.start, done, 0, seed, points=points):
            check(history, state, memory / "state")
            tally.tried += 1
    tally.notes["failures"] = len(chosen)


def _save_in_new_folders(root: Path, promise: Callable[[str, Any], None]) -> None:
    files.new_directory(root / "made")  # like `mkdir -p`, without a sync
    files.new_directory(root / "made" / "by-hand")
    _start_and_save(root / "made" / "by-hand", promise)


def _check_in_folders(root: Path, promised: Mapping[str, Any]) -> None:
    _check_run(root / "made" / "by-hand", promised)


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_run_in_newly_created_folders_survives_a_crash(
    memory: Path, monkeypatch: pytest.MonkeyPatch, is_synced: bool
) -> None:
    history = History("new folders", _save_in_new_folders, _check_in_folders)
    if not is_synced:
        monkeypatch.setattr(files, "sync_ancestors", lambda _: None)
    recording = history.record(memory / "run")
    places = [place + 1 for place, one in enumerate(recording.operations) if isinstance(one, Acknowledge)]
    result = states(recording.start, recording.operations, 0, 0, points=places)
    if is_synced:
        for state in result:
            check(history, state, memory / "state")
    else:
        with pytest.raises(AssertionError, match="update 0 was found, but 1 was acknowledged"):
            for state in result:
                check(history, state, memory / "state")


def _sync_again(root: Path, promise: Callable[[str, Any], None]) -> None:
    with files.AppendLog(root / "metrics.jsonl") as log:
        for number in (0, 1, 2):
            log.write(ROWS[number].decode())
            with suppress(StorageError):
                log.sync()
                promise("rows", number + 1)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_no_row_is_promised_after_a_failed_log_sync(
    memory: Path, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    history = replace(BY_NAME["a log"], act=_sync_again)
    trace = Attempt(history, {}, memory / "whole").faults.trace
    syncs = [number for number, (name, _) in enumerate(trace) if name == "fsync"]
    (memory / "run").mkdir()
    recording = Recording(memory / "run")
    if is_forgotten:  # lint-tests: private: simulates the defect, which no public argument should allow
        monkeypatch.setattr(files.AppendLog, "_sync_error", property(lambda _: None, lambda *_: None), raising=False)
    with Faults({syncs[-2]: "EIO"}, recording).active():
        _sync_again(memory / "run", recording.acknowledge)
    result = states(recording.start, recording.operations, 0, 0)
    if not is_forgotten:
        for state in result:
            check(history, state, memory / "state")
    else:
        with pytest.raises(AssertionError, match="bytes of rows were promised"):
            for state in result:
                check(history, state, memory / "state")


# Failing reads


@contextmanager
def failing_read(at: int, code: int) -> Iterator[list[str]]:
    """Make the read operation numbered `at` fail. Yield the list of operations."""
    calls: list[str] = []

    def intercept(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(subject: Any, *rest: Any, **keywords: Any) -> Any:
            if name == "open" and rest and rest[0] & (os.O_CREAT | os.O_WRONLY | os.O_DIRECTORY):
                return real(subject, *rest, **keywords)
            calls.append(f"{name} {subject}")
            if len(calls) - 1 == at:
                raise OSError(code, os.strerror(code))
            return real(subject, *rest, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "listdir", "lstat"):
            patch.setattr(os, name, intercept(name, getattr(os, name)))
        yield calls


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES], ids=errno.errorcode.get)
def test_a_failing_read_during_recovery_or_retention_loses_no_checkpoint(memory: Path, code: int, tally: Tally) -> None:
    def fill(directory: Path) -> Path:
        with files.use_system(Quick()):
            for update in (1, 2, 3, 4):
                checkpoint.save(directory, snapshot(update))
        return directory

    for act in (lambda path: checkpoint.retain(path, 2), checkpoint.recover):
        with failing_read(-1, code) as calls, files.use_system(Quick()):
            act(fill(memory / "whole"))
        shutil.rmtree(memory / "whole")
        for at in range(len(calls)):
            directory = fill(memory / "attempt")
            with failing_read(at, code), files.use_system(Quick()), suppress(StorageError):
                act(directory)
            with files.use_system(Quick()):
                check_checkpoints(directory, 4)
            shutil.rmtree(directory)
            tally.tried += 1
