"""When a function that changes names in a run folder returns, the names are durable, or nothing depends on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from runner.base.errors import CannotCreate, StorageError
from runner.durable import checkpoint, files
from runner.durable.checkpoint import checkpoint_path, install, recover, retain, save
from runner.durable.directory import RunDirectory
from tests.faults.crash_states import State, after_all, states
from tests.faults.histories import check_loaded, on_disk, snapshot
from tests.faults.recording import Faults, Killed, Quick, Recording


def copy_of(source: Path) -> Callable[[Path], None]:
    """Return a function that durably copies the files of a checkpoint to a folder."""

    def fill(folder: Path) -> None:
        for path in sorted(source.iterdir()):
            files.write_new(folder / path.name, [path.read_bytes()])

    return fill


def installs_another(run: Path) -> None:
    install(checkpoint_path(run, 4), copy_of(run.parent / "other" / "update-0000000004"))


def restores(run: Path) -> None:
    moved = checkpoint.set_aside_newer(run, 1)
    checkpoint.restore_moved(moved)


def sets_newer_aside(run: Path) -> None:
    checkpoint.set_aside_newer(run, 1)


def sets_all_aside(run: Path) -> None:
    checkpoint.set_aside(run)


def recovers_replaced(run: Path) -> None:
    """Another process was killed between the two renames of a save that replaces a checkpoint."""
    files.rename(checkpoint_path(run, 3), run / f"replaced-{checkpoint_path(run, 3).name}")
    recover(run)


def saves_again(run: Path) -> None:
    save(run, snapshot(3), overwrite=True)


def removes_all_but_two(run: Path) -> None:
    retain(run, 2)


def recording_of(act: Callable[[Path], object], folder: Path, *, root: str = "run") -> Recording:
    """Record the operations of `act` in a folder that has the durable checkpoints 1, 2 and 3."""
    with files.use_system(Quick()):
        for number in (1, 2, 3):
            save(folder / "run", snapshot(number))
        save(folder / "other", snapshot(4))
    recording = Recording(folder / root)
    with files.use_system(recording):
        act(recording.root)
    return recording


def crashes_of(recording: Recording, *, after: int | None = None) -> Iterator[State]:
    """Yield the states that a crash can leave.

    after  number of operations before the crash
    """
    points = None if after is None else [after]
    return states(recording.start, recording.operations, 60, "names", points=points)


def check_visible_checkpoints(recording: Recording, root: Path) -> None:
    """Check that each checkpoint that is visible after a crash is complete."""
    for state in crashes_of(recording):
        with on_disk(state, root) as found:
            for path in checkpoint.newest_first(found):
                check_loaded(checkpoint.load(path))


@pytest.mark.parametrize(
    "act",
    [installs_another, restores, sets_newer_aside, sets_all_aside, recovers_replaced, saves_again, removes_all_but_two],
    ids=lambda act: act.__name__,
)
def test_names_of_checkpoints_are_durable_when_a_function_returns(
    act: Callable[[Path], object], tmp_path: Path
) -> None:
    def visible(tree: object) -> dict[str, bytes | None]:
        assert isinstance(tree, dict)
        return {path: data for path, data in tree.items() if not path.startswith((files.TEMPORARY, "replaced-"))}

    recording = recording_of(act, tmp_path)
    wanted = visible(after_all(recording.start, recording.operations))
    for state in crashes_of(recording, after=len(recording.operations)):
        assert visible(state.tree) == wanted, state


@pytest.mark.parametrize("act", [installs_another, removes_all_but_two], ids=lambda act: act.__name__)
def test_visible_checkpoints_are_complete_after_a_crash(act: Callable[[Path], object], tmp_path: Path) -> None:
    recording = recording_of(act, tmp_path)
    check_visible_checkpoints(recording, tmp_path / "state")


def test_hidden_names_are_durable_before_checkpoints_are_removed(tmp_path: Path) -> None:
    """After a failed sync, the next call finds the hidden name, which a crash can still revert."""

    with files.use_system(Quick()):
        for number in (1, 2, 3):
            save(tmp_path / "run", snapshot(number))
    recording = Recording(tmp_path / "run")
    known = set(checkpoint.newest_first(recording.root))
    with Faults({1: "EIO"}, recording).active(), pytest.raises(StorageError):
        retain(recording.root, 2, verified=set(known))
    with files.use_system(recording):
        retain(recording.root, 2, verified=set(known))
    check_visible_checkpoints(recording, tmp_path / "state")


def test_replacements_are_durable_before_old_checkpoints_are_removed(tmp_path: Path) -> None:
    """The process that replaced the checkpoint was killed before it could sync the new name."""
    with files.use_system(Quick()):
        for number in (1, 2, 3):
            save(tmp_path / "run", snapshot(number))
        shutil.copytree(tmp_path / "run", tmp_path / "counted")
    counted = Faults()
    with counted.active():
        save(tmp_path / "counted", snapshot(3), overwrite=True)
    last = max(number for number, (operation, _) in enumerate(counted.trace) if operation == "rename")
    recording = Recording(tmp_path / "run")
    with Faults({last: "killed after"}, recording).active(), pytest.raises(Killed):
        save(recording.root, snapshot(3), overwrite=True)
    with files.use_system(recording):
        recover(recording.root)
    for state in crashes_of(recording):
        with on_disk(state, tmp_path / "state") as found:
            newest = recover(found).checkpoint
            assert newest is not None
            assert newest.update == 3, state
            check_loaded(newest)


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path) -> None:
    """The process that hid the checkpoint was killed before it could sync the hidden name."""
    with files.use_system(Quick()):
        for number in (1, 2, 3):
            save(tmp_path / "run", snapshot(number))
    recording = Recording(tmp_path / "run")
    known = set(checkpoint.newest_first(recording.root))
    with Faults({0: "killed after"}, recording).active(), pytest.raises(Killed):
        retain(recording.root, 2, verified=known)
    with files.use_system(recording):
        assert files.remove_temporary_files(recording.root) == ()
    check_visible_checkpoints(recording, tmp_path / "state")


@pytest.mark.parametrize("existing", ["", "a", "a/b/run/checkpoints"])
def test_the_folder_of_an_open_run_is_durable(existing: str, tmp_path: Path) -> None:
    """Some folders may already exist, because their process was killed before it synced the names."""
    (tmp_path / "disk").mkdir()
    recording = Recording(tmp_path / "disk")
    for folder in [*reversed(Path(existing).parents), Path(existing)][1:]:
        recording.mkdir(recording.root / folder)
    with files.use_system(recording), RunDirectory.create_or_open(recording.root / "a" / "b", "run"):
        pass
    for state in crashes_of(recording, after=len(recording.operations)):
        assert {"a", "a/b", "a/b/run", "a/b/run/checkpoints"} <= state.tree.keys(), state


@pytest.mark.parametrize(("kind", "is_refused"), [("EIO", True), ("EACCES", False)])
def test_unsynced_parents_are_an_error_unless_permission_is_missing(
    kind: str, is_refused: bool, tmp_path: Path
) -> None:
    faults = Faults({0: kind})
    (tmp_path / "one").mkdir()
    with faults.active(), pytest.raises(StorageError) if is_refused else nullcontext():
        files.sync_ancestors(tmp_path / "one")
    assert faults.trace == [("open", str(tmp_path))], "only the parent must be opened"


@pytest.mark.parametrize(("kind", "is_refused"), [("EIO", True), ("EACCES", False)])
def test_unreadable_parent_folders_do_not_prevent_a_run(kind: str, is_refused: bool, tmp_path: Path) -> None:
    """Other errors while syncing these folders do prevent it."""
    (tmp_path / "home").mkdir()
    with Faults({0: kind}).active() as faults, pytest.raises(StorageError) if is_refused else nullcontext():
        files.make_directory(tmp_path / "home" / "outputs")
    assert (tmp_path / "home" / "outputs").is_dir() != is_refused
    assert faults.trace[0] == ("open", str(tmp_path))


def test_folders_can_be_created_in_unreadable_folders(tmp_path: Path) -> None:
    with Faults().active() as counted:
        files.make_directory(tmp_path / "one" / "outputs")
    opened = [number for number, (operation, path) in enumerate(counted.trace) if operation == "open"]
    for number in opened:  # of each parent in turn
        with Faults({number: "EACCES"}).active():
            files.make_directory(tmp_path / f"two-{number}" / "outputs")
        assert (tmp_path / f"two-{number}" / "outputs").is_dir()
    assert len(opened) > 2


def test_a_run_with_an_unsynced_folder_is_not_opened(tmp_path: Path) -> None:
    for counted in (Faults(), Faults()):  # the first iteration creates the folder
        with counted.active(), RunDirectory.create_or_open(tmp_path, "run"):
            pass
    last = max(number for number, (operation, _) in enumerate(counted.trace) if operation == "fsync")
    with Faults({last: "EIO"}).active(), pytest.raises(CannotCreate):
        RunDirectory.create_or_open(tmp_path, "run")
    with RunDirectory.create_or_open(tmp_path, "run"):
        pass  # the failed attempt has released the lock


def written_together(folder: Path) -> None:
    (folder / "sub").mkdir(exist_ok=True)
    files.atomic_write_all({folder / "one": b"1" * 200, folder / "sub" / "two": b"2" * 200})


def written_as_a_stream(folder: Path) -> None:
    files.write_stream(folder / "one", [b"1" * 100, memoryview(b"2" * 100)])
    files.fsync_directory(folder)


def cut(folder: Path) -> None:
    with closing(files.AppendLog(folder / "rows")) as log:
        for number in range(40):
            log.write(f"{number}")
        log.sync()
        log.cut(30)


@pytest.mark.parametrize("act", [written_together, written_as_a_stream, cut], ids=lambda act: act.__name__)
def test_content_is_durable_when_a_function_returns(act: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "disk" / "sub").mkdir(parents=True)
    recording = Recording(tmp_path / "disk")
    with files.use_system(recording):
        act(recording.root)
    wanted = after_all(recording.start, recording.operations)
    assert any(wanted.values())
    for state in crashes_of(recording, after=len(recording.operations)):
        assert state.tree == wanted, state
