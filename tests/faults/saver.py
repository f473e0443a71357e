"""A process that saves repeatedly and reports what is acknowledged, and checks of the files after it was killed.

All content is a function of the update number, so that every byte found later can be compared.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import StorageError
from runner.durable import files
from runner.durable.checkpoint import LoadedCheckpoint, Snapshot, recover, retain, save, save_part, verify
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog
from runner.durable.system import System
from tests.durable.parts import RANKS, parts_of

NAME = "mine"
KEEP = 2
OPERATIONS = tuple(name for name in vars(System) if not name.startswith("_"))


@lru_cache(maxsize=64)
def snapshot(update: int) -> Snapshot:
    """Return the snapshot of `update`: most have 2 kB, some 100 kB, few 1 MB, all with different values."""
    generator = torch.Generator().manual_seed(update)
    size = 200_000 if update % 37 == 0 else 20_000 if update % 5 == 0 else 100
    return Snapshot(
        update=update,
        tensors={
            "model": {"weight": torch.randn(size, generator=generator), "bias": torch.randn(3, generator=generator)},
            "optimizer": {"0.exp_avg": torch.randn(size, generator=generator), "0.step": torch.tensor(float(update))},
            "random": {"cpu": torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8)},
        },
        state={"samples": update * 64, "best": 0.1 + update, "phases": ["train"], "name": "Zoë"},
        facts={
            "epoch": update // 10, "world_size": RANKS if is_in_parts(update) else 1, "run_id": NAME,
            "metrics_bytes": num_metrics_bytes(update),
        },
    )  # fmt: skip


def is_in_parts(update: int) -> bool:
    """Return whether the checkpoint of `update` is saved in parts, as by several ranks: two of three are."""
    return update % 3 != 0


def save_like_a_run(directory: Path, update: int) -> None:
    """Save the checkpoint of `update`, as a whole or in parts; one process writes the parts of all ranks.

    A kill or a power failure then ends all ranks at the same operation.
    """
    first = snapshot(update)
    if is_in_parts(update):
        first, *others = parts_of(first, token=f"of{update}")
        for other in others:
            save_part(directory, other)
    save(directory, first)


def rows(update: int) -> list[str]:
    """Return the rows of metrics.jsonl of `update`, of very different lengths."""
    generator = random.Random(update)
    return [
        json.dumps({"update": update, "row": number, "text": "x" * generator.choice((0, 10, 300, 5000))})
        for number in range(generator.randint(1, 4))
    ]


def num_metrics_bytes(update: int) -> int:
    """Return the length of metrics.jsonl after the rows of `update`."""
    for number in range(len(_ENDS), update + 1):
        _ENDS.append(_ENDS[-1] + sum(len(row) + 1 for row in rows(number)))
    return _ENDS[update]


def record(update: int) -> str:
    """Return the content of run.json at `update`."""
    return json.dumps({"state": "running", "update": update, "text": "y" * (update % 7 * 900)}) + "\n"


@dataclass
class Acknowledged:
    """The last acknowledged update of each kind."""

    rows: int = 0
    saved: int = 0
    recorded: int = 0
    operations: int = 0  # started, not necessarily acknowledged


def save_endlessly(root: Path, first: int, acknowledge: Callable[[str, int], None]) -> None:
    """Write rows, checkpoints and run.json endlessly, like a run, and acknowledge each once it must be durable."""
    run = root / NAME
    with AppendLog(run / "metrics.jsonl") as metrics:
        for update in range(first, sys.maxsize):
            for row in rows(update):
                metrics.write(row)
                metrics.flush()
            metrics.sync()
            acknowledge("rows", update)
            save_like_a_run(run / "checkpoints", update)
            acknowledge("saved", update)
            files.atomic_write(run / "run.json", record(update))
            acknowledge("recorded", update)
            retain(run / "checkpoints", KEEP)


def start(work: Callable[[Callable[[str, int], None]], None], system: System, before: int = 0) -> tuple[int, Listener]:
    """Start `work` in a forked process whose file operations use `system`; return its PID and the listener.

    An `Interrupted` system with `reports_operations` reports each operation to the listener, too.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, Listener(reading, before)
    code = 70
    try:
        if isinstance(system, Interrupted):
            system.report = lambda number: _send(writing, "operations", number)
        with files.use_system(system):
            work(lambda kind, update: _send(writing, kind, update))
    except (StorageError, OSError):
        code = 0  # the power was cut; nothing more was acknowledged
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Listener:
    """Receives acknowledgments through a pipe and keeps the last ones in `acknowledged`.

    before  the update that was durable when the process started
    """

    def __init__(self, reading: int, before: int) -> None:
        self.acknowledged = Acknowledged(before, before, before)
        self._reading = reading
        os.set_blocking(reading, False)

    def receive(self) -> None:
        """Receive all acknowledgments sent so far."""
        with suppress(BlockingIOError):
            while self._read(_MESSAGE << 10):
                pass

    def wait_for(self, kind: str, number: int) -> None:
        """Wait until `number` is received for this kind or the process has ended. The process itself does not wait."""
        while getattr(self.acknowledged, kind) < number:
            select.select([self._reading], [], [])
            with suppress(BlockingIOError):
                if not self._read(_MESSAGE):
                    return

    def _read(self, num_bytes: int) -> bytes:
        content = os.read(self._reading, num_bytes)
        for start_ in range(0, len(content), _MESSAGE):  # each message is written atomically
            update = int.from_bytes(content[start_ + 1 : start_ + _MESSAGE], "little")
            setattr(self.acknowledged, _KINDS[content[start_]], update)
        return content

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reading)


