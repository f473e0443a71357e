"""Damaged checkpoints are never loaded: the newest valid one is used, and no command prints a traceback."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runner.base.errors import DataError, Exit
from runner.cli import main
from runner.durable import checkpoint, files
from runner.durable.checkpoint import recover, save, verify
from tests.faults import damaging, saver
from tests.faults.damaging import NEW, OLD, Pair, name_of
from tests.faults.power_cuts import WithoutSync
from tests.faults.tallies import IS_LONG, Tally
from tests.forkserver import CompletedCommand, ForkServer

Amount = Callable[[int, int], int]
TASK = Path(__file__).with_name("task_of_faults.py")
BASE = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off"]


@pytest.fixture
def pair(memory: Path) -> Iterator[Pair]:
    with files.use_system(WithoutSync()):  # no test in this file needs fsync
        yield Pair(memory)


def assert_moved_aside(pair: Pair, damaged: damaging.Content, how: str) -> None:
    """Assert that the damaged newest checkpoint is moved aside and the previous one is loaded, byte for byte."""
    result = recover(pair.directory)
    assert result.checkpoint is not None, how
    assert result.checkpoint.update == OLD, f"{how}: update {result.checkpoint.update} was recovered"
    saver.assert_is(result.checkpoint)
    assert [name for name, _ in result.skipped] == [name_of(NEW)], how
    assert damaging.tree(pair.directory / f"damaged-{name_of(NEW)}-1") == damaged, how
    assert files.list_names(pair.directory) == [f"damaged-{name_of(NEW)}-1", name_of(OLD)], how


def test_a_damaged_checkpoint_is_moved_aside_and_the_previous_one_is_used(
    pair: Pair, amount: Amount, seed: int, tally: Tally
) -> None:
    for number in range(amount(600, 200_000)):
        generator = random.Random(f"{seed} damage {number}")
        kind = generator.choice(damaging.ON_A_CHECKPOINT)
        what, content = kind(pair, NEW, generator)
        how = f"seed {seed}, damage {number}: {what}"
        pair.put({name_of(OLD): pair.originals[OLD], name_of(NEW): content})
        if content == pair.originals[NEW]:  # equal blocks were swapped, or zeros were zeroed
            assert recover(pair.directory).skipped == (), how
            continue
        assert_moved_aside(pair, content, how)
        if number % 10 == 0:
            saver.assert_is(checkpoint.load(save(pair.directory, saver.snapshot(NEW))))
        tally.tried += 1


@pytest.mark.slow
def test_a_run_with_only_damaged_checkpoints_does_not_restart_silently(
    pair: Pair, amount: Amount, seed: int, tally: Tally
) -> None:
    for number in range(amount(150, 20_000)):
        generator = random.Random(f"{seed} both {number}")
        contents, descriptions = {}, []
        for update in (OLD, NEW):
            what, content = generator.choice(damaging.ON_A_CHECKPOINT)(pair, update, generator)
            descriptions.append(what)
            if content == pair.originals[update]:
                content = {"MANIFEST.json": b""}
            contents[name_of(update)] = content
        how = f"seed {seed}, damage of both {number}: {descriptions}"
        pair.put(contents)
        for _ in range(2):
            with pytest.raises(DataError, match="resume=fresh") as caught:
                recover(pair.directory)
            assert caught.value.exit_code == Exit.BAD_DATA, how
        there = {name: damaging.tree(pair.directory / name) for name in files.list_names(pair.directory)}
        assert there == {f"damaged-{name}-1": content for name, content in contents.items()}, how
        tally.tried += 1


def test_renamed_checkpoints_are_not_loaded(pair: Pair, tally: Tally) -> None:
    old, new = pair.originals[OLD], pair.originals[NEW]
    for names, expected in (
        ({name_of(OLD): new, name_of(NEW): old}, None),  # swapped
        ({name_of(OLD): old, name_of(3): new}, OLD),
        ({name_of(OLD): old, name_of(9_999_999_999): new}, OLD),
        ({name_of(NEW): new, name_of(3): old}, NEW),
        ({name_of(OLD): old, "update-2": new}, OLD),  # not the name of a checkpoint: not touched
        ({name_of(OLD): old, f"{name_of(NEW)}.bak": new}, OLD),
        ({name_of(OLD): old, name_of(NEW).upper(): new}, OLD),
        ({"update-000000000\u0662": new, name_of(OLD): old}, OLD),  # not an ASCII digit
        ({name_of(OLD): {}, name_of(NEW): new}, NEW),
    ):
        pair.put(names)
        if expected is None:
            with pytest.raises(DataError):
                recover(pair.directory)
        else:
            result = recover(pair.directory).checkpoint
            assert result is not None
            assert result.update == expected, list(names)
            saver.assert_is(result)
        tally.tried += 1


def test_checkpoints_with_folders_or_special_files_are_moved_aside(
    pair: Pair, amount: Amount, seed: int, tally: Tally
) -> None:
    for number in range(amount(20, 2000)):
        generator = random.Random(f"{seed} odd {number}")
        pair.put({name_of(update): pair.originals[update] for update in (OLD, NEW)})
        name = generator.choice(("", *pair.originals[NEW]))
        what = damaging.make_odd(pair.directory / name_of(NEW) / name, generator)
        if not name and what == "a folder":
            continue  # an empty folder is a checkpoint without a manifest, tested above
        result = recover(pair.directory)
        assert result.checkpoint is not None
        assert result.checkpoint.update == OLD, f"{name or 'the folder'} is {what}"
        assert f"damaged-{name_of(NEW)}-1" in files.list_names(pair.directory)
        tally.tried += 1


@pytest.mark.skipif(not IS_LONG, reason="every bit: scripts/faults.sh --long")
@pytest.mark.parametrize("change", [damaging.every_bit, damaging.every_length])
def test_every_flipped_bit_and_every_truncation_is_detected(
    pair: Pair, change: Callable[[bytes], Iterator[tuple[str, bytes]]], tally: Tally
) -> None:
    pair.put({name_of(OLD): pair.originals[OLD], name_of(NEW): pair.originals[NEW]})
    path = pair.directory / name_of(NEW)
    for name, data in pair.originals[NEW].items():
        for what, changed in change(data):
            (path / name).write_bytes(changed)
            assert verify(path), f"{name}: {what}"
            tally.tried += 1
        (path / name).write_bytes(data)
    assert verify(path) == []


# A finished run whose other files are damaged


@pytest.fixture(scope="module")
def finished(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    result = server.run(BASE, folder)
    assert result.code == 0, result.err
    return folder


NAMES = (
    "metrics.jsonl", "run.json", "events.jsonl", "config.yaml", "overrides.yaml", "plan.json", "environment.json",
    "console.log", "error.json", ".lock",
)  # fmt: skip


def damage_a_file(run: Path, generator: random.Random) -> str:
    """Damage some of the files other than checkpoints; return a description."""
    done = []
    for name in generator.sample(NAMES, generator.choice((1, 1, 2, len(NAMES)))):
        path = run / name
        data = path.read_bytes() if path.exists() else b'{"cause": "x"}\n'
        kind = generator.choice(("change", "change", "change", "remove", "line", "json", "utf-8", "deep"))
        if kind == "remove" or not data:
            path.unlink(missing_ok=True)
        elif kind == "line":
            lines = data.split(b"\n")
            lines[generator.randrange(len(lines))] = generator.choice(LINES)
            path.write_bytes(b"\n".join(lines))
        elif kind == "json":
            path.write_bytes(generator.choice(LINES) + b"\n")
        elif kind == "utf-8":
            path.write_bytes(data.replace(b"a", b"\xff\xfe"))
        elif kind == "deep":
            path.write_bytes(b"[" * 100_000)
        else:
            change = generator.choice(damaging.ON_A_FILE)
            kind = change.__name__
            path.write_bytes(change(data, generator) if len(data) > 1 else b"\0")
        done.append(f"{name} {kind}")
    return ", ".join(done)


LINES = (
    b"", b"{", b"null", b"[]", b"{}", b"3", b'"text"', b"\0\0\0\0", b'{"update": null}', b'{"update": "many"}',
    b'{"update": 1e400, "phase": [1]}', b'{"update": [], "train/loss": "low", "phase": {}}', b'{"update": -5}',
    b'{"state": "running", "pid": "x", "started": 7, "host": null}', b'{"state": [], "task": {}, "phases": 5}',
    b'{"state": "running", "pid": 1e99, "started": "never"}', b'{"pid": -1, "started": "2026-01-01T00:00:00+00:00"}',
    b'{"cause": [1], "where": {}, "fix": 3, "exit_code": "no"}', b'{"kind": "phase", "phase": [], "total": "x"}',
    b'{"updates": [], "phases": {"train": 3}}', b'{"phases": {"train": null}}', b'{"tracker_id": 5}',
    b'{"update": 10, "train/loss": [1, 2]}', b'{"update": 123456789012345678901234567890}', b"1" * 5000,
)  # fmt: skip


def assert_exit_code(result: CompletedCommand, how: str, *codes: int) -> None:
    """Assert a documented exit code and no traceback."""
    text = result.out + result.err
    assert result.code in codes, f"{how}: exit {result.code}\n{text}"
    assert "Traceback" not in text, f"{how}\n{text}"


@pytest.mark.slow
def test_status_shows_a_damaged_run(
    finished: Path, tmp_path: Path, server: ForkServer, amount: Amount, seed: int, tally: Tally
) -> None:
    (tmp_path / "outputs").mkdir()
    run = tmp_path / "outputs" / "mine"
    for number in range(amount(4, 3000)):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(finished / "outputs" / "mine", run)
        how = damage_a_file(run, random.Random(f"{seed} status {number}"))
        result = server.run(["status", "mine"], tmp_path)
        assert_exit_code(result, f"seed {seed}, status {number}: {how}", 0)
        assert f"{name_of(60)}: valid" in result.out, how
        tally.tried += 1


@pytest.mark.slow
def test_status_shows_a_run_whose_files_contain_arbitrary_lines(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    amount: Amount, seed: int, tally: Tally,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "mine"
    shutil.copytree(finished / "outputs" / "mine", run)
    rows = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    for line in random.Random(f"{seed} lines").sample(LINES, min(amount(8, 100), len(LINES))):
        for name in ("run.json", "plan.json", "error.json"):
            (run / name).write_bytes(line)
        for name, before in rows.items():
            (run / name).write_bytes(before + line + b"\n" + before)
        assert main(["status", "mine"]) == 0, line
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err, line
        assert f"{name_of(60)}: valid" in out, line
        tally.tried += 1


def weights(run: Path) -> dict[str, torch.Tensor]:
    loaded = checkpoint.load(checkpoint.checkpoint_path(run / "checkpoints", 60))
    return {f"{stem}/{name}": tensor for stem in loaded.stems for name, tensor in loaded.tensors(stem).items()}


def metric_rows(run: Path) -> list[dict[str, object]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if "perf/" not in key} for line in lines]


@pytest.mark.slow
def test_a_run_resumes_even_if_other_files_are_damaged(
    finished: Path, tmp_path: Path, server: ForkServer, amount: Amount, seed: int, tally: Tally
) -> None:
    """The newest checkpoint is removed, so that there are updates to compute. Damaged rows are not restored."""
    (tmp_path / "outputs").mkdir()
    run, whole = tmp_path / "outputs" / "mine", finished / "outputs" / "mine"
    for number in range(amount(3, 1000)):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        shutil.rmtree(checkpoint.checkpoint_path(run / "checkpoints", 60))
        generator = random.Random(f"{seed} resume {number}")
        how = f"seed {seed}, resume {number}: {damage_a_file(run, generator)}"
        result = server.run(BASE, tmp_path)
        assert_exit_code(result, how, 0)
        assert re.search(r"update \d+ from", result.out), how
        ours, theirs = weights(run), weights(whole)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), how
        if "metrics.jsonl" not in how:
            assert metric_rows(run) == metric_rows(whole), how
        assert server.run(["status", "mine"], tmp_path).out.startswith("mine: finished"), how
        tally.tried += 1


def test_folders_and_special_files_instead_of_files_are_reported(
    finished: Path, tmp_path: Path, server: ForkServer, amount: Amount, seed: int, tally: Tally
) -> None:
    (tmp_path / "outputs").mkdir()
    run, whole = tmp_path / "outputs" / "mine", finished / "outputs" / "mine"
    for number in range(amount(3, 500)):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        generator = random.Random(f"{seed} odd {number}")
        name = generator.choice((*NAMES, "checkpoints"))
        how = f"seed {seed}, odd {number}: {name} is {damaging.make_odd(run / name, generator)}"
        assert_exit_code(server.run(["status", "mine"], tmp_path), how, 0)
        assert_exit_code(server.run(BASE, tmp_path), how, 0, 65, 73, 74, 89)
        tally.tried += 1
