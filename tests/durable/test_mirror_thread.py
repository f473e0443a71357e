"""The thread of a mirror reports, retries and skips copies; a store converts errors of its file system."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.base.errors import AccelRunError, DataError, Exit
from runner.durable import mirror_store, mirror_thread
from runner.durable.checkpoint import checkpoint_path, load, save
from runner.durable.directory import RunDirectory
from runner.durable.mirror import Mirror, MirrorOwner, fetch_checkpoints, mirrored_name, mirrored_update
from runner.durable.mirror_store import MirrorError, MirrorStore
from runner.durable.mirror_thread import MirrorState, MirrorThread, NoMirror
from tests.durable.faulty_storage import FaultyStorage
from tests.durable.test_mirror import LONG_S, OTHER, UID, add, content, copy_checkpoints, cut, machine, numbers
from tests.durable.test_mirror import mirror as mirror  # noqa: PLC0414 - a fixture
from tests.faults.saver import snapshot
from tests.waiting import wait_until

ROOT = "faulty://bucket/runs"


@pytest.fixture(autouse=True)
def _new_storage() -> Iterator[None]:
    FaultyStorage.reset()
    yield
    FaultyStorage.reset()


def fail(action: Callable[[str, str], object] | None) -> None:
    """Call `action` for each later operation. None: no operation fails."""
    FaultyStorage.fault = staticmethod(lambda operation, path: action(operation, path) and None if action else None)


class Copies:
    """A thread that copies a run. It records warnings, and the pauses after failures instead of waiting."""

    def __init__(self, mirror: Mirror, run: RunDirectory, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self.warnings: list[str] = []
        self.pauses: list[float] = []
        self.run = run
        copies = self

        class Condition(threading.Condition):
            def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
                assert timeout is not None
                copies.pauses.append(timeout)
                return predicate()

        patch.setattr(mirror_thread, "threading", SimpleNamespace(**{**vars(threading), "Condition": Condition}))
        self.thread = MirrorThread(mirror, run, UID, keep_last=2, warn=self.warnings.append, **options)

    @property
    def recorded(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.run.path / "mirror.json").read_text())
        return result

    def finish(self) -> str:
        return self.thread.finish(LONG_S)


# ---------------------------------------------------------------- the thread


def test_the_state_of_the_copies_is_recorded(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(tmp_path, 1, 2) as run:
        copies = Copies(mirror, run, monkeypatch)
        copies.thread.start(is_required=True)
        summary = copies.finish()
        names = ["update-0000000001", "update-0000000002"]
        assert copies.recorded == {
            "url": f"{ROOT}/mine", "copied": names, "skipped": 0, "failed": 0, "problem": "",
        }  # fmt: skip
        assert (copies.warnings, copies.pauses) == ([], [])
        assert f"{ROOT}/mine: has 2 of 2 " in summary
        assert "not copied" not in summary
        assert "skipped" not in summary
        assert [*copies.thread.in_use()] == []


def test_repeated_failures_warn_once_and_pause_longer(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [6]

    def unreachable(operation: str, path: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            cut(operation)

    with machine(tmp_path, 1) as run:
        copies = Copies(mirror, run, monkeypatch, pauses_s=(1.0, 5.0, 30.0))
        fail(unreachable)
        copies.thread.start(is_required=False)
        copies.finish()
        assert numbers(mirror) == [1]
        assert copies.pauses == [0.0, 5.0, 30.0, 30.0, 30.0, 30.0], "the first failure is at the start"
        assert len(copies.warnings) == 1
        assert "cut during" in copies.warnings[0]
        assert (copies.recorded["failed"], copies.recorded["problem"]) == (6, "")


def test_a_second_series_of_failures_warns_again(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(tmp_path, 1) as run:
        copies = Copies(mirror, run, monkeypatch)
        copies.thread.start(is_required=True)
        wait_until(lambda: numbers(mirror) == [1] and copies.thread.state.copied != ())
        for update in (2, 3):
            is_cut = [True]

            def once(operation: str, path: str, is_cut: list[bool] = is_cut) -> None:
                if operation == "write" and is_cut.pop():
                    is_cut.append(False)
                    cut(operation)
                is_cut[:] = is_cut or [False]

            fail(once)
            path = add(run, update)
            assert path is not None
            copies.thread.notify(path)
            wait_until(lambda update=update: len(copies.thread.state.copied) == update)  # type: ignore[misc]
            fail(None)
        copies.finish()
        assert len(copies.warnings) == 2
        assert copies.thread.state.failed == 2


def test_a_damaged_checkpoint_is_skipped_with_one_warning(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(tmp_path, 1, 2, 3) as run:
        (checkpoint_path(run.checkpoints, 2) / "state.json").write_bytes(b"{}")
        copies = Copies(mirror, run, monkeypatch)
        copies.thread.start(is_required=True)
        wait_until(lambda: numbers(mirror) == [3, 1])
        path = add(run, 4)
        assert path is not None
        copies.thread.notify(path)
        summary = copies.finish()
        assert numbers(mirror) == [4, 3, 1]
        assert len(copies.warnings) == 1
        assert "update-0000000002" in copies.warnings[0]
        assert "3 of 4" in summary
        assert "update-0000000002" in summary


def test_a_replaced_checkpoint_is_copied_again(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(tmp_path, 1) as run:
        copies = Copies(mirror, run, monkeypatch)
        copies.thread.start(is_required=True)
        path = checkpoint_path(run.checkpoints, 1)
        wait_until(lambda: copies.thread.state.copied != ())
        before = mirrored_name(path)
        given = replace(snapshot(11), update=1)
        save(run.checkpoints, replace(given, facts={**given.facts, "run_uid": UID, "metrics_bytes": 0}), overwrite=True)
        copies.thread.notify(path)
        summary = copies.finish()
        assert mirrored_name(path) != before
        assert mirrored_name(path) in mirror.checkpoints(UID)
        assert "1 of 1" in summary


def test_checkpoints_removed_before_their_copy_are_counted(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(tmp_path, 1, 2, 3) as run:
        copies = Copies(mirror, run, monkeypatch)
        for update in (1, 2):
            shutil.rmtree(checkpoint_path(run.checkpoints, update))
        copies.thread.start(is_required=True)
        summary = copies.finish()
        assert (numbers(mirror), copies.recorded["skipped"]) == ([3], 2)
        assert "(2 were removed" in summary
        assert "1 of 1" in summary


def test_a_run_trains_without_copies_if_threads_cannot_start(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with machine(tmp_path, 1) as run:
        copies = Copies(mirror, run, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            copies.thread.start(is_required=True)
        summary = copies.finish()
        assert len(copies.warnings) == 1
        assert "0 of 1" in summary
        assert "ended: " in summary
        assert copies.recorded["problem"].startswith("ended: ")


def test_an_error_in_the_mirror_thread_does_not_end_the_run(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ends only the copies."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("of the store")

    with machine(tmp_path, 1) as run:
        copies = Copies(mirror, run, monkeypatch)
        monkeypatch.setattr(Mirror, "upload", broken)
        copies.thread.start(is_required=True)
        summary = copies.finish()
        assert "ZeroDivisionError" in copies.thread.state.problem
        assert len(copies.warnings) == 1
        assert "0 of 1" in summary


def test_waiting_for_copies_at_the_end_is_reported(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    opened = threading.Event()

    def block(operation: str, path: str) -> None:
        if operation == "write" and path.endswith("model.safetensors"):
            assert opened.wait(LONG_S)

    def on_wait() -> None:
        waits.append(len(waits))
        opened.set()

    with machine(tmp_path, 1) as run:
        fail(block)
        copies = Copies(mirror, run, monkeypatch)
        copies.thread.start(is_required=True)
        assert "1 of 1" in copies.thread.finish(LONG_S, on_wait)
        assert waits


@pytest.mark.parametrize(("ahead", "is_claimed"), [(None, True), (1, True), (2, False)])
def test_a_mirror_unreachable_at_the_start_is_claimed_later(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int | None, is_claimed: bool
) -> None:
    """This requires that the mirror has no newer checkpoints."""
    with machine(tmp_path / "a", 1) as run, machine(tmp_path / "b", 1, 2) as other:
        if ahead is not None:
            copy_checkpoints(mirror, other, ahead)
        is_cut = iter([True])
        fail(lambda operation, path: cut(operation) if next(is_cut, False) else None)
        copies = Copies(mirror, run, monkeypatch)
        copies.thread.start(is_required=False)
        copies.finish()
        assert (mirror.owner().writer not in (None, "writer")) == is_claimed
        assert (1 in numbers(mirror)) == is_claimed
        assert copies.thread.state.problem.startswith("ended: ") != is_claimed


def test_a_mirror_of_another_run_is_not_claimed_later(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(tmp_path, 1) as run:
        mirror.claim(OTHER, "writer")
        is_cut = iter([True])
        fail(lambda operation, path: cut(operation) if next(is_cut, False) else None)
        copies = Copies(mirror, run, monkeypatch)
        copies.thread.start(is_required=False)
        copies.finish()
        assert mirror.owner() == MirrorOwner(OTHER, "writer")
        assert numbers(mirror) == []
        assert copies.thread.state.problem.startswith("ended: ")


def test_a_run_without_a_mirror_copies_nothing() -> None:
    none = NoMirror()
    none.notify(Path("update-0000000001"))
    assert ([*none.in_use()], none.finish(LONG_S)) == ([], "")
    assert json.loads(MirrorState("s3://bucket").to_json())["copied"] == []


# ---------------------------------------------------------------- the mirror


def test_a_mirror_with_several_runs_must_have_an_owner(mirror: Mirror, tmp_path: Path) -> None:
    assert mirror.owner() == MirrorOwner(None)
    for uid in (UID, OTHER):
        mirror.store.write(f"{uid}/update-0000000001-0123456789abcdef/state.json", b"{}")
    with pytest.raises(DataError):
        mirror.owner()
    mirror.claim(UID, "writer")
    assert mirror.owner() == MirrorOwner(UID, "writer")


@pytest.mark.parametrize("record", [b"", b"[]", b'{"run_uid": 3}', b'{"run_uid": "abc", "writer": "x"}'], ids=str)
def test_a_damaged_owner_file_in_an_empty_mirror_is_rejected(mirror: Mirror, record: bytes) -> None:
    mirror.store.write("owner.json", record)
    with pytest.raises(DataError):
        mirror.owner()


def test_a_non_string_writer_is_unknown(mirror: Mirror) -> None:
    mirror.store.write("owner.json", json.dumps({"run_uid": UID, "writer": 3}).encode())
    assert mirror.owner() == MirrorOwner(UID, None)


def test_folders_with_other_names_are_not_checkpoints(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path, 1, 2) as run:
        copy_checkpoints(mirror, run, 1, 2)
    complete = mirror.checkpoints(UID)
    assert [mirrored_update(name) for name in complete] == [2, 1]
    for name in ("update-1-0123456789abcdef", "update-0000000003-0123456789ABCDEF", "update-0000000004"):
        mirror.store.write(f"{UID}/{name}/MANIFEST.json", b"{}")
    partial = "update-0000000009-0123456789abcdef"
    mirror.store.write(f"{UID}/{partial}/MANIFEST.json", b"{}")
    assert mirror.checkpoints(UID) == complete
    assert mirror.candidates(UID) == [partial, *complete]


def test_pruning_keeps_newest_selected_and_newer_copies(mirror: Mirror, tmp_path: Path) -> None:
    """Copies may be newer than the checkpoints of this process."""
    with machine(tmp_path, *range(1, 6)) as run:
        copy_checkpoints(mirror, run, *range(1, 6))
    of_update = {mirrored_update(name): name for name in mirror.checkpoints(UID)}
    running = "update-0000000009-0123456789abcdef"
    mirror.store.write(f"{UID}/{running}/model.safetensors", b"is being uploaded by another process")
    removed = mirror.prune(UID, [of_update[1]], 0)
    assert sorted(removed) == [of_update[2], of_update[3]], "the newest two must be kept"
    assert mirror.store.names(UID) == [of_update[1], of_update[4], of_update[5], running]
    assert mirror.prune(UID, [], 3) == []
    assert mirror.prune(UID, [], 2) == [of_update[1]]


def test_pruning_needs_a_constant_number_of_requests(mirror: Mirror, tmp_path: Path) -> None:
    """Otherwise, each upload to a mirror with many copies could need a thousand requests."""

    def requests(names: list[str]) -> int:
        FaultyStorage.calls.clear()
        mirror.prune(UID, names, 2)
        return len(FaultyStorage.calls)

    counts = []
    with machine(tmp_path, *range(1, 10)) as run:
        for last in (4, 9):
            copy_checkpoints(mirror, run, *range(1, last + 1))
            names = mirror.store.names(UID)
            counts.append((requests(names), requests(names[1:])))
    assert counts[0] == counts[1]


def test_pruning_removes_the_manifest_first(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path, 1, 2, 3) as run:
        copy_checkpoints(mirror, run, 1, 2, 3)
    FaultyStorage.calls.clear()
    mirror.prune(UID, [], 2)
    removed = [path for operation, path in FaultyStorage.calls if operation == "remove"]
    assert removed[0].endswith("/MANIFEST.json")
    assert f"{removed[1]}/MANIFEST.json" == removed[0]


def test_the_best_checkpoints_are_downloaded(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path / "a", 1, 2, 3) as run:
        given = snapshot(4)
        state = {**given.state, "bests": [[0.5, 2], [0.1, 9], "x", [1]], "kept": [1, "y", True, -1, 4]}
        facts = {**given.facts, "run_uid": UID, "metrics_bytes": 10}
        save(run.checkpoints, replace(given, state=state, facts=facts))
        copy_checkpoints(mirror, run, 1, 2, 3, 4)
        with machine(tmp_path / "b") as there:
            reports: list[str] = []
            fetch_checkpoints(mirror, there, reports.append, reports.append)
            assert sorted(path.name for path in there.checkpoints.iterdir()) == [
                f"update-{update:010}" for update in (1, 2, 4)
            ]
            assert len(reports) == 1
            assert "update-0000000004" in reports[0]
            for update in (1, 2):
                path = checkpoint_path(there.checkpoints, update)
                assert content(path) == content(checkpoint_path(run.checkpoints, update))


def test_incomplete_metrics_do_not_prevent_a_resume(mirror: Mirror, tmp_path: Path) -> None:
    """A warning reports them."""
    with machine(tmp_path / "a", 2) as run:
        copy_checkpoints(mirror, run, 2)
        (name,) = mirror.checkpoints(UID)
        mirror.store.write(f"{UID}/{name}/metrics.jsonl", b"123456789\n")
        with machine(tmp_path / "b") as there:
            warnings: list[str] = []
            fetch_checkpoints(mirror, there, lambda _: None, warnings.append)
            assert load(checkpoint_path(there.checkpoints, 2)).update == 2
            assert len(warnings) == 1
            assert not there.metrics.exists()


def test_a_run_without_metrics_is_copied(mirror: Mirror, tmp_path: Path) -> None:
    with machine(tmp_path, 1) as run:
        run.metrics.unlink()
        name = mirror.upload(checkpoint_path(run.checkpoints, 1), run.metrics, UID)
        assert mirror.store.read(f"{UID}/{name}/metrics.jsonl", 100) == b""


@pytest.mark.parametrize("name", ["../state.json", ".hidden", "a/b", 3])
def test_a_manifest_with_a_path_is_damaged(mirror: Mirror, tmp_path: Path, name: object) -> None:
    with machine(tmp_path, 1) as run:
        copy_checkpoints(mirror, run, 1)
        (there,) = mirror.checkpoints(UID)
        manifest = json.loads(mirror.store.read(f"{UID}/{there}/MANIFEST.json", 1 << 20) or b"")
        manifest["files"][0]["name"] = name
        mirror.store.write(f"{UID}/{there}/MANIFEST.json", json.dumps(manifest).encode())
        with pytest.raises(DataError):
            mirror.download(UID, there, tmp_path / "b")


# ---------------------------------------------------------------- the store


def test_a_store_accesses_only_files_in_its_folder() -> None:
    store, other = MirrorStore(f"{ROOT}/", "mine"), MirrorStore(ROOT, "other")
    assert store.shown == f"{ROOT}/mine"
    assert (store.names(), store.names("a"), store.size("a/x"), store.read("a/x", 3)) == ([], [], None, None)
    for name in ("b", "a/y", "a/x"):
        store.write(name, b"123")
    other.write("c", b"")
    assert (store.names(), store.names("a")) == (["a", "b"], ["x", "y"])
    assert (store.size("b"), store.read("b", 3), [*store.chunks("b")]) == (3, b"123", [b"123"])
    with pytest.raises(MirrorError):
        store.read("b", 2)
    store.write("b", b"4")
    assert store.read("b", 3) == b"4"
    for name in ("a", "b", "missing"):
        store.remove(name)
    assert (store.names(), other.names()) == ([], ["c"])


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    store = MirrorStore(f"file://{tmp_path}", "mine")
    size = (8 << 20) + 5
    (tmp_path / "large").write_bytes(bytes(size))
    store.upload(tmp_path / "large", "folder/large")
    assert [len(chunk) for chunk in store.chunks("folder/large")] == [8 << 20, 5]
    assert store.names() == ["folder"]


class CredentialRetrievalError(Exception):
    pass


class Unauthenticated(Exception):
    """An error class whose name does not indicate that permission is missing."""


class HttpAuthError(Exception):
    pass


class HttpResponseError(Exception):
    """An error with an HTTP status, like those of azure-core."""

    def __init__(self, status_code: int) -> None:
        super().__init__("Server failed to authenticate the request")
        self.status_code = status_code


class HttpError(Exception):
    """An error with an HTTP status, like those of gcsfs."""

    def __init__(self, code: int) -> None:
        super().__init__("Invalid Credentials")
        self.code = code


class RefreshError(Exception):
    """The error that google-auth raises for a key that cannot be used."""


@pytest.mark.parametrize(
    ("error", "is_permission"),
    [
        (PermissionError("denied"), True), (CredentialRetrievalError("none"), True), (HttpAuthError("401"), True),
        (HttpResponseError(403), True), (HttpError(401), True), (RefreshError("invalid_grant"), True),
        (OSError("Forbidden: b/bucket"), True), (HttpResponseError(503), False), (HttpError(500), False),
        (ConnectionResetError("reset"), False), (Unauthenticated("x"), False), (OSError(28, "full"), False),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_file_system_errors_become_mirror_errors(error: Exception, is_permission: bool) -> None:
    def raises(operation: str, path: str) -> None:
        raise error

    store = MirrorStore(ROOT, "mine")
    fail(raises)
    calls: list[Callable[[], object]] = [
        store.names, lambda: store.size("x"), lambda: store.read("x", 9), lambda: [*store.chunks("x")],
        lambda: store.write("x", b""), lambda: store.upload(Path(__file__), "x"), lambda: store.remove("x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(MirrorError) as caught:
            call()
        assert caught.value.exit_code == (Exit.PERMISSION if is_permission else Exit.INPUT_OUTPUT)
        assert caught.value.problems[0].where == store.shown
        assert caught.value.__cause__ is error


def test_errors_of_the_runner_are_not_converted() -> None:
    def raises(operation: str, path: str) -> None:
        raise own

    own, store = AccelRunError("of the runner"), MirrorStore(ROOT, "mine")
    fail(raises)
    with pytest.raises(AccelRunError) as caught:
        store.write("x", b"")
    assert caught.value is own
    assert mirror_store.MirrorError("x").exit_code == Exit.INPUT_OUTPUT
