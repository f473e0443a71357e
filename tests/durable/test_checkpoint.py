"""Acknowledged checkpoints are never lost, and damaged ones are never loaded."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.base.errors import DataError, Exit, StorageError
from runner.durable import checkpoint, checkpoint_writer, files, safetensors_writer
from runner.durable.checkpoint import Snapshot, checkpoint_path, recover, retain, save, verify
from runner.durable.checkpoint_writer import CheckpointWriter
from runner.durable.manifest import serialize_manifest
from runner.durable.system import System
from runner.durable.system_errors import storage_errors
from tests.faults.recording import Faults, Killed
from tests.faults.tallies import IS_LONG, SEED

ROOT = Path(__file__).parents[2]
DTYPES = [getattr(torch, name) for name in sorted(safetensors_writer.DTYPES)]


def snapshot(update: int) -> Snapshot:
    """Return a small snapshot in which every part depends on `update`."""
    generator = torch.Generator().manual_seed(update)
    return Snapshot(
        update=update,
        tensors={
            "model": {"weight": torch.randn(3, 4, generator=generator), "bias": torch.randn(3, generator=generator)},
            "optimizer": {"0.exp_avg": torch.randn(3, 4, generator=generator), "0.step": torch.tensor(float(update))},
            "random": {"cpu": generator.get_state()},
        },
        state={"samples": update * 64, "best": 0.1 + update, "phases": ["train"], "name": "Zoë"},
        facts={"epoch": update // 10, "world_size": 1, "run_id": "ab12", "metrics_bytes": update * 100},
    )


def assert_is(loaded: checkpoint.LoadedCheckpoint | None, update: int) -> None:
    """Assert that the loaded checkpoint is bitwise equal to the snapshot of `update`."""
    assert loaded is not None
    expected = snapshot(update)
    assert loaded.update == update
    assert loaded.state == expected.state
    assert {key: loaded.manifest[key] for key in expected.facts} == expected.facts
    assert set(loaded.stems) == set(expected.tensors)
    for stem, there in expected.tensors.items():
        assert_same_bits(loaded.tensors(stem), there)


def assert_same_bits(actual: dict[str, Tensor], expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape
        assert torch.equal(bits(actual[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a tensor of random bits, such as NaNs with payloads, infinities and denormals."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
    return torch.frombuffer(bytearray(os.urandom(size)), dtype=dtype).reshape(shape)


def updates_in(directory: Path) -> list[int]:
    return [int(name.removeprefix("update-")) for name in files.list_names(directory) if name.startswith("update-")]


def damage(path: Path) -> None:
    """Flip one bit of the model file."""
    content = bytearray((path / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "model.safetensors").write_bytes(content)


# Round trip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_restored_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    square = random_tensor(dtype, 5, 7)
    saved = {
        "square": square,
        "scalar": random_tensor(dtype, 1).reshape(()),
        "empty": torch.empty(0, 3, dtype=dtype),
        "transposed": random_tensor(dtype, 3, 5).t(),
        "strided": random_tensor(dtype, 10)[1::3],
        "expanded": random_tensor(dtype, 1).expand(4),
        "tied": square,
        "view": square[1:3],
    }
    path = save(tmp_path, Snapshot(1, {"model": saved}, {}, {}))
    assert_same_bits(checkpoint.load(path).tensors("model"), saved)


def test_a_conjugated_view_is_saved_conjugated(tmp_path: Path) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    path = save(tmp_path, Snapshot(1, {"model": {"conj": tensor.conj()}}, {}, {}))
    assert torch.equal(checkpoint.load(path).tensors("model")["conj"], tensor.conj())


def test_state_and_metadata_are_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "nan": math.nan,
        "tiny": 5e-324,
        "third": 1 / 3,
        "big": 2**80,
        "nested": {"a": [None, True, "\ud800"]},
    }
    path = save(tmp_path, Snapshot(7, {}, state, {"layers": {10: "a", 9: "b"}, "pair": (1, 2)}))
    loaded = checkpoint.load(path)
    assert math.isnan(loaded.state.pop("nan"))  # type: ignore[attr-defined]
    del state["nan"]
    assert loaded.state == state
    assert loaded.manifest["layers"] == {"10": "a", "9": "b"}
    assert loaded.manifest["pair"] == [1, 2]


def test_the_manifest_begins_with_its_own_hash(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, snapshot(3)) / "MANIFEST.json").read_text())
    assert list(manifest)[:3] == ["sha256", "format_version", "update"]
    names = [entry["name"] for entry in manifest["files"]]
    assert names == ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]


def test_unsupported_tensors_are_rejected_before_writing(tmp_path: Path) -> None:
    wrong = [
        Snapshot(1, {}, {"object": object()}, {}),
        Snapshot(1, {}, {}, {"object": {1, 2}}),
        Snapshot(1, {"model": {"x": torch.zeros(2, dtype=torch.complex128)}}, {}, {}),
        Snapshot(1, {"model": {"x": torch.eye(2).to_sparse()}}, {}, {}),
    ]
    for one in wrong:
        with pytest.raises(TypeError):
            save(tmp_path / "checkpoints", one)
    assert list(tmp_path.iterdir()) == []


def test_all_files_are_private(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", snapshot(1))
    assert path.stat().st_mode & 0o777 == 0o700
    assert {entry.stat().st_mode & 0o777 for entry in path.iterdir()} == {0o600}


def test_ranks_write_files_with_different_names() -> None:
    stems = {checkpoint.rank_stem("random", rank) for rank in range(100)}
    assert len(stems) == 100
    assert "random-rank00003" in stems


# Detection of damage


def test_a_flipped_bit_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path, snapshot(1))
    assert verify(path) == []
    generator = random.Random(0)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        every = file.name == "MANIFEST.json"
        positions = range(len(content)) if every else generator.sample(range(len(content)), 40)
        for position in positions:
            flipped = bytearray(content)
            flipped[position] ^= 1 << generator.randrange(8)
            file.write_bytes(flipped)
            assert verify(path), f"{file.name}, byte {position}"
        file.write_bytes(content)
    assert verify(path) == []


def test_truncations_and_additions_are_detected(tmp_path: Path) -> None:
    path = save(tmp_path, snapshot(1))
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        changed = [content[:length] for length in {0, 1, 8, len(content) // 2, len(content) - 1}]
        for other in (*changed, content + b"\n", content + b"\0" * 512):
            file.write_bytes(other)
            assert verify(path), file.name
        file.unlink()
        assert verify(path), file.name
        file.write_bytes(content)
    assert verify(path) == []


def test_swapped_files_are_detected(tmp_path: Path) -> None:
    first, second = (save(tmp_path, snapshot(update)) for update in (1, 2))
    for name in files.list_names(first):
        ours, theirs = (first / name).read_bytes(), (second / name).read_bytes()
        (first / name).write_bytes(theirs)
        assert verify(first), name
        (first / name).write_bytes(ours)
    shutil.copytree(second, tmp_path / "update-0000000003")
    (reason,) = verify(tmp_path / "update-0000000003")
    assert reason.endswith("update 2")
    shutil.copytree(second, tmp_path / "a-copy-under-another-name")
    assert verify(tmp_path / "a-copy-under-another-name") == []


def test_additional_files_and_links_are_rejected(tmp_path: Path) -> None:
    path = save(tmp_path, snapshot(1))
    model = path / "model.safetensors"
    (path / "more.safetensors").write_bytes(b"")
    (reason,) = verify(path)
    assert reason.startswith("more.safetensors ")
    (path / "more.safetensors").unlink()
    model.rename(tmp_path / "kept")
    model.symlink_to(tmp_path / "kept")
    assert [reason.split()[0] for reason in verify(path)] == ["model.safetensors"]
    model.unlink()
    os.mkfifo(model)
    assert [reason.split()[0] for reason in verify(path)] == ["model.safetensors"]
    model.unlink()
    (tmp_path / "kept").rename(model)
    assert verify(path) == []
    (tmp_path / "update-0000000002").symlink_to(path)
    assert verify(tmp_path / "update-0000000002")
    assert verify(tmp_path / "missing")


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"name": "../../state.json", "size": 2, "sha256": "x"}]},
        {"files": [{"name": "/etc/passwd", "size": 2, "sha256": "x"}]},
        {"files": [{"name": "state.json", "size": 2.0, "sha256": "x"}]},
        {"files": [{"name": "state.json"}]},
        {"files": [{"name": 3, "size": 1, "sha256": "x"}]},
        {"files": {"state.json": 1}},
        {"files": []},
        {"files": None},
        {"format_version": 2},
        {"format_version": None},
        {"update": "1"},
        {"update": True},
        {"update": -1},
        {"update": 10**10},
    ],
    ids=str,
)
def test_a_malicious_manifest_with_valid_hash_is_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    path = save(tmp_path, Snapshot(1, {}, {}, {}))
    manifest = json.loads((path / "MANIFEST.json").read_text())
    del manifest["sha256"]
    (path / "MANIFEST.json").write_bytes(serialize_manifest(manifest))
    assert verify(path) == []
    (path / "MANIFEST.json").write_bytes(serialize_manifest(manifest | change))
    assert verify(path)


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"1" * 5000, b"NaN"],
    ids=lambda text: repr(text[:10]),
)
def test_verification_never_raises_for_any_manifest(tmp_path: Path, text: bytes) -> None:
    path = save(tmp_path, snapshot(1))
    (path / "MANIFEST.json").write_bytes(text)
    assert verify(path)


def test_files_changed_after_verification_are_not_loaded(tmp_path: Path) -> None:
    loaded = checkpoint.load(save(tmp_path, snapshot(1)))
    damage(loaded.path)
    with pytest.raises(DataError, match="changed since"):
        loaded.tensors("model")
    with pytest.raises(DataError, match="it has model, optimizer, random"):
        loaded.tensors("scaler")
    with pytest.raises(DataError, match="does not match its hash"):
        checkpoint.load(loaded.path)


def test_files_of_other_formats_are_invalid(tmp_path: Path) -> None:
    path = save(tmp_path, Snapshot(1, {}, {}, {}))
    size, sha256 = files.write_new(path / "model.safetensors", [b"\xff" * 64])
    manifest = json.loads((path / "MANIFEST.json").read_text())
    del manifest["sha256"]
    manifest["files"].append({"name": "model.safetensors", "size": size, "sha256": sha256})
    (path / "MANIFEST.json").write_bytes(serialize_manifest(manifest))
    with pytest.raises(DataError, match="not in the safetensors format"):
        checkpoint.load(path).tensors("model")


# Recovery


def test_without_checkpoints_a_run_starts_from_scratch(tmp_path: Path) -> None:
    assert recover(tmp_path / "checkpoints") == checkpoint.Recovery(None)
    (tmp_path / ".tmp-update-0000000001-ab").mkdir()
    (tmp_path / "notes").write_text("not ours")
    assert recover(tmp_path) == checkpoint.Recovery(None)
    assert files.list_names(tmp_path) == ["notes"]


def test_the_newest_valid_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Damaged checkpoints are moved aside."""
    for update in (1, 2, 3, 4):
        save(tmp_path, snapshot(update))
    damage(checkpoint_path(tmp_path, 4))
    (checkpoint_path(tmp_path, 3) / "state.json").unlink()
    assert checkpoint.newest_valid(tmp_path) == checkpoint_path(tmp_path, 2)
    assert updates_in(tmp_path) == [1, 2, 3, 4]
    recovery = recover(tmp_path)
    assert_is(recovery.checkpoint, 2)
    result = [(name, *(reason.split()[0] for reason in reasons)) for name, reasons in recovery.skipped]
    assert result == [("update-0000000004", "model.safetensors"), ("update-0000000003", "state.json")]
    assert updates_in(tmp_path) == [1, 2]
    assert {"damaged-update-0000000003-1", "damaged-update-0000000004-1"} <= set(files.list_names(tmp_path))
    assert_is(checkpoint.load(save(tmp_path, snapshot(3))), 3)