def assert_recovers(root: Path, acknowledged: Acknowledged, *, garbage: bool = False) -> int:
    """Assert that recovery finds what was acknowledged, byte for byte, and that the next save works.

    Returns the update of that save, which is complete and on disk.
    garbage  data that were appended to a file but not synced may contain anything
    """
    with RunDirectory.create_or_open(root, NAME) as directory:
        checkpoints = directory.checkpoints
        result = recover(checkpoints)
        assert result.skipped == (), f"skipped: {result.skipped}"
        update = result.checkpoint.update if result.checkpoint else 0
        assert update >= acknowledged.saved, f"update {acknowledged.saved} was acknowledged, but {update} was recovered"
        if result.checkpoint:
            assert_is(result.checkpoint)
        there = [name for name in files.list_names(checkpoints) if name.startswith("update-")]
        assert len(there) >= min(KEEP, acknowledged.saved), f"only {there} are left"
        assert all(not verify(checkpoints / name) for name in there), f"not all of {there} are valid"
        _assert_rows(directory.metrics, acknowledged, update, garbage=garbage)
        _assert_record(directory.run_json, acknowledged)
        assert not list(directory.path.rglob(f"{files.TEMPORARY}*")), "temporary files are left"
        _assert_next_save(directory, update + 1)
    return update + 1


def assert_is(loaded: LoadedCheckpoint) -> None:
    """Assert that the checkpoint is bitwise equal to the snapshot of its update."""
    expected = snapshot(loaded.update)
    assert loaded.state == expected.state, f"state of {loaded.update} is {loaded.state}"
    facts = {key: loaded.manifest[key] for key in expected.facts}
    assert facts == expected.facts, f"facts of {loaded.update} are {facts}"
    assert set(loaded.stems) == set(expected.tensors)
    for stem, tensors in expected.tensors.items():
        actual = loaded.tensors(stem)
        assert actual.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert actual[name].dtype == tensor.dtype
            assert torch.equal(actual[name], tensor), f"{stem}: {name} of update {loaded.update} differs"


class Interrupted(System):
    """Calls `end` at the operation numbered `at`: before it, after it, or halfway through a write.

    before_each  called with the number before each operation
    reports_operations  report each operation to the listener before it starts
    """

    report: Callable[[int], None]  # set by `start` in the forked process

    def __init__(
        self,
        end: Callable[[], None],
        at: int,
        moment: str,
        real: System | None = None,
        before_each: Callable[[int], None] = lambda _: None,
        *,
        reports_operations: bool = False,
    ) -> None:
        self._end, self._at, self._moment = end, at, moment
        self._real = real or System()
        self._before_each, self._reports_operations = before_each, reports_operations
        self.count = 0
        for name in OPERATIONS:
            setattr(self, name, self._intercepted(name, getattr(self._real, name)))

    def _intercepted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            self.count += 1
            is_target = self.count == self._at
            self._before_each(self.count)
            if self._reports_operations:
                self.report(self.count)
            if is_target and self._moment == "before":
                self._end()
            if is_target and self._moment == "half way" and name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self._end()
            result = real(*arguments)
            if is_target:
                self._end()
            return result

        return operation


MOMENTS = ("before", "half way", "after")


def _assert_rows(path: Path, acknowledged: Acknowledged, update: int, *, garbage: bool) -> None:
    """Assert that synced rows exist, that all lines are complete, and that the run can resume after `update`."""
    with AppendLog(path) as metrics:
        content = path.read_bytes()
        newest = max(acknowledged.rows, update)  # the last acknowledgment may not have been received
        assert len(content) == metrics.length
        expected = "".join(row + "\n" for number in range(1, newest + 4) for row in rows(number)).encode()
        synced = num_metrics_bytes(newest)
        assert content[:synced] == expected[:synced], (
            f"{synced} bytes of rows, up to update {newest}, were synced ({acknowledged}), but of the"
            f" {len(content)} bytes in the file only the first {_num_equal(content, expected)} are correct"
        )
        assert not content or content.endswith(b"\n")
        if not garbage:
            assert expected.startswith(content), f"there are different rows after byte {synced}"
        metrics.cut(num_metrics_bytes(update))


def _num_equal(left: bytes, right: bytes) -> int:
    return next((at for at, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), len(left))


def _assert_record(path: Path, acknowledged: Acknowledged) -> None:
    content = path.read_text() if path.exists() else ""
    update = int(json.loads(content)["update"]) if content else 0
    assert update >= acknowledged.recorded, (
        f"run.json of update {acknowledged.recorded} was acknowledged, but the file is of update {update}"
    )
    assert content == (record(update) if update else "")


def _assert_next_save(directory: RunDirectory, update: int) -> None:
    with AppendLog(directory.metrics) as metrics:
        for row in rows(update):
            metrics.write(row)
        metrics.sync()
    save_like_a_run(directory.checkpoints, update)
    files.atomic_write(directory.run_json, record(update))
    retain(directory.checkpoints, KEEP)
    result = recover(directory.checkpoints).checkpoint
    assert result is not None
    assert result.update == update, f"the next save was not found: {result.path.name}"
    assert_is(result)


def _send(writing: int, kind: str, update: int) -> None:
    os.write(writing, bytes([_KINDS.index(kind)]) + update.to_bytes(_MESSAGE - 1, "little"))


_KINDS = ("rows", "saved", "recorded", "operations")
_MESSAGE = 9
_ENDS = [0]
