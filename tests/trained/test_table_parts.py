"""A stopped command keeps the finished rows of its table, and running it again predicts only the others."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import Exit
from runner.base.order import MicroBatchKey
from runner.durable import files
from runner.durable.directory import RunDirectory
from runner.loading.fetcher import Fetcher
from runner.trained.batch_predictions import PredictedBatch, PredictedRows, SplitBatches
from runner.trained.table_parts import TableParts
from tests.commands_here import run_here
from tests.faults.crash_states import states
from tests.faults.histories import History, Promise, check
from tests.forkserver import CompletedCommand, ForkServer
from tests.trained.task_with_tables import SIZES

TASK = Path(__file__).with_name("task_with_tables.py")
PREDICTIONS = Path("outputs/one/predictions")
WRITE_EVERY_BATCH = "from runner.trained import table_parts; table_parts.MAX_WRITE_DELAY_S = 0.0"
BATCH = "inference.batch_size=4"
NUM_BATCHES = -(-SIZES["test"] // 4)
# The file `stop` in the working directory contains the first sample of the batch at which the command stops.
STOP = """
        if Path("stop").exists() and names[0] == f'name, "{Path("stop").read_text()}"':
            if Path("raise").exists():
                raise ValueError("planted")
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    text = TASK.read_text(encoding="utf-8").replace(
        "import os\n", "import os\nimport signal\nfrom pathlib import Path\n"
    )
    unpacked = "        x, label, names = batch\n"
    text = text.replace(unpacked, unpacked + STOP)
    points = "torch.Generator().manual_seed(len(split)))"
    text = text.replace(points, f'{points} + Path("shifted").exists()')
    text = text.replace('"name": names,', '"name": names, "drawn": torch.rand(len(label)),')
    (folder / "tables.py").write_text(text, encoding="utf-8")
    result = run_here("train --task tables.py run=one checkpoint.every=1", folder)
    assert result.code == 0, result.err
    return folder


def infer(server: ForkServer, folder: Path, args: str) -> CompletedCommand:
    return server.run(f"inference one inference.split=test {args}", folder, before=WRITE_EVERY_BATCH)


def stop(server: ForkServer, folder: Path, args: str, sample: int = 32, *, raises: bool = False) -> CompletedCommand:
    """Run the command until the batch that begins with `sample`."""
    (folder / "stop").write_text(str(sample), encoding="utf-8")
    if raises:
        (folder / "raise").touch()
    try:
        return infer(server, folder, args)
    finally:
        (folder / "stop").unlink()
        (folder / "raise").unlink(missing_ok=True)


def complete(server: ForkServer, folder: Path, args: str, file: str = "test.csv") -> tuple[bytes, Mapping[str, Any]]:
    """Run the command to completion; return the table and the summary."""
    result = infer(server, folder, args)
    assert result.code == 0, result.err
    summary = json.loads((folder / PREDICTIONS / "summary.json").read_text(encoding="utf-8"))
    return (folder / PREDICTIONS / file).read_bytes(), summary


def parts_in(folder: Path) -> list[Path]:
    return sorted((folder / PREDICTIONS / "incomplete").glob("*/part-*.json"))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("parallelism=ddp parallelism.world_size=2", "parallelism=ddp parallelism.world_size=3"),
     ("", "parallelism=ddp parallelism.world_size=2"), ("dataloader.num_workers=1", "dataloader=thread"),
     ("parallelism=ddp parallelism.world_size=2", "")],
)  # fmt: skip
def test_a_killed_command_resumes_and_writes_the_same_bytes(
    before: str, after: str, server: ForkServer, trained: Path
) -> None:
    whole, summary = complete(server, trained, BATCH)
    assert summary["kept"] == 0

    (trained / PREDICTIONS / "test.csv").unlink()
    stopped = stop(server, trained, f"{BATCH} {before}")
    assert stopped.code == (-signal.SIGKILL if "ddp" not in before else Exit.RANK_LOST), stopped.err
    assert not (trained / PREDICTIONS / "test.csv").exists()
    kept = sum(len(json.loads(part.read_text(encoding="utf-8"))) for part in parts_in(trained))
    table, summary = complete(server, trained, f"{BATCH} {after}")
    assert table == whole
    assert summary["predictions"] == SIZES["test"]
    assert kept > 0
    assert summary["model"]["calls"] == NUM_BATCHES - kept
    assert not (trained / PREDICTIONS / "incomplete").exists()


def test_a_command_with_given_weights_resumes(server: ForkServer, trained: Path) -> None:
    folder = trained / "outputs" / "given" / "predictions"
    (trained / "stop").write_text("32", encoding="utf-8")
    given = f"inference --task tables.py weights=outputs/one run=given inference.split=test {BATCH}"
    stopped = server.run(given, trained, before=WRITE_EVERY_BATCH)
    (trained / "stop").unlink()
    assert stopped.code == -signal.SIGKILL
    for weights, kept in (("outputs/one/checkpoints/update-0000000005", 0), ("outputs/one", 32)):
        result = server.run(given.replace("outputs/one", weights), trained)
        assert result.code == 0, result.err
        assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["kept"] == kept


def test_an_error_of_the_task_keeps_the_rows_before_it(server: ForkServer, trained: Path) -> None:
    result = stop(server, trained, BATCH, raises=True)
    assert result.code == Exit.SOFTWARE
    _, summary = complete(server, trained, BATCH)
    assert summary["kept"] == 32