def test_exit_code_is_65_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    """The exit code stays 65 until the checkpoints are moved aside."""
    for update in (1, 2):
        damage(save(tmp_path, snapshot(update)))
    for _ in range(3):
        with pytest.raises(DataError, match="resume=fresh") as caught:
            recover(tmp_path)
        assert caught.value.exit_code == Exit.BAD_DATA
    assert checkpoint.newest_valid(tmp_path) is None
    assert checkpoint.set_aside(tmp_path) == 2
    assert recover(tmp_path).checkpoint is None
    assert len(files.list_names(tmp_path)) == 2


def test_checkpoints_set_aside_by_a_fresh_start_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, snapshot(9))
    assert checkpoint.set_aside(tmp_path) == 1
    save(tmp_path, snapshot(1))
    assert_is(recover(tmp_path).checkpoint, 1)
    assert verify(tmp_path / "earlier-update-0000000009-1") == []


def test_an_unreadable_checkpoint_is_moved_if_another_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for update in (1, 2):
        save(tmp_path, snapshot(update))
    listdir = os.listdir

    def deny(path: Any) -> list[str]:
        if Path(path) == checkpoint_path(tmp_path, 2):
            raise OSError(errno.EMFILE, "Too many open files")
        return listdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", deny)
        recovery = recover(tmp_path)
    assert_is(recovery.checkpoint, 1)
    assert recovery.skipped[0][0] == "update-0000000002"
    # Under its old name, it could be mistaken for a checkpoint of another computation at the same update.
    assert_is(checkpoint.load(tmp_path / "unreadable-update-0000000002-1"), 2)
    assert_is(recover(tmp_path).checkpoint, 1)
    changed = save(tmp_path, dataclasses.replace(snapshot(2), facts={"run_id": "another"}))
    assert checkpoint.load(changed).manifest["run_id"] == "another"


