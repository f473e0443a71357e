"""File operations of runs, and the conditions that must hold after a crash at any of these operations."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import ConfigError, Problem
from runner.durable import checkpoint, files
from runner.durable.checkpoint import Snapshot, checkpoint_path, recover, retain, save, save_part
from runner.durable.checkpoint_writer import CheckpointWriter
from runner.durable.directory import RunDirectory
from runner.durable.rewind import rewind_run
from tests.durable.parts import parts_of
from tests.faults.crash_states import State
from tests.faults.recording import Quick, Recording

Promise = Callable[[str, Any], None]  # from now on, the promised state must survive a crash
ROWS = [f'{{"update": {number}, "loss": {1 / (number + 1):.17g}}}\n'.encode() for number in range(12)]


@dataclass(frozen=True)
class History:
    """A sequence of file operations of a run.

    act      performs the operations in a folder, and reports what it promises
    check    raises if the folder does not contain what was promised
    prepare  creates the durable state before `act`
    """

    name: str
    act: Callable[[Path, Promise], None]
    check: Callable[[Path, Mapping[str, Any]], None]
    prepare: Callable[[Path], None] = lambda _: None

    def record(self, root: Path) -> Recording:
        """Record the history in the new folder `root`."""
        root.mkdir()
        with files.use_system(Quick()):
            self.prepare(root)
        recording = Recording(root)
        with files.use_system(recording):
            self.act(root, recording.acknowledge)
        return recording


@cache
def snapshot(update: int) -> Snapshot:
    """Return a snapshot of a few hundred bytes, all of which depend on `update`."""
    generator = torch.Generator().manual_seed(update)
    return Snapshot(
        update=update,
        tensors={
            "model": {"weight": torch.randn(3, 4, generator=generator)},
            "optimizer": {"0.exp_avg": torch.randn(3, generator=generator), "0.step": torch.tensor(float(update))},
        },
        state={"samples": update * 64, "best": 0.1 + update},
        facts={"epoch": update // 10, "metrics_bytes": sum(map(len, ROWS[:update]))},
    )


@cache
def bits_of(update: int) -> dict[str, dict[str, tuple[torch.dtype, torch.Size, bytes]]]:
    return {stem: _bits(tensors) for stem, tensors in snapshot(update).tensors.items()}


def check_loaded(loaded: checkpoint.LoadedCheckpoint) -> None:
    """Assert that the checkpoint is bitwise equal to what was saved for its update."""
    expected = snapshot(loaded.update)
    assert loaded.state == expected.state
    assert {key: loaded.manifest[key] for key in expected.facts} == expected.facts
    assert {stem: _bits(loaded.tensors(stem)) for stem in loaded.stems} == bits_of(loaded.update)


def check_checkpoints(
    directory: Path, acknowledged: int, *, damaged: frozenset[int] = frozenset(), num_saved: int | None = None
) -> int:
    """Check a folder of checkpoints; return the update that recovery found, 0 if it starts from scratch.

    Recovery must not raise, the checkpoint that it finds must equal what was saved and be at least as new as the
    acknowledged one, and the next save must work. After two acknowledged saves there must be two valid checkpoints
    (`num_saved`: number of saves; None: one per update up to `acknowledged`). Only `damaged` ones may be invalid:
    a crash leaves each checkpoint either complete or not visible.
    """
    visible = {update for update in range(20) if files.exists(checkpoint_path(directory, update))}
    whole = {update for update in visible if not checkpoint.verify(checkpoint_path(directory, update))}
    assert visible - whole <= damaged, f"visible but damaged: {visible - whole}"
    assert len(whole) >= min(2, acknowledged if num_saved is None else num_saved), f"only {whole} are left"
    recovery = recover(directory)
    names = {f"update-{update:010}" for update in damaged}
    assert {name for name, _ in recovery.skipped} <= names, f"skipped: {recovery.skipped}"
    result = recovery.checkpoint.update if recovery.checkpoint else 0
    assert result >= acknowledged, f"update {result} was found, but {acknowledged} was acknowledged"
    if recovery.checkpoint:
        check_loaded(recovery.checkpoint)
    assert not [name for name in files.list_names(directory) if name.startswith(files.TEMPORARY)], (
        "temporary files are left"
    )
    save(directory, snapshot(result + 1))
    retain(directory, 2)
    newest = recover(directory).checkpoint
    assert newest is not None
    assert newest.update == result + 1, f"update {result + 1} was saved, but {newest.update} is found"
    check_loaded(newest)
    return result


@contextmanager
def on_disk(state: State, root: Path) -> Iterator[Path]:
    """Write the state to the folder `root` and delete it afterwards. Within the context, fsync is a no-op."""
    state.put(root)
    try:
        with files.use_system(Quick()):
            yield root
    finally:
        shutil.rmtree(root)


def check(history: History, state: State, root: Path) -> None:
    """Check the state against the history. An AssertionError contains everything needed to reproduce the state."""
    with on_disk(state, root):
        try:
            history.check(root, state.acknowledged)
        except Exception as error:
            raise AssertionError(f"{history.name}: {state}\n{type(error).__name__}: {error}") from error


def damage(path: Path, file: str = "model.safetensors") -> None:
    """Flip one bit of a file of the checkpoint."""
    content = bytearray((path / file).read_bytes())
    content[-1] ^= 1
    (path / file).write_bytes(content)


# Checkpoints


def _checkpoints(root: Path) -> Path:
    return root / "runs" / "one" / "checkpoints"


def _open_run(root: Path) -> Path:
    """Open the run as every start does, and return its folder of checkpoints."""
    with RunDirectory.create_or_open(root / "runs", "one") as run:
        return run.checkpoints


def _save_all(directory: Path, *updates: int) -> None:
    for update in updates:
        save(directory, snapshot(update))


def _save_and_retain(root: Path, promise: Promise) -> None:
    directory = _open_run(root)
    for update in (1, 2, 3, 4):
        save(directory, snapshot(update))
        promise("update", update)
        retain(directory, 2)


def _save_in_parts(root: Path, promise: Promise) -> None:
    directory = _open_run(root)
    for update in (1, 2, 3):
        first, *others = parts_of(snapshot(update), token=f"of{update}")
        for other in others:
            save_part(directory, other)
        save(directory, first)
        promise("update", update)
        retain(directory, 2)


def _write_in_the_background(root: Path, promise: Promise) -> None:
    directory = _open_run(root)

    def saved(path: Path) -> None:
        promise("update", int(path.name.removeprefix("update-")))

    with CheckpointWriter(directory, keep_last=1, on_saved=saved) as writer:
        for update in (1, 2, 3, 4):
            writer.submit(snapshot(update), best=[checkpoint_path(directory, 1)])


def _check_saved(root: Path, promised: Mapping[str, Any]) -> None:
    check_checkpoints(_checkpoints(root), promised.get("update", 0))


def _one_valid_two_damaged(root: Path) -> None:
    directory = _open_run(root)
    _save_all(directory, 1, 2, 3)
    damage(checkpoint_path(directory, 2))
    damage(checkpoint_path(directory, 3), checkpoint.STATE)


def _save_over_damaged(root: Path, promise: Promise) -> None:
    directory = _open_run(root)
    promise("update", 1)
    for update in (2, 3):
        save(directory, snapshot(update))
        promise("update", update)
        retain(directory, 2)


def _recover_and_continue_saving(root: Path, promise: Promise) -> None:
    directory = _open_run(root)
    promise("update", 1)
    result = recover(directory).checkpoint
    assert result is not None
    for update in range(result.update + 1, 4):
        save(directory, snapshot(update))
        promise("update", update)
        retain(directory, 2)


def _check_beside_damaged(root: Path, promised: Mapping[str, Any]) -> None:
    check_checkpoints(_checkpoints(root), promised.get("update", 1), damaged=frozenset({2, 3}))


def _save_two(root: Path) -> None:
    _save_all(_open_run(root), 1, 2)


def _save_again(root: Path, promise: Promise) -> None:
    directory = root / "runs" / "one" / "checkpoints"
    promise("update", 2)
    for _ in range(2):
        save(directory, snapshot(2), overwrite=True)
    retain(directory, 2)


def _check_saved_again(root: Path, promised: Mapping[str, Any]) -> None:
    check_checkpoints(_checkpoints(root), promised.get("update", 2), num_saved=1)


def _leftovers_of_kills(root: Path) -> None:
    """Create what a killed save and a killed retention leave behind."""
    directory = _open_run(root)
    _save_all(directory, 1, 2, 3)
    checkpoint_path(directory, 1).rename(directory / ".tmp-old-update-0000000001-ab")
    (directory / ".tmp-update-0000000004-cd").mkdir()
    (directory / ".tmp-update-0000000004-cd" / "model.safetensors").write_bytes(b"half")


def _remove_leftovers_and_save(root: Path, promise: Promise) -> None:
    promise("update", 3)
    _recover_and_save(root, promise, last=5)


def _recover_and_save(root: Path, promise: Promise, last: int) -> None:
    directory = _open_run(root)
    result = recover(directory).checkpoint
    for update in range(result.update + 1 if result else 1, last + 1):
        save(directory, snapshot(update))
        promise("update", update)
        retain(directory, 2)


def _three_and_a_damaged_one(root: Path) -> None:
    directory = _open_run(root)
    _save_all(directory, 7, 8, 9)
    checkpoint_path(directory, 7).rename(directory / "damaged-update-0000000007-1")


def _start_fresh(root: Path, promise: Promise) -> None:
    directory = _open_run(root)
    assert checkpoint.set_aside(directory) == 3
    promise("fresh", True)
    save(directory, snapshot(1))
    promise("update", 1)


def _check_fresh(root: Path, promised: Mapping[str, Any]) -> None:
    directory = _checkpoints(root)
    kept = [name for name in files.list_names(directory) if re.search("update-000000000[789]", name)]
    assert len(kept) == 3, f"a fresh start must delete nothing, but only {kept} are left"
    if not promised:
        return
    result = recover(directory).checkpoint
    assert result is None or result.update == 1, f"update {result and result.update} reappeared"
    check_checkpoints(directory, promised.get("update", 0))


# Small files and logs


def _write_small_files(root: Path, promise: Promise) -> None:
    with RunDirectory.create_or_open(root / "runs", "one") as run:
        for number in range(4):
            run.write("run.json", _small(number))
            promise("run.json", number)
        run.write("plots/loss.json", _small(0))
        promise("plots/loss.json", 0)


def _small(number: int) -> bytes:
    return random.Random(number).randbytes(150 + 70 * number)


def _check_small_files(root: Path, promised: Mapping[str, Any]) -> None:
    run = root / "runs" / "one"
    for name in ("run.json", "plots/loss.json"):
        path, oldest = run / name, promised.get(name, -1)
        if oldest < 0 and not files.exists(path):
            continue
        assert path.read_bytes() in [_small(number) for number in range(max(0, oldest), 4)], f"{name} is incomplete"
        files.atomic_write(path, b"next")
        assert path.read_bytes() == b"next"


FEW = ("predictions/a.txt", "predictions/b.txt", "plots/a.png")


def _write_several_at_once(root: Path, promise: Promise) -> None:
    with RunDirectory.create_or_open(root / "runs", "one") as run:
        for number in range(3):
            run.write_all({name: _small(number) for name in FEW[number:] + FEW[:number]})
            promise("several", number)


def _check_several(root: Path, promised: Mapping[str, Any]) -> None:
    for name in FEW:
        path, oldest = root / "runs" / "one" / name, promised.get("several", -1)
        if oldest < 0 and not files.exists(path):
            continue
        assert path.read_bytes() in [_small(number) for number in range(max(0, oldest), 3)], f"{name} is incomplete"


def _append_and_cut(root: Path, promise: Promise) -> None:
    with files.AppendLog(root / "metrics.jsonl") as log:
        log.write(ROWS[0].decode())
        log.sync()
        promise("rows", 1)
        for number in (1, 2, 3):
            log.write(ROWS[number].decode())
            log.flush()
        log.sync()
        promise("rows", 4)
        log.write(ROWS[4].decode())
        log.flush()
        promise("rows", 2)
        log.cut(len(b"".join(ROWS[:2])))
        promise("not", 2)
        for number in (5, 6):
            log.write(ROWS[number].decode())
        log.sync()
        promise("after the cut", True)


def _write_torn_log(root: Path) -> None:
    (root / "metrics.jsonl").write_bytes(ROWS[0] + ROWS[1] + ROWS[2][:11])


def _append_after_a_torn_line(root: Path, promise: Promise) -> None:
    promise("rows", 2)
    with files.AppendLog(root / "metrics.jsonl") as log:
        for number in (2, 3):
            log.write(ROWS[number].decode())
            log.sync()
            promise("rows", number + 1)


def _check_log(root: Path, promised: Mapping[str, Any]) -> None:
    path = root / "metrics.jsonl"
    with files.AppendLog(path) as log:
        content = path.read_bytes()
        assert log.length == len(content)
        assert not content or content.endswith(b"\n"), f"the last line is incomplete: {content[-30:]!r}"
        rows = b"".join(ROWS[: promised.get("rows", 0)])
        assert content.startswith(rows), f"{len(rows)} bytes of rows were promised, but the file contains {content!r}"
        if promised.get("not"):
            assert ROWS[2] not in content, "truncated rows reappeared"
        if promised.get("after the cut"):
            assert content == rows + ROWS[5] + ROWS[6], content
        log.write("next")
    assert path.read_bytes() == content + b"next\n"


def _rows_and_saves(root: Path, promise: Promise) -> None:
    """Rows must be on disk before the checkpoint that counts them."""
    with RunDirectory.create_or_open(root / "runs", "one") as run, files.AppendLog(run.metrics) as log:
        for update in (1, 2, 3):
            log.write(ROWS[update - 1].decode())
            save(run.checkpoints, snapshot(update), sync_first=log.sync)
            promise("update", update)
            retain(run.checkpoints, 2)


def _check_rows(root: Path, promised: Mapping[str, Any]) -> None:
    newest = checkpoint.newest_valid(_checkpoints(root))
    if newest:
        counted = checkpoint.load(newest).manifest["metrics_bytes"]
        content = (root / "runs" / "one" / "metrics.jsonl").read_bytes()
        assert content[:counted] == b"".join(ROWS)[:counted], "rows that a checkpoint counts are missing"
    _check_saved(root, promised)


def _three_saved_with_rows(root: Path) -> None:
    with RunDirectory.create_or_open(root / "runs", "one") as run, files.AppendLog(run.metrics) as log:
        for update in (1, 2, 3):
            log.write(ROWS[update - 1].decode())
            log.sync()
            save(run.checkpoints, snapshot(update))


def _go_back_and_return(root: Path, promise: Promise) -> None:
    """Rewind to update 1 in a run that then fails before training."""
    run = RunDirectory.find(root / "runs", "one")
    promise("between", (1, 2, 3))
    with suppress(ConfigError), rewind_run(run, "1", lambda _: None):
        promise("between", (1, 3))
        with RunDirectory.create_or_open(root / "runs", "one") as held, files.AppendLog(held.metrics) as log:
            log.cut(len(ROWS[0]))
        raise ConfigError(Problem("is refused", "task", "use another one"))
    promise("between", (3,))


def _check_return(root: Path, promised: Mapping[str, Any]) -> None:
    """Assert that no checkpoint or row is lost, and that metrics.jsonl has the rows of the newest checkpoint."""
    directory, run = _checkpoints(root), root / "runs" / "one"
    kept = {result[0] for name in files.list_names(directory) if (result := re.search(r"\d{10}", name))}
    assert kept == {f"{update:010}" for update in (1, 2, 3)}, f"a checkpoint is lost: {files.list_names(directory)}"
    rows = b"".join(ROWS[:3])
    logs = [path.read_bytes() for path in run.glob("metrics*.jsonl")]
    assert any(log == rows for log in logs), "rows are lost"
    newest = checkpoint.newest_valid(directory)
    assert newest is not None
    result = checkpoint.load(newest)
    check_loaded(result)
    assert result.update in promised.get("between", (1, 2, 3))
    counted = result.manifest["metrics_bytes"]
    assert (run / "metrics.jsonl").read_bytes()[:counted] == rows[:counted]


RETURN = History("a rewind that is undone", _go_back_and_return, _check_return, _three_saved_with_rows)
HISTORIES = [
    History("saves with retention", _save_and_retain, _check_saved),
    History("saves in parts", _save_in_parts, _check_saved),
    History("saves by the writer", _write_in_the_background, _check_saved),
    History("saves over damaged checkpoints", _save_over_damaged, _check_beside_damaged, _one_valid_two_damaged),
    History(
        "recovery from damaged checkpoints", _recover_and_continue_saving, _check_beside_damaged, _one_valid_two_damaged
    ),
    History("saves that replace another", _save_again, _check_saved_again, _save_two),
    History("leftovers of kills are removed", _remove_leftovers_and_save, _check_saved, _leftovers_of_kills),
    History("a fresh start", _start_fresh, _check_fresh, _three_and_a_damaged_one),
    History("several files at once", _write_several_at_once, _check_several),
    History("small files", _write_small_files, _check_small_files),
    History("a log", _append_and_cut, _check_log),
    History("a log with a torn line", _append_after_a_torn_line, _check_log, _write_torn_log),
    History("rows and saves", _rows_and_saves, _check_rows),
    RETURN,
]


# Short histories; tests mutate or fail each of their operations


def _two_saved(root: Path) -> None:
    with RunDirectory.create_or_open(root / "runs", "one") as run:
        for update in (1, 2):
            save(run.checkpoints, snapshot(update))


def _save_the_third(root: Path, promise: Promise) -> None:
    directory = root / "runs" / "one" / "checkpoints"
    promise("update", 2)
    save(directory, snapshot(3))
    promise("update", 3)
    retain(directory, 1)


def _save_the_first(root: Path, promise: Promise) -> None:
    with RunDirectory.create_or_open(root / "runs", "one") as run:
        save(run.checkpoints, snapshot(1))
        promise("update", 1)


def _save_the_first_in_parts(root: Path, promise: Promise) -> None:
    directory = root / "runs" / "one" / "checkpoints"
    first, other = parts_of(snapshot(1), 2)
    save_part(directory, other)
    save(directory, first)
    promise("update", 1)


def _opened(root: Path) -> None:
    with RunDirectory.create_or_open(root / "runs", "one"):
        pass


def _one_valid_one_damaged(root: Path) -> None:
    _two_saved(root)
    damage(checkpoint_path(root / "runs" / "one" / "checkpoints", 2))


def _save_over_the_damaged(root: Path, promise: Promise) -> None:
    promise("update", 1)
    save(root / "runs" / "one" / "checkpoints", snapshot(2))
    promise("update", 2)


def _check_over_the_damaged(root: Path, promised: Mapping[str, Any]) -> None:
    directory = root / "runs" / "one" / "checkpoints"
    is_aside = files.exists(directory / "damaged-update-0000000002-1")
    damaged = frozenset[int]() if is_aside else frozenset({2})
    check_checkpoints(directory, promised.get("update", 1), damaged=damaged)


def _one_row_and_save(root: Path, promise: Promise) -> None:
    with RunDirectory.create_or_open(root / "runs", "one") as run, files.AppendLog(run.metrics) as log:
        log.write(ROWS[0].decode())
        save(run.checkpoints, snapshot(1), sync_first=log.sync)
        promise("update", 1)


BY_NAME = {history.name: history for history in HISTORIES}
SHORT = [
    History("the third save and its retention", _save_the_third, BY_NAME["saves with retention"].check, _two_saved),
    History("the first save of a run", _save_the_first, BY_NAME["saves with retention"].check),
    History("the first save in parts", _save_the_first_in_parts, BY_NAME["saves in parts"].check, _opened),
    History("a row and a save", _one_row_and_save, BY_NAME["rows and saves"].check),
    *(BY_NAME[name] for name in ("small files", "a log", "a log with a torn line", "a fresh start")),
    BY_NAME["saves that replace another"],
    History("a save over a damaged one", _save_over_the_damaged, _check_over_the_damaged, _one_valid_one_damaged),
]


def _bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }
