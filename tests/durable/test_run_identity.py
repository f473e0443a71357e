"""A checkpoint belongs to the run that wrote it, even if the run or the checkpoint has been moved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import DataError, IncompatibleResume
from runner.durable import checkpoint
from runner.durable.checkpoint import LoadedCheckpoint, checkpoint_path, load_newest, recover, save, verify
from runner.durable.directory import RunDirectory
from runner.durable.run_identity import RunIdentity, generate_uid, is_valid_uid, read_identity
from runner.records.run_record import RunRecord
from tests.durable.test_checkpoint import snapshot

# a constant, so that all test processes agree
MINE, OTHERS = ("6dd94ac0ffcca0ce3a530174dfec9b81", "5d9677014f13f3579791c3923b7cc493")
RUN = RunIdentity(frozenset({"mine"}), MINE)


def save_and_load(folder: Path, update: int, **facts: Any) -> LoadedCheckpoint:
    return checkpoint.load(save(folder, dataclasses.replace(snapshot(update), facts=facts)))


def test_uids_are_unique_and_bit_flips_make_them_invalid() -> None:
    uid = generate_uid()
    assert generate_uid() != uid
    assert is_valid_uid(uid)
    for place, digit in enumerate(uid):
        for bit in range(8):
            flipped = chr(ord(digit) ^ 1 << bit)
            assert not is_valid_uid(uid[:place] + flipped + uid[place + 1 :])


@pytest.mark.parametrize("value", [None, 7, 1e99, [], [MINE], {}, "", MINE[:-1], MINE + "0", MINE.upper(), "\ud800"])
def test_an_invalid_uid_is_ignored(tmp_path: Path, value: Any) -> None:
    assert not is_valid_uid(value)
    content = {"name": "mine", "names": value, "uid": value, "adopted": [value, {"uid": value}, {"uid": OTHERS}]}
    record = RunRecord.decode(json.dumps(content).encode())
    assert read_identity(record, "mine").uid is None
    assert read_identity(record, "mine").adopted == {OTHERS}
    assert read_identity(RunRecord.decode(json.dumps({"adopted": value}).encode()), "mine") == RunIdentity()
    loaded = save_and_load(tmp_path, 1, run_id="mine", run_uid=value)
    assert verify(loaded.path, RUN) == [], "checkpoints of an earlier version have no UID, and must be accepted"


def test_the_identity_of_a_run_is_in_its_run_json(tmp_path: Path) -> None:
    directory = RunDirectory.join(tmp_path / "renamed")
    assert directory.owner == RunIdentity()
    directory.path.mkdir()
    directory.write("run.json", json.dumps({"name": "mine", "names": ["first", "mine"], "uid": MINE}))
    assert directory.owner == RunIdentity(frozenset({"first", "mine", "renamed"}), MINE)


@pytest.mark.parametrize("name", ["mine", "renamed"])
def test_a_checkpoint_of_a_renamed_run_is_accepted(tmp_path: Path, name: str) -> None:
    save_and_load(tmp_path, 1, run_id=name, run_uid=MINE)
    assert recover(tmp_path, RUN).checkpoint is not None


@pytest.mark.parametrize(
    "run", [RunIdentity(), RunIdentity(frozenset({"mine"})), RunIdentity(RUN.names, MINE, frozenset({OTHERS}))]
)
def test_an_unknown_or_adopted_uid_is_accepted(tmp_path: Path, run: RunIdentity) -> None:
    save_and_load(tmp_path, 1, run_id="mine", run_uid=OTHERS)
    assert recover(tmp_path, run).checkpoint is not None


def test_a_checkpoint_of_a_namesake_run_is_rejected(tmp_path: Path) -> None:
    """The checkpoint stays in the folder."""
    save_and_load(tmp_path, 1, run_id="mine", run_uid=MINE)
    save_and_load(tmp_path, 2, run_id="mine", run_uid=OTHERS)
    for _ in range(2):
        with pytest.raises(IncompatibleResume, match="another run with the same name"):
            recover(tmp_path, RUN)
    assert verify(checkpoint_path(tmp_path, 2), RUN)
    mine = load_newest(tmp_path, RUN)
    assert mine is not None
    assert mine.update == 1
    result = recover(tmp_path, RUN, allows_others=True).checkpoint
    assert result is not None
    assert result.update == 2


def test_a_checkpoint_with_another_run_name_is_moved_aside(tmp_path: Path) -> None:
    save_and_load(tmp_path, 1, run_id="mine", run_uid=MINE)
    for update, facts in ((2, {"run_uid": OTHERS}), (3, {}), (4, {"run_uid": None})):
        save_and_load(tmp_path, update, run_id="other", **facts)
    for update, run_id in ((5, []), (6, {}), (7, 7)):
        save_and_load(tmp_path, update, run_id=run_id)
    result = recover(tmp_path, RUN)
    assert result.checkpoint is not None
    assert result.checkpoint.update == 1
    assert len(list(tmp_path.glob("foreign-*"))) == 6
    save(tmp_path / "only", dataclasses.replace(snapshot(2), facts={"run_id": "other", "run_uid": OTHERS}))
    with pytest.raises(DataError):
        recover(tmp_path / "only", RUN)
