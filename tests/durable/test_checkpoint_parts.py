"""A checkpoint of several ranks is valid only when all parts are durable, and can be read like a single file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runner.base.errors import DataError, StorageError
from runner.durable import checkpoint_parts, files
from runner.durable.checkpoint import (
    Snapshot,
    checkpoint_path,
    load,
    load_newest,
    recover,
    save,
    save_part,
    verify,
)
from runner.durable.checkpoint_parts import CheckpointPart, open_files
from runner.durable.checkpoint_writer import CheckpointWriter, PartWriter
from tests.durable.parts import RANKS, parts_of
from tests.faults.saver import snapshot


def save_in_parts(directory: Path, update: int, num_ranks: int = RANKS) -> Path:
    first, *others = parts_of(snapshot(update), num_ranks)
    for other in others:
        save_part(directory, other)
    return save(directory, first)


def equal(result: dict[str, Tensor], expected: Any) -> bool:
    return result.keys() == expected.keys() and all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_sharded_checkpoints_are_read_like_unsharded_ones(tmp_path: Path, num_ranks: int) -> None:
    path = save_in_parts(tmp_path, 1, num_ranks)
    assert verify(path) == []
    result = load(path)
    assert result.stems == ("model", "optimizer", "random")
    for stem in result.stems:
        assert equal(result.tensors(stem), snapshot(1).tensors[stem]), stem
    assert result.state == snapshot(1).state
    names = {file.name for file in path.iterdir()}
    assert len([name for name in names if name.startswith("model-part")]) == num_ranks
    assert len(names) == 3 * num_ranks + 2, "the reports of ranks must be removed"


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_hashes_only_the_shards_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """Rank 0 verifies all parts. If every rank did so, n ranks would read n * n parts."""
    path = save_in_parts(tmp_path, 1, num_ranks)
    hashed: list[str] = []
    hash_file = files.file_sha256
    monkeypatch.setattr(files, "file_sha256", lambda file: hashed.append(file.name) or hash_file(file))
    stored = load(path, hashes_tensors=False).stored("model")
    assert hashed == ["state.json"]
    for tensor in stored.values():
        if tensor.shape:
            tensor.read(0, 1)
            tensor.read(0, 1)
    assert hashed == ["state.json", "model-part00000.safetensors"]
    assert len(files.read(path / "MANIFEST.json")) < 1000 + 600 * num_ranks


def test_a_part_changed_after_verification_is_not_read(tmp_path: Path) -> None:
    path = save_in_parts(tmp_path, 1, 2)
    stored = load(path, hashes_tensors=False).stored("model")
    changed = path / "model-part00001.safetensors"
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    tensor = next(tensor for tensor in stored.values() if tensor.shape and tensor.shape[0] > 1)
    tensor.read(0, 1)
    with pytest.raises(DataError, match="changed since"):
        tensor.read()


def test_the_size_of_a_shard_is_checked_without_hashing(tmp_path: Path) -> None:
    path = save_in_parts(tmp_path, 1, 2)
    (path / "model-part00001.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="bytes, but has 0"):
        load(path, hashes_tensors=False)


def test_a_checkpoint_exists_only_when_all_parts_are_durable(tmp_path: Path) -> None:
    first, second, third = parts_of(snapshot(1))
    with CheckpointWriter(tmp_path) as writer:
        writer.submit(first)
        save_part(tmp_path, second)
        assert load_newest(tmp_path) is None
        save_part(tmp_path, third)
        assert writer.wait() == 1
    newest = load_newest(tmp_path)
    assert newest is not None
    assert newest.update == 1


def test_ranks_write_checkpoints_while_training(tmp_path: Path) -> None:
    parts = [parts_of(snapshot(update), token=f"t{update}") for update in (1, 2, 3)]
    with (
        CheckpointWriter(tmp_path, keep_last=2) as writer,
        PartWriter(tmp_path) as second,
        PartWriter(tmp_path) as third,
    ):
        for save_of_all in parts:
            for of_rank, given in zip(
                (third, writer, second), (save_of_all[2], save_of_all[0], save_of_all[1]), strict=True
            ):
                of_rank.submit(given)
        assert writer.wait() == 3
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["update-0000000002", "update-0000000003"]
    assert verify(checkpoint_path(tmp_path, 3)) == []


def test_a_failure_to_write_a_shard_fails_the_save(tmp_path: Path) -> None:
    """The older checkpoint is kept."""
    save_in_parts(tmp_path, 1)
    first, second, third = parts_of(snapshot(2), token="other")
    failures: list[StorageError] = []

    def refuse(_: Snapshot) -> None:
        raise StorageError("no space left on the device", where="there")

    with CheckpointWriter(tmp_path, on_failure=failures.append) as writer, PartWriter(tmp_path, check=refuse) as other:
        writer.submit(first)
        save_part(tmp_path, second)
        other.submit(third)
        writer.close()
        other.close()
    assert len(failures) == 1
    assert "rank 2" in str(failures[0])
    assert [path.name for path in tmp_path.iterdir()] == ["update-0000000001"]
    save_in_parts(tmp_path, 3)  # the next save succeeds
    assert recover(tmp_path).checkpoint is not None


def test_a_silent_rank_fails_the_save(tmp_path: Path) -> None:
    first, second, _ = parts_of(snapshot(1))
    save_part(tmp_path, second)
    (temporary,) = tmp_path.iterdir()
    with pytest.raises(StorageError, match="rank 2"):
        checkpoint_parts.collect_parts(temporary, first.part or CheckpointPart(0, RANKS, ""), timeout_s=0.0)


def test_a_part_that_shrank_after_its_report_fails_the_save(tmp_path: Path) -> None:
    first, *others = parts_of(snapshot(1))
    for other in others:
        save_part(tmp_path, other)
    (temporary,) = tmp_path.iterdir()
    part = temporary / "model-part00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(StorageError, match="part00001"):
        save(tmp_path, first)
    assert load_newest(tmp_path) is None


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("removes", [False, True])
def test_damaged_or_missing_files_are_detected(tmp_path: Path, removes: bool) -> None:
    """The older checkpoint is used instead."""
    for name in sorted(file.name for file in save_in_parts(tmp_path / "first", 1).iterdir()):
        directory = tmp_path / name
        save_in_parts(directory, 1)
        file = save_in_parts(directory, 2) / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink() if removes else file.write_bytes(bytes(content))
        assert verify(checkpoint_path(directory, 2)), name
        result = recover(directory).checkpoint
        assert result is not None
        assert result.update == 1, name


def _piece(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "parts",
    [
        [{"a": _piece(1)}, {"a": _piece(1)}, {}],
        [{"a": _piece(1, 2)}, {"a": _piece(1, 3)}],
        [{"a": _piece()}, {"a": _piece()}],
        [{"a": _piece(1)}, {"a": _piece(1, dtype=torch.int32)}],
    ],
)
def test_shards_that_do_not_match_count_as_damaged(parts: Sequence[dict[str, Tensor]], tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(parts))]
    for path, tensors in zip(paths, parts, strict=True):
        save_file(tensors, path)
    with pytest.raises(DataError):
        open_files(paths)


def test_a_late_part_is_removed_at_the_next_start(tmp_path: Path) -> None:
    _, second, _ = parts_of(snapshot(1))
    late = threading.Thread(target=save_part, args=(tmp_path, second))
    late.start()
    late.join()
    assert [name for name in files.list_names(tmp_path) if name.startswith(files.TEMPORARY)]
    recover(tmp_path)
    assert files.list_names(tmp_path) == []


def test_a_failed_rank_is_reported_before_others_finish(tmp_path: Path) -> None:
    """Ranks with lower numbers are still writing."""
    checkpoint_parts.report_failure(tmp_path, 2, "disk-full")
    with pytest.raises(StorageError) as caught:
        checkpoint_parts.collect_parts(tmp_path, CheckpointPart(0, 3, ""), timeout_s=0.0)
    assert "rank 2" in caught.value.problems[0].what
    assert "disk-full" in caught.value.problems[0].what