def test_shards_of_separate_commands_resume(server: ForkServer, trained: Path) -> None:
    shard = f"{BATCH} inference.shard=0 inference.num_shards=2"
    whole, _ = complete(server, trained, shard, "test-0-of-2.csv")
    stop(server, trained, shard)
    table, summary = complete(server, trained, shard, "test-0-of-2.csv")
    assert table == whole
    assert summary["kept"] == 16


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change",
    ["inference.batch_size=2", "inference.scale=3.0", "inference.seed=1", "task.item=token", "checkpoint=5", "code",
     "data"],
)  # fmt: skip
def test_rows_of_a_different_command_are_kept_but_not_used(change: str, server: ForkServer, trained: Path) -> None:
    code, shifted = trained / "tables.py", trained / "shifted"
    text = code.read_text(encoding="utf-8")
    expected = complete(server, trained, BATCH)[0]
    stop(server, trained, BATCH)
    parts = parts_in(trained)
    if change == "code":
        code.write_text(f"{text}\n# edited\n", encoding="utf-8")
    elif change == "data":
        shifted.touch()
    table, summary = complete(server, trained, f"{BATCH} {change if '=' in change else ''}")
    assert summary["kept"] == 0
    assert table.count(b"\n") == expected.count(b"\n")
    assert parts_in(trained) == parts

    code.write_text(text, encoding="utf-8")
    shifted.unlink(missing_ok=True)
    table, summary = complete(server, trained, BATCH)
    assert (table, summary["kept"]) == (expected, 32)


def test_rows_before_an_out_of_memory_error_are_not_predicted_again(server: ForkServer, trained: Path) -> None:
    text = (trained / "tables.py").read_text(encoding="utf-8")
    planted = text.replace('if Path("stop")', "if len(label) > 2 and 'name, \"34\"' in names:\n"
                           "            raise MemoryError('planted')\n        if Path(\"stop\")")  # fmt: skip
    (trained / "less.py").write_text(planted, encoding="utf-8")
    result = server.run(f"inference --task less.py run=one inference.split=test {BATCH}", trained)
    assert result.code == 0, result.err
    summary = json.loads((trained / PREDICTIONS / "summary.json").read_text(encoding="utf-8"))
    assert (summary["predictions"], summary["items"]) == (SIZES["test"], SIZES["test"] - 32)
    assert summary["kept"] == 0  # this command has predicted all rows


def test_a_large_part_of_the_table_can_be_read(tmp_path: Path) -> None:
    """A batch is written to one part, whatever its size."""
    table = make_table(tmp_path)
    rows = "0," + "x" * (65 << 20) + "\n"
    table.add(PredictedRows({}, items=1, batch=0, names=["text"], rows=rows))
    found = make_table(tmp_path)
    found.read()
    assert found.batches.keys() == {0}
    assert found.batches[0].rows == rows


def test_a_command_continues_if_another_one_completes_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command removes the folder between two parts, or while a part is written."""
    table, other = make_table(tmp_path), make_table(tmp_path)
    rename = files.rename

    def remove_and_rename(*arguments: Any) -> None:
        monkeypatch.setattr(files, "rename", rename)
        other.remove()
        rename(*arguments)

    for number in range(3):
        table.add(rows_of(number))
        table.write()
        if number == 0:
            other.remove()
        if number == 1:
            assert {path.name for path in (tmp_path / table.folder).glob("identity*")} == {"identity.json"}
            monkeypatch.setattr(files, "rename", remove_and_rename)
    found = make_table(tmp_path)
    found.read()
    assert found.batches.keys() == {2}
    assert not [*found.find_others()]


# ---------------------------------------------------------------- crashes


def make_table(folder: Path, report: Callable[[str], object] = print) -> TableParts:
    fetcher = Fetcher([0, 1], list, bad_samples="stop")
    keys = [MicroBatchKey(0, [number], last=True) for number in range(80)]
    split = SplitBatches(fetcher, keys, 0, 2, {})
    return TableParts(RunDirectory.join(folder), "val.csv", split, {"seed": 0}, report)


def rows_of(number: int) -> PredictedRows:
    return PredictedRows({}, items=1, batch=number, names=["text"], rows=f"{number},{'é' * number}\n")


def _write_parts(root: Path, promise: Promise) -> None:
    table = make_table(root)
    for number in range(4):
        table.add(rows_of(number))
        table.write()
        promise("batches", number + 1)


def _check_parts(root: Path, promised: Mapping[str, Any]) -> None:
    table = make_table(root)
    table.read()
    assert len(table.batches) >= promised.get("batches", 0)
    for number, batch in table.batches.items():
        assert batch == PredictedBatch(1, ["text"], rows_of(number).rows)


def test_every_crash_state_keeps_the_written_batches(tmp_path: Path) -> None:
    history = History("parts of a table", _write_parts, _check_parts)
    recording = history.record(tmp_path / "recorded")
    for state in states(recording.start, recording.operations, 200, 0):
        check(history, state, tmp_path / "state")


def test_progress_is_reported_after_each_tenth_of_a_shard(tmp_path: Path) -> None:
    reported: list[str] = []
    table = make_table(tmp_path, reported.append)
    for number in range(0, 80, 2):
        table.add(rows_of(number))
        table.write()
    assert len(reported) == 11
    assert [int("".join(filter(str.isdigit, text))) for text in reported[1:]] == [*range(10, 101, 10)]


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"0": [1]}', b'{"0": [1, 2, "a"]}', b'{"a": [1, ["b"], "c"]}'])
def test_a_damaged_part_is_ignored(damaged: bytes, tmp_path: Path) -> None:
    table = make_table(tmp_path)
    table.add(rows_of(0))
    table.write()
    (tmp_path / table.folder / "part-0.json").write_bytes(damaged)
    found = make_table(tmp_path)
    found.read()
    assert found.batches == {0: PredictedBatch(1, ["text"], rows_of(0).rows)}