def test_the_only_checkpoint_is_kept_even_if_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, snapshot(1))

    def deny(path: Path, **_: Any) -> bytes:
        with storage_errors("read", path):
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "read", deny)
        with pytest.raises(DataError, match="the disk reports an error"):
            recover(tmp_path)
    assert_is(recover(tmp_path).checkpoint, 1)


def test_the_newest_checkpoint_is_found_during_saves_and_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saves and removes checkpoints at the same time."""
    save(tmp_path, snapshot(1))
    is_folder, looks = files.is_plain_directory, []

    def overtake(path: Path) -> bool:
        looks.append(path.name)
        if len(looks) < 4:  # the listed checkpoint is removed before it is checked
            patch.undo()
            save(tmp_path, snapshot(len(looks) + 1))
            patch.setattr(files, "is_plain_directory", overtake)
            shutil.rmtree(path)
        return is_folder(path)

    patch = monkeypatch
    patch.setattr(files, "is_plain_directory", overtake)
    assert_is(checkpoint.load_newest(tmp_path), 4)


def test_saving_an_update_again_replaces_only_damaged_checkpoints(tmp_path: Path) -> None:
    path = save(tmp_path, snapshot(1))
    inode = path.stat().st_ino
    assert save(tmp_path, snapshot(1)) == path
    assert path.stat().st_ino == inode
    damage(path)
    assert_is(checkpoint.load(save(tmp_path, snapshot(1))), 1)
    assert files.list_names(tmp_path) == ["damaged-update-0000000001-1", "update-0000000001"]


# Fault injection: each system call in turn fails, or is the last one before the process is killed


KINDS = ["EIO", "ENOSPC", "killed before", "killed half way", "killed after"]


def save_quickly(directory: Path, update: int) -> Path:
    """Save without syncing to disk."""
    with Faults().active():
        return save(directory, snapshot(update))


def count_operations(act: Callable[[], object]) -> int:
    faults = Faults()
    with faults.active():
        act()
    return len(faults.trace)


def some(num_operations: int) -> list[int]:
    """Return the indices of the operations that fail: by default, a third of them."""
    count = num_operations if IS_LONG else num_operations // 3
    return random.Random(SEED).sample(range(num_operations), count)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_during_a_save_leaves_a_valid_checkpoint(tmp_path: Path, kind: str) -> None:
    num_operations = count_operations(lambda: save(tmp_path / "counting", snapshot(2)))
    assert num_operations > 25
    for at in some(num_operations):
        directory = tmp_path / str(at)
        save_quickly(directory, 1)
        acknowledged = 1
        with Faults({at: kind}).active():
            try:
                save(directory, snapshot(2))
                acknowledged = 2
            except StorageError:
                assert files.list_names(directory) == ["update-0000000001"]
            except Killed:
                pass
        result = recover(directory)
        assert result.skipped == ()
        assert result.checkpoint is not None
        assert result.checkpoint.update >= acknowledged
        assert_is(result.checkpoint, result.checkpoint.update)
        assert_is(checkpoint.load(save_quickly(directory, 3)), 3)
        assert not any(name.startswith(files.TEMPORARY) for name in files.list_names(directory))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_during_retention_keeps_the_newest_two(tmp_path: Path, kind: str) -> None:
    def fill(directory: Path) -> Path:
        for update in (1, 2, 3, 4):
            save_quickly(directory, update)
        return directory

    counting = fill(tmp_path / "counting")
    num_operations = count_operations(lambda: retain(counting, 2))
    assert updates_in(counting) == [3, 4]
    assert num_operations > 15
    for at in some(num_operations):
        directory = fill(tmp_path / str(at))
        with Faults({at: kind}).active(), suppress(StorageError, Killed):
            retain(directory, 2)
        assert all(verify(checkpoint_path(directory, update)) == [] for update in updates_in(directory))
        assert updates_in(directory)[-2:] == [3, 4]
        assert_is(recover(directory).checkpoint, 4)
        retain(directory, 2)
        assert files.list_names(directory) == ["update-0000000003", "update-0000000004"]


def test_files_are_synced_before_a_checkpoint_gets_its_name(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    faults = Faults()
    with faults.active():
        target = save(directory, snapshot(1))
    renames = [position for position, (name, _) in enumerate(faults.trace) if name == "rename"]
    assert len(renames) == 1
    before, after = faults.trace[: renames[0]], faults.trace[renames[0] + 1 :]
    temporary = faults.trace[renames[0]][1]
    for name in files.list_names(target):
        file = f"{temporary}/{name}"
        last_write = max(position for position, step in enumerate(before) if step == ("write", file))
        assert before.index(("fsync", file)) > last_write, name
    manifest = before.index(("open", f"{temporary}/MANIFEST.json"))
    assert all(
        ("fsync", f"{temporary}/{name}") in before[:manifest] for name in files.list_names(target) if name[0] != "M"
    )
    assert before.index(("fsync", temporary)) > before.index(("fsync", f"{temporary}/MANIFEST.json"))
    assert ("fsync", str(directory)) in after


def test_metric_rows_are_synced_before_the_checkpoint(tmp_path: Path) -> None:
    faults = Faults()
    with faults.active(), files.AppendLog(tmp_path / "metrics") as log:
        log.write("a row")
        target = save(tmp_path / "checkpoints", snapshot(1), sync_first=log.sync)
        named = [step for step, _ in faults.trace].index("rename")
        assert ("fsync", str(tmp_path / "metrics")) in faults.trace[:named]
        log.write("another")
        del faults.trace[:]
        save(tmp_path / "checkpoints", snapshot(1), sync_first=log.sync)
        assert ("fsync", str(tmp_path / "metrics")) in faults.trace, (
            "rows must be synced even if the checkpoint already exists"
        )
    assert target.name == "update-0000000001"


def test_a_checkpoint_is_not_saved_without_its_rows(tmp_path: Path) -> None:
    """In the test, the metric rows cannot be synced."""

    def fail() -> None:
        raise StorageError("cannot sync", where="metrics.jsonl")

    writer = CheckpointWriter(tmp_path / "checkpoints", sync_first=fail)
    for update in (1, 2, 3):
        writer.submit(snapshot(update))
    writer.close()
    with pytest.raises(StorageError, match="3 saves in a row failed; the last error: cannot sync"):
        writer.wait()
    assert files.list_names(tmp_path / "checkpoints") == []


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    script = f"""
import importlib.util, os, random, signal, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("laws", {__file__!r})
laws = importlib.util.module_from_spec(spec)
spec.loader.exec_module(laws)
directory = Path({str(tmp_path / "checkpoints")!r})
generator, acknowledged = random.Random(0), 0
for _ in range({15 if IS_LONG else 5}):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        update = acknowledged
        while True:
            update += 1
            laws.save(directory, laws.snapshot(update))
            os.write(writing, update.to_bytes(8, "little"))
            laws.retain(directory, 2)
    os.close(writing)
    acknowledgments = os.read(reading, 8)
    time.sleep(generator.uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    acknowledgments += os.read(reading, 1 << 20)
    os.close(reading)
    acknowledged = int.from_bytes(acknowledgments[-8:], "little")
    recovery = laws.recover(directory)
    assert not recovery.skipped, recovery.skipped
    assert recovery.checkpoint.update >= acknowledged
    laws.assert_is(recovery.checkpoint, recovery.checkpoint.update)
    acknowledged = recovery.checkpoint.update
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# Retention


def test_retention_renames_a_checkpoint_before_removing_files(tmp_path: Path) -> None:
    for update in (1, 2, 3):
        save_quickly(tmp_path, update)
    faults = Faults()
    with faults.active():
        retain(tmp_path, 2)
    steps = [name for name, _ in faults.trace]
    assert steps.index("rename") < steps.index("fsync") < steps.index("unlink")


@pytest.mark.parametrize("keep_last", [-1, 0, 1, 2, 3, 9])
def test_at_least_two_checkpoints_are_kept(tmp_path: Path, keep_last: int) -> None:
    for update in range(1, 6):
        save(tmp_path, snapshot(update))
        retain(tmp_path, keep_last)
    expected = min(5, max(2, keep_last))
    assert updates_in(tmp_path) == list(range(6 - expected, 6))


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for update in range(1, 6):
        save(tmp_path, snapshot(update))
    damage(checkpoint_path(tmp_path, 5))
    damage(checkpoint_path(tmp_path, 3))
    retain(tmp_path, 2)
    assert updates_in(tmp_path) == [2, 3, 4, 5]


def test_the_best_checkpoint_is_kept_regardless_of_age(tmp_path: Path) -> None:
    for update in range(1, 6):
        save(tmp_path, snapshot(update))
    retain(tmp_path, 2, best=checkpoint_path(tmp_path, 1))
    assert updates_in(tmp_path) == [1, 4, 5]


# The writer


def test_training_continues_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write_new = files.write_new

    def slow(*arguments: Any) -> Any:
        gate.wait(60)
        return write_new(*arguments)

    monkeypatch.setattr(files, "write_new", slow)
    saved: list[Path] = []
    with CheckpointWriter(tmp_path, on_saved=saved.append) as writer:
        writer.submit(snapshot(1))
        assert files.list_names(tmp_path)[-1:] != ["update-0000000001"]
        gate.set()
        assert writer.wait() == 1
        writer.submit(snapshot(2))
    assert writer.acknowledged == 2
    assert saved == [checkpoint_path(tmp_path, 1), checkpoint_path(tmp_path, 2)]
    assert_is(recover(tmp_path).checkpoint, 2)


def test_a_save_is_attempted_three_times_in_new_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(System):
        def __init__(self, num_failures: int) -> None:
            self.left, self.folders = num_failures, list[Path]()

        def rename(self, source: Path, target: Path) -> None:
            self.folders.append(source)
            self.left -= 1
            if self.left >= 0:
                raise OSError(errno.EIO, "broken")
            super().rename(source, target)

    monkeypatch.setattr(checkpoint_writer, "RETRY_DELAYS_S", (0.0, 0.0))
    tried: list[StorageError] = []
    failed: list[StorageError] = []
    writer = CheckpointWriter(tmp_path, on_retry=tried.append, on_failure=failed.append)
    for update, num_failures in ((1, 2), (2, 3)):
        with files.use_system(disk := Faulty(num_failures)):
            writer.submit(snapshot(update))
            assert writer.wait() == 1
        assert len(set(disk.folders)) == 3
    assert (len(tried), len(failed)) == (4, 1)
    assert files.list_names(tmp_path) == ["update-0000000001"]


def test_the_third_consecutive_failed_save_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failed save is reported."""
    monkeypatch.setattr(checkpoint_writer, "RETRY_DELAYS_S", (0.0, 0.0))
    obstacle, directory = tmp_path / "disk", tmp_path / "disk" / "checkpoints"
    messages: list[StorageError] = []
    writer = CheckpointWriter(directory, on_failure=messages.append)
    obstacle.write_text("in the way")
    for update in (1, 2):
        writer.submit(snapshot(update))
        assert writer.wait() is None
    obstacle.unlink()
    writer.submit(snapshot(3))
    assert writer.wait() == 3
    shutil.rmtree(obstacle)
    obstacle.write_text("in the way")
    for update in (4, 5, 6):
        writer.submit(snapshot(update))
    writer.close()
    with pytest.raises(StorageError, match="3 saves in a row failed") as caught:
        writer.submit(snapshot(7))
    assert caught.value.exit_code == Exit.INPUT_OUTPUT
    assert writer.acknowledged == 3
    assert writer.failures == messages
    assert len(messages) == 5


def test_the_writer_keeps_the_newest_and_the_best_checkpoints(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=2) as writer:
        for update in range(1, 7):
            writer.submit(snapshot(update), best=[checkpoint_path(tmp_path, min(update, 2))])
    assert updates_in(tmp_path) == [2, 5, 6]
    with CheckpointWriter(tmp_path, keep_last=2) as writer:
        writer.submit(snapshot(7), best=[checkpoint_path(tmp_path, 2)])
    assert updates_in(tmp_path) == [2, 6, 7]


def test_written_or_verified_checkpoints_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for update in (1, 2, 3):
        save(tmp_path, snapshot(update))
    verified: list[str] = []
    monkeypatch.setattr(checkpoint, "verify", lambda path: verified.append(path.name) or [])
    with CheckpointWriter(tmp_path, keep_last=3) as writer:
        for update in (4, 5, 6, 7):
            writer.submit(snapshot(update))
            writer.wait()
    assert verified == ["update-0000000003"]
    assert updates_in(tmp_path) == [5, 6, 7]


def test_the_writer_reports_the_cost_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    writer = CheckpointWriter(tmp_path, sync_first=lambda: bool(gate.wait(60)) or None)
    assert writer.busy_s is None
    assert writer.last is None
    writer.submit(snapshot(1))
    assert writer.busy_s is not None
    gate.set()
    writer.wait()
    assert writer.busy_s is None
    saved = writer.last
    assert saved is not None
    assert saved.path == checkpoint_path(tmp_path, 1)
    assert saved.nbytes == sum(tensor.nbytes for there in snapshot(1).tensors.values() for tensor in there.values())
    assert 0 < saved.write_s <= saved.total_s


def test_failed_retention_is_not_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed retention is reported, too."""

    def fail(*_: object, **__: object) -> None:
        raise StorageError("cannot remove")

    monkeypatch.setattr(checkpoint_writer, "retain", fail)
    with CheckpointWriter(tmp_path) as writer:
        for update in range(1, 6):
            writer.submit(snapshot(update))
    assert writer.acknowledged == 5
    assert len(writer.failures) == 5


def test_an_internal_error_is_raised_in_the_training_thread(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.submit(Snapshot(1, {}, {"object": object()}, {}))
    with pytest.raises(TypeError):
        writer.wait()
    writer.submit(snapshot(2))
    assert writer.wait() == 2


def test_checkpoints_are_saved_synchronously_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system may refuse to start a thread."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = CheckpointWriter(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        writer.submit(snapshot(1))
        assert writer.busy_s is None
        assert writer.wait() == 1
    writer.submit(snapshot(2))
    assert writer.wait() == 2
    assert updates_in(tmp_path) == [1, 2]


def test_closing_the_writer_ends_its_thread(tmp_path: Path) -> None:
    before = threading.enumerate()
    writer = CheckpointWriter(tmp_path)
    for update in range(5):
        writer.submit(snapshot(update))
    writer.close()
    writer.close()
    assert threading.enumerate() == before


def test_a_repeated_save_replaces_a_valid_one(tmp_path: Path) -> None:
    save(tmp_path, snapshot(1))
    save(tmp_path, dataclasses.replace(snapshot(1), state={"finished": True}), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["update-0000000001"]
    assert checkpoint.load(checkpoint_path(tmp_path, 1)).state == {"finished": True}


def test_a_crashed_replacement_of_a_checkpoint_is_undone(tmp_path: Path) -> None:
    """The crash is between the two renames."""
    save(tmp_path, snapshot(1))
    save(tmp_path, snapshot(2))
    checkpoint_path(tmp_path, 2).rename(tmp_path / "replaced-update-0000000002")
    result = recover(tmp_path).checkpoint
    assert result is not None
    assert result.path == checkpoint_path(tmp_path, 2)
    assert not (tmp_path / "replaced-update-0000000002").exists()


def test_replaced_checkpoints_do_not_reappear_after_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, snapshot(1))
    checkpoint_path(tmp_path, 1).rename(tmp_path / "replaced-update-0000000001")
    assert checkpoint.set_aside(tmp_path) == 1
    assert recover(tmp_path).checkpoint is None
