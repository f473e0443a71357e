"""Copies of checkpoints on an S3 server: cut connections, throttling, partial uploads, credentials, two writers.

At any time, each copy that counts as complete has the bytes of its checkpoint; after the faults, no copy is missing.
"""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from runner.base.errors import Exit
from runner.durable.checkpoint import checkpoint_path, load_newest
from runner.durable.directory import RunDirectory
from runner.durable.mirror import Mirror, fetch_checkpoints, mirrored_name, mirrored_update
from runner.durable.mirror_store import MirrorError, MirrorStore
from tests.durable.test_mirror import (
    LONG_S,
    UID,
    add,
    content,
    copy_checkpoints,
    fetch_to_empty_machine,
    machine,
    numbers,
    thread,
)
from tests.faults import s3_server
from tests.faults.s3_server import S3Server
from tests.faults.tallies import Tally
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("moto") is None or importlib.util.find_spec("s3fs") is None,
        reason="needs an S3 server: pip install s3fs 'moto[server]'",
    ),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of boto and of cut connections
]
CUTS = 6, 100  # by default, and with ACCEL_RUN_FAULTS=long


@pytest.fixture(scope="module")
def storage_threads() -> None:
    s3_server.start_storage_threads()


@pytest.fixture
def server(storage_threads: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server whose clients do not repeat requests, so that each fault reaches the mirror."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with s3_server.with_bucket(monkeypatch) as result:
        yield result


@pytest.fixture
def mirror(server: S3Server) -> Mirror:
    return Mirror(MirrorStore("s3://bucket/runs", "mine"))


def assert_complete_copies_are_equal(mirror: Mirror, run: RunDirectory) -> None:
    for name in mirror.checkpoints(UID):
        local = content(checkpoint_path(run.checkpoints, mirrored_update(name)))
        assert all(mirror.store.read(f"{UID}/{name}/{file}", 1 << 20) == data for file, data in local.items()), name


def assert_an_empty_machine_receives(update: int, mirror: Mirror, run: RunDirectory, folder: Path) -> None:
    there, warnings = fetch_to_empty_machine(mirror, folder)
    with there:
        assert warnings == []
        newest = load_newest(there.checkpoints)
        assert newest is not None
        assert newest.update == update
        assert content(newest.path) == content(checkpoint_path(run.checkpoints, update))


def test_an_interrupted_upload_is_incomplete_until_the_next_upload(
    server: S3Server, mirror: Mirror, tmp_path: Path, tally: Tally, seed: int, amount: Callable[[int, int], int]
) -> None:
    with machine(tmp_path / "a", 1, 2) as run:
        copy_checkpoints(mirror, run, 1)
        before = server.num_bytes
        copy_checkpoints(mirror, run, 2)
        num_bytes = server.num_bytes - before
        for place in sorted(random.Random(seed).sample(range(num_bytes), amount(*CUTS))):
            mirror.store.remove(f"{UID}/{mirrored_name(checkpoint_path(run.checkpoints, 2))}")
            server.cut_after = place
            with suppress(MirrorError):
                copy_checkpoints(mirror, run, 2)
            tally.tried, server.cut_after = tally.tried + 1, None
            assert numbers(mirror)[-1] == 1
            assert_complete_copies_are_equal(mirror, run)
            copy_checkpoints(mirror, run, 2)
            assert numbers(mirror) == [2, 1]
            assert_complete_copies_are_equal(mirror, run)
        assert server.num_cuts >= tally.tried // 2, "connections are not cut if fewer bytes were left to copy"
        assert_an_empty_machine_receives(2, mirror, run, tmp_path / "b")


def test_an_interrupted_download_leaves_no_partial_checkpoint(
    server: S3Server, mirror: Mirror, tmp_path: Path, tally: Tally, seed: int, amount: Callable[[int, int], int]
) -> None:
    with machine(tmp_path / "a", 1) as run:
        copy_checkpoints(mirror, run, 1)
        before = server.num_bytes
        assert_an_empty_machine_receives(1, mirror, run, tmp_path / "b")
        num_bytes = server.num_bytes - before
        for place in sorted(random.Random(seed).sample(range(num_bytes), amount(*CUTS))):
            with machine(tmp_path / f"c{place}") as there:
                server.cut_after = place
                with suppress(MirrorError):
                    fetch_checkpoints(mirror, there, lambda _: None, lambda _: None)
                tally.tried, server.cut_after = tally.tried + 1, None
                assert [path.name for path in there.path.glob("checkpoints/*")] in ([], ["update-0000000001"])
                fetch_checkpoints(mirror, there, lambda _: None, lambda _: None)
                assert content(checkpoint_path(there.checkpoints, 1)) == content(checkpoint_path(run.checkpoints, 1))


def test_no_checkpoint_is_lost_if_requests_are_throttled_and_connections_reset(
    server: S3Server, mirror: Mirror, tmp_path: Path, tally: Tally, seed: int, amount: Callable[[int, int], int]
) -> None:
    """One of 30 requests is answered with 503 SlowDown, about one for each copy, and connections are cut."""
    draw, warnings, last = random.Random(seed), [], 1 + amount(6, 50)
    with machine(tmp_path / "a", 1) as run:
        copies = thread(mirror, run, warnings)
        copies.start(is_required=True)
        server.throttles = lambda method, path: draw.random() < 1 / 30
        for update in range(2, last + 1):
            server.cut_after = draw.randrange(1 << 16)
            path = add(run, update)
            assert path is not None
            copies.notify(path)
            wait_until(lambda update=update: len(copies.state.copied) == update)  # type: ignore[misc]
        server.throttles = lambda method, path: False
        server.cut_after = None
        copies.finish(LONG_S)
        tally.tried = server.num_throttled + server.num_cuts
        assert numbers(mirror) == [*range(last, 0, -1)]
        assert server.num_throttled > 0
        assert server.num_cuts > 0
        assert copies.state.skipped == 0
        assert 1 <= len(warnings) <= copies.state.failed, "one warning for each series of failures"
        assert_complete_copies_are_equal(mirror, run)
        assert_an_empty_machine_receives(last, mirror, run, tmp_path / "b")


def test_clients_retry_throttled_requests_and_no_copy_fails(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients have their default settings, and one of five requests is throttled."""
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    count = [0]

    def fifth(method: str, path: str) -> bool:
        count[0] += 1
        return count[0] % 5 == 0

    mirror = Mirror(MirrorStore("s3://bucket/runs", "mine"))
    with machine(tmp_path / "a", 1) as run:
        server.throttles = fifth
        copy_checkpoints(mirror, run, 1)
        assert server.num_throttled > 0
        assert numbers(mirror) == [1]


def test_an_interrupted_multipart_upload_is_not_visible(server: S3Server, mirror: Mirror, tmp_path: Path) -> None:
    """s3fs sends files above 100 MB in parts of 50 MB (2026.6)."""
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate(101 << 20)
    server.cut_after, server.stays_cut = 70 << 20, True  # otherwise, the client would send the part again
    with pytest.raises(MirrorError):
        mirror.store.upload(file, "large")
    server.cut_after = None
    assert server.num_cuts > 0
    assert mirror.store.size("large") is None
    mirror.store.upload(file, "large")
    assert mirror.store.size("large") == 101 << 20


def test_invalid_credentials_are_reported_and_not_written_to_files(
    server: S3Server, mirror: Mirror, tmp_path: Path
) -> None:
    server.check_signatures(after_requests="0")
    with machine(tmp_path / "a", 1) as run:
        with pytest.raises(MirrorError) as raised:
            thread(mirror, run).start(is_required=True)
        assert raised.value.exit_code == Exit.PERMISSION
        warnings: list[str] = []
        copies = thread(mirror, run, warnings)
        copies.start(is_required=False)
        line = copies.finish(0.0)
        for each in threading.enumerate():
            if each.name == "mirror":
                each.join()  # it may still write mirror.json
        texts = [str(raised.value), line, *warnings, *(path.read_text() for path in run.path.glob("*.json*"))]
        assert len(warnings) == 1
        assert not any(s3_server.KEY_ID in text or s3_server.SECRET in text for text in texts)
    server.check_signatures(after_requests="inf")


def test_the_first_of_two_writers_stops(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run, machine(tmp_path / "b", 1, 3) as there:
        warnings: list[str] = []
        first = thread(mirror, run, warnings)
        first.start(is_required=True)
        wait_until(lambda: numbers(mirror) == [1])
        second = thread(mirror, there)
        second.start(is_required=True)
        path = add(run, 2)
        assert path is not None
        first.notify(path)
        first.finish(LONG_S)
        second.finish(LONG_S)
        assert numbers(mirror) == [3, 1]
        assert len(warnings) == 1
        assert_complete_copies_are_equal(mirror, there)
