"""Copies of checkpoints in object storage are valid only if complete, and never block training."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from runner.base.errors import DataError, Exit, IncompatibleResume, MissingPackage
from runner.durable import files, mirror_thread
from runner.durable.checkpoint import checkpoint_path, load, load_newest, retain, save
from runner.durable.directory import RunDirectory
from runner.durable.mirror import Mirror, MirrorOwner, OwnerChanged, fetch_checkpoints, mirrored_update
from runner.durable.mirror_store import MirrorError, MirrorStore
from runner.durable.mirror_thread import MirrorThread
from runner.durable.run_identity import generate_uid
from runner.durable.system import System
from tests.durable.faulty_storage import FaultyStorage
from tests.faults.saver import snapshot
from tests.waiting import wait_until

UID, OTHER = generate_uid(), generate_uid()
KEEP = 2
LONG_S = 60.0


@pytest.fixture(autouse=True)
def _new_storage() -> Iterator[None]:
    FaultyStorage.reset()
    with files.use_system(Unsynced()):
        yield
    FaultyStorage.reset()


class Unsynced(System):
    """The file system without fsync, because these tests simulate no power loss."""

    def fsync(self, descriptor: int) -> None:
        pass


@pytest.fixture
def mirror() -> Mirror:
    return Mirror(MirrorStore("faulty://bucket/runs", "mine"))


def machine(root: Path, *updates: int, uid: str = UID) -> RunDirectory:
    """Return the folder of the run on one machine, with the given checkpoints and their metrics."""
    run = RunDirectory.create_or_open(root, "mine")
    add(run, *updates, uid=uid)
    return run


def add(run: RunDirectory, *updates: int, uid: str = UID) -> Path | None:
    path = None
    for update in updates:
        given = snapshot(update)
        facts = {**given.facts, "run_uid": uid, "metrics_bytes": 10 * update}
        run.write("metrics.jsonl", b"123456789\n" * update)
        path = save(run.checkpoints, replace(given, facts=facts))
    return path


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def fetch_to_empty_machine(mirror: Mirror, root: Path) -> tuple[RunDirectory, list[str]]:
    """Fetch the run to an empty machine. Return its folder and the warnings."""
    run, warnings = machine(root), []
    fetch_checkpoints(mirror, run, lambda _: None, warnings.append)
    return run, warnings


def copy_checkpoints(mirror: Mirror, run: RunDirectory, *updates: int) -> None:
    for update in updates:
        mirror.upload(checkpoint_path(run.checkpoints, update), run.metrics, UID)
    mirror.claim(UID, "writer")


def numbers(mirror: Mirror) -> list[int]:
    return [mirrored_update(name) for name in mirror.checkpoints(UID)]


def test_an_empty_machine_receives_the_same_bytes(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1, 2) as run:
        copy_checkpoints(mirror, run, 1, 2)
        there, warnings = fetch_to_empty_machine(mirror, tmp_path / "b")
        with there:
            assert warnings == []
            assert content(checkpoint_path(there.checkpoints, 2)) == content(checkpoint_path(run.checkpoints, 2))
            assert there.metrics.read_bytes() == run.metrics.read_bytes()
            assert [path.name for path in there.checkpoints.iterdir()] == ["update-0000000002"]


def test_copied_metrics_end_at_the_checkpoint(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run:
        run.write("metrics.jsonl", b"123456789\n" * 7)  # training has continued after the checkpoint
        copy_checkpoints(mirror, run, 1)
        with fetch_to_empty_machine(mirror, tmp_path / "b")[0] as there:
            assert there.metrics.read_bytes() == b"123456789\n"


def failing_at(number: int) -> Callable[[str, str], None]:
    left = [number]

    def fault(operation: str, path: str) -> None:
        left[0] -= 1
        if left[0] == -1:
            cut(operation)

    return fault


def cut(operation: str) -> None:
    raise ConnectionResetError(f"cut during {operation}")


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_a_truncated_upload_is_never_valid(mirror: Mirror, tmp_path: Path, half: bool) -> None:
    with machine(tmp_path / "a", 1, 2) as run:
        copy_checkpoints(mirror, run, 1)
        FaultyStorage.calls.clear()
        copy_checkpoints(mirror, run, 2)
        num_calls = len(FaultyStorage.calls)
        assert num_calls > 15
        for number in range(num_calls):
            FaultyStorage.reset()
            copy_checkpoints(mirror, run, 1)
            FaultyStorage.half, FaultyStorage.fault = half, staticmethod(failing_at(number))
            with pytest.raises(MirrorError):
                copy_checkpoints(mirror, run, 2)
            FaultyStorage.fault = staticmethod(lambda *_: None)
            assert numbers(mirror)[-1] == 1
            for name in mirror.checkpoints(UID):
                local = content(checkpoint_path(run.checkpoints, mirrored_update(name)))
                assert all(mirror.store.read(f"{UID}/{name}/{file}", 1 << 20) == data for file, data in local.items())
            copy_checkpoints(mirror, run, 2)  # the next attempt succeeds
            assert numbers(mirror) == [2, 1]


def test_a_retry_uploads_only_missing_files(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run:
        FaultyStorage.fault = staticmethod(lambda operation, path: cut(operation) if "state" in path else None)
        with pytest.raises(MirrorError):
            copy_checkpoints(mirror, run, 1)
        FaultyStorage.fault = staticmethod(lambda *_: None)
        FaultyStorage.calls.clear()
        copy_checkpoints(mirror, run, 1)
        sent = [path.rpartition("/")[2] for operation, path in FaultyStorage.calls if operation == "write"]
        assert sent == ["state.json", "metrics.jsonl", "MANIFEST.json", "owner.json"]


def test_a_truncated_download_leaves_no_checkpoint(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run:
        copy_checkpoints(mirror, run, 1)
    FaultyStorage.calls.clear()
    fetch_to_empty_machine(mirror, tmp_path / "b")[0].release()
    for number in range(len(FaultyStorage.calls)):
        FaultyStorage.fault = staticmethod(failing_at(number))
        with machine(tmp_path / f"c{number}") as there:
            with pytest.raises(MirrorError):
                fetch_checkpoints(mirror, there, lambda _: None, lambda _: None)
            FaultyStorage.fault = staticmethod(lambda *_: None)
            left = [path.name for path in there.path.glob("checkpoints/*")]
            assert left in ([], ["update-0000000001"])
            fetch_checkpoints(mirror, there, lambda _: None, lambda _: None)
            assert load_newest(there.checkpoints) is not None


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "MANIFEST.json", "metrics.jsonl"])
def test_data_corrupted_by_a_transfer_is_copied_again(mirror: Mirror, tmp_path: Path, name: str) -> None:
    def flip_bit(path: str, data: bytes) -> bytes:
        return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:] if path.endswith(name) else data

    with machine(tmp_path / "a", 1) as run:
        FaultyStorage.changed = staticmethod(flip_bit)
        with pytest.raises(MirrorError):
            copy_checkpoints(mirror, run, 1)
        FaultyStorage.changed = staticmethod(lambda _, data: data)
        copy_checkpoints(mirror, run, 1)
        with fetch_to_empty_machine(mirror, tmp_path / "b")[0] as there:
            assert content(checkpoint_path(there.checkpoints, 1)) == content(checkpoint_path(run.checkpoints, 1))


def damage(update: int, name: str = "model.safetensors", *, removes: bool = False) -> None:
    for path, file in list(FaultyStorage.store.items()):
        if f"update-{update:010}" in path and path.endswith(name):
            if removes:
                del FaultyStorage.store[path]
            else:
                data = bytearray(file.getvalue())
                data[len(data) // 2] ^= 4
                file.seek(0)
                file.write(bytes(data))


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "MANIFEST.json"])
def test_a_damaged_copy_is_skipped_for_an_older_one(mirror: Mirror, tmp_path: Path, name: str, removes: bool) -> None:
    with machine(tmp_path / "a", 1, 2) as run:
        copy_checkpoints(mirror, run, 1, 2)
    damage(2, name, removes=removes)
    there, warnings = fetch_to_empty_machine(mirror, tmp_path / "b")
    with there:
        newest = load_newest(there.checkpoints)
        assert newest is not None
        assert newest.update == 1
        # without a manifest, the copy never was complete
        assert len(warnings) == (0 if removes and name == "MANIFEST.json" else 1)


@pytest.mark.parametrize("name", ["model.safetensors", "MANIFEST.json"])
def test_a_run_does_not_start_over_if_all_copies_are_damaged(mirror: Mirror, tmp_path: Path, name: str) -> None:
    with machine(tmp_path / "a", 1, 2) as run:
        copy_checkpoints(mirror, run, 1, 2)
        damage(1, name)
        damage(2, name)
        with pytest.raises(DataError):
            fetch_to_empty_machine(mirror, tmp_path / "b")
        fetch_checkpoints(mirror, run, lambda _: None, lambda _: None)  # uses the valid local checkpoints


def test_only_newer_checkpoints_are_downloaded(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1, 2) as run:
        copy_checkpoints(mirror, run, 1)
        FaultyStorage.calls.clear()
        fetch_checkpoints(mirror, run, lambda _: None, lambda _: None)
        assert not any(path.endswith(".safetensors") for _, path in FaultyStorage.calls)


def test_a_damaged_local_checkpoint_is_replaced_by_its_copy(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1, 2) as run:
        copy_checkpoints(mirror, run, 1, 2)
        intact = content(checkpoint_path(run.checkpoints, 2))
        (checkpoint_path(run.checkpoints, 2) / "state.json").write_bytes(b"{}")
        fetch_checkpoints(mirror, run, lambda _: None, lambda _: None)
        assert content(checkpoint_path(run.checkpoints, 2)) == intact


def test_a_mirror_of_another_run_is_rejected(mirror: Mirror, tmp_path: Path) -> None:
    """The other run has the same name."""
    with machine(tmp_path / "a", 1) as run:
        copy_checkpoints(mirror, run, 1)
    with machine(tmp_path / "b", 1, uid=OTHER) as other, pytest.raises(IncompatibleResume):
        fetch_checkpoints(mirror, other, lambda _: None, lambda _: None)


def test_resuming_works_with_a_damaged_owner_file(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run:
        copy_checkpoints(mirror, run, 1)
    mirror.store.write("owner.json", b'{"run_uid": "')
    assert mirror.owner() == MirrorOwner(UID)
    with fetch_to_empty_machine(mirror, tmp_path / "b")[0] as there:
        assert load_newest(there.checkpoints) is not None


# ---------------------------------------------------------------- the thread


def thread(mirror: Mirror, run: RunDirectory, warnings: list[str] | None = None, **options: object) -> MirrorThread:
    warn = (warnings if warnings is not None else []).append
    return MirrorThread(mirror, run, UID, keep_last=KEEP, warn=warn, pauses_s=(0.0,), **options)  # type: ignore[arg-type]


def test_checkpoints_saved_before_and_during_a_run_are_copied(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run:
        copies = thread(mirror, run)
        copies.start(is_required=True)
        path = add(run, 2)
        assert path is not None
        copies.notify(path)
        line = copies.finish(LONG_S)
        assert numbers(mirror) == [2, 1]
        assert "2 of 2" in line
        assert copies.state.skipped == copies.state.failed == 0


class Gate:
    """A fault that blocks the upload of one update's model until `opened` is set."""

    def __init__(self, update: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.name = f"update-{update:010}"

    def __call__(self, operation: str, path: str) -> None:
        if operation == "write" and self.name in path and path.endswith("model.safetensors"):
            self.reached.set()
            assert self.opened.wait(LONG_S)


@contextmanager
def stalled(mirror: Mirror, folder: Path) -> Iterator[tuple[Gate, RunDirectory, MirrorThread]]:
    """Yield a run whose first upload is blocked until the gate is opened."""
    gate = Gate(1)
    FaultyStorage.fault = staticmethod(gate)
    with machine(folder / "a", 1) as run:
        copies = thread(mirror, run)
        copies.start(is_required=True)
        assert gate.reached.wait(LONG_S)
        yield gate, run, copies


def test_a_slow_mirror_copies_the_newest_checkpoints(mirror: Mirror, tmp_path: Path) -> None:
    """The mirror counts the checkpoints that it skips."""
    with stalled(mirror, tmp_path) as (gate, run, copies):
        for update in range(2, 7):  # saving must not wait for the mirror
            path = add(run, update)
            assert path is not None
            copies.notify(path)
            retain(run.checkpoints, KEEP, copies.in_use())
        assert checkpoint_path(run.checkpoints, 1).is_dir()  # this checkpoint is still being uploaded
        gate.opened.set()
        copies.finish(LONG_S)
        order = [path for operation, path in FaultyStorage.calls if operation == "write" and "model." in path]
        assert [int(path.split("update-")[1][:10]) for path in order] == [1, 6, 5]
        assert copies.state.skipped == 3
        assert numbers(mirror)[:2] == [6, 5]


def test_an_unresponsive_mirror_does_not_block_the_end(mirror: Mirror, tmp_path: Path) -> None:
    with stalled(mirror, tmp_path) as (gate, _, copies):
        line = copies.finish(0.0)
        assert "0 of 1" in line
        assert "update-0000000001" in line
        gate.opened.set()


def test_a_checkpoint_saved_during_a_listing_is_copied(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Path | None] = []
    with machine(tmp_path / "a", 1) as run:
        copies = thread(mirror, run)
        listing = mirror_thread.newest_first

        def list_late(folder: Path) -> list[Path]:
            found = listing(folder)
            if not saved:
                saved.append(add(run, 2))
                assert saved[0] is not None
                copies.notify(saved[0])
            return found

        monkeypatch.setattr(mirror_thread, "newest_first", list_late)
        copies.start(is_required=True)
        copies.finish(LONG_S)
        assert numbers(mirror) == [2, 1]
        assert copies.state.skipped == 0


def test_throttling_delays_copies_but_loses_none(mirror: Mirror, tmp_path: Path) -> None:
    left = [0]

    def throttle(operation: str, path: str) -> None:
        left[0] += operation == "write"
        if operation == "write" and left[0] % 3:
            raise OSError("SlowDown: please reduce your request rate")

    with machine(tmp_path / "a", 1, 2) as run:
        warnings: list[str] = []
        copies = thread(mirror, run, warnings)
        copies.start(is_required=False)
        FaultyStorage.fault = staticmethod(throttle)
        path = add(run, 3)
        assert path is not None
        copies.notify(path)
        copies.finish(LONG_S)
        assert numbers(mirror)[0] == 3
        assert len(warnings) <= 1 + copies.state.failed  # one warning per series of failures


def test_the_mirror_keeps_what_retention_keeps(mirror: Mirror, tmp_path: Path) -> None:
    """If there are no local checkpoints, the mirror keeps two."""
    with machine(tmp_path / "a", *range(1, 8)) as run:
        copy_checkpoints(mirror, run, *range(1, 8))
        mirror.store.write(f"{UID}/update-0000000003-0123456789abcdef/model.safetensors", b"left by a crash")
        retain(run.checkpoints, 3, checkpoint_path(run.checkpoints, 2))  # 2 is the best checkpoint
        copies = thread(mirror, run)
        copies.start(is_required=True)
        copies.finish(LONG_S)
        assert numbers(mirror) == [7, 6, 5, 2]
        assert len(mirror.store.names(UID)) == 4
        shutil.rmtree(run.checkpoints)
        run.subfolder("checkpoints")
        copies = thread(mirror, run)
        copies.start(is_required=True)
        copies.finish(LONG_S)
        assert numbers(mirror) == [7, 6]


def test_invalid_credentials_are_reported_but_not_stored(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is reported immediately."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c4n4ry/S3cr3t+Key9")

    def deny(operation: str, path: str) -> None:
        raise PermissionError("Access denied for c4n4ry/S3cr3t+Key9")

    with machine(tmp_path / "a", 1) as run:
        FaultyStorage.fault = staticmethod(deny)
        with pytest.raises(MirrorError) as raised:
            thread(mirror, run).start(is_required=True)
        assert raised.value.exit_code == Exit.PERMISSION
        warnings: list[str] = []
        copies = thread(mirror, run, warnings)
        copies.start(is_required=False)
        copies.finish(0.0)
        for each in threading.enumerate():
            if each.name == "mirror":
                each.join()  # the thread may still write mirror.json
        texts = [str(raised.value), *warnings, *(file.read_text() for file in run.path.glob("*.json*"))]
        assert len(texts) > 2
        assert not any("c4n4ry" in text for text in texts)


def test_a_second_process_takes_over_and_the_first_stops(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run, machine(tmp_path / "b") as there:
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
        assert 2 not in numbers(mirror)
        assert len(warnings) == 1
        second.finish(LONG_S)


def test_copies_of_one_update_by_two_runs_are_not_mixed(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1) as run, machine(tmp_path / "b") as other:
        given = replace(snapshot(11), update=1)
        save(other.checkpoints, replace(given, facts={**given.facts, "run_uid": UID, "metrics_bytes": 0}))
        copy_checkpoints(mirror, run, 1)
        copy_checkpoints(mirror, other, 1)
        assert numbers(mirror) == [1, 1]
        for name in mirror.checkpoints(UID):
            mirror.download(UID, name, tmp_path / name)
            assert load(checkpoint_path(tmp_path / name, 1)).update == 1


def test_a_mirror_with_newer_checkpoints_is_not_claimed(mirror: Mirror, tmp_path: Path) -> None:
    """The mirror was not reachable when the run started."""
    with machine(tmp_path / "a", 1) as run, machine(tmp_path / "b", 1, 5) as ahead:
        copy_checkpoints(mirror, ahead, 5)
        FaultyStorage.fault = staticmethod(failing_at(0))  # fails only at the start
        warnings: list[str] = []
        copies = thread(mirror, run, warnings)
        copies.start(is_required=False)
        copies.finish(LONG_S)
        assert numbers(mirror) == [5]
        assert mirror.owner() == MirrorOwner(UID, "writer")
        with pytest.raises(OwnerChanged):
            mirror.check_owner(UID, "another")


def test_an_unsupported_protocol_names_the_missing_package() -> None:
    with pytest.raises(MissingPackage) as raised:
        MirrorStore("nosuch://bucket", "mine")
    assert "s3fs" in str(raised.value)
