"""File operations in the run directory: atomic writes, logs and locks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.errors import Exit, StorageError
from runner.base.json_values import parse_object
from runner.durable import files
from runner.durable.system import System

ROOT = Path(__file__).parents[2]


def fail_with(error: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_failed_file_system_sync_raises_the_system_error() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)) as raised:
        System().sync_file_system(-1)
    assert raised.value.errno == errno.EBADF


def test_a_written_file_has_the_content_and_is_private(tmp_path: Path) -> None:
    files.atomic_write(tmp_path / "run.json", '{"ä": 1}')
    files.atomic_write(tmp_path / "run.json", b"second")
    assert (tmp_path / "run.json").read_bytes() == b"second"
    assert mode_of(tmp_path / "run.json") == 0o600
    assert files.list_names(tmp_path) == ["run.json"]


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    path = tmp_path / "run.json"
    files.atomic_write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail_with(errno.EIO))
        with pytest.raises(StorageError):
            files.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert files.list_names(tmp_path) == ["run.json"]


def test_content_is_synced_before_the_file_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace: list[str] = []

    def trace_calls(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **keywords: Any) -> Any:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            trace.append("fsync folder" if is_folder else name)
            return real(*arguments, **keywords)

        return operation

    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, trace_calls(name, getattr(os, name)))
    files.atomic_write(tmp_path / "run.json", "{}")
    assert trace == ["write", "fsync", "rename", "fsync folder"]


def test_a_full_disk_has_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", fail_with(errno.ENOSPC))
    with pytest.raises(StorageError) as caught:
        files.write_new(tmp_path / "model", [b"abc"])
    assert "disk is full" in str(caught.value)
    assert str(tmp_path / "model") in str(caught.value)
    assert caught.value.exit_code == Exit.INPUT_OUTPUT


@pytest.mark.parametrize(("inodes", "free", "is_named"), [(100, 0, True), (100, 5, False), (0, 0, False)])
def test_exhausted_inodes_are_not_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, free: int, is_named: bool
) -> None:
    there = SimpleNamespace(f_files=inodes, f_favail=free, f_bavail=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: there)
    monkeypatch.setattr(os, "mkdir", fail_with(errno.ENOSPC))
    with pytest.raises(StorageError) as caught:
        files.make_directory(tmp_path / "a" / "b")
    assert caught.value.exit_code == Exit.INPUT_OUTPUT
    problem = caught.value.problems[0]
    assert ("inodes" in problem.what, "full" in problem.what) == (is_named, not is_named)
    assert problem.fix


def test_returned_size_and_hash_match_the_content(tmp_path: Path) -> None:
    chunks: list[bytes | bytearray | memoryview] = [b"", os.urandom(3 << 20), bytearray(b"x" * 17), memoryview(b"tail")]
    size, digest = files.write_new(tmp_path / "data", chunks)
    content = (tmp_path / "data").read_bytes()
    assert content == b"".join(chunks)
    assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())
    assert digest == files.file_sha256(tmp_path / "data")


@pytest.mark.parametrize("sizes", [[], [0], [1], [3, 0, 5], [9 << 20], [100, 8 << 20, 7, 17 << 20, 1]])
def test_pieces_of_any_size_are_written_in_order(tmp_path: Path, sizes: list[int]) -> None:
    chunks = [os.urandom(size) for size in sizes]
    size, digest = files.write_new(tmp_path / "data", chunks)
    whole = b"".join(chunks)
    assert (size, digest) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert (tmp_path / "data").read_bytes() == whole


def test_writeback_of_large_files_starts_before_the_sync(tmp_path: Path) -> None:
    class Watching(System):
        def __init__(self) -> None:
            self.begun: list[tuple[int, int]] = []
            self.left: int | None = None

        def begin_write_back(self, descriptor: int, start: int, length: int) -> None:
            self.begun.append((start, length))
            raise OSError("a hint may fail")

        def fsync(self, descriptor: int) -> None:
            self.left = os.fstat(descriptor).st_size - sum(length for _, length in self.begun)

    with files.use_system(watching := Watching()):
        files.write_new(tmp_path / "data", [b"head", bytes(100 << 20)])
    assert watching.left is not None
    assert watching.left < 16 << 20
    ends = [0, *(start + length for start, length in watching.begun)]
    assert [start for start, _ in watching.begun] == ends[:-1]


def test_a_failed_write_leaves_no_thread_running(tmp_path: Path) -> None:
    class Full(System):
        def write(self, descriptor: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "full")

    before = threading.enumerate()
    with files.use_system(Full()), pytest.raises(StorageError, match="full"):
        files.write_new(tmp_path / "data", [bytes(64 << 20)])
    assert threading.enumerate() == before
    assert list(tmp_path.iterdir()) == []


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:3])))
    files.atomic_write(tmp_path / "data", "0123456789")
    assert (tmp_path / "data").read_text() == "0123456789"


@pytest.mark.parametrize("dangling", [True, False])
def test_a_new_file_never_follows_a_link(tmp_path: Path, dangling: bool) -> None:
    victim = tmp_path / "victim"
    if not dangling:
        victim.write_text("precious")
    (tmp_path / "name").symlink_to(victim)
    with pytest.raises(StorageError):
        files.write_new(tmp_path / "name", [b"overwritten"])
    assert (tmp_path / "name").is_symlink()
    assert dangling != victim.exists()


def test_an_existing_file_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "name").write_text("first")
    with pytest.raises(StorageError, match="already exists"):
        files.write_new(tmp_path / "name", [b"second"])
    assert (tmp_path / "name").read_text() == "first"


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "plain").write_text("here")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    for name in ("pipe", "link", "missing"):
        with pytest.raises(StorageError):
            files.read(tmp_path / name)
    assert files.read(tmp_path / "plain", at_most=4) == b"here"
    with pytest.raises(StorageError):
        files.read(tmp_path / "plain", at_most=3)


@pytest.mark.parametrize("key", ["val/loss", "val/größe", 'a "quoted" name', "\U0001f642"])
def test_rows_with_a_key_are_read_without_parsing_others(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def parse(line: bytes) -> dict[str, Any] | None:
        parsed.append(line)
        return parse_object(line)

    monkeypatch.setattr(files, "parse_object", parse)
    rows = [{"update": 1}, {"update": 2, key: 0.5}, {"text": key}, {key: None}, {"nested": {key: 1}}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + f'{{{json.dumps(key)}: \n{{"update": 6')
    assert list(files.read_rows(path, key)) == [rows[1], rows[3]]
    assert len(parsed) == 5, "only lines that contain the text of the key must be parsed"
    assert list(files.read_rows(path)) == rows


def test_removing_a_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    (tmp_path / "outgoing").mkdir()
    (tmp_path / "outgoing" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    files.remove(tmp_path / "link")
    files.remove(tmp_path / "outgoing")
    assert files.list_names(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").read_text() == "kept"


def test_new_folders_are_private(tmp_path: Path) -> None:
    files.make_directory(tmp_path / "a" / "b")
    files.make_directory(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a") == mode_of(tmp_path / "a" / "b") == 0o700


@pytest.mark.parametrize(("error", "raises"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_only_unsupported_folder_syncs_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, raises: bool
) -> None:
    monkeypatch.setattr(os, "fsync", fail_with(error))
    if raises:
        with pytest.raises(StorageError):
            files.fsync_directory(tmp_path)
    else:
        files.fsync_directory(tmp_path)


def test_length_is_the_number_of_bytes_in_the_file(tmp_path: Path) -> None:
    with files.AppendLog(tmp_path / "log") as log:
        log.write("one")
        assert log.length == 0
        log.flush()
        assert log.length == 4
        log.write("zwölf\n")
        log.sync()
        assert log.length == (tmp_path / "log").stat().st_size == 11
    with files.AppendLog(tmp_path / "log") as log:
        assert log.length == 11
    log.close()
    assert (tmp_path / "log").read_text() == "one\nzwölf\n"
    assert mode_of(tmp_path / "log") == 0o600


def test_rows_are_written_while_the_disk_is_busy(tmp_path: Path) -> None:
    class Slow(System):
        def __init__(self) -> None:
            self.reached, self.gate = threading.Event(), threading.Event()

        def fsync(self, descriptor: int) -> None:
            self.reached.set()
            assert self.gate.wait(60)

    with files.AppendLog(tmp_path / "log") as log, files.use_system(slow := Slow()):
        syncing = threading.Thread(target=log.sync)
        log.write("one")
        syncing.start()
        assert slow.reached.wait(60)
        log.write("two")
        log.flush()
        assert (tmp_path / "log").read_text() == "one\ntwo\n"
        slow.gate.set()
        syncing.join()


def test_syncs_after_a_failed_sync_also_fail(tmp_path: Path) -> None:
    class Broken(System):
        def fsync(self, descriptor: int) -> None:
            raise OSError(errno.EIO, "broken")

    with files.AppendLog(tmp_path / "log") as log:
        log.write("one")
        with files.use_system(Broken()), pytest.raises(StorageError, match="cannot sync: the disk reports an error"):
            log.sync()
        log.write("two")
        with pytest.raises(StorageError):
            log.sync()
    with files.AppendLog(tmp_path / "log") as log:
        log.sync()


@pytest.mark.parametrize("whole", ["", "one\n", "one\ntwo\n", "x" * (3 << 20) + "\n"])
@pytest.mark.parametrize("torn", ["", "t", "y" * (2 << 20)])
def test_an_incomplete_last_line_is_removed(tmp_path: Path, whole: str, torn: str) -> None:
    (tmp_path / "log").write_text(whole + torn)
    with files.AppendLog(tmp_path / "log") as log:
        log.write("next")
    assert (tmp_path / "log").read_text() == whole + "next\n"


def test_a_failed_flush_neither_splits_nor_loses_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = files.AppendLog(tmp_path / "log")
    log.write("first")
    log.flush()
    log.write("second")
    write, calls = os.write, []

    def half_then_full(descriptor: int, data: memoryview) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, bytes(data[:3]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        with pytest.raises(StorageError, match="the disk is full"):
            log.flush()
    assert (tmp_path / "log").read_text() == "first\n"
    log.write("third")
    log.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird\n"


def test_truncating_never_extends_a_log(tmp_path: Path) -> None:
    with files.AppendLog(tmp_path / "log") as log:
        log.write("one")
        log.write("two")
        log.flush()
        log.write("forgotten")
        log.cut(100)
        assert log.length == 8
        log.cut(4)
        assert log.length == 4
        log.write("three")
    assert (tmp_path / "log").read_text() == "one\nthree\n"


def test_lines_written_by_several_threads_are_not_mixed(tmp_path: Path) -> None:
    with files.AppendLog(tmp_path / "log") as log:

        def write(word: str) -> None:
            for _ in range(200):
                log.write(word * 20)
                log.flush()

        threads = [threading.Thread(target=write, args=(word,)) for word in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert log.length == (tmp_path / "log").stat().st_size
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == [word * 20 for word in "abcd" for _ in range(200)]


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A forked child that still runs does not hold the lock."""
    script = f"""
import os, sys, time
from pathlib import Path
from runner.durable import files
from runner.durable.system import System
lock = files.Lock(Path({str(tmp_path / ".lock")!r}), "held")
child = os.fork()
if child == 0:
    os.write(1, b"forked\\n")
    time.sleep(30)
    os._exit(0)
os.write(1, b"%d\\n" % child)
sys.stdin.read()
os._exit(0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        messages = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        child = int((messages - {"forked"}).pop())
        try:
            with pytest.raises(files.LockHeld) as caught:
                files.Lock(tmp_path / ".lock", "mine")
            assert caught.value.note == "held"
            process.stdin.close()
            process.wait(timeout=60)
            files.Lock(tmp_path / ".lock", "mine").release()
        finally:
            os.kill(child, 9)


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    """Releasing a lock twice does nothing."""
    lock = files.Lock(tmp_path / ".lock", "first")
    with pytest.raises(files.LockHeld) as caught:
        files.Lock(tmp_path / ".lock", "second")
    assert caught.value.note == "first"
    lock.release()
    again = files.Lock(tmp_path / ".lock", "third")
    lock.release()  # its descriptor may belong to another file now
    with pytest.raises(files.LockHeld) as caught:
        files.Lock(tmp_path / ".lock", "fourth")
    assert caught.value.note == "third"
    again.release()


def test_a_replaced_lock_file_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = files.Lock(path, "mine")
    assert lock.holds(path)
    path.unlink()
    assert not lock.holds(path)
    path.write_text("of another process")
    assert not lock.holds(path)
    lock.release()
    assert not lock.holds(path)


def test_a_forked_child_does_not_release_the_lock(tmp_path: Path) -> None:
    lock = files.Lock(tmp_path / ".lock", "parent")
    child = os.fork()
    if child == 0:
        try:
            lock.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(files.LockHeld):
        files.Lock(tmp_path / ".lock", "other")
    lock.release()


class RefusesToSync(System):
    """A file system whose syncfs fails with the given errno."""

    def __init__(self, reason: int) -> None:
        self.reason = reason

    def sync_file_system(self, descriptor: int) -> None:
        raise OSError(self.reason, os.strerror(self.reason))


@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC])
def test_a_failed_file_system_sync_keeps_the_old_content(tmp_path: Path, reason: int) -> None:
    paths = [tmp_path / str(number) for number in range(20)]
    files.atomic_write_all(dict.fromkeys(paths, b"old"))
    with files.use_system(RefusesToSync(reason)), pytest.raises(StorageError):
        files.atomic_write_all(dict.fromkeys(paths, b"new"))
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"old"}
    assert sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.EPERM])
def test_each_file_is_synced_if_syncfs_is_unsupported(tmp_path: Path, reason: int) -> None:
    synced = []

    class Counting(RefusesToSync):
        def fsync(self, descriptor: int) -> None:
            synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    paths = [tmp_path / str(number) for number in range(20)]
    with files.use_system(Counting(reason)):
        files.atomic_write_all(dict.fromkeys(paths, b"new"))
    assert {path.read_bytes() for path in paths} == {b"new"}
    assert len({name for name in synced if name != str(tmp_path)}) == len(paths)


WITHOUT_INPUT = """
import os, sys
from pathlib import Path
from runner.durable import files
os.close(0)
log = files.AppendLog(Path(sys.argv[1]))
log.write("a row")
log.close()
"""


def test_rows_are_written_at_exit_to_descriptor_0(tmp_path: Path) -> None:
    """If a process starts without standard input, the first file that it opens gets descriptor 0."""
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", WITHOUT_INPUT, path], cwd=ROOT, check=True)
    assert path.read_text() == "a row\n"
